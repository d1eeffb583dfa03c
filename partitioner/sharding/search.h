// Choosing a strategy for every node: the least time of work and communication, node by node in the graph's order.
//
// A state is the form of every value that a later node still needs. From each state each strategy of the next node leads to another; of
// states that agree only the cheapest stays. So the result is the best of all where the number of states stays below the width kept; a
// chain of repeated blocks, however long, has a few dozen. Beyond the width the dearest states are dropped, counting what it takes to
// complete their pending sums.
#pragma once
#include <string>
#include <vector>

#include "partitioner/sharding/strategies.h"
#include "partitioner/target.h"

namespace fretsaw {

struct Search {
  const Graph& graph;   // whose nodes the strategies are for
  const Graph& costed;  // the same with sizes for costs, nodes at the same positions
  const Target& target;
  std::unordered_map<const Value*, Form> pins;  // forms that values must take once they are made
};
// The number of each node's strategy.
std::vector<int> choose_strategies(const Strategies& strategies, const Search& search);

// What it takes to bring a value from one form to another.
enum class Conversion : uint8_t {
  none,
  all_reduce,      // pending -> whole
  reduce_scatter,  // pending -> cut
  all_gather,      // cut -> whole
  slice,           // whole or a cut that holds it -> cut: no communication
  once,            // whole -> pending: one rank's share is it, the others' zeros
  pad,             // cut -> pending: zeros around
  reduce_slice,    // pending -> cut whose parts overlap: all-reduce, then slice
  gather_slice,    // cut -> another, or pending where zeros around won't do: all-gather, then slice
};
Conversion conversion(const FormTable& forms, Form from, Form to);
// The form a value is in afterwards, which may be more than was asked for: what is whole stays whole.
Form form_after(Conversion conversion, Form from, Form to);
double all_reduce_us(double bytes, int ranks, const Target& target);
double one_way_us(double bytes, int ranks, const Target& target);  // reduce-scatter or all-gather of so many bytes in all

}  // namespace fretsaw
