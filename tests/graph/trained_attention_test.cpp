// Attention is recognised in graphs that are to be trained: with a symbolic batch, computed constants, and weights whose numbers change.
#include <gtest/gtest.h>

#include <algorithm>

#include "graph/gradients.h"
#include "graph/training/attention.h"
#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

using testing::only;
using testing::ops;
using testing::parse_model;

// x [N, 5, 12] attends to z and w with three heads; `body` goes from the scores s [N, 3, 5, 7] to the probabilities p.
std::string attention(const std::string& body, const std::string& batch = "N", const std::string& more = "") {
  const std::string wide = batch + ",5,12] ", keys = batch + ",7,12] ";
  return "g (float[" + wide + "x, float[" + keys + "z, float[" + keys + "w) => (float[" + wide +
         "y) <int64[4] qs = {0,5,3,4}, int64[4] ks = {0,7,3,4}, int64[3] ys = {0,5,12}, float sc = {0.5}, float none = {0}, float[5,7] c = "
         "{0,-inf,-inf,-inf,-inf,-inf,-inf, 0,0,-inf,-inf,-inf,-inf,-inf, 0,0,0,-inf,-inf,-inf,-inf, 0,0,0,0,-inf,-inf,-inf, "
         "0,0,0,0,0,-inf,-inf}" +
         more +
         "> { q0 = Reshape(x, qs) q = Transpose<perm=[0,2,1,3]>(q0) k0 = Reshape(z, ks) kt = Transpose<perm=[0,2,3,1]>(k0) v0 = Reshape(w, "
         "ks) "
         "v = Transpose<perm=[0,2,1,3]>(v0) s = MatMul(q, kt) " +
         body + " a = MatMul(p, v) t = Transpose<perm=[0,2,1,3]>(a) y = Reshape(t, ys) }";
}

Model inferred(const std::string& text) {
  Model model = parse_model(24, text);
  run_passes(model, normalise_passes());
  infer_shapes(model);
  return model;
}

Value* find(Model& model, const std::string& name) {
  for (Value& v : model.graph->all_values())
    if (v.name == name) return &v;
  throw Error("no value '" + name + "'");
}

TEST(TrainedAttention, IsFoundWithASymbolicBatch) {
  Model model = inferred(attention("m = Mul(s, sc) n = Add(m, c) p = Softmax<axis=-1>(n)"));
  EXPECT_EQ(fuse_trained_attention(model), 1);
  verify(*model.graph);
  const Node& node = only(*model.graph, "Attention");
  EXPECT_EQ(node.input(0)->name, "x");
  EXPECT_EQ(node.get_int("q_num_heads", 0), 3);
  EXPECT_EQ(node.get_int("is_causal", 0), 1);
  EXPECT_EQ(to_string(node.out(0)->type), to_string(find(model, "x")->type));
  EXPECT_EQ(to_string(model.graph->outputs[0]->type), to_string(find(model, "x")->type));
  for (const Node* reshape : model.graph->nodes) {
    if (!reshape->is("Reshape")) continue;
    const auto dims = int_values(*reshape->input(1)->constant);
    EXPECT_TRUE(std::all_of(dims->begin(), dims->end(), [](int64_t n) { return n < 100; })) << reshape->name;
  }
}

TEST(TrainedAttention, IsFoundWithANumberForTheBatch) {
  Model model = inferred(attention("p = Softmax<axis=-1>(s)", "2"));
  EXPECT_EQ(fuse_trained_attention(model), 1);
  EXPECT_EQ(only(*model.graph, "Attention").input(3), nullptr);
}

TEST(TrainedAttention, HeadsBeforeRowsKeepTheirBatch) {
  Model model = inferred(
      "g (float[N,3,5,4] q, float[N,3,4,7] kt, float[N,3,7,4] v, bool[N,1,1,7] seen) => (float[N,3,5,4] y) <float low = {-inf}> { "
      "s = MatMul(q, kt) m = Where(seen, s, low) p = Softmax<axis=-1>(m) y = MatMul(p, v) }");
  EXPECT_EQ(fuse_trained_attention(model), 1);
  EXPECT_EQ(only(*model.graph, "Attention").input(3)->name, "seen");
  EXPECT_EQ(to_string(model.graph->outputs[0]->type), to_string(find(model, "q")->type));
}

