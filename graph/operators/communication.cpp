// The communication operators of the domain ai.fretsaw. Send and Recv pass a tensor on; what collectives do to its axes is in
// their attributes, and a cut of the tensor inside one has no meaning.
#include "graph/operators/rule_builder.h"

namespace fretsaw {

std::vector<OperatorRecord> communication_operators() {
  std::vector<OperatorRecord> records;
  for (const char* name : {"Send", "Recv"})
    records.push_back({.name = name, .domain = "ai.fretsaw", .since = 1, .role = Role::movement, .factors = elementwise_factors});
  for (const char* name : {"AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Broadcast", "HaloExchange"})
    records.push_back({.name = name, .domain = "ai.fretsaw", .since = 1});
  return records;
}

}  // namespace fretsaw
