// Questions about whole graphs, and the few rewrites every pass is made of.
#include <algorithm>
#include <bit>
#include <queue>
#include <unordered_set>

#include "graph/errors.h"
#include "graph/ir.h"

namespace fretsaw {
namespace {

bool inside(const Graph* graph, const Graph* outer) {
  for (; graph; graph = graph->parent)
    if (graph == outer) return true;
  return false;
}

// Calls f(value) for each use in the node's bodies, at any depth, of a value.
template <typename F>
void for_uses_in_bodies(const Node& node, const F& f) {
  for (const GraphPtr& body : bodies(node)) {
    for (const Node* inner : body->nodes) {
      for (Value* v : inner->inputs)
        if (v) f(v);
      for_uses_in_bodies(*inner, f);
    }
    for (Value* v : body->outputs) f(v);
  }
}

}  // namespace

std::vector<Value*> captures(const Node& node) {
  std::vector<Value*> found;
  std::vector<GraphPtr> own = bodies(node);
  if (own.empty()) return found;
  std::unordered_set<const Value*> seen;
  for_uses_in_bodies(node, [&](Value* v) {
    bool outer = std::none_of(own.begin(), own.end(), [&](const GraphPtr& g) { return inside(v->graph, g.get()); });
    if (outer && seen.insert(v).second) found.push_back(v);
  });
  return found;
}

Consumers consumers_of(const Graph& graph) {
  Consumers users;
  users.reserve(graph.all_values().size());
  for (Node* node : graph.nodes) {
    auto add = [&](const Value* v) {
      auto& list = users[v];
      if (list.empty() || list.back() != node) list.push_back(node);
    };
    for (const Value* v : node->inputs)
      if (v) add(v);
    for (const Value* v : captures(*node)) add(v);
  }
  return users;
}

std::vector<Value*> operands(const Node& node) {
  std::vector<Value*> found = captures(node);
  found.insert(found.begin(), node.inputs.begin(), node.inputs.end());
  std::erase(found, nullptr);
  return found;
}

void replace_operand(Node& node, Value* from, Value* to) {
  std::replace(node.inputs.begin(), node.inputs.end(), from, to);
  for (const GraphPtr& body : bodies(node)) replace_uses(*body, from, to);
}

void replace_uses(Graph& graph, Value* from, Value* to) {
  for (Node* node : graph.nodes) {
    std::replace(node->inputs.begin(), node->inputs.end(), from, to);
    for (const GraphPtr& body : bodies(*node)) replace_uses(*body, from, to);
  }
  std::replace(graph.outputs.begin(), graph.outputs.end(), from, to);
}

namespace {

// The nodes on one cycle among `left`, as "a -> b -> a".
std::string describe_cycle(const std::vector<Node*>& left, const std::unordered_map<const Node*, std::vector<Node*>>& producers) {
  std::unordered_set<const Node*> open(left.begin(), left.end()), seen;
  const Node* at = left.front();
  std::vector<const Node*> path;
  while (seen.insert(at).second) {  // every node left waits for another one that is left
    path.push_back(at);
    auto it = producers.find(at);
    if (it == producers.end()) break;
    for (const Node* p : it->second)
      if (open.count(p)) {
        at = p;
        break;
      }
  }
  auto start = std::find(path.begin(), path.end(), at);
  std::string text;
  for (auto it = path.end(); it != start;) text += "'" + (*--it)->name + "' -> ";
  return text + "'" + path.back()->name + "'";
}

}  // namespace

bool sort_nodes(Graph& graph) {
  std::unordered_map<const Node*, size_t> position;
  position.reserve(graph.nodes.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) position[graph.nodes[i]] = i;
  bool ordered = true;
  std::unordered_map<const Node*, std::vector<Node*>> producers;
  std::vector<std::vector<size_t>> users(graph.nodes.size());
  std::vector<int> waits(graph.nodes.size(), 0);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    Node* node = graph.nodes[i];
    auto depend = [&](const Value* v) {
      if (!v || !v->producer) return;
      auto it = position.find(v->producer);
      if (it == position.end()) return;  // a value of an outer graph
      if (it->second >= i) ordered = false;
      users[it->second].push_back(i);
      ++waits[i];
    };
    for (const Value* v : node->inputs) depend(v);
    for (const Value* v : captures(*node)) depend(v);
  }
  if (ordered) return false;
  std::priority_queue<size_t, std::vector<size_t>, std::greater<>> ready;
  for (size_t i = 0; i < waits.size(); ++i)
    if (waits[i] == 0) ready.push(i);
  std::vector<Node*> sorted;
  sorted.reserve(graph.nodes.size());
  while (!ready.empty()) {
    size_t i = ready.top();
    ready.pop();
    sorted.push_back(graph.nodes[i]);
    for (size_t u : users[i])
      if (--waits[u] == 0) ready.push(u);
  }
  if (sorted.size() != graph.nodes.size()) {
    std::vector<Node*> left;
    for (size_t i = 0; i < waits.size(); ++i)
      if (waits[i] > 0) left.push_back(graph.nodes[i]);
    for (Node* node : left) {
      auto add = [&](const Value* v) {
        if (v && v->producer && position.count(v->producer)) producers[node].push_back(v->producer);
      };
      for (const Value* v : node->inputs) add(v);
      for (const Value* v : captures(*node)) add(v);
    }
    throw Error("the graph has a cycle: " + describe_cycle(left, producers),
                "a model must not use a value before it is computed; export it again")
        .at_node(left.front()->name, left.front()->op);
  }
  graph.nodes = std::move(sorted);
  return true;
}

