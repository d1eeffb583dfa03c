// Function bodies as graphs, and putting them in place of calls.
#include "graph/passes/functions.h"

#include <onnx/onnx_pb.h>

#include <algorithm>
#include <unordered_set>

#include "graph/errors.h"
#include "graph/io/reading.h"
#include "graph/passes.h"
#include "graph/passes/upgrade.h"

namespace fretsaw {

namespace {

Attribute read_default(const onnx::AttributeProto& proto, const std::string& folder, FileCache& files) {
  // The reader takes attributes as parts of nodes.
  onnx::GraphProto holder;
  onnx::NodeProto* node = holder.add_node();
  node->set_op_type("Constant");
  *node->add_attribute() = proto;
  GraphPtr graph = graph_from_proto(holder, nullptr, folder, files);
  return graph->nodes.front()->attributes.front();
}

}  // namespace

FunctionBody read_function(const onnx::FunctionProto& proto, Graph* scope, const std::string& folder, FileCache& files) {
  FunctionBody function;
  function.id = (proto.domain().empty() ? "" : proto.domain() + ".") + proto.name();
  try {
    onnx::GraphProto graph;
    graph.set_name(proto.name());
    for (const std::string& name : proto.input()) graph.add_input()->set_name(name);
    *graph.mutable_node() = proto.node();
    // A body made for one call may leave out outputs that the call does not want; they stand as null.
    std::unordered_set<std::string> made(proto.input().begin(), proto.input().end());
    for (const auto& node : proto.node()) made.insert(node.output().begin(), node.output().end());
    for (const std::string& name : proto.output())
      if (made.count(name)) graph.add_output()->set_name(name);
    function.graph = graph_from_proto(graph, scope, folder, files);
    std::vector<Value*>& outputs = function.graph->outputs;
    for (size_t i = 0; i < static_cast<size_t>(proto.output_size()); ++i)
      if (!made.count(proto.output(static_cast<int>(i)))) outputs.insert(outputs.begin() + static_cast<std::ptrdiff_t>(i), nullptr);
    for (const auto& a : proto.attribute_proto()) function.defaults.push_back(read_default(a, folder, files));
  } catch (const Error& e) {
    throw Error("in function '" + function.id + "': " + e.problem(), e.remedy(), e.code()).at_node(e.node(), e.op());
  }
  for (const auto& opset : proto.opset_import()) function.opsets[opset.domain() == "ai.onnx" ? "" : opset.domain()] = opset.version();
  return function;
}

namespace {

// Puts the call's attributes where nodes of the body refer to them, at every depth.
void substitute(Graph& graph, const FunctionBody& function, const Node& call) {
  for_each_graph(graph, [&](Graph& g) {
    for (Node* node : g.nodes) {
      std::vector<Attribute> kept;
      for (Attribute& a : node->attributes) {
        if (a.refers_to.empty()) {
          kept.push_back(std::move(a));
          continue;
        }
        const Attribute* given = call.attribute(a.refers_to);
        if (!given)
          for (const Attribute& d : function.defaults)
            if (d.name == a.refers_to) given = &d;
        if (!given) continue;  // optional, and not given
        // A call inside another function's body may itself refer on; that reference then stays open.
        Attribute& b = kept.emplace_back(Attribute{a.name, given->value, given->refers_to, a.doc});
        if (auto* body = std::get_if<GraphPtr>(&b.value)) {
          *body = clone(**body);
          (*body)->parent = &g;
        }
      }
      node->attributes = std::move(kept);
    }
  });
}

}  // namespace

GraphPtr instantiate(const FunctionBody& function, const Node& call, const std::string& model_path,
                     const std::function<bool(const Node&)>& leave) {
  if (call.inputs.size() > function.graph->inputs.size() || call.outputs.size() > function.graph->outputs.size())
    throw Error("the call has more inputs or outputs than function '" + function.id + "'", "export the model again")
        .at_node(call.name, call.op);
  GraphPtr instance = clone(*function.graph);
  substitute(*instance, function, call);
  constants_to_initializers(*instance, model_path);
  auto version = function.opsets.find("");
  if (version != function.opsets.end()) upgrade_graph(*instance, version->second, leave);
  return instance;
}

namespace {

void remove_missing(Node& node, const std::vector<Value*>& missing) {
  for (Value*& v : node.inputs)
    if (v && std::find(missing.begin(), missing.end(), v) != missing.end()) v = nullptr;
  for (const GraphPtr& body : bodies(node))
    for (Node* inner : body->nodes) remove_missing(*inner, missing);
}

// A node that hands `from` on as `to`.
Node* identity(Value* from, Value* to, const Node& call) {
  Node* node = call.graph->add_node_object();
  node->op = "Identity";
  node->name = call.graph->fresh_name(call.name + "_Identity");
  node->inputs = {from};
  node->outputs = {nullptr};
  set_output(*node, 0, to);
  return node;
}

}  // namespace

std::vector<Node*> splice(const Graph& instance, Node& call) {
  ValueMap mapping;
  std::vector<Value*> missing;  // inputs that the call leaves out
  for (size_t i = 0; i < instance.inputs.size(); ++i) {
    Value* given = call.input(i);
    if (given)
      mapping[instance.inputs[i]] = given;
    else
      missing.push_back(instance.inputs[i]);
  }
  if (!missing.empty())
    for (Node* node : instance.nodes) remove_missing(*node, missing);
  std::vector<std::pair<Value*, Value*>> handed_on;  // inner output, the call's output
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    Value *outer = call.outputs[i], *inner = instance.outputs[i];
    if (!outer) continue;
    if (!inner)
      throw Error("output '" + outer->name + "' is not made by the function's body", "export the model again").at_node(call.name, call.op);
    bool made_inside = inner->producer && inner->graph == &instance;
    if (made_inside && mapping.try_emplace(inner, outer).second) continue;
    handed_on.emplace_back(inner, outer);
  }
  std::vector<Node*> nodes = copy_nodes(instance, *call.graph, mapping, call.name);
  for (auto [inner, outer] : handed_on) {
    auto it = mapping.find(inner);
    if (it == mapping.end() && inner->graph == &instance)
      throw Error("output '" + outer->name + "' of the function is an input that the call leaves out", "give the input")
          .at_node(call.name, call.op);
    nodes.push_back(identity(it == mapping.end() ? inner : it->second, outer, call));
  }
  return nodes;
}

}  // namespace fretsaw
