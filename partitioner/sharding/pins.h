// What --shard and annotations ask of values and operands, as forms: seeds for the candidates, and a choice among the strategies.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "partitioner/sharding/candidates.h"
#include "partitioner/sharding/strategies.h"

namespace fretsaw {

class Pins {
 public:
  // The forms and cuts that are asked for are added to the table and the candidates.
  Pins(const Graph& graph, const StrategyOptions& options, FormTable& forms, Candidates& candidates);

  // Leaves the strategies that take and make what is asked for. Where none does: a note, and the strategies stay; the operand is brought
  // into the form that is needed. Of operands that do not go together the larger constant is heard first.
  void choose(const Node& node, NodeStrategies& own, std::vector<std::string>& notes) const;
  // The form of every value that must take one once it is made.
  const std::unordered_map<const Value*, Form>& of_values() const { return values_; }

 private:
  struct Wish {
    size_t operand;
    Form form;
  };
  Form add(const Value& value, const Sharding& sharding, FormTable& forms, Candidates& candidates);
  std::vector<Wish> inputs_of(const Node& node) const;

  const FormTable& forms_;
  std::unordered_map<const Value*, Form> values_, constants_;
  std::unordered_map<const Node*, std::vector<Wish>> inputs_, outputs_;
};

}  // namespace fretsaw
