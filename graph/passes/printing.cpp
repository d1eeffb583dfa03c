// Graphs as text for people: one line a node, bodies indented under their node.
#include <sstream>

#include "graph/passes.h"

namespace fretsaw {
namespace {

std::string name_of(const Value* value) {
  return value ? "%" + value->name : "_";
}

std::string typed_name(const Value* value) {
  if (!value) return "_";
  return value->type.kind == Type::Kind::unknown ? name_of(value) : name_of(value) + ": " + to_string(value->type);
}

template <typename T, typename F>
std::string join(const std::vector<T>& items, const F& text) {
  std::string s;
  for (const T& item : items) s += (s.empty() ? "" : ", ") + text(item);
  return s;
}

std::string text_of(float v) {
  std::ostringstream s;
  s << v;
  return s.str();
}

std::string text_of(const TensorPtr& t) {
  return t ? std::string(fretsaw::name_of(t->dtype)) + to_string(t->dims) : "null";
}

std::string text_of(const AttributeValue& value) {
  struct Visitor {
    std::string operator()(int64_t v) const { return std::to_string(v); }
    std::string operator()(float v) const { return text_of(v); }
    std::string operator()(const std::string& v) const { return "\"" + v + "\""; }
    std::string operator()(const TensorPtr& v) const { return text_of(v); }
    std::string operator()(const GraphPtr& v) const { return "graph " + v->name; }
    std::string operator()(const std::vector<int64_t>& v) const {
      return "[" + join(v, [](int64_t x) { return std::to_string(x); }) + "]";
    }
    std::string operator()(const std::vector<float>& v) const {
      return "[" + join(v, [](float x) { return text_of(x); }) + "]";
    }
    std::string operator()(const std::vector<std::string>& v) const {
      return "[" + join(v, [](const std::string& x) { return "\"" + x + "\""; }) + "]";
    }
    std::string operator()(const std::vector<TensorPtr>& v) const {
      return "[" + join(v, [](const TensorPtr& x) { return text_of(x); }) + "]";
    }
    std::string operator()(const std::vector<GraphPtr>& v) const { return std::to_string(v.size()) + " graphs"; }
    std::string operator()(const OpaqueAttribute&) const { return "..."; }
  };
  return std::visit(Visitor{}, value);
}

void print(const Graph& graph, const std::string& indent, std::string& out) {
  out += indent + "graph " + graph.name + "(" + join(graph.inputs, [](const Value* v) { return typed_name(v); }) + ") -> (" +
         join(graph.outputs, [](const Value* v) { return typed_name(v); }) + ")\n";
  for (const Node* node : graph.nodes) {
    out += indent + "  " + join(node->outputs, [](const Value* v) { return typed_name(v); }) + " = " +
           (node->domain.empty() ? "" : node->domain + ".") + node->op + "(" +
           join(node->inputs, [](const Value* v) { return name_of(v); }) + ")";
    if (!node->attributes.empty())
      out += " {" +
             join(node->attributes,
                  [](const Attribute& a) { return a.name + "=" + (a.refers_to.empty() ? text_of(a.value) : "@" + a.refers_to); }) +
             "}";
    if (node->group >= 0) out += " group " + std::to_string(node->group);
    out += "\n";
    for (const GraphPtr& body : bodies(*node)) print(*body, indent + "    ", out);
  }
}

}  // namespace

std::string print_graph(const Graph& graph) {
  std::string out;
  print(graph, "", out);
  return out;
}

}  // namespace fretsaw
