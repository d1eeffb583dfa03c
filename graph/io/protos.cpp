// The IR as libonnx's classes.
#include <onnx/onnx_pb.h>

#include <unordered_set>

#include "graph/errors.h"
#include "graph/io.h"

namespace fretsaw {

void to_proto(const Type& type, onnx::TypeProto& proto) {
  auto fill = [&](auto* t) {
    t->set_elem_type(static_cast<int32_t>(type.dtype));
    if (!type.shape) return;
    auto* shape = t->mutable_shape();
    for (const Dim& d : *type.shape) {
      auto* dim = shape->add_dim();
      if (d.known()) dim->set_dim_value(d.value);
      if (!d.known() && !d.symbol.empty()) dim->set_dim_param(d.symbol);
    }
  };
  switch (type.kind) {
    case Type::Kind::tensor:
      return fill(proto.mutable_tensor_type());
    case Type::Kind::sparse_tensor:
      return fill(proto.mutable_sparse_tensor_type());
    case Type::Kind::sequence:
      return to_proto(*type.element, *proto.mutable_sequence_type()->mutable_elem_type());
    case Type::Kind::optional:
      return to_proto(*type.element, *proto.mutable_optional_type()->mutable_elem_type());
    case Type::Kind::map:
      proto.mutable_map_type()->set_key_type(static_cast<int32_t>(type.dtype));
      return to_proto(*type.element, *proto.mutable_map_type()->mutable_value_type());
    case Type::Kind::unknown:
      return;
  }
}

namespace {

// Writes graphs with names that are unique along every path from the outermost graph inwards.
class GraphWriter {
 public:
  GraphWriter(int64_t ir_version, bool with_weights) : ir_version_(ir_version), with_weights_(with_weights) {}

  void write(const Graph& graph, onnx::GraphProto& proto, const std::unordered_set<std::string>& outer) {
    std::unordered_set<std::string> used = outer;
    name_values(graph, used);
    if (!graph.extra.empty()) proto.ParseFromString(graph.extra);
    proto.set_name(graph.name.empty() ? "graph" : graph.name);
    std::unordered_set<const Value*> listed(graph.inputs.begin(), graph.inputs.end());
    for (const Value* v : graph.inputs) write_value(*v, *proto.add_input());
    for (const Value& v : graph.all_values()) {
      if (!v.constant || v.producer) continue;
      write_tensor(v, *proto.add_initializer(), with_weights_ || graph.parent != nullptr);
      if (ir_version_ < 4 && listed.insert(&v).second) write_value(v, *proto.add_input());
    }
    for (const Node* node : graph.nodes) write_node(*node, *proto.add_node(), used);
    for (const Value* v : graph.outputs) {
      write_value(*v, *proto.add_output());
      listed.insert(v);
    }
    for (const Node* node : graph.nodes)
      for (const Value* v : node->outputs)
        if (v && v->type.kind != Type::Kind::unknown && listed.insert(v).second) write_value(*v, *proto.add_value_info());
  }

 private:
  void name_values(const Graph& graph, std::unordered_set<std::string>& used) {
    auto give = [&](const Value* v) {
      if (!v || v->graph != &graph || names_.count(v)) return;
      std::string name = v->name.empty() ? "value" : v->name;
      for (int k = 1; !used.insert(name).second; ++k) name = v->name + "_" + std::to_string(k);
      names_[v] = name;
    };
    for (const Value* v : graph.inputs) give(v);
    for (const Value* v : graph.outputs) give(v);
    for (const Value& v : graph.all_values())
      if (v.constant) give(&v);
    for (const Node* node : graph.nodes)
      for (const Value* v : node->outputs) give(v);
  }

  const std::string& name_of_value(const Value& v) const {
    auto it = names_.find(&v);
    return it == names_.end() ? v.name : it->second;
  }

  void write_value(const Value& v, onnx::ValueInfoProto& proto) const {
    if (!v.extra.empty()) proto.ParseFromString(v.extra);
    proto.set_name(name_of_value(v));
    if (v.type.kind != Type::Kind::unknown) to_proto(v.type, *proto.mutable_type());
  }

  void write_tensor(const Value& v, onnx::TensorProto& proto, bool with_bytes) const {
    if (!v.constant->is_missing() && (with_bytes || v.constant->bytes() < kExternalFrom)) {
      to_proto(*v.constant, proto);
    } else {
      header(*v.constant, proto);
    }
    proto.set_name(name_of_value(v));
  }

