// Upgrade rules of normalisations, the Softmax family and Dropout.
#include <cstring>

#include "graph/errors.h"
#include "graph/passes/upgrade.h"

namespace fretsaw {
namespace {

// Softmax [1, 11] flattens x to two dimensions at `axis` and works on the second:
//   x [a, b, c], axis 1  ->  Flatten [a, (b c)]  ->  Softmax  ->  Reshape [a, b, c]
// With the last axis both meanings are the same.
void upgrade_softmax(Upgrade& u) {
  int64_t axis = u.node.get_int("axis", 1);
  Value* x = u.node.input(0);
  if (!x || !u.node.out(0)) return;
  if (axis == -1) return;
  const Shape* shape_of_x = u.shape_of(x);
  if (shape_of_x && axis == static_cast<int64_t>(shape_of_x->size()) - 1) {
    u.node.set("axis", int64_t{-1});
    return;
  }
  Value* shape = u.edit.add("Shape", {x});
  u.node.inputs[0] = u.edit.add("Flatten", {x}, {{"axis", axis}});
  u.node.set("axis", int64_t{-1});
  Value* y = u.edit.detach(u.node, 0);
  u.edit.add_making("Reshape", {u.node.outputs[0], shape}, {y}, {}, true);
}

// spatial=0 has statistics for each element of a sample: mean [C, H, W]. Then it is plain arithmetic that broadcasts over N.
void spell_out(Upgrade& u) {
  const std::vector<Value*>& in = u.node.inputs;  // x, scale, bias, mean, variance
  Value* epsilon = u.float_like(u.node.get_float("epsilon", 1e-5F), in[4], "epsilon");
  Value* deviation = u.edit.add("Sqrt", {u.edit.add("Add", {in[4], epsilon})});
  Value* normal = u.edit.add("Div", {u.edit.add("Sub", {in[0], in[3]}), deviation});
  Value* scaled = u.edit.add("Mul", {normal, in[1]});
  u.edit.add_making("Add", {scaled, in[2]}, {u.node.outputs[0]});
  u.drop = true;
}

void upgrade_batch_norm_7(Upgrade& u) {
  bool whole = u.node.get_int("spatial", 1) != 0;
  u.node.remove("spatial");
  if (whole) return;
  if (u.node.inputs.size() < 5) throw Error("BatchNormalization needs five inputs", "export the model again");
  for (size_t i = 1; i < u.node.outputs.size(); ++i)
    if (u.node.out(i))
      throw Error("BatchNormalization with spatial=0 in training mode is not supported", "export the model with operator set 9 or later");
  spell_out(u);
}

// Below 14 more than one output means training: y, mean, variance, saved mean, saved variance.
void upgrade_batch_norm_9(Upgrade& u) {
  bool training = false;
  for (size_t i = 1; i < u.node.outputs.size(); ++i) training |= u.node.out(i) != nullptr;
  if (u.node.out(3) || u.node.out(4))
    throw Error("the outputs 'saved_mean' and 'saved_var' of BatchNormalization no longer exist",
                "export the model with operator set 14 or later");
  if (training) u.node.set("training_mode", int64_t{1});
  u.node.outputs.resize(training ? 3 : 1);
}

// Below 12 the ratio is an attribute and the node is never in training. Below 10 the mask has the type of the data.
void upgrade_dropout_7(Upgrade& u) {
  float ratio = u.node.get_float("ratio", 0.5F);
  u.node.remove("ratio");
  u.set_input(1, u.edit.constant(make_float(ratio), u.node.name + "_ratio"));
  if (u.from >= 10 || !u.node.out(1)) return;
  Value* mask = u.edit.detach(u.node, 1);
  u.edit.add_making("CastLike", {u.node.outputs[1], u.node.inputs[0]}, {mask}, {}, true);
}

// The number of channels of x [N, C, ...], where it is certain.
int64_t channels_of(const Upgrade& u, const Value* x) {
  const Shape* shape = u.shape_of(x);
  return shape && shape->size() > 1 ? (*shape)[1].value : -1;
}

// A constant [G] with each element repeated `times`: [G * times]. Null when its bytes are not at hand.
TensorPtr repeat_elements(const Tensor& t, int64_t times) {
  if (t.is_missing() || !t.data || bits_of(t.dtype) < 8 || t.dims.size() != 1) return nullptr;
  auto repeated = make_tensor(t.dtype, {t.dims[0] * times});
  auto size = static_cast<size_t>(bits_of(t.dtype) / 8);
  for (int64_t i = 0; i < repeated->count(); ++i)
    std::memcpy(mutable_data(*repeated) + static_cast<size_t>(i) * size, t.data + static_cast<size_t>(i / times) * size, size);
  return repeated;
}

// Scale and bias had an element for each group, from 21 on for each channel.
void upgrade_group_norm_18(Upgrade& u) {
  int64_t groups = u.node.get_int("num_groups", 0);
  if (u.node.inputs.size() < 3 || groups <= 0)
    throw Error("GroupNormalization needs three inputs and 'num_groups'", "export the model again");
  Value* x = u.node.inputs[0];  // [N, C, ...]
  int64_t channels = channels_of(u, x);
  Value* expanded = nullptr;  // [G, C / G] as a shape, made when needed
  for (size_t i : {1, 2}) {
    Value* v = u.node.inputs[i];  // [G]
    if (channels > 0 && channels % groups == 0 && is_fixed(v))
      if (TensorPtr repeated = repeat_elements(*v->constant, channels / groups)) {
        u.node.inputs[i] = u.edit.constant(repeated, v->name + "_channels");
        u.node.inputs[i]->source = v->source_name();
        continue;
      }
    if (!expanded) {
      Value* c = u.edit.add("Shape", {x}, {{"start", int64_t{1}}, {"end", int64_t{2}}});
      Value* g = u.ints({groups}, "groups");
      expanded = u.edit.add("Concat", {g, u.edit.add("Div", {c, g})}, {{"axis", int64_t{0}}});
    }
    Value* column = u.edit.add("Unsqueeze", {v, u.ints({1}, "axes")});          // [G, 1]
    Value* square = u.edit.add("Expand", {column, expanded});                   // [G, C / G]
    u.node.inputs[i] = u.edit.add("Reshape", {square, u.ints({-1}, "shape")});  // [C]
  }
}

// Inference over the operator's function body needs the axes to be written out.
void write_out_axes(Upgrade& u) {
  if (!u.node.has("axes")) u.node.set("axes", std::vector<int64_t>{0, 2, 3});
}

constexpr UpgradeRow kRows[] = {
    {"MeanVarianceNormalization", 28, write_out_axes},
    {"Softmax", 13, upgrade_softmax},
    {"LogSoftmax", 13, upgrade_softmax},
    {"Hardmax", 13, upgrade_softmax},
    {"BatchNormalization", 9, upgrade_batch_norm_7},
    {"BatchNormalization", 14, upgrade_batch_norm_9},
    {"Dropout", 12, upgrade_dropout_7},
    {"GroupNormalization", 21, upgrade_group_norm_18},
};

}  // namespace

std::span<const UpgradeRow> normalization_upgrades() {
  return kRows;
}

}  // namespace fretsaw
