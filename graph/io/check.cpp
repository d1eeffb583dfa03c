// Soundness of a model: operators, attributes and types, by ONNX's schemas and inference.
#include "graph/io/check.h"

#include <fmt/format.h>
#include <onnx/defs/schema.h>
#include <onnx/onnx_pb.h>

#include <optional>
#include <set>
#include <unordered_set>

#include "graph/annotation_rules.h"
#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/io/reading.h"
#include "graph/passes.h"

namespace fretsaw {
namespace {

constexpr int64_t kOldestOpset = 7;

std::string first_line(std::string text) {
  return text.substr(0, text.find('\n'));
}

using Opsets = std::map<std::string, int64_t>;

class NodeChecker {
 public:
  NodeChecker(const Model& model, std::vector<Finding>& findings) : findings_(findings) {
    for (const Function& f : model.functions) functions_.emplace(f.domain, f.name);
  }

  void check(const Graph& graph, const Opsets& opsets) {
    for (const Node* node : graph.nodes) {
      const size_t before = findings_.size();
      if (std::string kind = kind_of(*node); !sound_.contains(kind)) {
        check(signature(*node), opsets);
        if (findings_.size() == before) sound_.insert(std::move(kind));
      }
      for (const GraphPtr& body : bodies(*node)) check(*body, opsets);
    }
  }

  void check(const Function& function, const Opsets& of_model) {
    onnx::FunctionProto proto;
    if (!proto.ParseFromString(function.proto)) return;
    Opsets opsets;
    for (const auto& opset : proto.opset_import()) opsets[opset.domain() == "ai.onnx" ? "" : opset.domain()] = opset.version();
    for (const auto& node : proto.node()) check_deep(node, opsets.empty() ? of_model : opsets);
  }

 private:
  void check_deep(const onnx::NodeProto& node, const Opsets& opsets) {
    check(node, opsets);
    for (const auto& attribute : node.attribute()) {
      for (const auto& inner : attribute.g().node()) check_deep(inner, opsets);
      for (const auto& graph : attribute.graphs())
        for (const auto& inner : graph.node()) check_deep(inner, opsets);
    }
  }

  // Nodes of one kind are the same to their schema: operator, which inputs and outputs are there, names and types of attributes.
  static std::string kind_of(const Node& node) {
    std::string kind = node.domain + ':' + node.op + ':';
    for (const Value* v : node.inputs) kind += v ? 'x' : '-';
    kind += ':';
    for (const Value* v : node.outputs) kind += v ? 'x' : '-';
    for (const Attribute& attribute : node.attributes) {
      kind += ':' + attribute.name + '=' + std::to_string(attribute.value.index());
      if (const auto* opaque = std::get_if<OpaqueAttribute>(&attribute.value)) kind += opaque->proto;
    }
    return kind;
  }

  // As much of a node as its schema is asked about: the attributes' names and types, without what they hold.
  static onnx::NodeProto signature(const Node& node) {
    onnx::NodeProto proto;
    proto.set_name(node.name);
    proto.set_op_type(node.op);
    proto.set_domain(node.domain);
    for (const Value* v : node.inputs) proto.add_input(v ? v->name : "");
    for (const Value* v : node.outputs) proto.add_output(v ? v->name : "");
    for (const Attribute& attribute : node.attributes) describe(attribute, *proto.add_attribute());
    return proto;
  }

  static void describe(const Attribute& attribute, onnx::AttributeProto& proto) {
    static constexpr onnx::AttributeProto::AttributeType kTypes[] = {
        // in the order of AttributeValue
        onnx::AttributeProto::INT,     onnx::AttributeProto::FLOAT,  onnx::AttributeProto::STRING,   onnx::AttributeProto::TENSOR,
        onnx::AttributeProto::GRAPH,   onnx::AttributeProto::INTS,   onnx::AttributeProto::FLOATS,   onnx::AttributeProto::STRINGS,
        onnx::AttributeProto::TENSORS, onnx::AttributeProto::GRAPHS, onnx::AttributeProto::UNDEFINED};
    static_assert(std::size(kTypes) == std::variant_size_v<AttributeValue>);
    if (const auto* opaque = std::get_if<OpaqueAttribute>(&attribute.value)) {
      proto.ParseFromString(opaque->proto);
      return;
    }
    proto.set_name(attribute.name);
    proto.set_type(kTypes[attribute.value.index()]);
    proto.set_i(0), proto.set_f(0), proto.set_s("");  // the schema asks whether the field is there
    proto.mutable_t(), proto.mutable_g();
  }