  static void header(const Tensor& t, onnx::TensorProto& proto) {
    proto.set_data_type(static_cast<int32_t>(t.dtype));
    for (int64_t d : t.dims) proto.add_dims(d);
  }

  void write_node(const Node& node, onnx::NodeProto& proto, const std::unordered_set<std::string>& used) {
    if (!node.extra.empty()) proto.ParseFromString(node.extra);
    proto.set_name(node.name);
    proto.set_op_type(node.op);
    if (!node.domain.empty()) proto.set_domain(node.domain);
    if (!node.overload.empty()) proto.set_overload(node.overload);
    for (const Value* v : node.inputs) proto.add_input(v ? name_of_value(*v) : "");
    for (const Value* v : node.outputs) proto.add_output(v ? name_of_value(*v) : "");
    for (const Attribute& a : node.attributes) write_attribute(a, *proto.add_attribute(), used);
    for (const auto& [key, value] : node.metadata) {
      if (key == "fretsaw.group") continue;
      auto* entry = proto.add_metadata_props();
      entry->set_key(key);
      entry->set_value(value);
    }
    if (node.group >= 0) {
      auto* entry = proto.add_metadata_props();
      entry->set_key("fretsaw.group");
      entry->set_value(std::to_string(node.group));
    }
  }

  void write_attribute(const Attribute& a, onnx::AttributeProto& proto, const std::unordered_set<std::string>& used) {
    if (const auto* opaque = std::get_if<OpaqueAttribute>(&a.value)) {
      proto.ParseFromString(opaque->proto);
      return;
    }
    proto.set_name(a.name);
    if (!a.doc.empty()) proto.set_doc_string(a.doc);
    if (const auto* i = std::get_if<int64_t>(&a.value)) {
      proto.set_type(onnx::AttributeProto::INT);
      proto.set_i(*i);
    } else if (const auto* f = std::get_if<float>(&a.value)) {
      proto.set_type(onnx::AttributeProto::FLOAT);
      proto.set_f(*f);
    } else if (const auto* s = std::get_if<std::string>(&a.value)) {
      proto.set_type(onnx::AttributeProto::STRING);
      proto.set_s(*s);
    } else if (const auto* t = std::get_if<TensorPtr>(&a.value)) {
      proto.set_type(onnx::AttributeProto::TENSOR);
      to_proto(**t, *proto.mutable_t());
    } else if (const auto* g = std::get_if<GraphPtr>(&a.value)) {
      proto.set_type(onnx::AttributeProto::GRAPH);
      write(**g, *proto.mutable_g(), used);
    } else if (const auto* is = std::get_if<std::vector<int64_t>>(&a.value)) {
      proto.set_type(onnx::AttributeProto::INTS);
      proto.mutable_ints()->Add(is->begin(), is->end());
    } else if (const auto* fs = std::get_if<std::vector<float>>(&a.value)) {
      proto.set_type(onnx::AttributeProto::FLOATS);
      proto.mutable_floats()->Add(fs->begin(), fs->end());
    } else if (const auto* ss = std::get_if<std::vector<std::string>>(&a.value)) {
      proto.set_type(onnx::AttributeProto::STRINGS);
      for (const std::string& one : *ss) proto.add_strings(one);
    } else if (const auto* ts = std::get_if<std::vector<TensorPtr>>(&a.value)) {
      proto.set_type(onnx::AttributeProto::TENSORS);
      for (const TensorPtr& one : *ts) to_proto(*one, *proto.add_tensors());
    } else if (const auto* gs = std::get_if<std::vector<GraphPtr>>(&a.value)) {
      proto.set_type(onnx::AttributeProto::GRAPHS);
      for (const GraphPtr& one : *gs) write(*one, *proto.add_graphs(), used);
    }
  }

  int64_t ir_version_;
  bool with_weights_;
  std::unordered_map<const Value*, std::string> names_;
};

}  // namespace

void to_proto(const Model& model, onnx::ModelProto& proto, bool with_weights) {
  if (!model.extra.empty()) proto.ParseFromString(model.extra);
  proto.set_ir_version(model.ir_version);
  for (const auto& [domain, version] : model.opsets) {
    auto* opset = proto.add_opset_import();
    opset->set_domain(domain);
    opset->set_version(version);
  }
  for (const auto& [key, value] : model.metadata) {
    auto* entry = proto.add_metadata_props();
    entry->set_key(key);
    entry->set_value(value);
  }
  for (const Function& f : model.functions) proto.add_functions()->ParseFromString(f.proto);
  GraphWriter(model.ir_version, with_weights).write(*model.graph, *proto.mutable_graph(), {});
}

}  // namespace fretsaw
