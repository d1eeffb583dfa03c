// Parts of running statistics run in the stage of the norm that moves them, and so does what makes their next values.
#include "partitioner/statistic_stages.h"

#include <gtest/gtest.h>

#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

TEST(StatisticStages, PartsAndNextValuesGoWhereTheNormIs) {
  Model model = testing::parse_model(23, R"(
    g (float[n,4] x) => (float loss, float count, float[2] next)
    <float[4] mean = {0, 0, 0, 0}, float[2] var = {1, 1}, float[2] row = {1, 1}, int64[1] begin = {0}, int64[1] end = {3}, int64[1] two = {2},
     float[4,2] w = {1, 2, 3, 4, 5, 6, 7, 8}, float kept = {0.9}> {
      half = Slice(mean, begin, end)
      part = Slice(half, begin, two)
      y = MatMul(x, w)
      z, moved, other = BatchNormalization<training_mode=1>(y, row, row, part, var)
      loss = ReduceSum<keepdims=0>(z)
      count = ReduceMax<keepdims=0>(z)
      next = Mul(moved, kept)
    })");
  infer_shapes(model);
  const GraphIndex index(*model.graph);
  //                          half part y  z  loss count next
  std::vector<int> stage_of = {0, 0, 0, 1, 2, 2, 2};
  keep_statistics_together(index, stage_of);
  EXPECT_EQ(stage_of, (std::vector<int>{1, 1, 0, 1, 2, 2, 1}));
  // Copies stay copies.
  stage_of = {-1, -1, 0, 1, 2, 2, 0};
  keep_statistics_together(index, stage_of);
  EXPECT_EQ(stage_of, (std::vector<int>{-1, -1, 0, 1, 2, 2, 1}));
}

}  // namespace
}  // namespace fretsaw
