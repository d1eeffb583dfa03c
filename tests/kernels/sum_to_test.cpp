// SumTo against a sum element by element: rows that are summed as a whole, and axes in between.
#include <gtest/gtest.h>

#include "tests/kernels/operator_case.h"

namespace fretsaw::testing {
namespace {

struct Shapes {
  Dims x, y;
};

// The elements of y that each element of x belongs to, one after the other.
std::vector<double> sums(const Dims& x, const Dims& y, const float* elements) {
  std::vector<double> out(static_cast<size_t>(count_of(y)));
  for (int64_t i = 0; i < count_of(x); ++i) {
    int64_t rest = i, at = 0, stride = 1;
    for (size_t k = 0; k < x.size(); ++k) {  // from the last axis on
      const int64_t dim = x[x.size() - 1 - k], index = rest % dim;
      rest /= dim;
      if (k >= y.size()) continue;
      if (y[y.size() - 1 - k] != 1) at += index * stride;
      stride *= y[y.size() - 1 - k];
    }
    out[static_cast<size_t>(at)] += static_cast<double>(elements[i]);
  }
  return out;
}

class SumTo : public ::testing::TestWithParam<Shapes> {};

TEST_P(SumTo, IsTheSumElementByElement) {
  const auto& [x, y] = GetParam();
  const RuntimeValue values = counting(x);
  std::vector<float> wanted;
  for (double sum : sums(x, y, values.tensor.as<float>())) wanted.push_back(static_cast<float>(sum));
  const std::vector<int64_t> shape(y.begin(), y.end());
  EXPECT_EQ(failure_of({"case", "SumTo", {}, {values, ints(shape)}, {tensor_of(y, wanted)}, "ai.fretsaw"}), "");
}
INSTANTIATE_TEST_SUITE_P(Some, SumTo,
                         ::testing::Values(Shapes{{3, 4}, {3, 4}}, Shapes{{300, 70}, {70}}, Shapes{{5, 60, 130}, {1, 130}},
                                           Shapes{{2, 3, 4, 5}, {4, 5}}, Shapes{{2, 3, 4, 5}, {3, 1, 5}}, Shapes{{2, 3, 4}, {2, 3, 1}},
                                           Shapes{{2, 3}, {1, 1}}, Shapes{{40000}, {}}, Shapes{{0, 3}, {3}}, Shapes{{0, 3}, {0, 3}},
                                           Shapes{{1, 3}, {3}}, Shapes{{2, 1, 3}, {1, 3}}));

}  // namespace
}  // namespace fretsaw::testing
