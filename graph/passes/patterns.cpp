// The matcher, and the list of pattern passes.
#include "graph/passes/patterns.h"

#include <algorithm>
#include <cmath>

#include "graph/passes.h"

namespace fretsaw {

bool has_any(const Graph& graph, std::initializer_list<std::string_view> ops) {
  for (const Node* node : graph.nodes)
    for (std::string_view op : ops)
      if (node->is(op)) return true;
  return false;
}

void Matcher::run(const std::function<void(Node&)>& visit) {
  for (size_t i = graph_.nodes.size(); i-- > 0;)
    if (!gone_.count(graph_.nodes[i])) visit(*graph_.nodes[i]);
  std::erase_if(graph_.nodes, [&](const Node* node) { return gone_.count(node) > 0; });
}

Node* Match::made_by(const Value* value, std::string_view op) {
  if (!value || !value->producer || value->graph != &matcher_.graph_) return nullptr;
  Node* node = value->producer;
  if (!node->is(op) || value->output != 0 || matcher_.gone_.count(node)) return nullptr;
  if (std::find(taken_.begin(), taken_.end(), node) == taken_.end()) taken_.push_back(node);
  return node;
}

bool Match::either(const Node& node, const std::function<bool(Value*, Value*)>& test) {
  if (node.inputs.size() != 2 || !node.inputs[0] || !node.inputs[1]) return false;
  size_t before = mark();
  if (test(node.inputs[0], node.inputs[1])) return true;
  back_to(before);
  if (test(node.inputs[1], node.inputs[0])) return true;
  back_to(before);
  return false;
}

bool Match::closed() const {
  auto inside = [&](const Node* node) {
    return node == &root_ || matcher_.gone_.count(node) || std::find(taken_.begin(), taken_.end(), node) != taken_.end();
  };
  for (const Node* node : taken_)
    for (const Value* v : node->outputs) {
      if (!v || node == &root_) continue;
      if (matcher_.uses_.is_output(v) || !matcher_.uses_.all_users(v, inside)) return false;
    }
  return true;
}

Node* Match::replace(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes) {
  for (Node* node : taken_) {
    if (node == &root_) continue;
    matcher_.gone_[node] = true;
    for (Value* v : node->outputs)
      if (v) v->producer = nullptr;
  }
  for (Value* v : inputs)  // later matches see who uses these now
    if (v) matcher_.uses_.add(v, &root_);
  // The root stays in its place in the order, with its name and output.
  root_.op = op;
  root_.inputs = std::move(inputs);
  root_.attributes = std::move(attributes);
  root_.outputs.resize(1);
  return &root_;
}

bool near(double found, double number, DType type) {
  double tolerance = type == DType::float16 ? 1e-3 : type == DType::bfloat16 ? 8e-3 : 1e-6;
  return std::abs(found - number) <= tolerance * std::abs(number);
}

bool is_number(const Value* value, double number) {
  double found = 0;
  return scalar_value(value, found) && value->constant->dims.size() <= 1 && near(found, number, value->constant->dtype);
}

int64_t rank_of(const Value* value) {
  return value && value->type.is_tensor() && value->type.shape ? static_cast<int64_t>(value->type.shape->size()) : -1;
}

int64_t last_dim(const Value* value) {
  return rank_of(value) > 0 ? value->type.shape->back().value : -1;
}

bool reduces_last_axis(const Node& node) {
  const Value* axes = node.input(1);
  if (node.get_int("keepdims", 1) == 0 || !axes || !is_fixed(axes)) return false;
  auto values = int_values(*axes->constant);
  if (!values || values->size() != 1) return false;
  int64_t rank = rank_of(node.input(0));
  return (*values)[0] == -1 || (rank > 0 && (*values)[0] == rank - 1);
}

// Normalisations are found by their types and shapes: inferred when there may be one to find.
static void infer_for_patterns(Model& model) {
  bool found = false;
  for_each_graph(*model.graph, [&](Graph& g) { found |= has_any(g, {"ReduceMean"}) && has_any(g, {"Sqrt", "Pow"}); });
  if (found) infer_shapes(model);
}

std::vector<Pass> pattern_passes() {
  auto everywhere = [](void (*pass)(Graph&)) { return [pass](Model& model) { for_each_graph(*model.graph, pass); }; };
  return {
      {"infer-for-patterns", infer_for_patterns},
      {"fuse-layer-normalization", everywhere(fuse_layer_normalization)},
      {"fuse-rms-normalization", everywhere(fuse_rms_normalization)},
      {"fuse-gelu", everywhere(fuse_gelu)},
      {"fuse-swish", everywhere(fuse_swish)},
      {"fold-batch-norm", everywhere(fold_batch_norm)},
      {"remove-dead-nodes", [](Model& model) { remove_dead_nodes(*model.graph); }},
  };
}

}  // namespace fretsaw
