// Upgrade rules of resizing and sampling, and of Scan, whose first version had a batch axis.
#include <cstring>

#include "graph/errors.h"
#include "graph/passes/upgrade.h"

namespace fretsaw {
namespace {

TensorPtr floats(const std::vector<float>& values) {
  auto t = make_tensor(DType::float32, {static_cast<int64_t>(values.size())});
  if (!values.empty()) std::memcpy(mutable_data(*t), values.data(), values.size() * sizeof(float));
  return t;
}

void upgrade_upsample_7(Upgrade& u) {
  if (!u.node.has("scales")) throw Error("an Upsample below operator set 9 needs the attribute 'scales'", "export the model again");
  u.set_input(1, u.edit.constant(floats(u.node.get_floats("scales")), u.node.name + "_scales"));
  u.node.remove("scales");
}

// Upsample is a Resize [10].
void upgrade_upsample_9(Upgrade& u) {
  u.node.op = "Resize";
  if (u.node.get_string("mode", "nearest") == "bilinear") u.node.set("mode", std::string("linear"));
}

void resize_again(Upgrade& u, std::vector<float> scales) {
  Value* y = u.edit.detach(u.node, 0);
  Value* second = u.edit.constant(floats(scales), u.node.name + "_scales");
  std::vector<Attribute> attributes = u.node.attributes;
  for (Attribute& a : attributes)
    if (a.name == "nearest_mode") a.value = std::string("ceil");
  u.edit.add_making("Resize", {u.node.outputs[0], nullptr, second}, {y}, attributes, true);
}

// Resize [10] takes x_in = x_out / scale. "nearest" rounds it down along axes that grow and up along axes that shrink; where a
// constant scale does both, two nodes do.
void upgrade_resize_10(Upgrade& u) {
  Value* scales = u.node.input(1);
  u.set_input(2, scales);
  u.node.inputs[1] = nullptr;
  u.node.set("coordinate_transformation_mode", std::string("asymmetric"));
  if (u.node.get_string("mode", "nearest") != "nearest") return;
  std::vector<double> values;
  std::vector<float> grow, shrink;
  bool grows = false, shrinks = false;
  if (float_values(scales, values))
    for (double s : values) {
      grow.push_back(static_cast<float>(s >= 1 ? s : 1));
      shrink.push_back(static_cast<float>(s < 1 ? s : 1));
      grows |= s > 1;
      shrinks |= s < 1;
    }
  u.node.set("nearest_mode", std::string(shrinks && !grows ? "ceil" : "floor"));
  if (!grows || !shrinks) return;
  u.node.inputs[2] = u.edit.constant(floats(grow), u.node.name + "_scales");
  resize_again(u, shrink);
}

// Resize [11] names unused inputs by empty tensors, and has a mode that half_pixel with another rounding equals:
// floor((x + 0.5) / s) = round_half_up((x + 0.5) / s - 0.5).
void upgrade_resize_11(Upgrade& u) {
  if (u.node.get_string("coordinate_transformation_mode", "") == "tf_half_pixel_for_nn" &&
      u.node.get_string("nearest_mode", "") == "floor") {
    u.node.set("coordinate_transformation_mode", std::string("half_pixel"));
    u.node.set("nearest_mode", std::string("round_prefer_ceil"));
  }
}

// Exporters of later sets still write empty tensors where an input is left out.
void drop_empty_inputs(Upgrade& u) {
  for (size_t i = 1; i < u.node.inputs.size(); ++i) {
    Value* v = u.node.inputs[i];
    if (v && v->constant && v->constant->count() == 0) u.node.inputs[i] = nullptr;
  }
}

void upgrade_grid_sample_16(Upgrade& u) {
  std::string mode = u.node.get_string("mode", "bilinear");
  if (mode == "bilinear") u.node.set("mode", std::string("linear"));
  if (mode == "bicubic") u.node.set("mode", std::string("cubic"));
}

void upgrade_roi_align_10(Upgrade& u) {
  u.node.set("coordinate_transformation_mode", std::string("output_half_pixel"));
}

// Scan [8] has inputs sequence_lens, states [B, ...], sequences [B, T, ...]: a Scan over the batch whose body is a Scan over time.
//   Scan(states, sequences)  ->  Scan(states as sequences, sequences) { Scan(states, sequences) }
void upgrade_scan_8(Upgrade& u) {
  Node& node = u.node;
  if (node.input(0))
    throw Error("Scan of operator set 8 with sequence lengths is not supported", "export the model with operator set 9 or later");
  GraphPtr body = node.get_graph("body");
  int64_t sequences = node.get_int("num_scan_inputs", 0);
  auto inputs = static_cast<int64_t>(node.inputs.size()) - 1;
  if (!body || sequences <= 0 || sequences > inputs)
    throw Error("Scan does not have as many inputs as 'num_scan_inputs' says", "export the model again");
  auto sample = std::make_shared<Graph>();
  sample->name = body->name + "_sample";
  sample->parent = node.graph;
  Node* inner = sample->add_node_object();
  inner->op = "Scan";
  inner->name = node.graph->fresh_name(node.name + "_sample");
  for (int64_t i = 0; i < inputs; ++i) {
    Value* v = sample->add_value(sample->fresh_name(body->inputs[static_cast<size_t>(i)]->name + "_sample"));
    sample->inputs.push_back(v);
    inner->inputs.push_back(v);
  }
  inner->outputs.resize(node.outputs.size());
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    Value* v = sample->add_value(sample->fresh_name(body->outputs[i]->name + "_sample"));
    set_output(*inner, i, v);
    sample->outputs.push_back(v);
  }
  inner->set("body", body);
  inner->set("num_scan_inputs", sequences);
  if (node.has("directions")) inner->set("scan_input_directions", node.get_ints("directions"));
  body->parent = sample.get();
  sample->nodes.push_back(inner);
  node.remove("directions");
  node.set("body", sample);
  node.set("num_scan_inputs", inputs);
  node.inputs.erase(node.inputs.begin());
}

constexpr UpgradeRow kRows[] = {
    {"Upsample", 9, upgrade_upsample_7},    {"Upsample", 10, upgrade_upsample_9}, {"Resize", 11, upgrade_resize_10},
    {"Resize", 13, upgrade_resize_11},      {"Resize", 28, drop_empty_inputs},    {"GridSample", 20, upgrade_grid_sample_16},
    {"RoiAlign", 16, upgrade_roi_align_10}, {"Scan", 9, upgrade_scan_8},
};

}  // namespace

std::span<const UpgradeRow> image_upgrades() {
  return kRows;
}

}  // namespace fretsaw
