// Writes stages and specs into the source's nodes, and the rest into metadata.
#include "partitioner/annotate.h"

#include <algorithm>
#include <optional>
#include <set>

#include "graph/annotations.h"
#include "partitioner/correspondence.h"
#include "partitioner/spec_form.h"

namespace fretsaw {
namespace {

// Stages that never go back along an edge: known ones where the plan says so, else the first user's, else that of what comes before.
std::vector<int> node_stages(const Graph& graph, const std::unordered_map<std::string, int>& stage_of_value, int stages) {
  size_t n = graph.nodes.size();
  std::vector<int> stage(n, -1);
  std::unordered_map<const Value*, int> first_use, made;
  for (size_t i = n; i-- > 0;) {
    const Node& node = *graph.nodes[i];
    for (const Value* v : node.outputs) {
      if (!v) continue;
      auto known = stage_of_value.find(v->source_name());
      if (known != stage_of_value.end()) stage[i] = std::max(stage[i], known->second);
    }
    if (stage[i] < 0) {
      int first = stages;
      for (const Value* v : node.outputs)
        if (auto it = first_use.find(v); v && it != first_use.end()) first = std::min(first, it->second);
      if (first < stages) stage[i] = first;
    }
    if (stage[i] < 0) continue;
    auto use = [&](const Value* v) {
      auto [it, is_new] = first_use.try_emplace(v, stage[i]);
      if (!is_new) it->second = std::min(it->second, stage[i]);
    };
    for (const Value* v : node.inputs)
      if (v) use(v);
    for (const Value* v : captures(node)) use(v);
  }
  for (size_t i = 0; i < n; ++i) {
    const Node& node = *graph.nodes[i];
    auto after = [&](const Value* v) {
      if (auto it = made.find(v); it != made.end()) stage[i] = std::max(stage[i], it->second);
    };
    for (const Value* v : node.inputs) after(v);
    for (const Value* v : captures(node)) after(v);
    stage[i] = std::max(stage[i], 0);
    for (const Value* v : node.outputs)
      if (v) made[v] = stage[i];
  }
  return stage;
}

void leave_out_weights(Graph& graph) {
  constexpr size_t kMostBytes = 1000 * 1000, kSmallBytes = 1024;
  size_t total = 0;
  for (const Value* v : graph.initializers()) total += v->constant->bytes();
  if (total < kMostBytes) return;
  for (Value* v : graph.initializers()) {
    if (v->constant->bytes() < kSmallBytes || v->constant->dtype == DType::string) continue;
    auto header = std::make_shared<Tensor>();
    header->name = v->constant->name;
    header->dtype = v->constant->dtype;
    header->dims = v->constant->dims;
    header->missing = "annotated.onnx holds no weights";
    v->constant = header;
  }
}

// How a tensor lies at a node, by what stands for it in the normalised graph; nullopt: nothing says, or two places differ.
struct Lie {
  Sharding sharding;
  size_t rank = 0;
  int batch_axis = -1;
};
bool same(const Sharding& a, const Sharding& b) {
  return a.kind == b.kind && a.dim == b.dim && a.cut == b.cut;
}
class Lies {
 public:
  Lies(const Graph& source, const Annotating& a) : a_(a), same_(source, a.normalised) {
    position_.reserve(a.normalised.nodes.size());
    for (size_t i = 0; i < a.normalised.nodes.size(); ++i) position_[a.normalised.nodes[i]] = i;
  }

  std::optional<Lie> of(const Node& node, const Value& tensor) const {
    std::optional<Lie> found;
    const Node* now = same_.node_of(&node);
    for (const OperandPlace& place : same_.places_of(node, tensor.name)) {
      const Value* v = (place.output ? now->outputs : now->inputs)[place.index];
      if (!v->type.is_tensor() || (tensor.type.shape && v->type.shape && tensor.type.shape->size() != v->type.shape->size()))
        return std::nullopt;
      const std::optional<Sharding> sharding = at(*now, place);
      if (!sharding || (found && !same(found->sharding, *sharding))) return std::nullopt;
      found = Lie{*sharding, v->type.shape ? v->type.shape->size() : 0, batch_axis(v)};
    }
    return found;
  }

