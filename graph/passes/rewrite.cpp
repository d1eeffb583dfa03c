// Editing node lists, counting uses, reading small constants.
#include "graph/passes/rewrite.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "graph/communication_schemas.h"

namespace fretsaw {

void Rewriter::walk(const std::function<bool(Node&)>& visit) {
  kept_.clear();
  kept_.reserve(graph_.nodes.size());
  std::vector<Node*> nodes = graph_.nodes;
  for (Node* node : nodes) {
    current_ = node;
    if (visit(*node)) {
      kept_.push_back(node);
    } else {
      for (Value* v : node->outputs)
        if (v && v->producer == node) v->producer = nullptr;
    }
    kept_.insert(kept_.end(), after_.begin(), after_.end());
    after_.clear();
  }
  current_ = nullptr;
  graph_.nodes = std::move(kept_);
}

Node* Rewriter::add_making(const std::string& op, std::vector<Value*> inputs, std::vector<Value*> outputs,
                           std::vector<Attribute> attributes, bool after) {
  Node* node = graph_.add_node_object();
  node->op = op;
  node->inputs = std::move(inputs);
  node->attributes = std::move(attributes);
  node->outputs.resize(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) set_output(*node, i, outputs[i]);
  node->name = graph_.fresh_name((current_ && !current_->name.empty() ? current_->name + "_" : "") + op);
  (after ? after_ : kept_).push_back(node);
  return node;
}

Value* Rewriter::add(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes, const std::string& name) {
  std::string wish = name;
  if (wish.empty()) {
    Value* first = current_ ? current_->out(0) : nullptr;
    wish = (first ? first->name + "_" : "") + op;
  }
  Value* value = graph_.add_value(graph_.fresh_name(wish));
  add_making(op, std::move(inputs), {value}, std::move(attributes));
  return value;
}

Value* Rewriter::detach(Node& node, size_t output) {
  Value* old = node.outputs[output];
  Value* fresh = graph_.add_value(graph_.fresh_name(old->name + "_" + node.op));
  set_output(node, output, fresh);
  old->producer = nullptr;
  return old;
}

Value* Rewriter::constant(TensorPtr tensor, const std::string& name) {
  return graph_.add_constant(graph_.fresh_name(name), std::move(tensor));
}

void for_each_graph(Graph& graph, const std::function<void(Graph&)>& visit) {
  visit(graph);
  for (size_t i = 0; i < graph.nodes.size(); ++i)
    for (const GraphPtr& body : bodies(*graph.nodes[i])) for_each_graph(*body, visit);
}

void remove_unused_nodes(Graph& graph) {
  const size_t count = graph.outputs.size();
  for (const Node* node : graph.nodes)
    if (communicates(*node))
      for (Value* v : node->outputs)
        if (v) graph.outputs.push_back(v);
  remove_dead_nodes(graph);
  graph.outputs.resize(count);
}

void set_output(Node& node, size_t index, Value* value) {
  node.outputs[index] = value;
  if (!value) return;
  value->producer = &node;
  value->output = static_cast<int>(index);
}

void replace_uses(Graph& graph, const ValueMap& replacements) {
  if (replacements.empty()) return;
  auto replace = [&](Value*& v) {
    for (auto it = replacements.find(v); it != replacements.end(); it = replacements.find(v)) v = it->second;
  };
  for_each_graph(graph, [&](Graph& g) {
    for (Node* node : g.nodes)
      for (Value*& v : node->inputs)
        if (v) replace(v);
    for (Value*& v : g.outputs) replace(v);
  });
}

std::vector<Node*> copy_nodes(const Graph& body, Graph& target, ValueMap& mapping, const std::string& prefix) {
  auto named = [&](const std::string& name) { return target.fresh_name(prefix.empty() ? name : prefix + "/" + name); };
  for (const Value& v : body.all_values())
    if (v.constant && !mapping.count(&v)) {
      Value* copy = target.add_constant(named(v.name), v.constant);
      copy->source = v.source;
      mapping[&v] = copy;
    }
  std::vector<Node*> copies;
  copies.reserve(body.nodes.size());
  for (const Node* node : body.nodes) {
    Node* n = target.add_node_object();
    n->op = node->op;
    n->domain = node->domain;
    n->overload = node->overload;
    n->metadata = node->metadata;
    n->extra = node->extra;
    for (const Value* v : node->inputs) {
      auto it = mapping.find(v);
      n->inputs.push_back(it != mapping.end() ? it->second : const_cast<Value*>(v));
    }
    n->outputs.resize(node->outputs.size());
    for (size_t i = 0; i < node->outputs.size(); ++i) {
      const Value* v = node->outputs[i];
      if (!v) continue;
      Value*& copy = mapping[v];
      if (!copy) copy = target.add_value(named(v->name), v->type);
      if (copy->type.kind == Type::Kind::unknown) copy->type = v->type;
      set_output(*n, i, copy);
    }
    n->name = named(node->name);  // after the outputs: of a node and a value with one name, the value keeps it
    auto copied = [&](const GraphPtr& g) {
      GraphPtr c = clone(*g, &mapping);
      c->parent = &target;
      return c;
    };
    for (const Attribute& a : node->attributes) {
      Attribute& b = n->attributes.emplace_back(a);
      if (auto* g = std::get_if<GraphPtr>(&b.value)) *g = copied(*g);
      if (auto* gs = std::get_if<std::vector<GraphPtr>>(&b.value))
        for (GraphPtr& g : *gs) g = copied(g);
    }
    copies.push_back(n);
  }
  return copies;
}

Uses::Uses(const Graph& graph) {
  users_.reserve(graph.nodes.size() * 2);
  for (Node* node : graph.nodes) {
    for (const Value* v : node->inputs)
      if (v) add(v, node);
    for (const Attribute& a : node->attributes)
      if (std::holds_alternative<GraphPtr>(a.value) || std::holds_alternative<std::vector<GraphPtr>>(a.value)) {
        for (const Value* v : captures(*node)) add(v, node);
        break;
      }
  }
  for (const Value* v : graph.outputs) users_[v].output = true;
}

void Uses::add(const Value* value, Node* user) {
  Users& users = users_[value];
  if (!users.first)
    users.first = user;
  else
    users.more.push_back(user);
}

bool Uses::is_output(const Value* value) const {
  auto it = users_.find(value);
  return it != users_.end() && it->second.output;
}

Node* Uses::only_user(const Value* value) const {
  auto it = users_.find(value);
  return it != users_.end() && it->second.more.empty() && !it->second.output ? it->second.first : nullptr;
}

bool Uses::unused(const Value* value) const {
  return users_.find(value) == users_.end();
}

namespace {

double half_to_double(uint16_t h) {
  int exponent = (h >> 10) & 31;
  double fraction = h & 1023;
  double magnitude = exponent == 0    ? std::ldexp(fraction, -24)
                     : exponent == 31 ? (fraction == 0 ? HUGE_VAL : std::nan(""))
                                      : std::ldexp(1024 + fraction, exponent - 25);
  return h & 0x8000 ? -magnitude : magnitude;
}

template <typename T>
T element(const Tensor& tensor, int64_t i) {
  T v;  // raw bytes in a file need not be aligned
  std::memcpy(&v, tensor.data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return v;
}

}  // namespace

bool is_fixed(const Value* value) {
  if (!value || !value->constant) return false;
  const auto& inputs = value->graph->inputs;
  return std::find(inputs.begin(), inputs.end(), value) == inputs.end();
}

bool float_values(const Value* value, std::vector<double>& numbers) {
  if (!is_fixed(value)) return false;
  const Tensor& t = *value->constant;
  if (t.is_missing() || (!t.data && t.count() > 0)) return false;
  if (t.dtype != DType::float32 && t.dtype != DType::float64 && t.dtype != DType::float16 && t.dtype != DType::bfloat16) return false;
  numbers.resize(static_cast<size_t>(t.count()));
  for (int64_t i = 0; i < t.count(); ++i) {
    double& x = numbers[static_cast<size_t>(i)];
    if (t.dtype == DType::float32) x = element<float>(t, i);
    if (t.dtype == DType::float64) x = element<double>(t, i);
    if (t.dtype == DType::float16) x = half_to_double(element<uint16_t>(t, i));
    if (t.dtype == DType::bfloat16) x = std::bit_cast<float>(static_cast<uint32_t>(element<uint16_t>(t, i)) << 16);
  }
  return true;
}

bool scalar_value(const Value* value, double& number) {
  if (!value || !value->constant || value->constant->count() != 1 || !is_fixed(value)) return false;
  std::vector<double> numbers;
  if (float_values(value, numbers)) {
    number = numbers[0];
    return true;
  }
  auto ints = int_values(*value->constant);
  if (!ints) return false;
  number = static_cast<double>((*ints)[0]);
  return true;
}

}  // namespace fretsaw
