// Graph, node and attribute accessors.
#include "graph/ir.h"

#include <algorithm>

#include "graph/errors.h"

namespace fretsaw {

const Attribute* Node::attribute(std::string_view wanted) const {
  for (const Attribute& a : attributes)
    if (a.name == wanted) return &a;
  return nullptr;
}

namespace {

template <typename T>
const T* typed(const Node& node, std::string_view name, const char* kind) {
  const Attribute* a = node.attribute(name);
  if (!a) return nullptr;
  if (const T* v = std::get_if<T>(&a->value)) return v;
  throw Error("attribute '" + std::string(name) + "' is not " + kind, "export the model again, or check the file")
      .at_node(node.name, node.op);
}

}  // namespace

int64_t Node::get_int(std::string_view n, int64_t absent) const {
  const auto* v = typed<int64_t>(*this, n, "an integer");
  return v ? *v : absent;
}

float Node::get_float(std::string_view n, float absent) const {
  const auto* v = typed<float>(*this, n, "a float");
  return v ? *v : absent;
}

std::string Node::get_string(std::string_view n, std::string_view absent) const {
  const auto* v = typed<std::string>(*this, n, "a string");
  return v ? *v : std::string(absent);
}

std::vector<int64_t> Node::get_ints(std::string_view n, std::vector<int64_t> absent) const {
  const auto* v = typed<std::vector<int64_t>>(*this, n, "a list of integers");
  return v ? *v : std::move(absent);
}

std::vector<float> Node::get_floats(std::string_view n, std::vector<float> absent) const {
  const auto* v = typed<std::vector<float>>(*this, n, "a list of floats");
  return v ? *v : std::move(absent);
}

std::vector<std::string> Node::get_strings(std::string_view n) const {
  const auto* v = typed<std::vector<std::string>>(*this, n, "a list of strings");
  return v ? *v : std::vector<std::string>{};
}

TensorPtr Node::get_tensor(std::string_view n) const {
  const auto* v = typed<TensorPtr>(*this, n, "a tensor");
  return v ? *v : nullptr;
}

GraphPtr Node::get_graph(std::string_view n) const {
  const auto* v = typed<GraphPtr>(*this, n, "a graph");
  return v ? *v : nullptr;
}

void Node::set(std::string_view n, AttributeValue value) {
  for (Attribute& a : attributes)
    if (a.name == n) {
      a.value = std::move(value);
      return;
    }
  attributes.push_back({std::string(n), std::move(value), "", ""});
}

void Node::remove(std::string_view n) {
  std::erase_if(attributes, [&](const Attribute& a) { return a.name == n; });
}

Value* Graph::add_value(std::string n, Type type) {
  Value& v = values_.emplace_back();
  v.name = std::move(n);
  v.type = std::move(type);
  v.graph = this;
  used_names_.try_emplace(v.name, 0);
  return &v;
}

Value* Graph::add_constant(std::string n, TensorPtr tensor) {
  Value* v = add_value(std::move(n), Type::tensor(tensor->dtype, shape_of(tensor->dims)));
  v->constant = std::move(tensor);
  return v;
}

Node* Graph::add_node_object() {
  Node& node = nodes_.emplace_back();
  node.graph = this;
  return &node;
}

Node* Graph::add_node(std::string op, std::vector<Value*> ins, std::vector<std::string> output_names, std::vector<Attribute> attributes,
                      std::string domain) {
  Node* node = add_node_object();
  node->op = std::move(op);
  node->domain = std::move(domain);
  node->inputs = std::move(ins);
  node->attributes = std::move(attributes);
  for (size_t i = 0; i < output_names.size(); ++i) {
    if (output_names[i].empty()) {
      node->outputs.push_back(nullptr);
      continue;
    }
    Value* v = add_value(std::move(output_names[i]));
    v->producer = node;
    v->output = static_cast<int>(i);
    node->outputs.push_back(v);
  }
  std::string base = node->op;
  for (Value* v : node->outputs)
    if (v) {
      base = v->name;
      break;
    }
  node->name = base;
  nodes.push_back(node);
  return node;
}

std::string Graph::fresh_name(const std::string& wanted) {
  auto taken = [&](const std::string& n) {
    for (Graph* g = this; g; g = g->parent)
      if (g->used_names_.count(n)) return true;
    return false;
  };
  std::string candidate = wanted.empty() ? "value" : wanted;
  if (taken(candidate)) {
    int& next = used_names_[candidate];  // counts on where the last search for this name ended
    std::string base = candidate;
    do candidate = base + "_" + std::to_string(++next);
    while (taken(candidate));
  }
  for (Graph* g = this; g; g = g->parent) g->used_names_.try_emplace(candidate, 0);
  return candidate;
}

std::vector<Value*> Graph::initializers() const {
  std::vector<Value*> found;
  for (const Value& v : values_)
    if (v.constant && !v.producer) found.push_back(const_cast<Value*>(&v));
  return found;
}

std::vector<GraphPtr> bodies(const Node& node) {
  std::vector<GraphPtr> found;
  for (const Attribute& a : node.attributes) {
    if (const auto* g = std::get_if<GraphPtr>(&a.value)) found.push_back(*g);
    if (const auto* gs = std::get_if<std::vector<GraphPtr>>(&a.value)) found.insert(found.end(), gs->begin(), gs->end());
  }
  return found;
}

}  // namespace fretsaw
