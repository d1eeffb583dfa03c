// Operators without a kernel become the function body that ONNX defines for them, until all that is left has kernels or no body.
#include <onnx/defs/schema.h>
#include <onnx/onnx_pb.h>

#include "graph/errors.h"
#include "graph/io.h"
#include "graph/io/reading.h"
#include "graph/passes.h"
#include "graph/passes/functions.h"

namespace fretsaw {
namespace {

onnx::NodeProto proto_of(Node& node) {
  Model holder;
  holder.ir_version = 10;
  holder.opsets[""] = newest_opset();
  holder.graph = std::make_shared<Graph>();
  holder.graph->nodes = {&node};
  onnx::ModelProto proto;
  to_proto(holder, proto, true);
  return proto.graph().node(0);
}

// Bodies refer to attributes that a node may leave out; the schema knows their defaults.
void add_defaults(const onnx::OpSchema& schema, onnx::FunctionProto& function) {
  for (const auto& [name, attribute] : schema.attributes()) {
    if (attribute.default_value.name().empty()) continue;
    *function.add_attribute_proto() = attribute.default_value;
  }
}

// The function that the operator's schema gives for this node; false when there is none for its types and attributes.
bool find_function(const Model& model, Node& node, onnx::FunctionProto& function) {
  auto opset = model.opsets.find(node.domain);
  if (opset == model.opsets.end()) return false;
  const onnx::OpSchema* schema = onnx::OpSchemaRegistry::Schema(node.op, static_cast<int>(opset->second), node.domain);
  if (!schema) return false;
  if (const onnx::FunctionProto* plain = schema->GetFunction()) {
    function = *plain;
    add_defaults(*schema, function);
    return true;
  }
  if (!schema->HasContextDependentFunction()) return false;
  onnx::NodeProto proto = proto_of(node);
  std::vector<onnx::TypeProto> types(node.inputs.size());
  for (size_t i = 0; i < types.size(); ++i)
    if (node.inputs[i]) to_proto(node.inputs[i]->type, types[i]);
  onnx::FunctionBodyBuildContextImpl context(proto, types);
  try {
    if (!schema->BuildContextDependentFunction(context, function)) return false;
    add_defaults(*schema, function);
    return true;
  } catch (const std::exception&) {
    return false;  // it needs a type that is not known
  }
}

bool expand_all(Model& model, Graph& graph, const std::function<bool(const Node&)>& has_kernel) {
  bool expanded = false;
  std::vector<Node*> kept;
  kept.reserve(graph.nodes.size());
  for (Node* node : std::vector<Node*>(graph.nodes)) {
    onnx::FunctionProto proto;
    if (has_kernel(*node) || !find_function(model, *node, proto)) {
      for (const GraphPtr& body : bodies(*node)) expanded |= expand_all(model, *body, has_kernel);
      kept.push_back(node);
      continue;
    }
    FileCache files;
    Graph* scope = bodies(*node).empty() ? nullptr : node->graph;  // a body that the function takes along may use outer values
    FunctionBody function = read_function(proto, scope, "", files);
    for (const auto& [domain, version] : function.opsets)
      if (!domain.empty()) model.opsets.try_emplace(domain, version);
    GraphPtr instance = instantiate(function, *node, "", nullptr);
    for (Node* copy : splice(*instance, *node)) kept.push_back(copy);
    expanded = true;
  }
  graph.nodes = std::move(kept);
  return expanded;
}

}  // namespace

void decompose_to_functions(Model& model, const std::function<bool(const Node&)>& has_kernel) {
  constexpr int kMostRounds = 16;  // ONNX's own bodies nest three or four deep
  for (int round = 0; round < kMostRounds && expand_all(model, *model.graph, has_kernel); ++round) infer_shapes(model);
}

}  // namespace fretsaw
