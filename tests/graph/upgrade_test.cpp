// Old operator sets: each rule, by the operators and attributes that come out.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/graph/text_model.h"

namespace fretsaw {
namespace {

using testing::only;
using testing::ops;
using testing::parse_model;

struct Row {
  std::string name;
  int opset;
  std::string graph;
  std::string expected;                          // operators after upgrading
  std::function<void(const Graph&)> check = {};  // more, where operators do not tell
};

void PrintTo(const Row& row, std::ostream* out) {
  *out << row.name;
}

std::vector<int64_t> ints_of(const Value* v) {
  if (!v || !v->constant) throw Error("not a constant");
  return *int_values(*v->constant);
}

float float_of(const Value* v) {
  if (!v || !v->constant || v->constant->dtype != DType::float32) throw Error("not a float32 constant");
  return v->constant->as<float>()[0];
}

const Node& last(const Graph& g) {
  return *g.nodes.back();
}

class UpgradeTest : public ::testing::TestWithParam<Row> {};

TEST_P(UpgradeTest, GivesTheNewestForm) {
  const Row& row = GetParam();
  Model model = parse_model(row.opset, row.graph);
  run_passes(model, {{"constants", constants_to_initializers}, {"upgrade", upgrade_opset}});
  EXPECT_EQ(ops(*model.graph), row.expected) << print_graph(*model.graph);
  EXPECT_EQ(model.opsets[""], newest_opset());
  EXPECT_EQ(model.graph->outputs[0]->name, "y");
  if (row.check) row.check(*model.graph);
  // The result is right by ONNX's own inference.
  ShapeFacts facts = infer_shapes(model);
  for (const Finding& f : facts.faults) ADD_FAILURE() << f.message;
}

using Ints = std::vector<int64_t>;

const Row kRows[] = {
    {"squeeze", 11, "g (float[1,3] x) => (float[3] y) { y = Squeeze<axes=[0]>(x) }", "Squeeze",
     [](const Graph& g) {
       EXPECT_EQ(ints_of(last(g).input(1)), Ints{0});
       EXPECT_FALSE(last(g).has("axes"));
     }},
    {"squeeze_without_axes", 11, "g (float[1,3] x) => (float[3] y) { y = Squeeze(x) }", "Squeeze",
     [](const Graph& g) { EXPECT_EQ(last(g).inputs.size(), 1u); }},
    {"unsqueeze", 11, "g (float[3] x) => (float[1,3,1] y) { y = Unsqueeze<axes=[0,2]>(x) }", "Unsqueeze",
     [](const Graph& g) {
       EXPECT_EQ(ints_of(last(g).input(1)), (Ints{0, 2}));
     }},
    {"reduce_sum", 11, "g (float[2,3] x) => (float[2] y) { y = ReduceSum<axes=[1], keepdims=0>(x) }", "ReduceSum",
     [](const Graph& g) { EXPECT_EQ(ints_of(last(g).input(1)), Ints{1}); }},
    {"reduce_mean", 17, "g (float[2,3] x) => (float[2,1] y) { y = ReduceMean<axes=[-1]>(x) }", "ReduceMean",
     [](const Graph& g) { EXPECT_EQ(ints_of(last(g).input(1)), Ints{-1}); }},
    {"split_sizes", 11, "g (float[6] x) => (float[2] y, float[4] z) { y, z = Split<axis=0, split=[2,4]>(x) }", "Split",
     [](const Graph& g) {
       EXPECT_EQ(ints_of(last(g).input(1)), (Ints{2, 4}));
     }},
    {"split_equal", 13, "g (float[6] x) => (float[3] y, float[3] z) { y, z = Split<axis=0>(x) }", "Split",
     [](const Graph& g) { EXPECT_EQ(last(g).get_int("num_outputs", 0), 2); }},
    {"slice", 9, "g (float[4,4] x) => (float[2,4] y) { y = Slice<starts=[1], ends=[3], axes=[0]>(x) }", "Slice",
     [](const Graph& g) {
       EXPECT_EQ(ints_of(last(g).input(1)), Ints{1});
       EXPECT_EQ(ints_of(last(g).input(2)), Ints{3});
       EXPECT_EQ(ints_of(last(g).input(3)), Ints{0});
     }},
    {"pad_zero", 10, "g (float[2] x) => (float[4] y) { y = Pad<pads=[1,1]>(x) }", "Pad",
     [](const Graph& g) { EXPECT_EQ(last(g).inputs.size(), 2u); }},
    {"pad_value", 10, "g (float[2] x) => (float[4] y) { y = Pad<pads=[1,1], value=2.5>(x) }", "Pad",
     [](const Graph& g) { EXPECT_EQ(float_of(last(g).input(2)), 2.5F); }},
    {"topk", 9, "g (float[4] x) => (float[2] y, int64[2] i) { y, i = TopK<k=2>(x) }", "TopK",
     [](const Graph& g) { EXPECT_EQ(ints_of(last(g).input(1)), Ints{2}); }},
    {"scatter", 10, "g (float[4] x, int64[2] i, float[2] u) => (float[4] y) { y = Scatter(x, i, u) }", "ScatterElements"},
    {"clip_both", 10, "g (float[4] x) => (float[4] y) { y = Clip<min=0.0, max=6.0>(x) }", "Clip",
     [](const Graph& g) {
       EXPECT_EQ(float_of(last(g).input(1)), 0.0F);
       EXPECT_EQ(float_of(last(g).input(2)), 6.0F);
     }},
    {"clip_upper_only", 10, "g (float[4] x) => (float[4] y) { y = Clip<max=6.0>(x) }", "Clip",
     [](const Graph& g) {
       EXPECT_EQ(last(g).input(1), nullptr);
       EXPECT_EQ(float_of(last(g).input(2)), 6.0F);
     }},
    {"clip_after_other_nodes", 10, "g (float[4] x) => (float[4] y) { a = Relu(x) b = Add(a, x) y = Clip<max=6.0>(b) }", "Relu Add Clip",
     [](const Graph& g) { EXPECT_EQ(float_of(last(g).input(2)), 6.0F); }},
    {"clip_float16", 10, "g (float16[4] x) => (float16[4] y) { y = Clip<max=6.0>(x) }", "CastLike Clip"},
    {"clip_double", 10, "g (double[4] x) => (double[4] y) { y = Clip<max=6.0>(x) }", "Clip",
     [](const Graph& g) { EXPECT_EQ(last(g).input(2)->constant->dtype, DType::float64); }},
    {"dft", 17, "g (float[1,8,1] x) => (float[1,8,2] y) { y = DFT(x) }", "DFT",
     [](const Graph& g) { EXPECT_EQ(ints_of(last(g).input(2)), Ints{1}); }},
    {"softmax_last_axis", 11, "g (float[2,3] x) => (float[2,3] y) { y = Softmax<axis=1>(x) }", "Softmax",
     [](const Graph& g) { EXPECT_EQ(last(g).get_int("axis", 0), -1); }},
    {"softmax_inferred_rank", 11, "g (float[2,3,4] x) => (float[2,3,4] y) { a = Relu(x) y = Softmax<axis=2>(a) }", "Relu Softmax"},
    {"softmax_flattens", 11, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax(x) }", "Shape Flatten Softmax Reshape",
     [](const Graph& g) {
       EXPECT_EQ(g.nodes[1]->get_int("axis", 0), 1);
       EXPECT_EQ(g.nodes[2]->get_int("axis", 0), -1);
     }},
    {"hardmax_flattens", 11, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Hardmax(x) }", "Shape Flatten Hardmax Reshape"},
    {"softmax_of_13_stays", 13, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax<axis=1>(x) }", "Softmax",
     [](const Graph& g) { EXPECT_EQ(last(g).get_int("axis", 0), 1); }},
    {"batch_norm_inference", 9, "g (float[1,2,3] x, float[2] s) => (float[1,2,3] y) { y = BatchNormalization(x, s, s, s, s) }",
     "BatchNormalization", [](const Graph& g) { EXPECT_EQ(last(g).get_int("training_mode", 0), 0); }},
    {"batch_norm_training", 9,
     "g (float[1,2,3] x, float[2] s) => (float[1,2,3] y, float[2] m, float[2] v) { y, m, v = BatchNormalization(x, s, s, s, s) }",
     "BatchNormalization", [](const Graph& g) { EXPECT_EQ(last(g).get_int("training_mode", 0), 1); }},
    {"batch_norm_not_spatial", 7,
     "g (float[1,2,3] x, float[2,3] s) => (float[1,2,3] y) { y = BatchNormalization<spatial=0>(x, s, s, s, s) }",
     "Add Sqrt Sub Div Mul Add"},
    {"dropout", 7, "g (float[4] x) => (float[4] y) { y = Dropout<ratio=0.25>(x) }", "Dropout",
     [](const Graph& g) { EXPECT_EQ(float_of(last(g).input(1)), 0.25F); }},
    {"dropout_float_mask", 7, "g (float[4] x) => (float[4] y, float[4] m) { y, m = Dropout(x) }", "Dropout CastLike"},
    {"group_norm", 18,
     "g (float[1,4,3] x) => (float[1,4,3] y) <float[2] s = {1,2}, float[2] b = {3,4}> { y = GroupNormalization<num_groups=2>(x, s, b) }",
     "GroupNormalization",
     [](const Graph& g) {
       auto s = last(g).input(1)->constant->as<float>();
       EXPECT_EQ(std::vector<float>(s.begin(), s.end()), (std::vector<float>{1, 1, 2, 2}));
     }},
    {"group_norm_computed_scale", 18,
     "g (float[1,4,3] x, float[2] s) => (float[1,4,3] y) { y = GroupNormalization<num_groups=2>(x, s, s) }",
     "Shape Div Concat Unsqueeze Expand Reshape Unsqueeze Expand Reshape GroupNormalization"},
    {"upsample_7", 7, "g (float[1,1,2,2] x) => (float[1,1,4,4] y) { y = Upsample<scales=[1.0,1.0,2.0,2.0]>(x) }", "Resize",
     [](const Graph& g) {
       EXPECT_EQ(last(g).get_string("coordinate_transformation_mode", ""), "asymmetric");
       EXPECT_EQ(last(g).get_string("nearest_mode", ""), "floor");
       EXPECT_EQ(last(g).input(2)->constant->as<float>()[3], 2.0F);
     }},
    {"upsample_9", 9, "g (float[1,1,2,2] x) => (float[1,1,4,4] y) <float[4] s = {1,1,2,2}> { y = Upsample<mode=\"linear\">(x, s) }",
     "Resize", [](const Graph& g) { EXPECT_EQ(last(g).get_string("mode", ""), "linear"); }},
    {"resize_10_shrinks", 10, "g (float[1,1,4,4] x) => (float[1,1,2,2] y) <float[4] s = {1,1,0.5,0.5}> { y = Resize(x, s) }", "Resize",
     [](const Graph& g) { EXPECT_EQ(last(g).get_string("nearest_mode", ""), "ceil"); }},
    {"resize_10_both_ways", 10, "g (float[1,1,4,4] x) => (float[1,1,8,2] y) <float[4] s = {1,1,2,0.5}> { y = Resize(x, s) }",
     "Resize Resize",
     [](const Graph& g) {
       EXPECT_EQ(g.nodes[0]->get_string("nearest_mode", ""), "floor");
       EXPECT_EQ(g.nodes[1]->get_string("nearest_mode", ""), "ceil");
     }},
    {"resize_11_empty_inputs", 11,
     "g (float[1,1,2,2] x) => (float[1,1,4,4] y) <float[0] e = {}, int64[4] n = {1,1,4,4}> { y = Resize<mode=\"nearest\">(x, e, e, n) }",
     "Resize",
     [](const Graph& g) {
       EXPECT_EQ(last(g).input(1), nullptr);
       EXPECT_EQ(last(g).input(2), nullptr);
       EXPECT_EQ(ints_of(last(g).input(3)), (Ints{1, 1, 4, 4}));
     }},
    {"resize_tf_half_pixel", 11,
     "g (float[1,1,2,2] x) => (float[1,1,4,4] y) <float[0] e = {}, float[4] s = {1,1,2,2}> { y = "
     "Resize<coordinate_transformation_mode=\"tf_half_pixel_for_nn\", nearest_mode=\"floor\">(x, e, s) }",
     "Resize", [](const Graph& g) { EXPECT_EQ(last(g).get_string("nearest_mode", ""), "round_prefer_ceil"); }},
    {"grid_sample", 16, "g (float[1,1,2,2] x, float[1,2,2,2] s) => (float[1,1,2,2] y) { y = GridSample<mode=\"bicubic\">(x, s) }",
     "GridSample", [](const Graph& g) { EXPECT_EQ(last(g).get_string("mode", ""), "cubic"); }},
    {"grid_sample_default", 16, "g (float[1,1,2,2] x, float[1,2,2,2] s) => (float[1,1,2,2] y) { y = GridSample(x, s) }", "GridSample",
     [](const Graph& g) { EXPECT_EQ(last(g).get_string("mode", "linear"), "linear"); }},
    {"roi_align", 10, "g (float[1,1,4,4] x, float[1,4] r, int64[1] b) => (float[1,1,1,1] y) { y = RoiAlign(x, r, b) }", "RoiAlign",
     [](const Graph& g) { EXPECT_EQ(last(g).get_string("coordinate_transformation_mode", ""), "output_half_pixel"); }},
    {"scan_8", 8,
     "g (float[2,1] s, float[2,3,1] x) => (float[2,1] y, float[2,3,1] z) { y, z = Scan<num_scan_inputs=1, body = b (float[1] si, float[1] "
     "xi) => (float[1] so, float[1] yo) { so = Add(si, xi) yo = Identity(so) }>(\"\", s, x) }",
     "Scan{Scan{Add Identity}}", [](const Graph& g) { EXPECT_EQ(last(g).get_int("num_scan_inputs", 0), 2); }},
    {"inside_a_body", 11,
     "g (bool c, float[1,3] x) => (float[3] y) { y = If<then_branch = t () => (float[3] a) { a = Squeeze<axes=[0]>(x) }, else_branch = e "
     "() => (float[3] b) { b = ReduceSum<axes=[0], keepdims=0>(x) }>(c) }",
     "If{Squeeze}{ReduceSum}",
     [](const Graph& g) {
       for (const GraphPtr& body : bodies(last(g))) EXPECT_EQ(ints_of(body->nodes[0]->input(1)), Ints{0});
     }},
    {"early_broadcast", 6, "g (float[1,2,3,3] x) => (float[1,2,3,3] y) <float[2] b = {1,2}> { y = Add<broadcast=1, axis=1>(x, b) }",
     "Unsqueeze Add",
     [](const Graph& g) {
       EXPECT_EQ(ints_of(g.nodes[0]->input(1)), (Ints{1, 2}));
     }},
    {"early_reshape", 4, "g (float[4] x) => (float[2,2] y) { y = Reshape<shape=[2,2]>(x) }", "Reshape",
     [](const Graph& g) {
       EXPECT_EQ(ints_of(last(g).input(1)), (Ints{2, 2}));
     }},
    {"early_cast", 5, "g (float[4] x) => (int64[4] y) { y = Cast<to=\"INT64\">(x) }", "Cast",
     [](const Graph& g) { EXPECT_EQ(last(g).get_int("to", 0), 7); }},
    {"early_batch_norm", 6, "g (float[1,2,3] x, float[2] s) => (float[1,2,3] y) { y = BatchNormalization<is_test=1>(x, s, s, s, s) }",
     "BatchNormalization"},
};

