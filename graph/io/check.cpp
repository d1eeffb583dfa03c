// Soundness of a model that could be read: operators, attributes and types, by ONNX's checker and inference.
#include <fmt/format.h>
#include <onnx/checker.h>
#include <onnx/defs/schema.h>
#include <onnx/onnx_pb.h>

#include <set>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/io.h"
#include "graph/passes.h"

namespace fretsaw {
namespace {

std::string first_line(std::string text) {
  return text.substr(0, text.find('\n'));
}

void add_known_names(const Graph& graph, onnx::checker::LexicalScopeContext& scope) {
  for (const Value& v : graph.all_values()) scope.add(v.name);  // bodies add their own as the checker enters them
}

void check_nodes(const Model& model, const onnx::ModelProto& proto, std::vector<Finding>& findings) {
  onnx::checker::CheckerContext context;
  std::unordered_map<std::string, int> opsets;
  for (const auto& [domain, version] : model.opsets) opsets[domain] = static_cast<int>(version);
  context.set_ir_version(static_cast<int>(model.ir_version));
  context.set_opset_imports(opsets);
  context.set_skip_opset_compatibility_check(false);
  onnx::checker::LexicalScopeContext scope;
  add_known_names(*model.graph, scope);
  std::set<std::pair<std::string, std::string>> functions;
  for (const Function& f : model.functions) functions.emplace(f.domain, f.name);
  for (const auto& node : proto.graph().node()) {
    std::string domain = node.domain() == "ai.onnx" ? "" : node.domain();
    if (functions.count({domain, node.op_type()})) continue;
    auto opset = model.opsets.find(domain);
    if (opset == model.opsets.end()) {
      findings.push_back({"error", node.name(), "", "opset-import",
                          fmt::format("node '{}' ({}): its domain '{}' is not imported", node.name(), node.op_type(), domain)});
      continue;
    }
    if (!onnx::OpSchemaRegistry::Schema(node.op_type(), static_cast<int>(opset->second), domain)) {
      bool standard = domain.empty();
      findings.push_back({standard ? "error" : "warning", node.name(), "", "unknown-operator",
                          fmt::format("node '{}': operator '{}' of domain '{}' is not defined in version {}", node.name(), node.op_type(),
                                      domain, opset->second)});
      continue;
    }
    try {
      onnx::checker::check_node(node, context, scope);
    } catch (const std::exception& e) {
      findings.push_back({"error", node.name(), "", "operator-schema",
                          fmt::format("node '{}' ({}): {}", node.name(), node.op_type(), first_line(e.what()))});
    }
  }
}

}  // namespace

std::vector<Finding> check_model(const Model& model) {
  register_communication_schemas();
  std::vector<Finding> findings;
  onnx::ModelProto proto;
  to_proto(model, proto, false);
  check_nodes(model, proto, findings);
  for (const std::string& note : model.notes) findings.push_back({"warning", "", "", "reading", note});
  Model copy = clone(model);
  for (Finding& f : infer_shapes(copy).faults) findings.push_back(std::move(f));
  for (const Value* v : copy.graph->outputs)
    if (v->type.kind == Type::Kind::unknown)
      findings.push_back({"warning", "", v->name, "unknown-type", "the type of output '" + v->name + "' is not known"});
  return findings;
}

}  // namespace fretsaw
