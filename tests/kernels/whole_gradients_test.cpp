// Gradients of whole graphs: values used twice, shared weights, what does not reach the loss, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/gradients.h"
#include "tests/graph/text_model.h"
#include "tests/kernels/gradient_case.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::testing {

namespace {

// A model of the newest opset whose float64 inputs are given random numbers.
class WholeGraph {
 public:
  // Symbolic dimensions have `sizes`, or 3.
  explicit WholeGraph(const std::string& text, const std::map<std::string, int64_t>& sizes = {})
      : model_(parse_model(static_cast<int>(newest_opset()), text)) {
    run_passes(model_, normalise_passes());
    infer_shapes(model_);
    Draw draw;
    for (const Value* v : model_.graph->inputs) {
      Dims dims;
      for (const Dim& d : *v->type.shape) {
        const auto given = sizes.find(d.symbol);
        dims.push_back(d.known() ? d.value : given == sizes.end() ? 3 : given->second);
      }
      given_.push_back(v->type.dtype == DType::float64 ? draw(dims, -1, 1) : make_value(v->type.dtype, dims));
    }
  }

  Model& model() { return model_; }
  Value* value(const std::string& name) {
    for (Value& v : model_.graph->all_values())
      if (v.name == name) return &v;
    throw Error("the graph has no value " + name);
  }
  Gradients differentiate(const std::vector<std::string>& names, const GradientOptions& options = {}) {
    std::vector<Value*> wanted;
    for (const std::string& name : names) wanted.push_back(value(name));
    return add_gradients(model_, model_.graph->outputs[0], wanted, options);
  }

  // "" when the gradient of every float64 input agrees with differences along two directions.
  std::string failure() {
    const Interpreter forward(clone(model_));
    std::vector<std::string> names;
    for (const Value* v : model_.graph->inputs)
      if (v->type.dtype == DType::float64) names.push_back(v->name);
    const Gradients gradients = differentiate(names);
    for (const std::string& name : names)
      if (gradients.of(value(name))) model_.graph->outputs.push_back(gradients.of(value(name)));
    verify(*model_.graph);
    const std::vector<RuntimeValue> found = Interpreter(clone(model_)).run(given_);
    size_t at = 1;
    for (size_t i = 0; i < given_.size(); ++i) {
      if (!gradients.of(model_.graph->inputs[i])) continue;
      const std::vector<double> g = doubles_of(found[at++]), x = doubles_of(given_[i]);
      for (uint32_t seed : {1, 2}) {
        const std::vector<double> d = spread_values(static_cast<int64_t>(x.size()), -1, 1, seed);
        double expected = 0, squares = 0;
        for (size_t k = 0; k < d.size(); ++k) expected += g[k] * d[k], squares += g[k] * g[k];
        constexpr double kStep = 1e-5;
        const double above = loss(forward, i, d, kStep), below = loss(forward, i, d, -kStep), measured = (above - below) / (2 * kStep);
        // The losses are rounded, which dividing by the step makes larger.
        const double noise = std::numeric_limits<double>::epsilon() * (std::abs(above) + std::abs(below)) / (2 * kStep);
        if (!(std::abs(measured - expected) <= 1e-6 * std::max(1e-6, std::sqrt(squares)) + noise))
          return model_.graph->inputs[i]->name + ": " + std::to_string(expected) + ", differences " + std::to_string(measured);
      }
    }
    return "";
  }

 private:
  double loss(const Interpreter& forward, size_t input, const std::vector<double>& direction, double step) const {
    std::vector<RuntimeValue> moved = given_;
    std::vector<double> x = doubles_of(given_[input]);
    for (size_t k = 0; k < x.size(); ++k) x[k] += step * direction[k];
    moved[input] = tensor_as(DType::float64, given_[input].tensor.dims, x);
    return doubles_of(forward.run(moved)[0])[0];
  }

