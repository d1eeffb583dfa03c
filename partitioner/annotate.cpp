// Writes stages into the source's nodes. The few protobuf fields needed are encoded here, so that this layer needs no ONNX header.
#include "partitioner/annotate.h"

#include <algorithm>

namespace fretsaw {
namespace {

constexpr const char* kConfiguration = "fretsaw";
constexpr int64_t kIrWithAnnotations = 11;

// --- protobuf's wire format: a key (field number and kind), then a varint or a length and bytes ---

void add_varint(std::string& out, uint64_t v) {
  for (; v >= 0x80; v >>= 7) out += static_cast<char>(v | 0x80);
  out += static_cast<char>(v);
}
void add_number(std::string& out, int field, uint64_t v) {
  add_varint(out, static_cast<uint64_t>(field) << 3);
  add_varint(out, v);
}
void add_bytes(std::string& out, int field, const std::string& bytes) {
  add_varint(out, static_cast<uint64_t>(field) << 3 | 2);
  add_varint(out, bytes.size());
  out += bytes;
}

bool read_varint(const std::string& in, size_t& at, uint64_t& v) {
  v = 0;
  for (int shift = 0; shift < 64 && at < in.size(); shift += 7) {
    auto c = static_cast<unsigned char>(in[at++]);
    v |= static_cast<uint64_t>(c & 0x7F) << shift;
    if (!(c & 0x80)) return true;
  }
  return false;
}

// The message without this length-delimited field; unchanged when it can't be read.
std::string without_field(const std::string& in, uint64_t field) {
  std::string out;
  for (size_t at = 0; at < in.size();) {
    size_t begin = at;
    uint64_t key = 0, length = 0;
    if (!read_varint(in, at, key)) return in;
    switch (key & 7) {
      case 0:
        if (!read_varint(in, at, length)) return in;
        break;
      case 1:
        at += 8;
        break;
      case 2:
        if (!read_varint(in, at, length) || length > in.size() - at) return in;
        at += length;
        break;
      case 5:
        at += 4;
        break;
      default:
        return in;
    }
    if (at > in.size()) return in;
    if (key >> 3 != field) out.append(in, begin, at - begin);
  }
  return out;
}

// ModelProto.configuration (26): DeviceConfigurationProto {name = 1, num_devices = 2}
std::string configuration(int devices) {
  std::string message, field;
  add_bytes(message, 1, kConfiguration);
  add_number(message, 2, static_cast<uint64_t>(devices));
  add_bytes(field, 26, message);
  return field;
}
// NodeProto.device_configurations (10): NodeDeviceConfigurationProto {configuration_id = 1, pipeline_stage = 3}
std::string node_configuration(int stage) {
  std::string message, field;
  add_bytes(message, 1, kConfiguration);
  add_number(message, 3, static_cast<uint64_t>(stage));
  add_bytes(field, 10, message);
  return field;
}

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

}  // namespace

std::shared_ptr<Model> annotate(Model source, const std::unordered_map<std::string, int>& stage_of_value, int stages) {
  auto model = std::make_shared<Model>(std::move(source));
  Graph& graph = *model->graph;
  std::vector<int> stage = node_stages(graph, stage_of_value, stages);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    Node& node = *graph.nodes[i];
    node.extra = without_field(node.extra, 10) + node_configuration(stage[i]);
  }
  model->extra = without_field(model->extra, 26) + configuration(stages);
  model->ir_version = std::max(model->ir_version, kIrWithAnnotations);
  leave_out_weights(graph);
  return model;
}

}  // namespace fretsaw
