// The analysis behind batch.h: one walk over the nodes in order, for one choice of batch inputs.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "graph/factors.h"
#include "partitioner/batch.h"

namespace fretsaw {

using Contents = std::vector<DimProduct>;  // elements of an integer tensor of rank 0 or 1; batch_symbol() stands for the batch
const DimProduct& batch_symbol();
bool mentions_batch(const DimProduct& p);
bool mentions_batch(const Contents& contents);

inline bool is_one_of(const Node& node, std::initializer_list<const char*> ops) {
  return node.domain.empty() && std::any_of(ops.begin(), ops.end(), [&](const char* op) { return node.op == op; });
}

inline int64_t axis_from_front(int64_t axis, size_t rank) {
  return axis < 0 ? axis + static_cast<int64_t>(rank) : axis;
}

// What a value that does not depend on the batch looks like along a dimension that meets the batch.
struct RowPattern {
  enum class Kind : uint8_t { uniform, sample_index, varying } kind = Kind::varying;
  std::vector<SampleIndex> columns;  // of sample_index: as BatchAxis::sample_index
  std::string why;                   // of varying
};

class BatchAnalysis {
 public:
  // `batch`: the batch as it stands in the types of values, a number or a symbol.
  BatchAnalysis(Graph& graph, DimProduct batch, const std::vector<std::pair<Value*, int>>& inputs);
  void run();  // never throws for odd nodes: their outputs are mixed

  BatchAxis axis_of_value(const Value* value) const;
  bool depends_on_size(const Value* value) { return sized(value); }  // an integer computed from the number of samples
  RowPattern pattern(const Value* value, size_t dim, const DimProduct& outer, const DimProduct& inner);
  std::unordered_map<const Value*, BatchAxis> axes;
  std::vector<std::function<void(BatchRewriter&)>> edits;
  bool has_random = false;

 private:
  // Where the batch lies within one factor of a rule.
  struct Place {
    int factor = -1;
    DimProduct outer = 1, inner = 1;
  };
  struct Mixing {  // thrown by handlers: the outputs of the node are mixed
    std::string why;
    std::string partial;
    bool unknown_shape = true;
  };

  void visit_graph(Graph& graph);
  void visit(Node& node);
  void transfer(Node& node);
  bool special(Node& node);  // operators that read sizes or indices; false: by the rule
  void by_rule(Node& node, const FactorRule& rule, bool sizes_read = false);
  std::optional<Place> locate(const FactorRule& rule, const std::vector<int>& dim, const BatchAxis& batch) const;
  DimProduct product(const FactorRule& rule, const std::vector<int>& dim, size_t first, size_t last) const;
  Place common_place(Node& node, const FactorRule& rule);
  void demand_rows(Node& node, const FactorRule& rule, const Place& place, BatchAxis& result);
  void set_outputs(Node& node, const FactorRule& rule, const Place& place, const BatchAxis& like);
  void mix_outputs(Node& node, const Mixing& mixing);
  void carry_mixed(Node& node, const MixedCause& cause);
  std::string partial_of(const Node& node, const std::string& partial) const;
  // A value of the node, or else a graph input, that holds the plain batch, and the axis: where a rewrite takes its size from.
  std::pair<Value*, int> sample_source(const Node& node) const;
  void narrow(Node& node, size_t operand, size_t dim, const DimProduct& outer, const DimProduct& inner, bool broadcasts);
  // As narrow, but the rows may also find the samples; their columns.
  std::vector<SampleIndex> narrow_index(Node& node, size_t operand, size_t dim, const DimProduct& outer, const DimProduct& inner);
  bool keeps_sample_index(const Node& node, BatchAxis& result);
  std::optional<DimProduct> below(const Value* value, int depth = 0);  // a bound of a value that is at least 0
  bool is_batch_size(const Value* value);
  bool is_sum(const Value* value) const;  // over the samples
  void refine_outputs(Node& node, const FactorRule* rule);
  void set_shape(Value* value, const std::vector<DimProduct>& dims);
  void complete_types(Node& node);
  std::optional<std::vector<DimProduct>> made_shape(Node& node);  // of Reshape, Expand, ConstantOfShape, Range
  void name_dims(Value* value);