  Model model_;
  std::vector<RuntimeValue> given_;
};

// Two layers, the second with the first's weights turned round, and a residual.
constexpr const char* kPerceptron = R"(
  g (double[batch,4] x, double[4,4] w, double[4] b, double[4] c) => (double loss) {
    h = Gemm(x, w, b)
    a = Tanh(h)
    t = Transpose(w)
    m = MatMul(a, t)
    r = Add(m, a)
    y = Add(r, c)
    p = Mul(y, y)
    loss = ReduceMean<keepdims=0>(p)
  })";

TEST(WholeGradients, PerceptronWithTiedWeights) {
  EXPECT_EQ(WholeGraph(kPerceptron).failure(), "");
}

TEST(WholeGradients, ConvolutionsWithAResidual) {
  EXPECT_EQ(WholeGraph(R"(
    g (double[2,3,8,8] x, double[4,3,3,3] w, double[4] s, double[4] b, double[4] m, double[4] v, double[4,4,3,3] u, double[4] o,
       double[4,5] f, int64[2] label) => (double loss) {
      c = Conv<pads=[1,1,1,1]>(x, w)
      n, m2, v2 = BatchNormalization<training_mode=1>(c, s, b, m, v)
      r = Relu(n)
      q = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
      d = Conv<pads=[1,1,1,1]>(q, u, o)
      e = Add(d, q)
      k = Relu(e)
      a = GlobalAveragePool(k)
      z = Flatten(a)
      l = MatMul(z, f)
      loss = SoftmaxCrossEntropyLoss(l, label)
    })")
                .failure(),
            "");
}

// What x and y broadcast to is one size, whichever of them has it: sums go back to x and y alone.
TEST(WholeGradients, OpenSizesAreSummedOverWhereTheyMeet) {
  constexpr const char* kText = R"(
    g (double[n,4] x, double[m,4] y, double[4,5] w, double[5] b) => (double loss) {
      s = Add(x, y)
      r = Add(x, s)
      p = Mul(r, s)
      q = MatMul(p, w)
      c = Add(q, b)
      e = Greater(c, q)
      d = Where(e, c, q)
      loss = ReduceSum<keepdims=0>(d)
    })";
  for (const auto& sizes : std::vector<std::map<std::string, int64_t>>{{}, {{"n", 1}}, {{"m", 1}}, {{"n", 1}, {"m", 1}}}) {
    WholeGraph graph(kText, sizes);
    EXPECT_EQ(graph.failure(), "");
    const auto& nodes = graph.model().graph->nodes;
    EXPECT_EQ(std::count_if(nodes.begin(), nodes.end(), [](const Node* node) { return node->op == "SumTo"; }), 3);  // x twice, y
  }
}

// Batch and sequence are open, and yet the matrix's gradient is one product of all rows, and the bias's a sum over known axes.
TEST(WholeGradients, OfAMatrixIsOneProductOfAllRows) {
  WholeGraph graph(R"(
    g (double[batch,sequence,4] x, double[4,5] w, double[5] b) => (double loss) {
      m = MatMul(x, w)
      y = Add(m, b)
      p = Mul(y, y)
      loss = ReduceSum<keepdims=0>(p)
    })");
  EXPECT_EQ(graph.failure(), "");
  std::map<std::string, int> counts;
  for (const Node* node : graph.model().graph->nodes) ++counts[node->op];
  EXPECT_EQ(counts["MatMul"], 1);  // the forward one
  EXPECT_EQ(counts["Gemm"], 2);
  EXPECT_EQ(counts["ReduceSum"], 2);  // the loss, and the bias
  EXPECT_EQ(counts["SumTo"], 0);
}