INSTANTIATE_TEST_SUITE_P(Rules, UpgradeTest, ::testing::ValuesIn(kRows), [](const auto& info) { return info.param.name; });

TEST(UpgradeOpset, DistrustsTypesInTheFile) {
  // The rank in value_info is wrong: the Softmax works on the last two axes of three.
  Model model = parse_model(11, "g (float[2,3,4] x) => (float[2,3,4] y) <float[2,12] a> { a = Relu(x) y = Softmax<axis=1>(a) }");
  upgrade_opset(model);
  EXPECT_EQ(ops(*model.graph), "Relu Shape Flatten Softmax Reshape");
}

TEST(UpgradeOpset, RefusesWhatItCannotSay) {
  Model newer = parse_model(newest_opset() + 1, "g (float[2] x) => (float[2] y) { y = Relu(x) }");
  EXPECT_THROW(upgrade_opset(newer), Error);
  Model training = parse_model(6, "g (float[2] x) => (float[2] y) { y = Dropout(x) }");
  EXPECT_THROW(upgrade_opset(training), Error);
  Model saved =
      parse_model(9, "g (float[1,2] x, float[2] s) => (float[1,2] y, float[2] m) { y, a, b, m = BatchNormalization(x, s, s, s, s) }");
  EXPECT_THROW(upgrade_opset(saved), Error);
}

TEST(UpgradeOpset, LeavesUnknownDomains) {
  Model model = parse_model(
      "<ir_version: 8, opset_import: [\"\" : 11, \"other\" : 3]> g (float[1,2] x) => (float[1,2] y) { y = other.Squeeze<axes=[0]>(x) }");
  upgrade_opset(model);
  EXPECT_EQ(ops(*model.graph), "other.Squeeze");
  EXPECT_TRUE(model.graph->nodes[0]->has("axes"));
  EXPECT_EQ(model.opsets["other"], 3);
}

}  // namespace
}  // namespace fretsaw
