// Reading ONNX files into the IR.
#include <fmt/format.h>
#include <google/protobuf/arena.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <onnx/onnx_pb.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <filesystem>
#include <unordered_set>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/io.h"
#include "graph/io/reading.h"
#include "graph/io/wire.h"

namespace fretsaw {

Type type_from_proto(const onnx::TypeProto& proto) {
  auto tensor = [](const auto& t, Type::Kind kind) {
    Type type;
    type.kind = kind;
    type.dtype = static_cast<DType>(t.elem_type());
    if (t.has_shape()) {
      type.shape.emplace();
      for (const auto& d : t.shape().dim())
        type.shape->push_back(d.has_dim_value() && d.dim_value() >= 0 ? Dim(d.dim_value())
                              : d.has_dim_param()                     ? Dim(d.dim_param())
                                                                      : Dim());
    }
    return type;
  };
  Type type;
  switch (proto.value_case()) {
    case onnx::TypeProto::kTensorType:
      return tensor(proto.tensor_type(), Type::Kind::tensor);
    case onnx::TypeProto::kSparseTensorType:
      return tensor(proto.sparse_tensor_type(), Type::Kind::sparse_tensor);
    case onnx::TypeProto::kSequenceType:
      return Type::sequence(type_from_proto(proto.sequence_type().elem_type()));
    case onnx::TypeProto::kOptionalType:
      return Type::optional(type_from_proto(proto.optional_type().elem_type()));
    case onnx::TypeProto::kMapType:
      type.kind = Type::Kind::map;
      type.dtype = static_cast<DType>(proto.map_type().key_type());
      type.element = std::make_shared<const Type>(type_from_proto(proto.map_type().value_type()));
      return type;
    default:
      return type;
  }
}

namespace {

class GraphReader {
 public:
  GraphReader(const std::string& folder, FileCache& files, const ReadOptions& options, int64_t ir_version, std::vector<std::string>* notes)
      : folder_(folder), files_(files), options_(options), ir_version_(ir_version), notes_(notes) {}

  GraphPtr read(const onnx::GraphProto& proto, Graph* parent) {
    auto graph = std::make_shared<Graph>();
    graph->name = proto.name();
    graph->parent = parent;
    Scope scope;
    scopes_.push_back(&scope);
    read_inputs(proto, *graph, scope);
    read_initializers(proto, *graph, scope);
    make_outputs(proto, *graph, scope);
    for (int i = 0; i < proto.node_size(); ++i) fill_node(proto.node(i), *graph->nodes[static_cast<size_t>(i)]);
    for (const auto& output : proto.output()) read_output(output, *graph, scope);
    for (const auto& info : proto.value_info()) {
      auto it = scope.find(info.name());
      if (it != scope.end() && it->second->type.kind == Type::Kind::unknown) set_type(*it->second, info);
    }
    scopes_.pop_back();
    if (sort_nodes(*graph) && notes_)
      notes_->push_back(fmt::format("graph '{}': its nodes were not in topological order and have been sorted", graph->name));
    keep_rest(proto, *graph);
    return graph;
  }

  // For graphs read below an existing one: its values, and its parents', are in scope.
  void enter(Graph* outer) {
    for (; outer; outer = outer->parent) {
      auto scope = std::make_unique<Scope>();
      for (Value& v : outer->all_values()) scope->emplace(v.name, &v);
      scopes_.insert(scopes_.begin(), scope.get());
      entered_.push_back(std::move(scope));
    }
  }

 private:
  using Scope = std::unordered_map<std::string, Value*>;

  static void set_type(Value& v, const onnx::ValueInfoProto& info) {
    v.type = type_from_proto(info.type());
    if (info.has_doc_string() || info.metadata_props_size()) {
      onnx::ValueInfoProto rest = info;
      rest.clear_name();
      rest.clear_type();
      v.extra = rest.SerializeAsString();
    }
  }

  void read_inputs(const onnx::GraphProto& proto, Graph& graph, Scope& scope) {
    for (const auto& input : proto.input()) {
      if (input.name().empty()) throw Error("a graph input has no name", "export the model again");
      Value* v = graph.add_value(input.name());
      set_type(*v, input);
      if (!scope.emplace(input.name(), v).second)
        throw Error("the graph has two inputs named '" + input.name() + "'", "names must be unique");
      graph.inputs.push_back(v);
    }
  }

