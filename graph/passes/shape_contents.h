// Evaluates shape arithmetic element by element, with symbols: what ONNX calls data propagation.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "graph/passes.h"

namespace fretsaw {

using Elements = std::vector<ShapeElement>;
// Looks up what is known of a value; null when nothing is.
using ContentsLookup = std::function<const Elements*(const Value*)>;

// The elements of output 0 (of up to kMaxContents of them) of a node whose value types are known, or nullopt.
inline constexpr size_t kMaxContents = 256;
std::optional<Elements> contents_of_node(const Node& node, const ContentsLookup& lookup);
// Split, the one operator of shape arithmetic with several outputs.
std::vector<Elements> contents_of_split(const Node& node, const ContentsLookup& lookup);

}  // namespace fretsaw