TEST(WholeGradients, AttentionWithAMask) {
  EXPECT_EQ(WholeGraph(R"(
    g (double[2,3,8] x, double[8,24] w, double[24] b, double[8] s, double[8] t) => (double loss)
    <int64[4] heads = {0, 0, 2, 4}, int64[3] joined = {0, 0, 8}, double scale = {0.5}, double far = {-10000}, int64[1] last = {-1}> {
      n = LayerNormalization(x, s, t)
      p = MatMul(n, w)
      qkv = Add(p, b)
      q, k, v = Split<axis=-1, num_outputs=3>(qkv)
      qh = Reshape(q, heads)
      kh = Reshape(k, heads)
      vh = Reshape(v, heads)
      qt = Transpose<perm=[0,2,1,3]>(qh)
      kt = Transpose<perm=[0,2,3,1]>(kh)
      vt = Transpose<perm=[0,2,1,3]>(vh)
      qk = MatMul(qt, kt)
      scaled = Mul(qk, scale)
      sizes = Shape(scaled)
      ones = ConstantOfShape<value = int64[1] {1}>(sizes)
      lower = Trilu<upper=0>(ones)
      zero = Sub(lower, lower)
      seen = Greater(lower, zero)
      masked = Where(seen, scaled, far)
      a = Softmax(masked)
      y = MatMul(a, vt)
      yt = Transpose<perm=[0,2,1,3]>(y)
      yj = Reshape(yt, joined)
      out = Add(yj, x)
      g1 = Gelu(out)
      loss = ReduceSum<keepdims=0>(g1)
    })")
                .failure(),
            "");
}

TEST(WholeGradients, NamesMetadataAndTypes) {
  WholeGraph graph(kPerceptron);
  const size_t before = graph.model().graph->nodes.size();
  const Gradients gradients = graph.differentiate({"w", "b"});
  EXPECT_TRUE(gradients.notes.empty());
  EXPECT_EQ(gradients.of(graph.value("w"))->type, graph.value("w")->type);
  const auto& nodes = graph.model().graph->nodes;
  ASSERT_GT(nodes.size(), before);
  for (size_t i = before; i < nodes.size(); ++i) {
    EXPECT_TRUE(nodes[i]->metadata.count(kBackwardOf)) << nodes[i]->name;
    EXPECT_NE(nodes[i]->name.find("_grad"), std::string::npos) << nodes[i]->name;
    for (const Value* v : nodes[i]->outputs) EXPECT_TRUE(v->type.shape) << v->name;
  }
}

TEST(WholeGradients, OnlyWhatIsWantedIsComputed) {
  WholeGraph graph(kPerceptron);
  graph.differentiate({"c"});
  EXPECT_EQ(ops(*graph.model().graph),
            "Gemm Tanh Transpose MatMul Add Add Mul ReduceMean Size Cast Div Shape Expand Mul Mul Add ReduceSum");
}

TEST(WholeGradients, OfAValueInBetween) {
  WholeGraph graph(kPerceptron);
  const Gradients gradients = graph.differentiate({"a", "loss"});
  EXPECT_EQ(gradients.of(graph.value("a"))->type, graph.value("a")->type);
  EXPECT_TRUE(gradients.of(graph.value("loss"))->is_constant());
}

TEST(WholeGradients, ASeedIsTheGradientOfTheLoss) {
  WholeGraph graph(kPerceptron);
  GradientOptions options;
  options.seed = graph.model().graph->add_constant("scale", make_tensor(DType::float64, {}));
  EXPECT_EQ(graph.differentiate({"loss"}, options).of(graph.value("loss")), options.seed);
}

TEST(WholeGradients, AGradientOfAnotherTypeThanItsValueIsRefused) {
  for (const auto& [type, dims] : {std::pair(DType::float32, Dims{}), std::pair(DType::float64, Dims{2})}) {
    WholeGraph graph(kPerceptron);
    GradientOptions options;
    options.seed = graph.model().graph->add_constant("scale", make_tensor(type, dims));
    try {
      graph.differentiate({"loss"}, options);
      ADD_FAILURE() << "a seed of type " << name_of(type) << to_string(dims) << " was taken";
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), ::testing::HasSubstr("(ReduceMean): a gradient does not fit: that of 'loss', which is float64[], is " +
                                                 to_string(Type::tensor(type, shape_of(dims)))));
    }
  }
}

