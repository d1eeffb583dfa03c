// Parameters that a graph takes rounded to 16 bits.
#pragma once
#include <optional>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

// Everything that takes a value does so through Casts to one type of 16 bits, perhaps behind nodes that only hand it on.
struct RoundedUse {
  DType type = DType::undefined;
  std::vector<Node*> handing_on, casts;
};
// nullopt: something takes the value as it is, or in several types, or nothing takes it.
std::optional<RoundedUse> rounded_use(const Value* value, const Graph& graph, const Consumers& users);

}  // namespace fretsaw
