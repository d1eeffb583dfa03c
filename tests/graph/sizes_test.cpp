// Numbers for symbolic dimensions.
#include "graph/sizes.h"

#include <gtest/gtest.h>

namespace fretsaw {
namespace {

TEST(Sizes, ExpressionsAreEvaluated) {
  const DimSizes sizes = {{"batch", 3}, {"past", 7}, {"a-b", 5}};
  const std::pair<const char*, int64_t> cases[] = {{"batch", 3},
                                                   {"4*batch", 12},
                                                   {"past+1", 8},
                                                   {"2*(past+batch)*batch", 60},
                                                   {"past-batch", 4},
                                                   {"batch-past", 0},
                                                   {"other", 1},
                                                   {"other*batch", 3},
                                                   {"a-b", 5},
                                                   {"batch+", 1},
                                                   {"(batch", 1},
                                                   {"9999999999999999999", 1},
                                                   {"3037000500*3037000500*4", 1}};
  for (const auto& [text, size] : cases) EXPECT_EQ(size_of(Dim(text), sizes), size) << text;
  EXPECT_EQ(size_of(Dim(6), sizes), 6);
  EXPECT_EQ(size_of(Dim(), sizes), 1);
}

TEST(Sizes, TheLargestMicroBatchCounts) {
  Plan plan;
  plan.batch = 7, plan.micro_batches = 2, plan.mesh.data = 2;
  plan.inputs.push_back({"x", Type::tensor(DType::float32, Shape{Dim(5), Dim("n")}), 1, {0}});
  plan.inputs.push_back({"mask", Type::tensor(DType::float32, Shape{Dim("m")}), -1, {0}});
  EXPECT_EQ(micro_batch_sizes(plan), (DimSizes{{"n", 2}}));  // 4 samples on the first data rank
  plan.batch = -1;
  EXPECT_TRUE(micro_batch_sizes(plan).empty());
}

}  // namespace
}  // namespace fretsaw
