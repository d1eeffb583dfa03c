// Operators that need a whole axis, on parts of it: small graphs of plain operators and collectives.
//
//   Softmax x [.., j]    m = AllReduce max(ReduceMax x), e = Exp(x - m), e / AllReduce sum(ReduceSum e)
//   ArgMax  x [.., j]    each rank's maximum and its place are gathered, and the first of the largest is taken
//   Gather  table [v, h] indexes of other ranks' rows give zeros: a pending sum
#pragma once
#include <functional>
#include <vector>

#include "partitioner/sharding/local_graph.h"

namespace fretsaw {

struct DividedNode {
  const Node& node;  // of the source
  const FactorRule& rule;
  const Strategy& strategy;                         // of kind `divided`
  const std::vector<Value*>& inputs;                // on this rank
  std::function<Value*(const Value*)> make_output;  // the value on this rank for a result of the source
};
// Adds the nodes that make the results. Throws Error for an operator that has no such form.
void emit_divided(LocalGraph& local, const DividedNode& divided);

}  // namespace fretsaw