// Time-major rows [S, N * heads, width], as PyTorch's MultiheadAttention has them: the batch is no number of heads.
TEST(TrainedAttention, ABatchAmongTheHeadsStaysOpen) {
  Model model = inferred(
      "g (float[N,5,12] x, float[N,7,12] z, float[N,7,12] w) => (float[5,N,12] y) <int64[3] qs = {5,-1,4}, int64[3] ks = {7,-1,4}, "
      "int64[3] ys = {5,-1,12}> { xt = Transpose<perm=[1,0,2]>(x) zt = Transpose<perm=[1,0,2]>(z) wt = Transpose<perm=[1,0,2]>(w) "
      "q0 = Reshape(xt, qs) q = Transpose<perm=[1,0,2]>(q0) k0 = Reshape(zt, ks) kt = Transpose<perm=[1,2,0]>(k0) v0 = Reshape(wt, ks) "
      "v = Transpose<perm=[1,0,2]>(v0) s = MatMul(q, kt) p = Softmax<axis=-1>(s) a = MatMul(p, v) t = Transpose<perm=[1,0,2]>(a) "
      "y = Reshape(t, ys) }");
  EXPECT_EQ(fuse_trained_attention(model), 1);
  verify(*model.graph);
  const Node& node = only(*model.graph, "Attention");
  for (const char* heads : {"q_num_heads", "kv_num_heads"}) EXPECT_LT(node.get_int(heads, 0), 100) << heads;
  EXPECT_EQ(to_string(model.graph->outputs[0]->type), "float32[5,N,12]");
}

TEST(TrainedAttention, NothingIsReadOffWeightsThatLearn) {
  Model model = inferred(attention("m = Mul(s, sc) n = Add(m, c) p = Softmax<axis=-1>(n)"));
  TrainedAttentionOptions options;
  options.learned = {find(model, "c")};
  EXPECT_EQ(fuse_trained_attention(model, options), 1);
  const Node& node = only(*model.graph, "Attention");
  EXPECT_EQ(node.input(3)->name, "c");
  EXPECT_TRUE(node.input(3)->constant);
  EXPECT_EQ(node.get_int("is_causal", 0), 0);
  Model scaled = inferred(attention("m = Mul(s, sc) p = Softmax<axis=-1>(m)"));
  options.learned = {find(scaled, "sc")};
  EXPECT_EQ(fuse_trained_attention(scaled, options), 0);
}

TEST(TrainedAttention, DroppedProbabilitiesAreLeftAlone) {
  Model dropped = inferred(attention("e = Softmax<axis=-1>(s) p = Dropout(e, rt, on)", "N", ", float rt = {0.1}, bool on = {1}"));
  EXPECT_EQ(fuse_trained_attention(dropped), 0);
  Model kept = inferred(attention("e = Softmax<axis=-1>(s) p = Dropout(e, none, on)", "N", ", bool on = {1}"));
  EXPECT_EQ(fuse_trained_attention(kept), 1);
}

TEST(TrainedAttention, OtherUnknownSizesAreLeftAlone) {
  Model model = inferred(
      "g (float[N,3,S,4] q, float[N,3,4,S] kt, float[N,3,S,4] v) => (float[N,3,S,4] y) { s = MatMul(q, kt) p = Softmax<axis=-1>(s) y = "
      "MatMul(p, v) }");
  const std::string before = ops(*model.graph);
  EXPECT_EQ(fuse_trained_attention(model), 0);
  EXPECT_EQ(ops(*model.graph), before);
}

TEST(TrainedAttention, ItsGradientIsOneNodeInHalfPrecision) {
  for (const bool half : {true, false}) {
    const std::string type = half ? "float16" : "float", heads = type + "[N,3,5,4] ";
    Model model = inferred("g (" + heads + "q, " + heads + "k, " + heads + "v) => (" + type +
                           " loss) { y = Attention<is_causal=1>(q, k, v) " + "loss = ReduceSum<keepdims=0>(y) }");
    for (Node* node : model.graph->nodes) node->name = node->op;
    add_gradients(model, model.graph->outputs[0], {find(model, "q"), find(model, "k"), find(model, "v")});
    const auto& nodes = model.graph->nodes;
    const auto count = std::count_if(nodes.begin(), nodes.end(), [](const Node* n) { return n->op == "AttentionGrad"; });
    EXPECT_EQ(count, half ? 1 : 0) << print_graph(*model.graph);
  }
}

}  // namespace
}  // namespace fretsaw