// Names of sizes that Einsum's operands broadcast to are those of neither operand: a sum that one of them meets later is not left out.
TEST(WholeGradients, WhatAnEllipsisBroadcastsHasASizeOfItsOwn) {
  constexpr const char* kText = R"(
    g (double[n,2,3] x, double[m,3,4] y, double[n,2,4] z) => (double loss) {
      e = Einsum<equation="...ij,...jk->...ik">(x, y)
      s = Add(e, z)
      p = Mul(s, s)
      loss = ReduceSum<keepdims=0>(p)
    })";
  for (const auto& sizes : std::vector<std::map<std::string, int64_t>>{{}, {{"n", 1}}, {{"m", 1}}})
    EXPECT_EQ(WholeGraph(kText, sizes).failure(), "");
}

// Open sizes that Einsum's operands share are not summed over.
TEST(WholeGradients, SharedSizesOfEinsumAreKnownToBeEqual) {
  WholeGraph graph(R"(
    g (double[n,2,q,4] x, double[n,2,k,4] y) => (double loss) {
      e = Einsum<equation="bhqd,bhkd->bhqk">(x, y)
      p = Mul(e, e)
      loss = ReduceSum<keepdims=0>(p)
    })");
  EXPECT_EQ(graph.failure(), "");
  for (const Node* node : graph.model().graph->nodes) EXPECT_NE(node->op, "SumTo");
}

TEST(WholeGradients, WhatTheLossDoesNotDependOnIsNamed) {
  WholeGraph graph(R"(g (double[3] x, double[3] w, double[3] v) => (double loss) {
      f = Floor(w)
      s = Add(x, f)
      loss = ReduceSum<keepdims=0>(s)
    })");
  const Gradients gradients = graph.differentiate({"x", "w", "v"});
  EXPECT_NE(gradients.of(graph.value("x")), nullptr);
  EXPECT_EQ(gradients.of(graph.value("w")), nullptr);
  EXPECT_EQ(gradients.of(graph.value("v")), nullptr);
  EXPECT_THAT(gradients.notes, ::testing::ElementsAre(::testing::HasSubstr("'w' has no gradient"), ::testing::HasSubstr("'v'")));
}

std::string refusal(const std::string& text, const std::vector<std::string>& wanted) {
  try {
    WholeGraph(text).differentiate(wanted);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(WholeGradients, RefusalsNameTheNode) {
  using ::testing::HasSubstr;
  const char* without_rule = R"(g (double[2,2] x) => (double loss) { d = BitCast<to=11>(x)  loss = ReduceSum<keepdims=0>(d) })";
  EXPECT_THAT(refusal(without_rule, {"x"}),
              HasSubstr("(BitCast): there is no gradient for this operator; write it with other operators, or freeze"));
  const char* list = R"(g (double[2] x, int64 n) => (double loss) <int64 last = {-1}> {
      s = SequenceConstruct(x)
      l = Loop(n, , s) <body = t (int64 i, bool c, seq(double) m) => (bool d, seq(double) o) {
        d = Identity(c)  a = SequenceAt(m, last)  b = Tanh(a)  o = SequenceInsert(m, b) }>
      y = SequenceAt(l, last)  loss = ReduceSum<keepdims=0>(y)
    })";
  EXPECT_THAT(refusal(list, {"x"}), HasSubstr("(Loop): a list that a loop appends to is not differentiated"));
  EXPECT_THAT(refusal(R"(g (double[2] x) => (double[2] y) { y = Neg(x) })", {"x"}), HasSubstr("it must have one element"));
  EXPECT_THAT(refusal(R"(g (double[2] x, int64[2] i) => (double y) { y = ReduceSum<keepdims=0>(x) })", {"i"}),
              HasSubstr("'i' is int64[2]"));
}

TEST(WholeGradients, AFrozenOperatorWithoutARuleIsNoHindrance) {
  EXPECT_EQ(
      refusal(R"(g (double[2,2] x, double w) => (double loss) { d = BitCast<to=11>(x)  s = ReduceSum<keepdims=0>(d)  loss = Mul(s, w) })",
              {"w"}),
      "");
}

}  // namespace

}  // namespace fretsaw::testing
