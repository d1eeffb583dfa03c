// Whether a model's multi-device annotations are legal: the rules of docs/annotations.md.
#pragma once
#include <functional>
#include <vector>

#include "graph/io.h"

namespace fretsaw {

// Lists each annotation that is not, all as errors: node, tensor, the rule's name and a message. `type_of`, when given, knows more of a
// value's type than the value itself; what neither knows (a rank, a dimension) is not held against an annotation.
using TypeOf = std::function<Type(const Value&)>;
std::vector<Finding> check_annotations(const Model& model, const TypeOf& type_of = nullptr);

}  // namespace fretsaw
