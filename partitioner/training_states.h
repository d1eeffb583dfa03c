// How what is trained lies on the ranks.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "graph/ir.h"
#include "graph/plan.h"
#include "graph/sharding.h"
#include "graph/training/plan_graphs.h"
#include "partitioner/sharding/shard.h"

namespace fretsaw {

// A parameter or a running statistic on the tensor ranks, of which there may be a grid: rank t is (t / tensor_y, t % tensor_y).
struct StateLayout {
  // What a rank keeps: whole where there are none. All of the axis "tensor", with a part for each of its ranks; of a grid one for each axis
  // that cuts the state, in which the ranks along the other hold the same.
  std::vector<PlanState::Part> parts;
  std::string cut_over;    // the axis whose ranks together hold all of it: "tensor", "tensor_x", "tensor_y"; "": each does
  std::string alike_over;  // the axis whose ranks hold the same, likewise
};
using StateLayouts = std::map<std::string, StateLayout>;

// The one value that stands for each name in a rank's graph.
using StateValues = std::map<std::string, Value*>;

// The tensor ranks' graphs. `outer`: of constants that both axes of a grid cut, the part that the first one left.
struct TensorRanks {
  std::vector<Graph*> graphs;
  int second_axis = 1;  // tensor_y
  const OuterParts& outer;
};

// Reads from the tensor ranks' graphs, whose constants say which part of which initializer they are, how each of `names` lies. What is
// there in several forms, in parts that overlap, or as a summand that one rank adds, becomes whole on every rank, with its forms taken from
// it by nodes; likewise all of `whole`. The graphs come back sorted, with the same nodes on every rank.
struct SettledStates {
  StateLayouts layouts;
  std::vector<StateValues> values;  // by tensor rank
};
SettledStates settle_states(const TensorRanks& ranks, const Graph& source, const std::vector<std::string>& names,
                            const std::vector<std::string>& whole);

// The part of a state that a data rank keeps where states are divided over `data_ranks`: the first dimension that divides evenly on every
// tensor rank. nullopt: none does, and every data rank keeps all of it.
std::optional<PlanState::Part> data_part(const Type& type, const StateLayout& layout, int data_ranks);

}  // namespace fretsaw