int remove_dead_nodes(Graph& graph) {
  std::unordered_set<const Value*> used(graph.outputs.begin(), graph.outputs.end());
  std::vector<Node*> kept;
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    Node* node = graph.nodes[i];
    bool live = std::any_of(node->outputs.begin(), node->outputs.end(), [&](const Value* v) { return v && used.count(v); });
    if (!live) continue;
    for (const Value* v : node->inputs)
      if (v) used.insert(v);
    for (const GraphPtr& body : bodies(*node)) remove_dead_nodes(*body);
    for (const Value* v : captures(*node)) used.insert(v);
    kept.push_back(node);
  }
  int removed = static_cast<int>(graph.nodes.size() - kept.size());
  std::reverse(kept.begin(), kept.end());
  graph.nodes = std::move(kept);
  std::unordered_set<const Value*> inputs(graph.inputs.begin(), graph.inputs.end());
  for (Value& v : graph.all_values())
    if (v.constant && !used.count(&v) && !inputs.count(&v)) v.constant = nullptr;
  return removed;
}

namespace {

// A set of pointers in one flat table: verifying runs after every pass, on graphs of any size.
class PointerSet {
 public:
  explicit PointerSet(size_t expected) : table_(std::bit_ceil(2 * expected + 16)) {}
  bool insert(const void* p) {
    if (2 * (count_ + 1) > table_.size()) grow();
    const void*& slot = find(p);
    if (slot == p) return false;
    slot = p;
    ++count_;
    return true;
  }
  bool contains(const void* p) const { return const_cast<PointerSet*>(this)->find(p) == p; }

 private:
  const void*& find(const void* p) {
    size_t at = (reinterpret_cast<uintptr_t>(p) * 0x9e3779b97f4a7c15ull) >> 20 & (table_.size() - 1);
    while (table_[at] && table_[at] != p) at = (at + 1) & (table_.size() - 1);
    return table_[at];
  }
  void grow() {
    PointerSet larger(table_.size());
    for (const void* p : table_)
      if (p) larger.insert(p);
    *this = std::move(larger);
  }