  void add_initializer(TensorPtr tensor, Graph& graph, Scope& scope) {
    if (tensor->name.empty()) throw Error("an initializer has no name", "export the model again");
    auto it = scope.find(tensor->name);
    if (it == scope.end()) {
      scope[tensor->name] = graph.add_constant(tensor->name, tensor);
      return;
    }
    Value* v = it->second;
    if (v->constant) throw Error("there are two initializers named '" + tensor->name + "'", "names must be unique");
    if (v->type.is_tensor() && v->type.dtype != tensor->dtype)
      throw Error(fmt::format("initializer '{}' is {} and the input of that name is {}", tensor->name, name_of(tensor->dtype),
                              name_of(v->type.dtype)),
                  "the file is damaged");
    v->constant = std::move(tensor);
    v->type = Type::tensor(v->constant->dtype, shape_of(v->constant->dims));
    if (ir_version_ < 4) std::erase(graph.inputs, v);  // below IR 4 every initializer had to be an input as well
  }

  void read_initializers(const onnx::GraphProto& proto, Graph& graph, Scope& scope) {
    for (const auto& tensor : proto.initializer()) add_initializer(tensor_from_proto(tensor, folder_, files_, options_), graph, scope);
    for (const auto& sparse : proto.sparse_initializer()) add_initializer(densify(sparse, folder_, files_, options_), graph, scope);
  }

  // All values exist before any is used, since nodes may stand in any order.
  void make_outputs(const onnx::GraphProto& proto, Graph& graph, Scope& scope) {
    for (const auto& node_proto : proto.node()) {
      Node* node = graph.add_node_object();
      node->op = node_proto.op_type();
      node->domain = node_proto.domain() == "ai.onnx" ? "" : node_proto.domain();
      node->name = unique_node_name(node_proto);
      graph.nodes.push_back(node);
      for (const std::string& name : node_proto.output()) {
        if (name.empty()) {
          node->outputs.push_back(nullptr);
          continue;
        }
        auto it = scope.find(name);
        if (it != scope.end()) refuse_second_definition(*node, *it->second);
        Value* v = graph.add_value(name);
        v->producer = node;
        v->output = static_cast<int>(node->outputs.size());
        node->outputs.push_back(v);
        scope[name] = v;
      }
    }
  }

  [[noreturn]] static void refuse_second_definition(const Node& node, const Value& first) {
    std::string other = first.producer   ? "node '" + first.producer->name + "' makes"
                        : first.constant ? "an initializer is"
                                         : "a graph input is";
    throw Error(fmt::format("output '{}' is defined twice: {} it already", first.name, other),
                "every value must be made once; export the model again")
        .at_node(node.name, node.op);
  }

  std::string unique_node_name(const onnx::NodeProto& proto) {
    std::string base = proto.name();
    if (base.empty()) {
      base = proto.op_type();
      for (const std::string& output : proto.output())
        if (!output.empty()) {
          base = output;
          break;
        }
    }
    std::string name = base;
    while (!taken_node_names_.insert(name).second) name = base + "_" + std::to_string(++node_names_[base]);
    return name;
  }

  Value* find(const std::string& name) const {
    for (size_t i = scopes_.size(); i-- > 0;) {
      auto it = scopes_[i]->find(name);
      if (it != scopes_[i]->end()) return it->second;
    }
    return nullptr;
  }

  void fill_node(const onnx::NodeProto& proto, Node& node) {
    for (const std::string& name : proto.input()) {
      Value* v = name.empty() ? nullptr : find(name);
      if (!v && !name.empty())
        throw Error(fmt::format("input '{}' is not made by any node, and is no graph input or initializer", name), "export the model again")
            .at_node(node.name, node.op);
      node.inputs.push_back(v);
    }
    try {
      for (const auto& attribute : proto.attribute()) node.attributes.push_back(read_attribute(attribute, *node.graph));
    } catch (const Error& e) {
      throw e.at_node(node.name, node.op);
    }
    for (const auto& entry : proto.metadata_props()) node.metadata[entry.key()] = entry.value();
    if (auto it = node.metadata.find("fretsaw.group"); it != node.metadata.end()) node.group = std::atoi(it->second.c_str());
    node.overload = proto.overload();
    if (proto.has_doc_string() || proto.device_configurations_size() > 0 || !proto.unknown_fields().empty()) {
      onnx::NodeProto rest = proto;
      for (auto clear : {&onnx::NodeProto::clear_input, &onnx::NodeProto::clear_output, &onnx::NodeProto::clear_name,
                         &onnx::NodeProto::clear_op_type, &onnx::NodeProto::clear_attribute, &onnx::NodeProto::clear_domain,
                         &onnx::NodeProto::clear_metadata_props, &onnx::NodeProto::clear_overload})
        (rest.*clear)();
      node.extra = rest.SerializeAsString();
    }
  }

