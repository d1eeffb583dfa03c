// Upgrade rules of operators that move or reduce data: most turned attributes into inputs.
#include <algorithm>

#include "graph/errors.h"
#include "graph/passes/upgrade.h"

namespace fretsaw {
namespace {

void axes_to_input(Upgrade& u) {
  u.ints_to_input("axes", 1);
}

void upgrade_split_2(Upgrade& u) {
  u.ints_to_input("split", 1);
}

// From 18 on the number of equal parts is said; before, it was the number of outputs.
void upgrade_split_13(Upgrade& u) {
  if (!u.node.input(1)) u.node.set("num_outputs", static_cast<int64_t>(u.node.outputs.size()));
}

void upgrade_slice_1(Upgrade& u) {
  if (!u.node.has("starts") || !u.node.has("ends"))
    throw Error("a Slice below operator set 10 needs the attributes 'starts' and 'ends'", "export the model again");
  u.ints_to_input("starts", 1);
  u.ints_to_input("ends", 2);
  u.ints_to_input("axes", 3);
}

void upgrade_pad_2(Upgrade& u) {
  if (!u.node.has("pads")) throw Error("a Pad below operator set 11 needs the attribute 'pads'", "export the model again");
  u.ints_to_input("pads", 1);
  float value = u.node.get_float("value", 0);
  u.node.remove("value");
  if (value != 0 && u.node.get_string("mode", "constant") == "constant") u.set_input(2, u.float_like(value, u.node.input(0), "value"));
}

void upgrade_topk_1(Upgrade& u) {
  if (!u.node.has("k")) throw Error("a TopK below operator set 10 needs the attribute 'k'", "export the model again");
  u.ints_to_input("k", 1);
}

void upgrade_scatter_9(Upgrade& u) {
  u.node.op = "ScatterElements";
}

// Clip [6] has the limits as attributes; those that no float32 exceeds are no limits.
void upgrade_clip_6(Upgrade& u) {
  constexpr float lowest = -3.402823466e+38F, highest = 3.402823466e+38F;
  float low = u.node.get_float("min", lowest), high = u.node.get_float("max", highest);
  u.node.remove("min");
  u.node.remove("max");
  if (low > lowest) u.set_input(1, u.float_like(low, u.node.input(0), "min"));
  if (high < highest) u.set_input(2, u.float_like(high, u.node.input(0), "max"));
}

void upgrade_dft_17(Upgrade& u) {
  u.set_input(2, u.edit.constant(make_int64(u.node.get_int("axis", 1)), u.node.name + "_axis"));
  u.node.remove("axis");
}

constexpr UpgradeRow kRows[] = {
    {"Squeeze", 13, axes_to_input},         {"Unsqueeze", 13, axes_to_input},
    {"ReduceSum", 13, axes_to_input},       {"ReduceL1", 18, axes_to_input},
    {"ReduceL2", 18, axes_to_input},        {"ReduceLogSum", 18, axes_to_input},
    {"ReduceLogSumExp", 18, axes_to_input}, {"ReduceMax", 18, axes_to_input},
    {"ReduceMean", 18, axes_to_input},      {"ReduceMin", 18, axes_to_input},
    {"ReduceProd", 18, axes_to_input},      {"ReduceSumSquare", 18, axes_to_input},
    {"Split", 13, upgrade_split_2},         {"Split", 18, upgrade_split_13},
    {"Slice", 10, upgrade_slice_1},         {"Pad", 11, upgrade_pad_2},
    {"TopK", 10, upgrade_topk_1},           {"Scatter", 11, upgrade_scatter_9},
    {"Clip", 11, upgrade_clip_6},           {"DFT", 20, upgrade_dft_17},
};

}  // namespace

std::span<const UpgradeRow> shape_upgrades() {
  return kRows;
}

}  // namespace fretsaw
