// Operators over rows, the last axis, in terms of folds and elementwise values. To add one: a function here and its line in the table
// below; what it computes is held in registers and fused with whatever stands before and after it.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "kernels/cpu/scalar_types.h"
#include "kernels/cuda/pointwise_operators.h"
#include "kernels/cuda/pointwise_table.h"

namespace fretsaw::cuda {
namespace {

// The row operator of one node: values of its compute type, float32 or float64, and the result in its own.
class RowLowering {
 public:
  RowLowering(StepBuilder& b, const Node& node) : b_(b), node_(node), x_(b.required(node, 0)) {
    const PointValue& x = b.at(x_);
    if (!contains(types::floats, x.dtype)) throw Refused{not_supported(x.dtype)};
    if (!x.dims) throw Refused{"rows of unknown length"};
    if (x.dims->empty() || x.dims->back() < 2) throw Refused{"rows of less than two elements"};
    rank_ = static_cast<int64_t>(x.dims->size());
    n_ = x.dims->back();
    type_ = x.dtype;
    wide_ = type_ == DType::float64 ? DType::float64 : DType::float32;
  }

  int x() const { return x_; }
  bool has(size_t i) const { return b_.has_input(node_, i); }
  int operand(size_t i) {
    const int value = b_.required(node_, i);
    if (b_.at(value).dtype != type_) throw Refused{"operands of two types"};
    return value;
  }
  void require_last(int64_t axis) const {
    if (axis != -1 && axis != rank_ - 1) throw Refused{"rows over another axis than the last"};
  }
  int fold(const char* how, int value) { return b_.reduction(how, value); }
  // `expression` of x, y, z; n is the length of a row.
  int point(const std::string& expression, std::vector<int> arguments) {
    return b_.function(node_.op, wide_, text(expression), std::move(arguments));
  }
  int result(const std::string& expression, std::vector<int> arguments) {
    return b_.function(node_.op, type_, type_, text(expression), std::move(arguments));
  }
  void give(size_t i, int value) { b_.output(node_, i, value); }
  int as(DType dtype, int value) { return b_.cast(value, dtype); }
  void drop_axis(int value) { b_.drop_axis(value); }
  std::string number(double value) const { return literal_text(wide_, value); }
  const Node& node() const { return node_; }
  StepBuilder& builder() { return b_; }

 private:
  std::string text(const std::string& expression) const {
    return fmt::format("{}return T({});", expression.find("T(n)") == std::string::npos ? "" : fmt::format("const int n = {}; ", n_),
                       expression);
  }
  StepBuilder& b_;
  const Node& node_;
  int x_;
  int64_t rank_ = 0, n_ = 0;
  DType type_ = DType::undefined, wide_ = DType::undefined;
};

void lower_softmax(RowLowering& row) {
  row.require_last(row.node().get_int("axis", -1));
  const int top = row.fold("Larger", row.x());
  const int e = row.point("exp(x - y)", {row.x(), top});
  const int scale = row.point("T(1) / x", {row.fold("Add", e)});
  row.give(0, row.result("x * y", {e, scale}));
}

void lower_log_softmax(RowLowering& row) {
  row.require_last(row.node().get_int("axis", -1));
  const int top = row.fold("Larger", row.x());
  const int shifted = row.point("x - y", {row.x(), top});
  const int log_sum = row.point("log(x)", {row.fold("Add", row.point("exp(x)", {shifted}))});
  row.give(0, row.result("x - y", {shifted, log_sum}));
}

// The mean first, then the mean square of the distances from it.
void lower_layer_normalization(RowLowering& row) {
  row.require_last(row.node().get_int("axis", -1));
  const auto statistics = static_cast<DType>(row.node().get_int("stash_type", 1));
  const std::string epsilon = row.number(row.node().get_float("epsilon", 1e-5f));
  const int mean = row.point("x / T(n)", {row.fold("Add", row.x())});
  const int centred = row.point("x - y", {row.x(), mean});
  const int square = row.fold("Add", row.point("x * x", {centred}));
  const int inverse = row.point("T(1) / sqrt(x / T(n) + " + epsilon + ")", {square});
  const int scaled = row.point("x * y", {centred, inverse});
  if (row.has(2))
    row.give(0, row.builder().function("LayerNormalization", row.builder().at(row.x()).dtype, "return T(x * y + z);",
                                       {scaled, row.operand(1), row.operand(2)}));
  else
    row.give(0, row.result("x * y", {scaled, row.operand(1)}));
  row.give(1, row.as(statistics, mean));
  row.give(2, row.as(statistics, inverse));
}

void lower_rms_normalization(RowLowering& row) {
  row.require_last(row.node().get_int("axis", -1));
  const std::string epsilon = row.number(row.node().get_float("epsilon", 1e-5f));
  const int square = row.fold("Add", row.point("x * x", {row.x()}));
  const int inverse = row.point("T(1) / sqrt(x / T(n) + " + epsilon + ")", {square});
  row.give(0, row.result("x * y * z", {row.x(), inverse, row.operand(1)}));
}

// The rows of the table.
void lower_reduction(RowLowering& row) {
  const Node& node = row.node();
  const ReductionRow& r = *reduction_row(node.op);
  const TensorPtr axes = row.builder().constant(node, 1);
  const auto numbers = axes ? int_values(*axes) : std::nullopt;
  if (!numbers || numbers->size() != 1) throw Refused{"axes that are not the last alone"};
  row.require_last(numbers->front());
  int x = row.x(), shift = -1;
  if (r.shifted) {
    shift = row.point("x - x == T(0) ? x : T(0)", {row.fold("Larger", x)});  // an infinite maximum would give NaN
    x = row.point("x - y", {x, shift});
  }
  if (std::string_view(r.term) != "x") x = row.point(r.term, {x});
  const int sum = row.fold(r.fold, x);
  std::string finish = r.finish;
  std::replace(finish.begin(), finish.end(), 'z', 'x');
  const int y = shift < 0 ? row.result(finish, {sum}) : row.result(finish + " + y", {sum, shift});
  if (node.get_int("keepdims", 1) == 0) row.drop_axis(y);
  row.give(0, y);
}

}  // namespace

bool lower_row_operator(StepBuilder& b, const Node& node) {
  static const std::unordered_map<std::string_view, void (*)(RowLowering&)> all = [] {
    std::unordered_map<std::string_view, void (*)(RowLowering&)> made = {{"Softmax", lower_softmax},
                                                                         {"LogSoftmax", lower_log_softmax},
                                                                         {"LayerNormalization", lower_layer_normalization},
                                                                         {"RMSNormalization", lower_rms_normalization}};
    for (const ReductionRow& row : reduction_rows()) made[row.op] = lower_reduction;
    return made;
  }();
  const auto found = all.find(node.op);
  if (found == all.end()) return false;
  RowLowering row(b, node);
  found->second(row);
  return true;
}

}  // namespace fretsaw::cuda