  void check(const onnx::NodeProto& node, const Opsets& opsets) {
    const std::string domain = node.domain() == "ai.onnx" ? "" : node.domain();
    if (functions_.count({domain, node.op_type()})) return;
    const auto opset = opsets.find(domain);
    if (opset == opsets.end()) return add(node, "error", "opset-import", "its domain '" + domain + "' is not imported");
    const int version = static_cast<int>(std::min<int64_t>(opset->second, INT32_MAX));
    const onnx::OpSchema* schema = schema_of(node.op_type(), version, domain);
    if (!schema)
      return add(node, domain.empty() ? "error" : "warning", "unknown-operator",
                 fmt::format("operator '{}' of domain '{}' is not defined in version {}", node.op_type(), domain, opset->second));
    std::set<std::string> names;
    for (const auto& attribute : node.attribute())
      if (!names.insert(attribute.name()).second)
        return add(node, "error", "operator-schema", "attribute '" + attribute.name() + "' is there twice");
    if (schema->Deprecated())
      return add(node, "warning", "deprecated-operator",
                 fmt::format("operator '{}' is deprecated in version {}", node.op_type(), opset->second));
    try {
      schema->Verify(node);
    } catch (const std::exception& e) {
      add(node, "error", "operator-schema", first_line(e.what()));
    }
  }

  const onnx::OpSchema* schema_of(const std::string& op, int version, const std::string& domain) {
    auto [it, added] = schemas_.try_emplace({op, version, domain}, nullptr);
    if (added) it->second = onnx::OpSchemaRegistry::Schema(op, version, domain);
    return it->second;
  }

  void add(const onnx::NodeProto& node, const std::string& severity, const std::string& rule, const std::string& problem) {
    findings_.push_back({severity, node.name(), "", rule, fmt::format("node '{}' ({}): {}", node.name(), node.op_type(), problem)});
  }

  std::vector<Finding>& findings_;
  std::set<std::pair<std::string, std::string>> functions_;
  std::unordered_set<std::string> sound_;  // kinds of nodes that were found so
  std::map<std::tuple<std::string, int, std::string>, const onnx::OpSchema*> schemas_;
};

void check_opset(const Model& model, std::vector<Finding>& findings) {
  const auto opset = model.opsets.find("");
  if (opset == model.opsets.end() || (opset->second >= kOldestOpset && opset->second <= newest_opset())) return;
  findings.push_back({"error", "", "", "opset",
                      fmt::format("uses operator set {}; this build knows {} to {}", opset->second, kOldestOpset, newest_opset())});
}

// What a declared type says that inference contradicts; "" when nothing. `fatal`: no shape, which is but a hint.
std::string contradiction(const Type& declared, const Type& inferred, bool& fatal) {
  fatal = true;
  if (declared.kind == Type::Kind::unknown || inferred.kind == Type::Kind::unknown) return "";
  const std::string text = fmt::format("is declared {} and is {}", to_string(declared), to_string(inferred));
  if (declared.kind != inferred.kind) return text;
  if (!declared.is_tensor()) return "";
  if (declared.dtype != DType::undefined && inferred.dtype != DType::undefined && declared.dtype != inferred.dtype) return text;
  fatal = false;
  if (!declared.shape || !inferred.shape) return "";
  if (declared.shape->size() != inferred.shape->size()) return text;
  for (size_t i = 0; i < declared.shape->size(); ++i) {
    const Dim &d = (*declared.shape)[i], &f = (*inferred.shape)[i];
    if (d.known() && f.known() && d.value != f.value) return text;
  }
  return "";
}

bool has_bodies(const Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const Node* node) { return !bodies(*node).empty(); });
}

// The types that a file declares, of the results of nodes; they are put back at the end.
class DeclaredTypes {
 public:
  explicit DeclaredTypes(Graph& graph) : graph_(graph) {
    for (const Value& v : graph.all_values()) types_.push_back(v.type);
  }
  DeclaredTypes(const DeclaredTypes&) = delete;
  DeclaredTypes& operator=(const DeclaredTypes&) = delete;
  ~DeclaredTypes() {
    size_t i = 0;
    for (Value& v : graph_.all_values()) v.type = std::move(types_[i++]);
  }
  // Calls visit(value, declared type) for each value.
  template <typename Visit>
  void for_each(Visit visit) const {
    size_t i = 0;
    for (const Value& v : graph_.all_values()) visit(v, types_[i++]);
  }
  std::unordered_map<const Value*, const Type*> by_value() const {
    std::unordered_map<const Value*, const Type*> found;
    for_each([&](const Value& v, const Type& said) { found[&v] = &said; });
    return found;
  }

 private:
  Graph& graph_;
  std::vector<Type> types_;
};

