// fuse_attention wants sizes and constants, of which a graph that is to be trained has fewer than a specialised one: for the pass a
// symbolic batch is a number that is no other size, and what only depends on constants is computed.
#include "graph/training/attention.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "graph/errors.h"
#include "graph/passes/rewrite.h"
#include "graph/sizes.h"

namespace fretsaw {
namespace {

// A prime that no other size is a multiple of.
constexpr int64_t kBatch = 100003;

int count_attention(const Graph& graph) {
  return static_cast<int>(std::count_if(graph.nodes.begin(), graph.nodes.end(), [](const Node* node) { return node->is("Attention"); }));
}

// Replaces what is known by constants.
void fold_constants(Model& model, const TrainedAttentionOptions& options) {
  InferOptions infer;
  infer.evaluate = [&](const Node& node, const std::vector<TensorPtr>& inputs, std::vector<TensorPtr>& outputs) {
    const bool learns = std::any_of(node.inputs.begin(), node.inputs.end(), [&](const Value* v) { return options.learned.contains(v); });
    return !learns && options.evaluate(node, inputs, outputs);
  };
  Graph& graph = *model.graph;
  const ShapeFacts facts = infer_shapes(model, infer);
  ValueMap constants;
  for (const Node* node : graph.nodes) {
    for (const Value* v : node->outputs) {
      const auto known = v ? facts.known.find(v) : facts.known.end();
      if (known == facts.known.end() || std::find(graph.outputs.begin(), graph.outputs.end(), v) != graph.outputs.end()) continue;
      Value* constant = graph.add_constant(graph.fresh_name(v->name + "_known"), known->second);
      constant->type = Type::tensor(known->second->dtype, shape_of(known->second->dims));
      constants[v] = constant;
    }
  }
  replace_uses(graph, constants);
  remove_unused_nodes(graph);
}

// The symbol of the batch: the first dimension of the inputs. "": there is none, or there are several.
std::string batch_symbol(const Graph& graph) {
  std::string found;
  for (const Value* v : graph.inputs) {
    if (v->is_constant() || !v->type.is_tensor() || !v->type.shape || v->type.shape->empty()) continue;
    const std::string& symbol = v->type.shape->front().symbol;
    if (symbol.empty()) continue;
    if (!found.empty() && symbol != found) return "";
    found = symbol;
  }
  return found;
}

// Whether the only name in a dimension's expression ("12*batch") is this symbol.
bool is_of(const std::string& expression, const std::string& symbol) {
  bool found = false;
  for (size_t i = 0; i < expression.size();) {
    const size_t begin = i = std::min(expression.find_first_not_of(" +-*()0123456789", i), expression.size());
    i = std::min(expression.find_first_of(" +-*()", begin), expression.size());
    if (begin == i) break;
    if (expression.compare(begin, i - begin, symbol) != 0) return false;
    found = true;
  }
  return found;
}

// A number in place of the batch, until the scope ends: types get their symbols again, and the constants made meanwhile say the
// dimension as Reshape does.
class NumberedBatch {
 public:
  NumberedBatch(Graph& graph, std::string symbol) : graph_(graph), symbol_(std::move(symbol)) {
    const DimSizes sizes = {{symbol_, kBatch}};
    for (Value& v : graph_.all_values()) {
      before_.emplace(&v, v.type);
      if (!v.type.is_tensor() || !v.type.shape) continue;
      for (Dim& d : *v.type.shape)
        if (!d.known() && is_of(d.symbol, symbol_)) d = Dim(size_of(d, sizes));
    }
  }
  void restore() {
    for (Node* node : graph_.nodes)
      if (node->is("Reshape")) open_dims(*node);
    for (Value& v : graph_.all_values()) {
      const auto it = before_.find(&v);
      if (it != before_.end()) {
        v.type = it->second;
      } else if (v.type.is_tensor() && v.type.shape) {
        for (Dim& d : *v.type.shape)
          if (d.value > 0 && d.value % kBatch == 0) d = d.value == kBatch ? Dim(symbol_) : Dim();
      }
    }
  }

 private:
  // 0 takes a dimension over from the input, -1 is what is left.
  void open_dims(Node& reshape) {
    Value* shape = reshape.input(1);
    const Value* x = reshape.input(0);
    if (!shape || !shape->constant || before_.contains(shape) || !x->type.shape) return;
    std::vector<int64_t> dims = *int_values(*shape->constant);
    bool changed = false, rest = false;
    for (size_t i = 0; i < dims.size(); ++i) {
      if (dims[i] <= 0 || dims[i] % kBatch != 0) continue;
      const bool same = i < x->type.shape->size() && (*x->type.shape)[i].value == dims[i];
      if (!same && rest)
        throw Error("two dimensions of '" + reshape.name + "' depend on the batch", "report this as a fault, with the model");
      rest = rest || !same;
      dims[i] = same ? 0 : -1;
      changed = true;
    }
    if (!changed) return;
    reshape.inputs[1] = graph_.add_constant(graph_.fresh_name(shape->name), make_int64s(dims));
  }

  Graph& graph_;
  std::string symbol_;
  std::map<const Value*, Type> before_;
};

// Initializers that learn have no numbers to read, until the scope ends.
class HiddenNumbers {
 public:
  HiddenNumbers(Graph& graph, const std::unordered_set<const Value*>& learned) : graph_(graph) {
    for (Value& v : graph_.all_values())
      if (learned.contains(&v)) hidden_[&v] = std::exchange(v.constant, nullptr);
  }
  ~HiddenNumbers() {
    for (Value& v : graph_.all_values())
      if (const auto it = hidden_.find(&v); it != hidden_.end()) v.constant = it->second;
  }
  HiddenNumbers(const HiddenNumbers&) = delete;
  HiddenNumbers& operator=(const HiddenNumbers&) = delete;

 private:
  Graph& graph_;
  std::map<const Value*, TensorPtr> hidden_;
};

}  // namespace

int fuse_trained_attention(Model& model, const TrainedAttentionOptions& options) {
  Graph& graph = *model.graph;
  if (std::none_of(graph.nodes.begin(), graph.nodes.end(), [](const Node* node) { return node->is("Softmax"); })) return 0;
  if (options.evaluate) fold_constants(model, options);
  const int before = count_attention(graph);
  {
    const HiddenNumbers hidden(graph, options.learned);
    const std::string symbol = batch_symbol(graph);
    if (symbol.empty()) {
      fuse_attention(model);
    } else {
      NumberedBatch batch(graph, symbol);
      infer_shapes(model);  // with the number, arithmetic tells sizes that it does not with a symbol
      fuse_attention(model, kBatch);
      batch.restore();
    }
  }
  const int made = count_attention(graph) - before;
  for (Node* node : graph.nodes)
    if (node->name.empty()) node->name = graph.fresh_name(node->op);
  infer_shapes(model);
  return made;
}

}  // namespace fretsaw