  Attribute read_attribute(const onnx::AttributeProto& proto, Graph& graph) {
    Attribute a;
    a.name = proto.name();
    a.refers_to = proto.ref_attr_name();
    a.doc = proto.doc_string();
    if (!a.refers_to.empty()) {
      a.value = OpaqueAttribute{proto.SerializeAsString()};
      return a;
    }
    switch (type_of(proto)) {
      case onnx::AttributeProto::FLOAT:
        a.value = proto.f();
        break;
      case onnx::AttributeProto::INT:
        a.value = proto.i();
        break;
      case onnx::AttributeProto::STRING:
        a.value = proto.s();
        break;
      case onnx::AttributeProto::TENSOR:
        a.value = tensor_from_proto(proto.t(), folder_, files_, options_);
        break;
      case onnx::AttributeProto::GRAPH:
        a.value = read_body(proto.g(), graph);
        break;
      case onnx::AttributeProto::FLOATS:
        a.value = std::vector<float>(proto.floats().begin(), proto.floats().end());
        break;
      case onnx::AttributeProto::INTS:
        a.value = std::vector<int64_t>(proto.ints().begin(), proto.ints().end());
        break;
      case onnx::AttributeProto::STRINGS:
        a.value = std::vector<std::string>(proto.strings().begin(), proto.strings().end());
        break;
      case onnx::AttributeProto::TENSORS: {
        std::vector<TensorPtr> tensors;
        for (const auto& t : proto.tensors()) tensors.push_back(tensor_from_proto(t, folder_, files_, options_));
        a.value = std::move(tensors);
        break;
      }
      case onnx::AttributeProto::GRAPHS: {
        std::vector<GraphPtr> graphs;
        for (const auto& g : proto.graphs()) graphs.push_back(read_body(g, graph));
        a.value = std::move(graphs);
        break;
      }
      default:
        a.value = OpaqueAttribute{proto.SerializeAsString()};
    }
    return a;
  }

  GraphPtr read_body(const onnx::GraphProto& proto, Graph& outer) {
    if (scopes_.size() > 60) throw Error("control flow is nested more than 60 deep", "flatten the model");
    return read(proto, &outer);
  }

  // Files of IR 1 and 2 left the type out.
  static int type_of(const onnx::AttributeProto& p) {
    if (p.type() != onnx::AttributeProto::UNDEFINED) return p.type();
    if (p.has_f()) return onnx::AttributeProto::FLOAT;
    if (p.has_i()) return onnx::AttributeProto::INT;
    if (p.has_s()) return onnx::AttributeProto::STRING;
    if (p.has_t()) return onnx::AttributeProto::TENSOR;
    if (p.has_g()) return onnx::AttributeProto::GRAPH;
    if (p.floats_size()) return onnx::AttributeProto::FLOATS;
    if (p.ints_size()) return onnx::AttributeProto::INTS;
    if (p.strings_size()) return onnx::AttributeProto::STRINGS;
    return onnx::AttributeProto::UNDEFINED;
  }

  void read_output(const onnx::ValueInfoProto& output, Graph& graph, Scope& scope) {
    auto it = scope.find(output.name());
    Value* v = it != scope.end() ? it->second : find(output.name());
    if (!v)
      throw Error("graph output '" + output.name() + "' is not made by any node, and is no graph input or initializer",
                  "export the model again");
    if (it != scope.end() && v->type.kind == Type::Kind::unknown) set_type(*v, output);
    graph.outputs.push_back(v);
  }

  static void keep_rest(const onnx::GraphProto& proto, Graph& graph) {
    if (!proto.has_doc_string() && proto.quantization_annotation_size() == 0 && proto.metadata_props_size() == 0 &&
        proto.unknown_fields().empty())
      return;
    onnx::GraphProto rest;
    rest.mutable_unknown_fields()->MergeFrom(proto.unknown_fields());
    if (proto.has_doc_string()) rest.set_doc_string(proto.doc_string());
    *rest.mutable_quantization_annotation() = proto.quantization_annotation();
    *rest.mutable_metadata_props() = proto.metadata_props();
    graph.extra = rest.SerializeAsString();
  }

