// What the factor functions of operators are written with.
#pragma once
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "graph/catalogue.h"
#include "graph/dim_product.h"

namespace fretsaw {

// Thrown by factor functions: there is no rule for this node. factor_rule() turns it into FactorRule::unknown.
struct NoRule {
  std::string why;
};

class RuleBuilder {
 public:
  using Kind = Factor::Kind;
  explicit RuleBuilder(const Node& node);

  const Node& node() const { return node_; }
  bool has(size_t operand) const { return node_.input(operand) != nullptr; }
  const Shape& shape(size_t operand) const;  // NoRule when left out or of unknown rank
  size_t rank(size_t operand) const { return shape(operand).size(); }
  const Dim& dim(size_t operand, size_t d) const;  // NoRule where the operand has no dimension d
  // The inferred shape of an output; nullptr when not even its rank is known or the output is not wanted.
  const Shape* output_shape(size_t output) const;

  int add(const Dim& size, Kind kind, std::string name);
  int parallel(const Dim& size, std::string name) { return add(size, Kind::parallel, std::move(name)); }
  int sum(const Dim& size, std::string name) { return add(size, Kind::sum, std::move(name)); }
  int whole(const Dim& size, std::string name) { return add(size, Kind::whole, std::move(name)); }
  int halo(const Dim& size, std::string name) { return add(size, Kind::halo, std::move(name)); }
  int repeated(const Dim& size, std::string name);
  Factor& factor(int f) { return rule_.factors[f]; }

  void in(size_t operand, size_t d, int factor) { rule_.inputs[operand].at(d).push_back(factor); }
  void out_rank(size_t output, size_t rank);  // every output that is wanted needs it
  void out(size_t output, size_t d, int factor);
  // Every dimension of the operand (that has no factor yet) gets a whole factor of its own.
  void rest_whole(size_t operand, const std::string& name = "w");
  void rest_whole_out(size_t output, const std::string& name = "w");
  // A factor for dimension `d` of the operand, put there; none (-1) when the dimension is 1.
  int from(size_t operand, size_t d, Kind kind, std::string name);
  // Puts the factor at the operand's dimension unless that is 1 (it broadcasts).
  void in_unless_one(size_t operand, size_t d, int factor);
  void set_added(size_t operand);
  void set_shape_operand(int operand) { rule_.shape_operand = operand; }
  // The attribute, where the node has it, is the product of these factors' sizes.
  void set_count(const char* attribute, std::vector<int> factors);
  // A whole factor may be cut where ranks exchange partial results.
  void set_combined(int factor, double exchanges) {
    rule_.factors[static_cast<size_t>(factor)].when_cut = Factor::WhenCut::combined;
    rule_.exchanges = exchanges;
  }
  void set_rounds() { rule_.rounds = true; }
  // Says of a joined axis what its segments are; nothing where a size is not known.
  void set_segments(bool splits, size_t axis, const std::vector<const Shape*>& parts);
  FactorRule done() { return std::move(rule_); }

 private:
  const Node& node_;
  FactorRule rule_;
};

// Axis counted from the front. NoRule when out of range.
size_t axis_of(int64_t axis, size_t rank);
// A constant operand; null when left out, not constant, or an input's default, in whose place a caller may give another.
const Tensor* constant_operand(const Node& node, size_t operand);
// The values of a constant integer operand; nullopt when there is none.
std::optional<std::vector<int64_t>> constant_ints(const Node& node, size_t operand);
// Axes given as an attribute or as a constant operand, counted from the front; nullopt when neither is there.
// NoRule when the operand is not constant.
std::optional<std::vector<size_t>> axes_of(const Node& node, size_t operand, const char* attribute, size_t rank);
bool same_known(const Dim& a, const Dim& b);  // both numbers and equal, or the same symbol
// Aligned from the right, gives every operand of `operands` and output 0 (or all of `outputs`) shared factors.
// The dimensions of the result; names "i0", "i1", ...
std::vector<int> broadcast(RuleBuilder& rule, const std::vector<size_t>& operands, size_t skip_last = 0);

// --- floating-point operations ---
double count_of(const Value* value);       // elements; unknown dimensions count as 1; 0 for a value left out
double output_elements(const Node& node);  // of output 0
double input_elements(const Node& node);   // of input 0
double factor_product(const FactorRule& rule);
double contraction_flops(const Node& node);  // two for each index of all the factors
double number_of(const Dim& dim);            // unknown counts as 1, "16*batch" as 16

// --- families: the records of each file ---
std::vector<OperatorRecord> elementwise_operators();
std::vector<OperatorRecord> reduction_operators();
std::vector<OperatorRecord> contraction_operators();
std::vector<OperatorRecord> convolution_operators();
std::vector<OperatorRecord> normalisation_operators();
std::vector<OperatorRecord> movement_operators();
std::vector<OperatorRecord> reshape_operators();
std::vector<OperatorRecord> indexing_operators();
std::vector<OperatorRecord> attention_operators();
std::vector<OperatorRecord> recurrent_operators();
std::vector<OperatorRecord> quantization_operators();
std::vector<OperatorRecord> image_operators();
std::vector<OperatorRecord> signal_operators();
std::vector<OperatorRecord> generation_operators();
std::vector<OperatorRecord> control_operators();
std::vector<OperatorRecord> communication_operators();
std::vector<OperatorRecord> gradient_operators();

double recurrent_flops(const Node& node);  // of LSTM, GRU, RNN, and of others with their X, W and R in front

FactorRule elementwise_factors(const Node& node);  // all inputs broadcast
// Regroups the elements of dimensions `from` as `to` in the same order: common factors, slowest first. See reshape.cpp.
void regroup(RuleBuilder& rule, size_t operand, const Shape& from, const Shape& to);

}  // namespace fretsaw
