// Factor rules of operators, one line a case, and what flops_of counts.
#include "graph/factors.h"

#include <gtest/gtest.h>

#include "graph/catalogue.h"
#include "graph/dim_product.h"
#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

struct Case {
  const char* inputs;  // of the graph, in ONNX's text form
  const char* node;    // the last node of the body is the one asked about
  const char* rule;
};

Model inferred(const Case& c) {
  Model model =
      testing::parse_model("<ir_version: 10, opset_import: [\"\" : 23]>\ng (" + std::string(c.inputs) + ") => (y) { " + c.node + " }");
  constants_to_initializers(model);
  infer_shapes(model);
  return model;
}

class FactorRules : public ::testing::TestWithParam<Case> {};

TEST_P(FactorRules, Rule) {
  Model model = inferred(GetParam());
  EXPECT_EQ(to_string(factor_rule(*model.graph->nodes.back())), GetParam().rule);
}

const Case kCases[] = {
    // elementwise: broadcasting axes share a factor
    {"float[2,3] a, float[2,3] b", "y = Add(a, b)", "i0 i1, i0 i1 -> i0 i1"},
    {"float[2,3] a, float[3] b", "y = Add(a, b)", "i0 i1, i1 -> i0 i1"},
    {"float[2,1] a, float[1,3] b", "y = Mul(a, b)", "i0 1, 1 i1 -> i0 i1"},
    {"float[n,4] a, float[n,4] b", "y = Sub(a, b)", "i0 i1, i0 i1 -> i0 i1"},
    {"bool[4,1] c, float[4,5] a, float b", "y = Where(c, a, b)", "i0 1, i0 i1, . -> i0 i1"},
    {"float[2,3] a", "y = Cast<to=11>(a)", "i0 i1 -> i0 i1"},
    // contractions
    {"float[4,5] a, float[5,6] b", "y = MatMul(a, b)", "m k, k n -> m n | sum k"},
    {"float[2,4,5] a, float[5,6] b", "y = MatMul(a, b)", "i0 m k, k n -> i0 m n | sum k"},
    {"float[2,1,4,5] a, float[3,5,6] b", "y = MatMul(a, b)", "i0 1 m k, i1 k n -> i0 i1 m n | sum k"},
    {"float[5] a, float[5,6] b", "y = MatMul(a, b)", "k, k n -> n | sum k"},
    {"float[4,5] a, float[5] b", "y = MatMul(a, b)", "m k, k -> m | sum k"},
    {"float[4,5] a, float[6,5] b, float[6] c", "y = Gemm<transB=1>(a, b, c)", "m k, n k, n -> m n | sum k"},
    {"float[4,5] a, float[5,6] b, float[4,1] c", "y = Gemm(a, b, c)", "m k, k n, m 1 -> m n | sum k"},
    {"float[2,3,4] a, float[2,5,4] b", "y = Einsum<equation=\"bij,bkj->bik\">(a, b)", "b i j, b k j -> b i k | sum j"},
    {"float[2,7,3] a, float[3,5] b", "y = Einsum<equation=\"...i,ij->...j\">(a, b)", "...0 ...1 i, i j -> ...0 ...1 j | sum i"},
    {"float[3,3] a", "y = Einsum<equation=\"ii->i\">(a)", "i00 i01 -> i | whole i00 i01 i"},
    {"float[2,3,3] a, float[2,4] b", "y = Einsum<equation=\"bii,bj->bj\">(a, b)", "b i01 i02, b j -> b j | whole i01 i02"},
    // convolutions and pooling
    {"float[2,3,8,8] x, float[6,3,3,3] w, float[6] b", "y = Conv<pads=[1,1,1,1]>(x, w, b)",
     "n c h w, o c kh kw, o -> n o h w | sum c | whole kh kw | halo h w"},
    {"float[2,4,8,8] x, float[6,2,1,1] w", "y = Conv<group=2>(x, w)", "n (g c) h w, (g o) c kh kw -> n (g o) h w | sum c | whole kh kw"},
    {"float[2,4,8,8] x, float[4,1,3,3] w", "y = Conv<group=4>(x, w)",
     "n (g c) h w, (g o) c kh kw -> n (g o) h w | sum c | whole kh kw | halo h w"},
    {"float[2,4,8,8] x, float[4,3,2,2] w", "y = ConvTranspose<strides=[2,2]>(x, w)",
     "n c h w, c o k2 k3 -> n o h w | sum c | whole k2 k3 | halo h w"},
    {"float[2,4,8,8] x", "y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)", "n c h w -> n c h w | halo h w"},
    {"float[2,4,8,8] x", "y, i = MaxPool<kernel_shape=[2,2]>(x)", "unknown: its indices count over the whole tensor"},
    {"float[2,4,8,8] x", "y = GlobalAveragePool(x)", "n c s2 s3 -> n c 1 1 | whole s2 s3"},
    // reductions
    {"float[2,3,4] x", "a = Constant<value_ints=[1]>() y = ReduceSum<keepdims=0>(x, a)", "i0 r1 i2, 1 -> i0 i2 | sum r1"},
    {"float[2,3,4] x", "a = Constant<value_ints=[-1]>() y = ReduceMean(x, a)", "i0 i1 r2, 1 -> i0 i1 1 | whole r2"},
    {"float[2,3] x", "y = ReduceMax<keepdims=0>(x)", "r0 r1 -> . | whole r0 r1"},
    {"float[2,3] x", "y = ArgMax<axis=1, keepdims=0>(x)", "i0 r1 -> i0 | whole r1"},
    // whole axes
    {"float[2,3,4] x", "y = Softmax(x)", "i0 i1 j2 -> i0 i1 j2 | whole j2"},
    {"float[2,3,4] x, float[4] s, float[4] b", "y = LayerNormalization(x, s, b)", "i0 i1 j2, j2, j2 -> i0 i1 j2 | whole j2"},
    {"float[2,6,4] x, float[6] s, float[6] b", "y = GroupNormalization<num_groups=3>(x, s, b)",
     "n (g c) s2, (g c), (g c) -> n (g c) s2 | whole c s2"},
    {"float[2,6,4] x, float[6] s, float[6] b, float[6] m, float[6] v", "y = BatchNormalization(x, s, b, m, v)",
     "i0 i1 i2, i1, i1, i1, i1 -> i0 i1 i2"},
    {"float[2,3] x", "a = Constant<value_int=1>() y = CumSum(x, a)", "i0 j1, . -> i0 j1 | whole j1"},
    {"float[2,3,3] x", "y = Trilu(x)", "i0 j1 j2 -> i0 j1 j2 | whole j1 j2"},
    // regrouping, also with symbols
    {"float[8,64] x", "s = Constant<value_ints=[8,4,16]>() y = Reshape(x, s)", "a (b c), 1 -> a b c"},
    {"float[2,16] x", "s = Constant<value_ints=[8,-1]>() y = Reshape(x, s)", "a (b c), 1 -> (a b) c"},
    {"float[4,9] x", "s = Constant<value_ints=[6,6]>() y = Reshape(x, s)", "(a u0) u1, 1 -> (a v0) v1 | whole u0 u1 v0 v1"},
    {"float[n,4,5] x", "s = Constant<value_ints=[0,-1]>() y = Reshape(x, s)", "a b c, 1 -> a (b c)"},
    {"float[n,4,5] x", "s = Constant<value_ints=[-1,5]>() y = Reshape(x, s)", "a b c, 1 -> (a b) c"},
    {"float[2,3,4] x", "y = Flatten<axis=2>(x)", "a b c -> (a b) c"},
    {"float[2,1,3] x", "a = Constant<value_ints=[1]>() y = Squeeze(x, a)", "i0 1 i2, 1 -> i0 i2"},
    {"float[2,3] x", "a = Constant<value_ints=[0,-1]>() y = Unsqueeze(x, a)", "i0 i1, 1 -> 1 i0 i1 1"},
    // movement
    {"float[2,3,4] x", "y = Transpose<perm=[2,0,1]>(x)", "i0 i1 i2 -> i2 i0 i1"},
    {"float[2,3] a, float[2,5] b", "y = Concat<axis=1>(a, b)", "i0 s0, i0 s1 -> i0 cat | whole s0 s1 cat"},
    {"float[2,6] x", "y, z = Split<axis=1, num_outputs=2>(x)", "i0 w1 -> i0 w1', i0 w1' | whole w1 w1' w1'"},
    {"float[2,6] x", "s = Constant<value_ints=[0,1]>() e = Constant<value_ints=[2,4]>() y = Slice(x, s, e)",
     "i0 w1, 1, 1 -> i0 w1' | whole w1 w1'"},
    {"float[2,6] x", "p = Constant<value_ints=[0,1,0,1]>() y = Pad(x, p)", "i0 w1, 1 -> i0 w1' | whole w1 w1'"},
    {"float[2,1] x", "s = Constant<value_ints=[4,2,3]>() y = Expand(x, s)", "i1 1, 1 -> i0 i1 i2 | repeated i0 i2"},
    {"float[2,3] x", "r = Constant<value_ints=[2,1]>() y = Tile(x, r)", "i0 i1, 1 -> (t0 i0) i1 | repeated t0"},
    {"float[1,8,2,3] x", "y = DepthToSpace<blocksize=2>(x)", "n (x y c) h w -> n c (h x) (w y) | whole x y"},
    // indexing
    {"float[9,4] x, int64[2,3] i", "y = Gather(x, i)", "v d1, i0 i1 -> i0 i1 d1 | whole v"},
    {"float[2,9] x, int64[2,3] i", "y = GatherElements<axis=1>(x, i)", "i0 v, i0 i1 -> i0 i1 | whole v"},
    {"float[2,9,4] x, int64[2,3,1] i", "y = GatherND<batch_dims=1>(x, i)", "b0 v1 d2, b0 i1 k -> b0 i1 d2 | whole k v1"},
    {"float[2,9] x", "k = Constant<value_ints=[3]>() y, i = TopK(x, k)", "i0 v, 1 -> i0 k, i0 k | whole v k"},
    {"int64[2,3] i", "d = Constant<value_int=5>() v = Constant<value_floats=[0.0,1.0]>() y = OneHot(i, d, v)",
     "i0 i1, ., values0 -> i0 i1 depth | whole values0 depth"},
    // transformers and recurrent networks
    {"float[2,8,5,16] q, float[2,2,7,16] k, float[2,2,7,4] v", "y = Attention(q, k, v)",
     "b (g r) s d, b g t d, b g t e -> b (g r) s e | whole s t d"},
    {"float[5,2,3] x, float[1,16,3] w, float[1,16,4] r", "y, h = LSTM<hidden_size=4>(x, w, r)",
     "t b i2, dir w1_1 w1_2, dir w2_1 w2_2 -> t dir b h, dir b h | whole dir t h i2 w1_1 w1_2 w2_1 w2_2"},
    // no rule
    {"float[2,3] x", "y = NonZero(x)", "unknown: the operator has no factor rule"},
};