  const std::string& folder_;
  FileCache& files_;
  const ReadOptions& options_;
  int64_t ir_version_;
  std::vector<std::string>* notes_;
  std::vector<Scope*> scopes_;
  std::vector<std::unique_ptr<Scope>> entered_;
  std::unordered_map<std::string, int> node_names_;
  std::unordered_set<std::string> taken_node_names_;
};

void parse(std::span<const std::byte> bytes, onnx::ModelProto& proto) {
  std::string stripped = strip_weights(bytes);
  google::protobuf::io::ArrayInputStream stream(stripped.data(), static_cast<int>(std::min<size_t>(stripped.size(), INT32_MAX)));
  google::protobuf::io::CodedInputStream coded(&stream);
  coded.SetRecursionLimit(500);
  if (stripped.size() > INT32_MAX || !proto.ParseFromCodedStream(&coded) || !coded.ConsumedEntireMessage())
    throw Error("is not an ONNX model, or is damaged: its bytes do not parse",
                "check that the file is complete and was written by an ONNX exporter");
}

void check_versions(const onnx::ModelProto& proto) {
  if (!proto.has_graph()) throw Error("holds no graph", "check that it is an ONNX model");
  if (proto.ir_version() < 3)
    throw Error(fmt::format("has IR version {}, which is below 3", proto.ir_version()), "convert the model with a newer exporter");
  if (proto.ir_version() > onnx::Version::IR_VERSION)
    throw Error(fmt::format("has IR version {}, newer than {}, the newest this build reads", proto.ir_version(),
                            static_cast<int>(onnx::Version::IR_VERSION)),
                "export it with an older IR version, or build fretsaw with a newer libonnx");
}

void read_header(const onnx::ModelProto& proto, Model& model) {
  if (proto.opset_import_size() == 0) throw Error("imports no operator set", "the file is damaged; export the model again");
  model.ir_version = proto.ir_version();
  for (const auto& opset : proto.opset_import()) {
    std::string domain = opset.domain() == "ai.onnx" ? "" : opset.domain();
    auto [it, added] = model.opsets.emplace(domain, opset.version());
    if (!added && it->second != opset.version())
      throw Error(fmt::format("imports operator set '{}' as version {} and as {}", domain, it->second, opset.version()),
                  "the file is damaged");
  }
  for (const auto& entry : proto.metadata_props()) model.metadata[entry.key()] = entry.value();
  for (const auto& f : proto.functions())
    model.functions.push_back({f.domain() == "ai.onnx" ? "" : f.domain(), f.name(), f.overload(), f.SerializeAsString()});
}

}  // namespace

GraphPtr graph_from_proto(const onnx::GraphProto& proto, Graph* parent, const std::string& folder) {
  FileCache files;
  return graph_from_proto(proto, parent, folder, files);
}

GraphPtr graph_from_proto(const onnx::GraphProto& proto, Graph* parent, const std::string& folder, FileCache& files) {
  ReadOptions options;
  GraphReader reader(folder, files, options, onnx::Version::IR_VERSION, nullptr);
  reader.enter(parent);
  return reader.read(proto, parent);
}

Model model_from_proto(onnx::ModelProto& proto, const std::string& folder, FileCache& files, const ReadOptions& options) {
  register_communication_schemas();
  check_versions(proto);
  Model model;
  try {
    read_header(proto, model);
    GraphReader reader(folder, files, options, proto.ir_version(), &model.notes);
    model.graph = reader.read(proto.graph(), nullptr);
  } catch (const Error& e) {
    throw StructureError(e);
  }
  proto.clear_graph();
  proto.clear_opset_import();
  proto.clear_metadata_props();
  proto.clear_functions();
  proto.clear_ir_version();
  model.extra = proto.SerializeAsString();
  return model;
}

Model read_model(const std::string& path, const ReadOptions& options) {
  try {
    FileCache files;
    files.model_file = MappedFile::open(path);
    auto bytes = files.model_file->bytes();
    if (bytes.empty()) throw Error("is empty", "name an ONNX model");
    google::protobuf::Arena arena;  // a large graph is millions of small messages
    onnx::ModelProto& proto = *google::protobuf::Arena::CreateMessage<onnx::ModelProto>(&arena);
    parse(bytes, proto);
    Model model = model_from_proto(proto, std::filesystem::path(path).parent_path().string(), files, options);
    model.path = path;
    XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
    model.digest = fmt::format("xxh3:{:016x}{:016x}", hash.high64, hash.low64);
    return model;
  } catch (const StructureError& e) {
    throw StructureError(e.in_file(path));
  } catch (const Error& e) {
    throw e.in_file(path);
  }
}

}  // namespace fretsaw