  std::vector<const void*> table_;
  size_t count_ = 0;
};

void verify_values(const Graph& graph, PointerSet& known) {
  auto fault = [](const Node& node, const std::string& what) {
    throw Error(what, "this is a fault in fretsaw or in the model").at_node(node.name, node.op);
  };
  for (const Value* v : graph.inputs) known.insert(v);
  for (const Value& v : graph.all_values())
    if (v.constant && !v.producer) known.insert(&v);
  for (const Node* node : graph.nodes) {
    if (node->graph != &graph) fault(*node, "the node is in another graph than it says");
    for (const Value* v : node->inputs)
      if (v && !known.contains(v)) fault(*node, "input '" + v->name + "' is used before it is made");
    for (const GraphPtr& body : bodies(*node)) {
      if (body->parent != &graph) fault(*node, "a body of the node does not name its parent graph");
      PointerSet inner = known;
      verify_values(*body, inner);
    }
    for (size_t i = 0; i < node->outputs.size(); ++i) {
      const Value* v = node->outputs[i];
      if (!v) continue;
      if (v->producer != node || v->output != static_cast<int>(i)) fault(*node, "output '" + v->name + "' does not name its producer");
      if (v->constant) fault(*node, "output '" + v->name + "' is a constant too");
      if (!known.insert(v)) fault(*node, "output '" + v->name + "' is made twice");
    }
  }
  for (const Value* v : graph.outputs)
    if (!known.contains(v))
      throw Error("graph output '" + v->name + "' is never made", "every output must come from a node, an input or an initializer");
}

}  // namespace

void verify(const Graph& graph) {
  PointerSet known(graph.all_values().size());
  verify_values(graph, known);
}

namespace {

using ValueMap = std::unordered_map<const Value*, Value*>;

GraphPtr clone_into(const Graph& graph, Graph* parent, ValueMap& values);

AttributeValue clone_attribute(const AttributeValue& value, Graph* parent, ValueMap& values) {
  if (const auto* g = std::get_if<GraphPtr>(&value)) return clone_into(**g, parent, values);
  if (const auto* gs = std::get_if<std::vector<GraphPtr>>(&value)) {
    std::vector<GraphPtr> copies;
    for (const GraphPtr& g : *gs) copies.push_back(clone_into(*g, parent, values));
    return copies;
  }
  return value;
}

GraphPtr clone_into(const Graph& graph, Graph* parent, ValueMap& values) {
  auto copy = std::make_shared<Graph>();
  copy->name = graph.name;
  copy->extra = graph.extra;
  copy->parent = parent;
  for (const Value& v : graph.all_values()) {
    Value* w = copy->add_value(v.name, v.type);
    w->output = v.output;
    w->constant = v.constant;
    w->source = v.source;
    w->part = v.part;
    w->extra = v.extra;
    values[&v] = w;
  }
  auto mapped = [&](Value* v) -> Value* {
    if (!v) return nullptr;
    auto it = values.find(v);
    return it == values.end() ? v : it->second;  // a value of a graph outside the copy stays
  };
  for (const Node* node : graph.nodes) {
    Node* n = copy->add_node_object();
    n->name = node->name;
    n->op = node->op;
    n->domain = node->domain;
    n->metadata = node->metadata;
    n->overload = node->overload;
    n->extra = node->extra;
    n->group = node->group;
    for (Value* v : node->inputs) n->inputs.push_back(mapped(v));
    for (Value* v : node->outputs) {
      n->outputs.push_back(mapped(v));
      if (v) n->outputs.back()->producer = n;
    }
    for (const Attribute& a : node->attributes)
      n->attributes.push_back({a.name, clone_attribute(a.value, copy.get(), values), a.refers_to, a.doc});
    copy->nodes.push_back(n);
  }
  for (Value* v : graph.inputs) copy->inputs.push_back(mapped(v));
  for (Value* v : graph.outputs) copy->outputs.push_back(mapped(v));
  return copy;
}

}  // namespace

GraphPtr clone(const Graph& graph, std::unordered_map<const Value*, Value*>* mapping) {
  ValueMap own;
  return clone_into(graph, graph.parent, mapping ? *mapping : own);
}

Model clone(const Model& model) {
  Model copy = model;
  copy.graph = clone(*model.graph);
  return copy;
}

}  // namespace fretsaw
