// Gradients of running products and determinants, of which some are 0.
#include "tests/kernels/gradient_case.h"
#include "tests/kernels/operator_case.h"

namespace fretsaw::testing {

namespace {

void add_running_products(std::vector<GradientCase>& cases, Draw& x) {
  // Rows with one zero, with several, at either end, and with nothing else.
  const RuntimeValue zeros =
      tensor_of({5, 4}, std::vector<double>{1.5, 0, -2, 0.5, 0, 1.25, 0, 3, 2, -1, 0, 0, 0, 0, -3, 0.75, 0, 0, 0, 0});
  const RuntimeValue columns = tensor_of({3, 2, 2}, std::vector<double>{1, 0, 2, -3, 0, 0.5, -1, 4, 2, 0, 0, 1});
  for (const int64_t exclusive : {0, 1}) {
    for (const int64_t reverse : {0, 1}) {
      const std::vector<Attribute> attributes = {{"exclusive", exclusive}, {"reverse", reverse}};
      cases.push_back({.op = "CumProd", .inputs = {x({3, 4, 2}), number(int64_t{1})}, .attributes = attributes});
      cases.push_back({.op = "CumProd", .inputs = {zeros, number(int64_t{-1})}, .attributes = attributes});
      cases.push_back({.op = "CumProd", .inputs = {columns, number(int64_t{0})}, .attributes = attributes, .fed = {1}});
      cases.push_back({.op = "CumProd", .inputs = {x({1}), number(int64_t{0})}, .attributes = attributes});
      cases.push_back({.op = "CumProd", .inputs = {x({3, 300}), number(int64_t{0})}, .attributes = attributes});
    }
  }
  cases.push_back({.op = "CumProd", .inputs = {x({2, 0}), number(int64_t{1})}});
  // Products of the data and one, two or three updates to a place, none of them 0, one, or several: with the last no share is left.
  const std::vector<Attribute> products = {{"axis", int64_t{1}}, {"reduction", std::string("mul")}};
  const RuntimeValue places = tensor_of({2, 4}, std::vector<int64_t>{1, 1, 1, 3, 0, 2, 2, -2});
  const RuntimeValue data = tensor_of({2, 4}, std::vector<double>{2, 0, 3, 0, -1, 0.5, 1.5, 0});
  const RuntimeValue updates = tensor_of({2, 4}, std::vector<double>{0.5, -2, 3, 0, 0, 2, 0, 4});
  cases.push_back({.op = "ScatterElements", .inputs = {x({2, 4}), places, x({2, 4})}, .attributes = products});
  cases.push_back({.op = "ScatterElements", .inputs = {data, places, updates}, .attributes = products});
  cases.push_back({.op = "ScatterND",
                   .inputs = {tensor_of({3, 2}, std::vector<double>{2, 0, 3, 1, 0, -1}), tensor_of({3, 1}, std::vector<int64_t>{0, 2, 0}),
                              tensor_of({3, 2}, std::vector<double>{0, 2, -1, 3, 0.5, 0})},
                   .attributes = {{"reduction", std::string("mul")}}});
}

// Matrices of this size whose row r is the sum of the rows before it for each r in `dependent`.
RuntimeValue singular(Draw& x, int64_t n, const std::vector<int64_t>& dependent) {
  RuntimeValue matrices = x({2, n, n});
  double* m = matrices.tensor.as<double>();
  for (int64_t i = 0; i < 2 * n * n; ++i) m[i] = static_cast<double>(static_cast<int64_t>(m[i] * 4)) / 2;  // so that sums are exact
  for (double* matrix : {m, m + n * n})
    for (const int64_t row : dependent)
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (int64_t i = 0; i < row; ++i) sum += matrix[i * n + j];
        matrix[row * n + j] = sum;
      }
  return matrices;
}

void add_determinants(std::vector<GradientCase>& cases, Draw& x) {
  for (const Dims& dims : {Dims{1, 1}, {2, 2}, {3, 3}, {5, 4, 4}, {2, 3, 6, 6}, {9, 9}})
    cases.push_back({.op = "Det", .inputs = {x(dims)}});
  // Of a rank that is 1 less than the size. (gradients_exact_test.cpp has one of a lower rank.)
  for (const int64_t n : {2, 3, 4, 6}) cases.push_back({.op = "Det", .inputs = {singular(x, n, {n - 1})}});
  cases.push_back({.op = "Det", .inputs = {singular(x, 4, {2})}});
  cases.push_back({.op = "Det", .inputs = {singular(x, 4, {0})}});
  cases.push_back({.op = "Det", .inputs = {x({2, 2, 2}, 0, 0)}});
  cases.push_back({.op = "Det", .inputs = {x({3, 1, 1}, 0, 0)}});
  cases.push_back({.op = "Det", .inputs = {x({0, 3, 3})}});
  cases.push_back({.op = "Det", .inputs = {x({2, 0, 0})}});
}

}  // namespace

std::vector<GradientCase> product_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  add_running_products(cases, x);
  add_determinants(cases, x);
  return cases;
}

}  // namespace fretsaw::testing