INSTANTIATE_TEST_SUITE_P(All, FactorRules, ::testing::ValuesIn(kCases));

TEST(FactorRules, ConstantShapesHaveNoFactorsInTheShapeOperand) {
  Model model = inferred({"float[8,64] x", "s = Constant<value_ints=[8,4,16]>() y = Reshape(x, s)", ""});
  FactorRule rule = factor_rule(*model.graph->nodes.back());
  ASSERT_EQ(rule.inputs.size(), 2u);
  EXPECT_TRUE(rule.inputs[1].at(0).empty());
}

struct FlopCase {
  const char* inputs;
  const char* node;
  double flops;
};
class Flops : public ::testing::TestWithParam<FlopCase> {};
TEST_P(Flops, Count) {
  Model model = inferred({GetParam().inputs, GetParam().node, ""});
  EXPECT_DOUBLE_EQ(flops_of(*model.graph->nodes.back()), GetParam().flops);
}
INSTANTIATE_TEST_SUITE_P(
    All, Flops,
    ::testing::Values(FlopCase{"float[4,5] a, float[5,6] b", "y = MatMul(a, b)", 2 * 4 * 5 * 6},
                      FlopCase{"float[n,5] a, float[5,6] b", "y = MatMul(a, b)", 2 * 5 * 6},
                      FlopCase{"float[2,4,8,8] x, float[6,2,3,3] w", "y = Conv<group=2>(x, w)", 2.0 * 2 * 6 * 6 * 6 * 2 * 9},
                      FlopCase{"float[2,3] a, float[3] b", "y = Add(a, b)", 6}, FlopCase{"float[2,3] x", "y = ReduceSum(x)", 6},
                      FlopCase{"float[2,3] x", "y = Transpose(x)", 0}, FlopCase{"float[2,3] x", "y = Softmax(x)", 6},
                      FlopCase{"float[2,4,5,8] q, float[2,4,7,8] k, float[2,4,7,8] v", "y = Attention(q, k, v)",
                               2.0 * 4 * 5 * 7 * (16 + 16 + 1)}));

TEST(DimProducts, Arithmetic) {
  DimProduct a(std::string("16*batch*seq")), b(std::string("batch*4"));
  EXPECT_EQ(to_string(*quotient(a, b)), "4*seq");
  EXPECT_FALSE(quotient(b, a));
  EXPECT_EQ(to_string(common_divisor(a, b)), "4*batch");
  EXPECT_EQ(to_string(DimProduct(std::string("past+seq")) * b), "4*batch*(past+seq)");
  EXPECT_EQ(DimProduct(std::string("4*batch*(past+seq)")), DimProduct(std::string("past+seq")) * b);
}

TEST(Catalogue, EveryOnnxOperatorOfTheNewestOpsetIsKnown) {
  for (const char* name : {"Conv", "Attention", "SwiGLU", "TensorScatter", "LinearAttention", "BitCast", "If", "SequenceAt"})
    EXPECT_NE(find_operator(name, ""), nullptr) << name;
  EXPECT_EQ(find_operator("Conv", "ai.onnx"), find_operator("Conv", ""));
  EXPECT_EQ(find_operator("Conv", "com.example"), nullptr);
}

}  // namespace
}  // namespace fretsaw
