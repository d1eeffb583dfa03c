// Which cuts come into question for each factor of each node.
#pragma once
#include <unordered_map>
#include <vector>

#include "partitioner/sharding/strategies.h"

namespace fretsaw {

// The known sizes of a dimension's factors before and after one of them.
struct FactorPlace {
  int64_t outer = 1, inner = 1;
};
// Where `factor` stands in operand dimension `factors` of size `dim`; nullopt when it is not there or a size is not known.
std::optional<FactorPlace> place_in(const FactorRule& rule, const std::vector<int>& factors, int factor, const Dim& dim);

class Candidates {
 public:
  // `rules` by node position; `heavy`: nodes whose factors are cut evenly to begin with.
  // `even`: only cuts in parts of one size come into question.
  Candidates(const Graph& graph, const std::vector<const FactorRule*>& rules, const std::vector<char>& heavy, bool even, FormTable& forms);

  // A cut of a value's dimension that is asked for from outside.
  void seed(const Value* value, int dim, const Cut& cut);
  void propagate();
  const std::vector<int>& of_factor(size_t node, int factor) const { return factor_cuts_[node][static_cast<size_t>(factor)]; }
  const std::vector<int>& of_segments(size_t node) const { return segment_cuts_[node]; }
  std::vector<Form> forms_of(const Value* value);  // the cuts of all its dimensions

 private:
  struct Use {
    int node;
    bool output;
    int operand;
  };
  bool usable(const Cut& cut) const;
  void add_to_factor(size_t node, int factor, int cut);
  void add_to_segments(size_t node, int cut);
  void add_to_value(const Value* value, int dim, int cut);
  void visit_use(const Use& use, const Value* value, int dim, const Cut& cut);
  void visit_segments(const Use& use, int dim, const Cut& cut);

  static constexpr size_t kMostCuts = 5;  // of one dimension or factor
  const Graph& graph_;
  const std::vector<const FactorRule*>& rules_;
  FormTable& forms_;
  bool even_;
  std::unordered_map<const Value*, std::vector<Use>> uses_;
  std::vector<std::vector<std::vector<int>>> factor_cuts_;  // [node][factor]
  std::vector<std::vector<int>> segment_cuts_;
  std::unordered_map<const Value*, std::vector<std::vector<int>>> value_cuts_;
  struct Work {
    const Value* value;
    int dim, cut;
  };
  std::vector<Work> work_;
};

}  // namespace fretsaw