  // batch_shapes.cpp: operators that read a shape
  void shape_of(Node& node);
  void reshape(Node& node);
  void check_reshape_target(Node& node);
  void expand(Node& node);
  void constant_of_shape(Node& node);
  void range(Node& node);
  void tile(Node& node);
  void slice(Node& node);
  void resize(Node& node);
  // batch_indexing.cpp: operators that join, part and index
  bool concat(Node& node);  // false: by the rule
  bool split(Node& node);
  bool gather(Node& node);
  bool gather_nd(Node& node);
  void take_samples(Node& node, const BatchAxis& data, size_t operand, size_t last_dim, size_t column, size_t out_dim);
  bool scatter_nd(Node& node);
  bool max_pool(Node& node);
  bool max_unpool(Node& node);
  bool sequence(Node& node);
  void squeeze(Node& node);
  // batch_bodies.cpp
  void branch(Node& node);
  void loop(Node& node);
  BatchAxis carried_axis(const Value* value);
  BatchAxis slice_axis(const Node& node, size_t input);
  void forget(Graph& body);

  // batch_contents.cpp
  std::optional<Contents> contents(const Value* value);
  std::optional<Contents> evaluate(Node& node);
  std::optional<Contents> evaluate_elementwise(const Node& node);
  std::optional<Contents> evaluate_movement(const Node& node);
  bool sized(const Value* value);  // its contents mention the batch
  DimProduct fresh();
  DimProduct in_types(const DimProduct& p) const;    // batch_symbol() replaced by the batch as types have it
  std::vector<DimProduct> dims(const Value* value);  // as products; nameless ones get names

  RowPattern constant_pattern(const Value& value, size_t dim, int64_t rows, int64_t inner) const;
  RowPattern produced_pattern(const Value& value, size_t dim, const DimProduct& outer, const DimProduct& inner);

  Graph& graph_;
  DimProduct batch_;
  std::vector<std::pair<Value*, int>> inputs_;
  std::unordered_map<const Value*, Contents> contents_;
  std::map<std::pair<const Value*, size_t>, RowPattern> patterns_;
  std::unordered_map<const Value*, const Value*> begins_;  // while a loop's first pass is looked at: what it carries -> how that begins
  int fresh_count_ = 0;
};

// Places new nodes before those that use them.
class BatchRewriter {
 public:
  BatchRewriter(Model& model, const BatchFacts& facts) : model_(model), facts_(facts) {}
  // The operand becomes its first `inner` rows along `dim` (they broadcast, or are repeated).
  void first_rows(Node& node, size_t operand, size_t dim, int64_t inner);
  // The operand becomes its rows for as many samples as `like` holds at `like_dim`.
  void equal_rows(Node& node, size_t operand, size_t dim, int64_t inner, Value* like, int like_dim);
  void leading_rows(Node& node, size_t operand, size_t dim, int64_t inner, Value* like, int like_dim);
  void set_constant(Node& node, size_t operand, const std::vector<int64_t>& values);
  // Element `k` of the shape operand becomes `times` the batch of `like`.
  void shape_element(Node& node, size_t operand, size_t k, size_t length, int64_t times, Value* like, int like_dim);
  void finish();  // puts the new nodes into their graphs' order

 private:
  Value* batch_of(Node& before, Value* like, int like_dim);  // int64 [1]
  Value* add(Node& before, const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes, Type type,
             const std::string& name);
  Value* narrowed(Node& before, Value* value, size_t dim, int64_t rows);
  Value* constant(Node& before, const std::vector<int64_t>& values, const std::string& name);

  Model& model_;
  const BatchFacts& facts_;
  std::map<std::tuple<Value*, size_t, int64_t>, Value*> narrowed_;
  std::unordered_map<Node*, std::vector<Node*>> before_;
};

}  // namespace fretsaw
