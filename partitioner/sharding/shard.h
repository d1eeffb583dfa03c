// Dividing a model over the ranks of the tensor axis.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "graph/ir.h"
#include "graph/sharding.h"
#include "partitioner/sharding/strategies.h"
#include "partitioner/target.h"

namespace fretsaw {

// --shard: for each dimension a mesh axis, or nothing. `W=[tensor,_]` is {"tensor", ""}.
struct PinnedTensor {
  std::vector<std::string> axes;
};
struct ShardOptions {
  int ranks = 1;
  int second = 1;  // ranks of a second axis: the parts of the first are cut once more, and there are ranks * second in all
  Target target;
  std::map<std::string, PinnedTensor> pins;            // by source name
  std::unordered_map<const Node*, NodePins> operands;  // of annotations, as in StrategyOptions
  std::optional<std::unordered_set<const Node*>> to_divide;
  std::map<std::string, std::string> kept_whole;  // nodes that must not be divided, with the reason
  std::function<Model(const Model&)> sized;       // for a second axis: a part of the model with sizes for costs
};
// Of constants that two axes cut (ValuePart::of_part): which part of the source the first one left.
using OuterParts = std::unordered_map<const Value*, std::shared_ptr<const ValuePart>>;

struct ShardedModel {
  std::vector<Model> models;                      // one for each rank, with the same nodes in the same order
  std::map<std::string, std::string> shardings;   // tensor -> "[_, tensor]": what is cut or pending
  std::vector<std::string> pin_notes;             // pins that are not followed, and why
  std::vector<std::string> notes;                 // what was replicated, gathered or cut unevenly, and why
  std::map<std::string, std::string> kept_whole;  // nodes whose parts came out wrong, with what was wrong
  // For each node of the model given: how its operands came to lie. Nothing for values that are made from constants alone.
  std::vector<NodePins> operands;
  OuterParts outer_parts;  // of constants in `models`
};
// The model must be normalised and its types inferred; `costed` is the same graph with sizes for costs. Every contraction, convolution and
// embedding is divided where a rule allows it; among the ways that divide them the fastest is taken (see search.h). Throws Error naming a
// pinned tensor that can't be cut so; one that is not there (normalising removed it) is noted.
// With a second axis the models come with its rank the fastest. The first then cuts in parts of one size only, so that all its parts are
// alike.
ShardedModel shard(const Model& model, const Graph& costed, const ShardOptions& options);

}  // namespace fretsaw
