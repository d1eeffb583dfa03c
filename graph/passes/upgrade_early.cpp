// Upgrade rules from operator sets 1 to 6, as far as such nodes say all that the newest form needs; the others are refused.
#include <algorithm>

#include "graph/errors.h"
#include "graph/passes/upgrade.h"

namespace fretsaw {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(what, "convert the model to operator set 7 or later (onnx.version_converter), or export it again");
}

void drop_consumed(Upgrade& u) {
  u.node.remove("consumed_inputs");
}

// broadcast=1, axis=k: the second operand's shape stands in the first one's from dimension k on, where numpy aligns it at the end:
// [N, C, H, W] + [C], axis 1  ->  [N, C, H, W] + [C, 1, 1]
void align_second_operand(Upgrade& u) {
  drop_consumed(u);
  bool broadcast = u.node.get_int("broadcast", 0) != 0;
  bool placed = broadcast && u.node.has("axis");
  int64_t axis = u.node.get_int("axis", 0);
  u.node.remove("broadcast");
  u.node.remove("axis");
  if (!placed) return;
  const Shape *a = u.shape_of(u.node.input(0)), *b = u.shape_of(u.node.input(1));
  if (!a || !b) refuse("its 'axis' attribute needs the ranks of its inputs, which are not known");
  auto rank = static_cast<int64_t>(a->size()), own = static_cast<int64_t>(b->size());
  if (axis < 0) axis += rank;
  std::vector<int64_t> axes;  // of size 1, behind the second operand's own
  for (int64_t i = own; i < rank - axis; ++i) axes.push_back(i);
  if (!axes.empty()) u.node.inputs[1] = u.edit.add("Unsqueeze", {u.node.inputs[1], u.ints(axes, "axes")});
}

void upgrade_gemm_1(Upgrade& u) {
  u.node.remove("broadcast");
}

// A slope [C] stood for the channels of [N, C, H, W].
void upgrade_prelu_1(Upgrade& u) {
  drop_consumed(u);
  const Shape *x = u.shape_of(u.node.input(0)), *slope = u.shape_of(u.node.input(1));
  if (!slope) refuse("the shape of its slope is not known");
  if (slope->empty() || (slope->size() == 1 && (*slope)[0].value == 1)) return;
  if (!x) refuse("the rank of its input is not known");
  if (slope->size() != 1 || x->size() < 2) return;
  std::vector<int64_t> axes;
  for (size_t i = 1; i + 1 < x->size(); ++i) axes.push_back(static_cast<int64_t>(i));
  if (!axes.empty()) u.node.inputs[1] = u.edit.add("Unsqueeze", {u.node.inputs[1], u.ints(axes, "axes")});
}

void inference_only(Upgrade& u) {
  drop_consumed(u);
  if (u.node.get_int("is_test", 0) == 0) refuse("below operator set 7 a node without is_test=1 trains");
  u.node.remove("is_test");
}

void upgrade_cast_1(Upgrade& u) {
  std::string to = u.node.get_string("to", "");
  std::transform(to.begin(), to.end(), to.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (to == "float") to = "float32";
  if (to == "double") to = "float64";
  for (int i = 1; i <= 26; ++i)
    if (to == name_of(static_cast<DType>(i))) {
      u.node.set("to", int64_t{i});
      return;
    }
  refuse("casts to '" + to + "', which is not known");
}

void upgrade_concat_1(Upgrade& u) {
  if (!u.node.has("axis")) u.node.set("axis", int64_t{1});
}

void upgrade_reshape_1(Upgrade& u) {
  drop_consumed(u);
  if (!u.node.has("shape")) refuse("has no 'shape'");
  u.ints_to_input("shape", 1);
}

void upgrade_pad_1(Upgrade& u) {
  if (!u.node.has("paddings")) refuse("has no 'paddings'");
  u.node.set("pads", u.node.get_ints("paddings"));
  u.node.remove("paddings");
}

void upgrade_upsample_1(Upgrade& u) {
  u.node.set("scales", std::vector<float>{1, 1, u.node.get_float("height_scale", 1), u.node.get_float("width_scale", 1)});
  u.node.remove("height_scale");
  u.node.remove("width_scale");
}

void norm_order_to_int(Upgrade& u) {
  float p = u.node.get_float("p", 2);
  if (p != static_cast<float>(static_cast<int64_t>(p))) refuse("has a 'p' that is no integer");
  u.node.set("p", static_cast<int64_t>(p));
}

void upgrade_split_1(Upgrade& u) {
  if (u.node.input(1)) refuse("takes its sizes as an input");
  if (!u.node.has("axis")) refuse("has no 'axis'");
}

void refuse_tile_1(Upgrade&) {
  refuse("Tile of operator set 1 is not supported");
}

void upgrade_recurrent(Upgrade& u) {
  if (u.node.get_string("direction", "forward") == "foward") u.node.set("direction", std::string("forward"));
  u.node.remove("output_sequence");
}

void upgrade_selu_1(Upgrade& u) {
  drop_consumed(u);
  if (!u.node.has("alpha")) u.node.set("alpha", 1.6732F);
  if (!u.node.has("gamma")) u.node.set("gamma", 1.0507F);
}

constexpr UpgradeRow kRows[] = {
    {"Abs", 6, drop_consumed},
    {"Ceil", 6, drop_consumed},
    {"Clip", 6, drop_consumed},
    {"Elu", 6, drop_consumed},
    {"Exp", 6, drop_consumed},
    {"Floor", 6, drop_consumed},
    {"HardSigmoid", 6, drop_consumed},
    {"InstanceNormalization", 6, drop_consumed},
    {"LeakyRelu", 6, drop_consumed},
    {"Log", 6, drop_consumed},
    {"Max", 6, drop_consumed},
    {"Mean", 6, drop_consumed},
    {"Min", 6, drop_consumed},
    {"Neg", 6, drop_consumed},
    {"Reciprocal", 6, drop_consumed},
    {"Relu", 6, drop_consumed},
    {"Sigmoid", 6, drop_consumed},
    {"Sqrt", 6, drop_consumed},
    {"Sum", 6, drop_consumed},
    {"Tanh", 6, drop_consumed},
    {"Selu", 6, upgrade_selu_1},
    {"Add", 7, align_second_operand},
    {"Sub", 7, align_second_operand},
    {"Mul", 7, align_second_operand},
    {"Div", 7, align_second_operand},
    {"Pow", 7, align_second_operand},
    {"And", 7, align_second_operand},
    {"Or", 7, align_second_operand},
    {"Xor", 7, align_second_operand},
    {"Equal", 7, align_second_operand},
    {"Less", 7, align_second_operand},
    {"Greater", 7, align_second_operand},
    {"Gemm", 7, upgrade_gemm_1},
    {"PRelu", 7, upgrade_prelu_1},
    {"BatchNormalization", 7, inference_only},
    {"Dropout", 7, inference_only},
    {"Cast", 6, upgrade_cast_1},
    {"Concat", 4, upgrade_concat_1},
    {"Reshape", 5, upgrade_reshape_1},
    {"Pad", 2, upgrade_pad_1},
    {"Upsample", 7, upgrade_upsample_1},
    {"GlobalLpPool", 2, norm_order_to_int},
    {"LpPool", 2, norm_order_to_int},
    {"Split", 2, upgrade_split_1},
    {"Tile", 6, refuse_tile_1},
    {"RNN", 7, upgrade_recurrent},
    {"LSTM", 7, upgrade_recurrent},
    {"GRU", 7, upgrade_recurrent},
};

}  // namespace

std::span<const UpgradeRow> early_upgrades() {
  return kRows;
}

}  // namespace fretsaw
