// What a model holds and costs: the counts behind `inspect MODEL`.
#include "tools/model_summary.h"

#include <algorithm>
#include <limits>
#include <set>
#include <unordered_set>

#include "graph/catalogue.h"
#include "graph/passes.h"
#include "graph/sizes.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

int64_t saturating_add(int64_t a, int64_t b) {
  return a > kMost - b ? kMost : a + b;
}

// Initializers of a graph and of the bodies in it, each tensor once.
void count_parameters(const Graph& graph, ModelSummary& summary, std::unordered_set<const Tensor*>& seen) {
  for (const Value& value : graph.all_values()) {
    if (!value.is_constant() || !seen.insert(value.constant.get()).second) continue;
    summary.parameters = saturating_add(summary.parameters, count_of(value.constant->dims));
    summary.parameter_bytes = saturating_add(summary.parameter_bytes, saturating_bytes(value.constant->dtype, value.constant->dims));
  }
  for (const Node* node : graph.nodes)
    for (const GraphPtr& body : bodies(*node)) count_parameters(*body, summary, seen);
}

// Walks the nodes in order, with the values between them alive from the node that makes them to the last one that takes them.
void count_activations(const Graph& graph, ModelSummary& summary) {
  std::unordered_map<const Value*, size_t> last_use;
  for (const auto& [value, users] : consumers_of(graph)) {
    if (value->producer && !value->producer->is("Constant") && value->graph == &graph && !users.empty()) last_use[value] = 0;
  }
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const Value* value : graph.nodes[i]->inputs)
      if (const auto found = last_use.find(value); found != last_use.end()) found->second = i;
    for (const Value* value : captures(*graph.nodes[i]))
      if (const auto found = last_use.find(value); found != last_use.end()) found->second = i;
  }
  std::vector<std::vector<const Value*>> ends(graph.nodes.size());
  for (const auto& [value, node] : last_use) ends[node].push_back(value);
  int64_t alive = 0;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const Value* value : graph.nodes[i]->outputs) {
      if (!value || !last_use.contains(value)) continue;
      const int64_t bytes = bytes_of_type(value->type);
      summary.activation_bytes = saturating_add(summary.activation_bytes, bytes);
      alive = saturating_add(alive, bytes);
    }
    summary.peak_activation_bytes = std::max(summary.peak_activation_bytes, alive);
    for (const Value* value : ends[i]) alive -= std::min(alive, bytes_of_type(value->type));
  }
}

// A function's arithmetic is that of its body.
double count_flops(const Model& model) {
  double flops = 0;
  if (model.functions.empty()) {
    for (const Node* node : model.graph->nodes) flops += flops_of(*node);
    return flops;
  }
  Model inlined = clone(model);
  inline_functions(inlined);
  infer_shapes(inlined);
  for (const Node* node : inlined.graph->nodes) flops += flops_of(*node);
  return flops;
}

// "batch and sequence are not known and count as 1"
void note_unknown_dimensions(const Graph& graph, const Graph& sized, ModelSummary& summary) {
  std::set<std::string> symbols;
  std::set<std::string> nameless, shapeless;
  for (const Value* input : graph.inputs) {
    if (!input->type.is_tensor()) continue;
    if (!input->type.shape) {
      shapeless.insert(input->name);
      continue;
    }
    for (const Dim& dim : *input->type.shape) {
      if (dim.known()) continue;
      if (dim.symbol.empty()) {
        nameless.insert(input->name);
      } else {
        symbols.insert(dim.symbol);
      }
    }
  }
  const auto listed = [](const std::set<std::string>& names) { return join({names.begin(), names.end()}, ", "); };
  if (!symbols.empty()) summary.notes.push_back("unknown dimensions count as 1: " + listed(symbols) + " (--shape fixes them)");
  if (!nameless.empty()) summary.notes.push_back("nameless unknown dimensions count as 1, of the inputs " + listed(nameless));
  if (!shapeless.empty()) summary.notes.push_back("inputs without a shape count as one element: " + listed(shapeless));
  int64_t unknown = 0;
  for (const Node* node : sized.nodes)
    for (const Value* value : node->outputs)
      if (value && (value->type.kind == Type::Kind::unknown || (value->type.is_tensor() && !value->type.shape))) ++unknown;
  if (unknown > 0) summary.notes.push_back(std::to_string(unknown) + " values have a shape that depends on data and count as one element");
}

}  // namespace

int64_t saturating_bytes(DType type, const Dims& dims) {
  double elements = 1;
  for (const int64_t size : dims) elements *= static_cast<double>(size);
  if (elements > 1e17) return kMost / 4;
  return static_cast<int64_t>(bytes_of(type, count_of(dims)));
}

int64_t bytes_of_type(const Type& type) {
  if (!type.is_tensor()) return 0;
  return saturating_bytes(type.dtype, type.shape ? dims_of(*type.shape) : Dims{});
}

std::string op_title(const Node& node) {
  return node.domain.empty() ? node.op : node.domain + "." + node.op;
}

ModelSummary summarise(const Model& model) {
  const Graph& graph = *model.graph;
  ModelSummary summary;
  summary.nodes = static_cast<int64_t>(graph.nodes.size());
  for (const Node* node : graph.nodes) ++summary.ops[op_title(*node)];
  std::unordered_set<const Tensor*> seen;
  count_parameters(graph, summary, seen);
  const Model sized = with_sizes(model, {});
  count_activations(*sized.graph, summary);
  summary.flops = count_flops(sized);
  summary.notes = model.notes;
  note_unknown_dimensions(graph, *sized.graph, summary);
  return summary;
}

}  // namespace fretsaw
