// MatMul, Gemm, Einsum, the integer products and Det against simple loops.
#include <cmath>

#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

RuntimeValue random_tensor(const Dims& dims, uint32_t seed, DType type = DType::float32) {
  const bool whole = is_integer(type);
  std::vector<double> values = spread_values(count_of(dims), whole ? 0 : -1, whole ? 9 : 1, seed);
  if (whole) {
    for (double& v : values) v = std::floor(v);
  }
  return tensor_as(type, dims, values);
}

void expect_near(const RuntimeValue& got, const Dims& dims, const std::vector<double>& wanted, double tolerance) {
  ASSERT_EQ(got.tensor.dims, dims);
  const std::vector<double> values = doubles_of(got);
  for (size_t i = 0; i < wanted.size(); ++i) ASSERT_NEAR(values[i], wanted[i], tolerance * (1 + std::fabs(wanted[i]))) << "element " << i;
}

struct ProductCase {
  Dims a, b, y;
};

// Batches are addressed by numpy's rule, from the last dimension.
std::vector<double> reference(const ProductCase& c, const std::vector<double>& a, const std::vector<double>& b) {
  Dims da = c.a, db = c.b, dy = c.y;
  if (c.a.size() == 1) da.insert(da.begin(), 1), dy.insert(dy.end() - (c.b.size() > 1 ? 1 : 0), 1);
  if (c.b.size() == 1) db.push_back(1), dy.push_back(1);
  const int64_t M = da[da.size() - 2], K = da.back(), N = db.back(), batches = M > 0 && N > 0 ? count_of(dy) / (M * N) : 0;
  const auto offset = [&](const Dims& dims, int64_t batch, int64_t size) {
    int64_t at = 0, step = 1;
    for (size_t i = 0; i + 2 < dy.size(); ++i) {
      const size_t from_end = dy.size() - 3 - i;
      const int64_t index = batch % dy[from_end];
      batch /= dy[from_end];
      if (i + 2 >= dims.size()) continue;
      const int64_t extent = dims[dims.size() - 3 - i];
      at += (extent == 1 ? 0 : index) * step, step *= extent;
    }
    return at * size;
  };
  std::vector<double> y;
  for (int64_t batch = 0; batch < batches; ++batch) {
    for (int64_t i = 0; i < M; ++i) {
      for (int64_t j = 0; j < N; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < K; ++k)
          sum +=
              a[static_cast<size_t>(offset(da, batch, M * K) + i * K + k)] * b[static_cast<size_t>(offset(db, batch, K * N) + k * N + j)];
        y.push_back(sum);
      }
    }
  }
  return y;
}

TEST(MatMul, FollowsNumpy) {
  const ProductCase cases[] = {
      {{4, 5}, {5, 6}, {4, 6}},
      {{5}, {5}, {}},
      {{5}, {5, 3}, {3}},
      {{4, 5}, {5}, {4}},
      {{2, 3, 4, 5}, {5, 6}, {2, 3, 4, 6}},
      {{4, 5}, {2, 5, 6}, {2, 4, 6}},
      {{2, 1, 4, 5}, {3, 5, 6}, {2, 3, 4, 6}},
      {{1, 4, 5}, {2, 5, 6}, {2, 4, 6}},
      {{2, 4, 5}, {5}, {2, 4}},
      {{5}, {2, 5, 3}, {2, 3}},
      {{0, 4}, {4, 3}, {0, 3}},
      {{2, 0}, {0, 3}, {2, 3}},
      {{3, 1, 7}, {1, 7, 1}, {3, 1, 1}},
      {{1, 130}, {130, 70}, {1, 70}},
  };
  for (const ProductCase& c : cases) {
    for (DType type : {DType::float32, DType::float64, DType::int32, DType::uint64, DType::bfloat16}) {
      const RuntimeValue a = random_tensor(c.a, 1, type), b = random_tensor(c.b, 2, type);
      const double tolerance = type == DType::float64 ? 1e-12 : type == DType::float32 ? 1e-5 : type == DType::bfloat16 ? 2e-2 : 0;
      for (int threads : {1, 2}) {
        SCOPED_TRACE(to_string(c.a) + " x " + to_string(c.b) + " " + std::string(name_of(type)));
        expect_near(run_op("MatMul", {a, b}, {}, 1, {.threads = threads})[0], c.y, reference(c, doubles_of(a), doubles_of(b)), tolerance);
      }
    }
  }
}

TEST(MatMul, WrongShapesAreErrors) {
  EXPECT_THROW(run_op("MatMul", {random_tensor({2, 3}, 1), random_tensor({4, 2}, 2)}), Error);
  EXPECT_THROW(run_op("MatMul", {random_tensor({2, 2, 3}, 1), random_tensor({3, 3, 2}, 2)}), Error);
  EXPECT_THROW(run_op("MatMul", {random_tensor({}, 1), random_tensor({3}, 2)}), Error);
  EXPECT_THROW(run_op("Gemm", {random_tensor({2, 3, 1}, 1), random_tensor({3, 3}, 2)}), Error);
}