 private:
  std::optional<Sharding> at(const Node& node, const OperandPlace& place) const {
    if (!a_.operands) return Sharding{};
    const NodePins& pins = (*a_.operands)[position_.at(&node)];
    return (place.output ? pins.outputs : pins.inputs)[place.index];
  }
  int batch_axis(const Value* v) const {
    if (a_.plan.mesh.data == 1) return -1;
    const auto axis = a_.facts.axes.find(v);
    const bool plain = axis != a_.facts.axes.end() && !axis->second.mixed && axis->second.outer == DimProduct(1);
    return plain ? axis->second.axis : -1;
  }

  const Annotating& a_;
  Correspondence same_;
  std::unordered_map<const Node*, size_t> position_;
};

// The specs of a node's operands; what they can't say becomes the node's metadata.
std::vector<TensorAnnotation> specs_of(Node& node, int stage, const Lies& lies, const Mesh& mesh) {
  std::vector<std::vector<int64_t>> devices;
  for (int d = 0; d < mesh.data; ++d) {
    devices.emplace_back();
    for (int t = 0; t < mesh.tensor; ++t) devices.back().push_back(mesh.rank(d, stage, t));
  }
  std::vector<TensorAnnotation> specs;
  std::set<const Value*> done;
  for (const auto* values : {&node.inputs, &node.outputs})
    for (const Value* v : *values) {
      if (!v || v->name.empty() || !done.insert(v).second) continue;
      const std::optional<Lie> lie = lies.of(node, *v);
      if (!lie) continue;
      if (lie->sharding.kind != Sharding::Kind::pending) specs.push_back(spec_of(v->name, lie->sharding, lie->batch_axis, devices));
      if (!fits_spec(lie->sharding)) node.metadata[kCutOfTensor + v->name] = lie->sharding.text(lie->rank, "tensor");
    }
  return specs;
}

// Nodes of the cut graph that do not run where a reader of the annotations would put them.
StageExceptions stage_exceptions(const Graph& source, const std::vector<int>& stage, const Annotating& a) {
  StageExceptions exceptions;
  if (a.assignment.stages == 1) return exceptions;
  std::unordered_map<std::string, int> stage_of_value;
  stage_of_value.reserve(source.nodes.size());
  for (size_t i = 0; i < source.nodes.size(); ++i)
    for (const Value* v : source.nodes[i]->outputs)
      if (v) stage_of_value[v->name] = stage[i];
  const std::vector<int> expected = stages_by_source(a.index, stage_of_value, a.assignment.stages, {});
  for (size_t i = 0; i < expected.size(); ++i)
    if (const Value* v = a.index.nodes[i]->out(0); v && expected[i] != a.assignment.stage_of[i])
      exceptions[v->name] = a.assignment.stage_of[i];
  return exceptions;
}

}  // namespace

std::shared_ptr<Model> annotate(Model source, const std::unordered_map<std::string, int>& stage_of_value, const Annotating& a) {
  auto model = std::make_shared<Model>(std::move(source));
  Graph& graph = *model->graph;
  const std::vector<int> stage = node_stages(graph, stage_of_value, a.assignment.stages);
  remove_annotations(graph);  // what the source says for other configurations goes with them
  remove_metadata(*model);
  std::optional<Lies> lies;  // one device a stage has everything; of two tensor axes only the stages are told
  if (a.plan.mesh.data * a.plan.mesh.tensor > 1 && a.plan.mesh.tensor_y == 1) lies.emplace(graph, a);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    NodeAnnotation annotation{kOwnConfiguration, stage[i], {}};
    if (lies) annotation.tensors = specs_of(*graph.nodes[i], stage[i], *lies, a.plan.mesh);
    set_annotations(*graph.nodes[i], {annotation});
  }
  set_device_configurations(*model, {DeviceConfiguration{kOwnConfiguration, a.plan.mesh.size(), {}}});
  write_metadata(a.plan, a.options, stage_exceptions(graph, stage, a), a.history, *model);
  model->ir_version = std::max(model->ir_version, kIrWithAnnotations);
  leave_out_weights(graph);
  return model;
}

}  // namespace fretsaw
