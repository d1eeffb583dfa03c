// Gradients that ranks add up in one exchange, in the order in which the backward pass finishes them.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "graph/plan.h"

namespace fretsaw {

// How the ranks add up a gradient. Those of one way may share an exchange.
struct GradientExchange {
  std::string over_tensor;                                                        // the axis whose ranks hold parts of a sum; "": none
  enum class OverData : uint8_t { none, all, parts } over_data = OverData::none;  // parts: each rank gets its own
  int dim = 0;                                                                    // of parts
  DType dtype = DType::float32;
  bool is_needed() const { return !over_tensor.empty() || over_data != OverData::none; }
  auto operator<=>(const GradientExchange&) const = default;
};

struct ReducedGradient {
  std::string parameter, state;  // the state holds the sum over micro-batches
  GradientExchange exchange;
  int64_t bytes = 0;
};

struct GradientBucket {
  GradientExchange exchange;
  std::vector<ReducedGradient> gradients;
};

// Where the graphs of a micro-batch make each state's new value: (number of the graph, place of the node), in the order in which the last
// micro-batch runs them. The lowest tensor rank's count for all, so that all ranks agree.
std::map<std::string, std::pair<int, size_t>> places_of_new_states(const Plan& plan);

// Buckets of up to `most_bytes`, in the order in which their last gradients are made; a gradient that is larger has one of its own.
// The last of a way of exchange, beside which nothing runs, is divided so that a sixteenth of a whole one at most comes at the very end.
// Gradients that need no exchange are in none.
std::vector<GradientBucket> gradient_buckets(std::vector<ReducedGradient> gradients,
                                             const std::map<std::string, std::pair<int, size_t>>& places, double most_bytes);

// Puts each of the nodes right behind what it takes, so that its result is there as early as can be.
void place_behind_inputs(Graph& graph, const std::vector<Node*>& nodes);

}  // namespace fretsaw