TEST(Gemm, TransposesScalesAndAdds) {
  for (bool ta : {false, true}) {
    for (bool tb : {false, true}) {
      for (const Dims& c_dims : {Dims{}, Dims{6}, Dims{1, 6}, Dims{4, 1}, Dims{4, 6}}) {
        for (DType type : {DType::float32, DType::float64}) {
          const RuntimeValue a = random_tensor(ta ? Dims{5, 4} : Dims{4, 5}, 1, type),
                             b = random_tensor(tb ? Dims{6, 5} : Dims{5, 6}, 2, type), c = random_tensor(c_dims, 3, type);
          const auto av = doubles_of(a), bv = doubles_of(b), cv = doubles_of(c);
          std::vector<double> wanted;
          for (size_t i = 0; i < 4; ++i) {
            for (size_t j = 0; j < 6; ++j) {
              double sum = 0;
              for (size_t k = 0; k < 5; ++k) sum += (ta ? av[k * 4 + i] : av[i * 5 + k]) * (tb ? bv[j * 5 + k] : bv[k * 6 + j]);
              const size_t at = cv.size() == 1 ? 0 : cv.size() == 6 ? j : cv.size() == 4 ? i : i * 6 + j;
              wanted.push_back(0.5 * sum + 3.0 * cv[at]);
            }
          }
          const std::vector<Attribute> attributes = {attribute("transA", int64_t{ta}), attribute("transB", int64_t{tb}),
                                                     attribute("alpha", 0.5f), attribute("beta", 3.0f)};
          expect_near(run_op("Gemm", {a, b, c}, attributes)[0], {4, 6}, wanted, 1e-6);
        }
      }
    }
  }
}

RuntimeValue einsum(const std::string& equation, const std::vector<RuntimeValue>& inputs) {
  return run_op("Einsum", inputs, {attribute("equation", equation)})[0];
}

TEST(Einsum, EqualsOtherOperators) {
  const RuntimeValue a = random_tensor({2, 3, 4}, 1), b = random_tensor({2, 4, 5}, 2);
  const std::vector<double> product = doubles_of(run_op("MatMul", {a, b})[0]);
  expect_near(einsum("bij,bjk->bik", {a, b}), {2, 3, 5}, product, 1e-6);
  expect_near(einsum("...ij,...jk", {a, b}), {2, 3, 5}, product, 1e-6);
  expect_near(einsum(" b i j , b j k -> b i k ", {a, b}), {2, 3, 5}, product, 1e-6);
  const std::vector<double> m = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  const RuntimeValue square = tensor_as(DType::float64, {3, 3}, m);
  expect_near(einsum("ii->i", {square}), {3}, {1, 5, 9}, 0);
  expect_near(einsum("ii", {square}), {}, {15}, 0);
  expect_near(einsum("ij->ji", {square}), {3, 3}, {1, 4, 7, 2, 5, 8, 3, 6, 9}, 0);
  expect_near(einsum("ba", {square}), {3, 3}, {1, 4, 7, 2, 5, 8, 3, 6, 9}, 0);
  expect_near(einsum("ij->j", {square}), {3}, {12, 15, 18}, 0);
  const RuntimeValue v = tensor_as(DType::float64, {3}, {1, 10, 100});
  expect_near(einsum("i,j,ij->", {v, v, square}), {}, {111 * 0 + 1 * 321 + 10 * 654 + 100 * 987}, 0);
  EXPECT_THROW(einsum("ij,jk->iz", {square, square}), Error);
  EXPECT_THROW(einsum("ij", {square, square}), Error);
  EXPECT_THROW(einsum("ijk->i", {square}), Error);
  EXPECT_THROW(einsum("i?->i", {square}), Error);
}

TEST(MatMulInteger, TakesZeroPoints) {
  const RuntimeValue a = tensor_as(DType::uint8, {2, 2}, {11, 7, 3, 10}), b = tensor_as(DType::int8, {2, 3}, {1, -4, 2, 3, 5, -6});
  const RuntimeValue za = tensor_as(DType::uint8, {}, {12}), zb = tensor_as(DType::int8, {3}, {0, 1, 2});
  // (a - 12) (b - [0, 1, 2])
  expect_near(run_op("MatMulInteger", {a, b, za, zb})[0], {2, 3}, {-16, -15, 40, -15, 37, 16}, 0);
}

TEST(Det, OfBatches) {
  const RuntimeValue x = tensor_as(DType::float32, {2, 2, 2}, {0, 2, 3, 4, 1, 2, 2, 4});
  expect_near(run_op("Det", {x})[0], {2}, {-6, 0}, 1e-6);
  EXPECT_THROW(run_op("Det", {random_tensor({2, 3}, 1)}), Error);
}

}  // namespace
}  // namespace fretsaw::testing
