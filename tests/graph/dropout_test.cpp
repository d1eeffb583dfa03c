// Dropout by counted masks, as graphs.
#include "graph/training/dropout.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/graph/text_model.h"

namespace fretsaw::testing {
namespace {

TEST(CountedDraws, ADropoutOfUnknownRank) {
  Model model = parse_model(static_cast<int>(newest_opset()), R"(
    g (float[n] x, int64[k] sizes) => (float loss) <float ratio = {0.5}, bool training = {1}> {
      r = Reshape(x, sizes)
      y = Dropout(r, ratio, training)
      loss = ReduceSum<keepdims=0>(y)
    })");
  infer_shapes(model);
  EXPECT_TRUE(count_draws(model, "counter"));
  const auto& nodes = model.graph->nodes;
  const auto mask = std::find_if(nodes.begin(), nodes.end(), [](const Node* node) { return node->op == "DropoutMask"; });
  ASSERT_NE(mask, nodes.end());
  EXPECT_EQ((*mask)->out(0)->type.dtype, DType::boolean);
  EXPECT_FALSE((*mask)->out(0)->type.shape);
}

}  // namespace
}  // namespace fretsaw::testing
