// The rows of graph/operators/elementwise.inc as text.
#include "kernels/cuda/pointwise_table.h"

#include <algorithm>

namespace fretsaw::cuda {
namespace {

using Kind = PointRow::Kind;

constexpr PointRow all_points[] = {
#define FRETSAW_UNARY(name, set, expression) {Kind::unary, #name, types::set, #expression, ""},
#define FRETSAW_UNARY_ATTR(name, set, a_name, a_value, b_name, b_value, expression) \
  {Kind::unary, #name, types::set, #expression, "", a_name, b_name, a_value, b_value},
#define FRETSAW_UNARY_CHOICE(name, set, attribute, choice1, expression1, choice2, expression2) \
  {Kind::unary, #name, types::set, #expression1, #expression2, "", "", 0, 0, attribute, choice1, choice2},
#define FRETSAW_TEST(name, set, a_name, a_value, b_name, b_value, expression) \
  {Kind::test, #name, types::set, #expression, "", a_name, b_name, a_value, b_value},
#define FRETSAW_BINARY(name, set, expression) {Kind::binary, #name, types::set, #expression, ""},
#define FRETSAW_BINARY_ATTR(name, set, a_name, a_value, expression) \
  {Kind::binary, #name, types::set, #expression, "", a_name, "", a_value, 0},
#define FRETSAW_BINARY_CHOICE(name, set, attribute, choice1, expression1, choice2, expression2) \
  {Kind::binary, #name, types::set, #expression1, #expression2, "", "", 0, 0, attribute, choice1, choice2},
#define FRETSAW_BINARY_MIXED(name, set, expression) {Kind::mixed, #name, types::set, #expression, ""},
#define FRETSAW_COMPARISON(name, set, expression) {Kind::comparison, #name, types::set, #expression, ""},
#define FRETSAW_VARIADIC(name, set, combine, finish) {Kind::variadic, #name, types::set, #combine, #finish},
#define FRETSAW_TERNARY(name, set, expression) {Kind::ternary, #name, types::set, #expression, ""},
#include "graph/operators/elementwise.inc"
};

constexpr const char* add = "Add";
constexpr const char* multiply = "Multiply";
constexpr const char* smaller = "Smaller";
constexpr const char* larger = "Larger";
constexpr ReductionRow all_reductions[] = {
#define FRETSAW_REDUCTION(name, set, fold, term, finish) {#name, fold, #term, #finish, false},
#define FRETSAW_REDUCTION_SHIFTED(name, set, fold, term, finish) {#name, fold, #term, #finish, true},
#include "graph/operators/elementwise.inc"
};

template <typename Row>
const Row* find_row(std::span<const Row> rows, std::string_view op) {
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const Row& row) { return row.op == op; });
  return found == rows.end() ? nullptr : &*found;
}

}  // namespace

const PointRow* point_row(std::string_view op) {
  return find_row(point_rows(), op);
}
std::span<const PointRow> point_rows() {
  return all_points;
}
const ReductionRow* reduction_row(std::string_view op) {
  return find_row(reduction_rows(), op);
}
std::span<const ReductionRow> reduction_rows() {
  return all_reductions;
}

}  // namespace fretsaw::cuda
