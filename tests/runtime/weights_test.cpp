// Weights that are made up: the same numbers whole, in parts, at once and later.
#include "runtime/weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "graph/tensor_bytes.h"
#include "graph/value_parts.h"
#include "kernels/random_weights.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

std::vector<std::byte> bytes_of_weights(const RandomWeights& weights, DType dtype, int64_t count) {
  std::vector<std::byte> bytes(bytes_of(dtype, count));
  weights(0, bytes);
  return bytes;
}

ValuePart rows(int dim, int64_t size, Intervals intervals) {
  ValuePart part;
  part.of = "w";
  part.dim = dim;
  part.size = size;
  part.intervals = std::move(intervals);
  return part;
}

TEST(RandomWeights, PartsAreSlicesOfTheWhole) {
  const Dims whole_dims = {6, 7, 5};
  const auto whole = bytes_of_weights({7, DType::float32, whole_dims}, DType::float32, count_of(whole_dims));
  for (const ValuePart& part : {rows(0, 6, {{1, 3}, {4, 5}}), rows(1, 7, {{0, 2}, {3, 4}, {6, 7}}), rows(2, 5, {{1, 4}})}) {
    const auto dim = static_cast<size_t>(part.dim);
    Dims dims = whole_dims;
    dims[dim] = size_of(part.intervals);
    const auto made = bytes_of_weights({7, DType::float32, dims, &part}, DType::float32, count_of(dims));
    int64_t inner = 1, outer = 1, at = 0;
    for (size_t d = 0; d < dims.size(); ++d) (d < dim ? outer : inner) *= d == dim ? 1 : dims[d];
    for (int64_t o = 0; o < outer; ++o) {
      for (const Interval& i : part.intervals) {
        const int64_t from = (o * whole_dims[dim] + i.begin) * inner, count = i.size() * inner;
        EXPECT_EQ(std::memcmp(&made[static_cast<size_t>(at) * 4], &whole[static_cast<size_t>(from) * 4], static_cast<size_t>(count) * 4), 0)
            << "dimension " << dim << ", from " << i.begin;
        at += count;
      }
    }
  }
}

TEST(RandomWeights, AnyPieceOfTheBytes) {
  for (DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16, DType::int8, DType::uint8, DType::int64}) {
    const RandomWeights weights(3, dtype, {9, 11});
    const auto whole = bytes_of_weights(weights, dtype, 99);
    for (size_t first : {size_t{0}, size_t{1}, size_t{6}, size_t{33}}) {
      for (size_t count : {size_t{0}, size_t{1}, size_t{8}, size_t{41}}) {
        std::vector<std::byte> piece(count, std::byte{0xcd});
        weights(first, piece);
        EXPECT_TRUE(std::equal(piece.begin(), piece.end(), whole.begin() + static_cast<std::ptrdiff_t>(first)))
            << name_of(dtype) << " from " << first << ", " << count;
      }
    }
  }
}

TEST(RandomWeights, KeysAndRanges) {
  const RandomWeights a(1, DType::float32, {300, 200}), b(2, DType::float32, {300, 200}), vector(1, DType::float32, {1000});
  EXPECT_NE(bytes_of_weights(a, DType::float32, 60000), bytes_of_weights(b, DType::float32, 60000));
  std::vector<float> numbers(60000), scales(1000);
  a(0, std::as_writable_bytes(std::span(numbers)));
  vector(0, std::as_writable_bytes(std::span(scales)));
  double sum = 0;
  for (float x : numbers) {
    EXPECT_LE(std::fabs(x), std::sqrt(3.0 / 300));
    sum += x;
  }
  EXPECT_NEAR(sum / 60000, 0, 1e-3);
  for (float x : scales) EXPECT_TRUE(x >= 0.5f && x < 1.0f);
}

TEST(JoinedTensors, RowsOfEveryPartInTurn) {
  const JoinedTensors joined{{floats({2, 3}, {1, 2, 3, 4, 5, 6}), floats({2, 1}, {7, 8})}, 2};
  std::vector<float> all(8);
  joined(0, std::as_writable_bytes(std::span(all)));
  EXPECT_EQ(all, (std::vector<float>{1, 2, 3, 7, 4, 5, 6, 8}));
  std::vector<float> some(3);
  joined(2 * sizeof(float), std::as_writable_bytes(std::span(some)));
  EXPECT_EQ(some, (std::vector<float>{3, 7, 4}));
}

// Two products of x with weights that are missing, one of them large.
std::shared_ptr<Model> model_without_weights(int64_t columns) {
  auto model = new_model();
  Value* x = add_input(*model, "x", DType::float32, {Dim(2), Dim(256)});
  for (const auto& [name, width] : {std::pair<std::string, int64_t>{"large", columns}, {"small", 8}}) {
    auto lost = std::make_shared<Tensor>();
    lost->name = name;
    lost->dtype = DType::float32;
    lost->dims = {256, width};
    lost->missing = "weights.bin is not there";
    Value* y = add_node(*model->graph, "MatMul", {x, model->graph->add_constant(name, lost)}, name + "_product");
    y->type = Type::tensor(DType::float32, Shape{Dim(2), Dim(width)});
    model->graph->outputs.push_back(y);
  }
  return model;
}

TEST(Weights, LargeOnesAreMadeLater) {
  const auto model = model_without_weights(300);
  const auto now = with_weights(model, {.random = true, .seed = 5}),
             later = with_weights(model, {.random = true, .seed = 5, .later = true});
  const auto wanted = now->graph->initializers(), given = later->graph->initializers();
  ASSERT_EQ(given.size(), 2U);
  EXPECT_EQ(given[0]->constant->data, nullptr);
  EXPECT_NE(given[0]->constant->generate.target<RandomWeights>(), nullptr);
  EXPECT_NE(given[1]->constant->data, nullptr);
  for (size_t i = 0; i < 2; ++i) {
    const TensorPtr made = with_bytes(given[i]->constant);
    EXPECT_EQ(std::memcmp(made->data, wanted[i]->constant->data, made->bytes()), 0) << wanted[i]->name;
  }
  EXPECT_EQ(weight_bytes({now}), weight_bytes({later}));
}

TEST(Weights, ProductsAreMergedBeforeTheirWeightsAreMade) {
  const auto merged_weights = [](bool later) {
    auto made = with_weights(model_without_weights(300), {.random = true, .seed = 5, .later = later});
    auto model = std::make_shared<Model>(clone(*made));
    merge_products(*model);
    for (const Value* v : model->graph->initializers())
      if (v->constant->dims == Dims{256, 308}) return v->constant;
    return TensorPtr();
  };
  const TensorPtr now = merged_weights(false), later = merged_weights(true);
  ASSERT_TRUE(now && later);
  EXPECT_EQ(later->data, nullptr);
  EXPECT_NE(later->generate.target<JoinedTensors>(), nullptr);
  EXPECT_EQ(std::memcmp(with_bytes(later)->data, now->data, now->bytes()), 0);
}

}  // namespace
}  // namespace fretsaw