// What inference knows of a type, and where it knows nothing, what the file says.
Type best_of(Type inferred, const Type& declared) {
  if (!inferred.is_tensor() || !declared.is_tensor()) return inferred.kind == Type::Kind::unknown ? declared : inferred;
  if (!inferred.shape) inferred.shape = declared.shape;
  if (!declared.shape || declared.shape->size() != inferred.shape->size()) return inferred;
  for (size_t i = 0; i < inferred.shape->size(); ++i)
    if (Dim& d = (*inferred.shape)[i]; !d.known()) d = (*declared.shape)[i];
  return inferred;
}

using Copies = std::unordered_map<const Value*, Value*>;

// While the model, or its copy, has inferred types.
std::vector<Finding> check_annotations(const Model& model, const DeclaredTypes& declared, const Copies& copies) {
  const auto said_of = declared.by_value();
  return check_annotations(model, [&](const Value& v) {
    const auto copy = copies.find(&v);
    const auto said = said_of.find(&v);  // none in a body, which only a copied model has: its types are as read
    return best_of(copy == copies.end() ? v.type : copy->second->type, said == said_of.end() ? v.type : *said->second);
  });
}

void add(std::vector<Finding> more, std::vector<Finding>& findings) {
  std::move(more.begin(), more.end(), std::back_inserter(findings));
}

// Inference starts from the inputs alone, and what the file says of other values is held against it.
void check_types(Model& model, std::vector<Finding>& findings) {
  // Inlining changes nodes, and types inside of bodies are not kept: such a model is inferred as a copy.
  Copies copies;
  std::optional<Model> copy;
  if (!model.functions.empty() || has_bodies(*model.graph)) {
    copy.emplace();
    copy->path = model.path, copy->ir_version = model.ir_version, copy->opsets = model.opsets, copy->functions = model.functions;
    copy->graph = clone(*model.graph, &copies);
    try {
      inline_functions(*copy);
    } catch (const Error& e) {
      findings.push_back({"error", e.node(), "", "functions", e.problem()});
      add(check_annotations(model), findings);
      return;
    }
  }
  const DeclaredTypes declared(*model.graph);
  std::set<std::string> told;  // a body may be walked several times
  for (Finding& f : infer_shapes(copy ? *copy : model, {.evaluate = nullptr, .keep_hints = false}).faults) {
    f.message = first_line(f.message);
    if (f.message.ends_with("have type but instead is null")) continue;  // what comes from an operator of which ONNX knows nothing
    if (told.insert(f.message).second) findings.push_back(std::move(f));
  }
  add(check_annotations(model, declared, copies), findings);
  const std::unordered_set<const Value*> outputs(model.graph->outputs.begin(), model.graph->outputs.end());
  declared.for_each([&](const Value& v, const Type& said) {
    const Node* node = v.producer;
    if (!node) return;
    const Type& inferred = copy ? copies.at(&v)->type : v.type;
    bool fatal = true;
    const std::string problem = contradiction(said, inferred, fatal);
    if (!problem.empty())
      findings.push_back({fatal && outputs.contains(&v) ? "error" : "warning", node->name, v.name, "declared-type",
                          fmt::format("node '{}' ({}): output '{}' {}", node->name, node->op, v.name, problem)});
    if (outputs.contains(&v) && said.kind == Type::Kind::unknown && inferred.kind == Type::Kind::unknown)
      findings.push_back({"warning", node->name, v.name, "unknown-type", "the type of output '" + v.name + "' is not known"});
  });
}

}  // namespace

std::vector<Finding> check_model(Model& model) {
  register_communication_schemas();
  std::vector<Finding> findings;
  check_opset(model, findings);
  NodeChecker nodes(model, findings);
  nodes.check(*model.graph, model.opsets);
  for (const Function& f : model.functions) nodes.check(f, model.opsets);
  for (const std::string& note : model.notes) findings.push_back({"warning", "", "", "reading", note});
  for (const Value* v : model.graph->initializers())
    if (v->constant->is_missing())
      findings.push_back({"warning", "", v->name, "missing-weights", fmt::format("initializer '{}': {}", v->name, v->constant->missing)});
  check_types(model, findings);
  return findings;
}

CheckedFile check_file(const std::string& path) {
  try {
    Model model = read_model(path, {.allow_missing_weights = true});
    return {check_model(model), model.notes};
  } catch (const StructureError& e) {
    const std::string at = e.op().empty() ? "" : fmt::format("node '{}' ({}): ", e.node(), e.op());
    return {{{"error", e.node(), "", "structure", at + e.problem()}}, {}};
  }
}

}  // namespace fretsaw
