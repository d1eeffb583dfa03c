// From a graph template to one for given inputs: shapes inferred, constants folded, branches with a known condition inlined.
#include <algorithm>
#include <bit>
#include <unordered_set>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"
#include "graph/passes.h"
#include "kernels/cpu/random.h"
#include "runtime/collectives.h"
#include "runtime/program.h"

namespace fretsaw {
namespace {

using ValueMap = std::unordered_map<const Value*, Value*>;

// Replaces uses of the map's keys by its values in the graph and its bodies, in one walk.
void substitute(Graph& graph, const ValueMap& map) {
  auto changed = [&](Value* v) {
    auto found = map.find(v);
    return found == map.end() ? v : found->second;
  };
  for (Node* node : graph.nodes) {
    for (Value*& v : node->inputs) v = changed(v);
    for (const GraphPtr& body : bodies(*node)) substitute(*body, map);
  }
  for (Value*& v : graph.outputs) v = changed(v);
}

// Send and Recv stand at the border to be seen; the schedule moves the data.
void remove_border_nodes(Graph& graph) {
  ValueMap passed;
  std::erase_if(graph.nodes, [&](Node* node) {
    bool border = node->domain == kCommunicationDomain && (node->op == "Send" || node->op == "Recv");
    if (!border || !node->input(0)) return false;
    Value* from = node->input(0);
    if (auto found = passed.find(from); found != passed.end()) from = found->second;
    if (node->out(0)) passed[node->out(0)] = from;
    return true;
  });
  if (!passed.empty()) substitute(graph, passed);
}

// Collectives stay also where nothing takes what they make: other ranks wait for this one in them.
void remove_unused_nodes(Graph& graph) {
  const size_t count = graph.outputs.size();
  for (const Node* node : graph.nodes) {
    if (is_collective(*node)) graph.outputs.insert(graph.outputs.end(), node->outputs.begin(), node->outputs.end());
  }
  remove_dead_nodes(graph);
  graph.outputs.resize(count);
}

bool fold_known_values(Graph& graph, const ShapeFacts& facts) {
  ValueMap constants;
  for (Node* node : graph.nodes) {
    for (Value* v : node->outputs) {
      if (!v) continue;
      auto known = facts.known.find(v);
      if (known == facts.known.end()) continue;
      Value* constant = graph.add_constant(graph.fresh_name(v->name + "_folded"), known->second);
      constant->source = v->source_name();
      constants[v] = constant;
    }
  }
  if (constants.empty()) return false;
  substitute(graph, constants);
  return true;
}

// The nodes of `body`, copied into `graph`; `map` receives where its values went.
std::vector<Node*> copy_body(Graph& graph, const Graph& body, ValueMap& map) {
  std::vector<Node*> copies;
  for (const Value& v : body.all_values()) {
    Value* copy = graph.add_value(graph.fresh_name(v.name), v.type);
    copy->output = v.output;
    copy->constant = v.constant;
    copy->source = v.source;
    map[&v] = copy;
  }
  auto mapped = [&](Value* v) {
    auto found = map.find(v);
    return found == map.end() ? v : found->second;
  };
  for (const Node* node : body.nodes) {
    Node* copy = graph.add_node_object();
    copy->name = node->name;
    copy->op = node->op;
    copy->domain = node->domain;
    copy->overload = node->overload;
    copy->metadata = node->metadata;
    copy->group = node->group;
    for (Value* v : node->inputs) copy->inputs.push_back(v ? mapped(v) : nullptr);
    for (Value* v : node->outputs) {
      copy->outputs.push_back(v ? mapped(v) : nullptr);
      if (v) copy->outputs.back()->producer = copy;
    }
    for (const Attribute& attribute : node->attributes) {
      copy->attributes.push_back(attribute);
      if (const auto* inner = std::get_if<GraphPtr>(&attribute.value)) {
        GraphPtr inner_copy = clone(**inner, &map);
        inner_copy->parent = &graph;
        copy->attributes.back().value = inner_copy;
      }
    }
    copies.push_back(copy);
  }
  return copies;
}

// Fusion groups of a body must not meet those of the graph it goes into.
void renumber_groups(const Graph& graph, std::vector<Node*>& copies) {
  int next = 0;
  for (const Node* node : graph.nodes) next = std::max(next, node->group + 1);
  std::unordered_map<int, int> numbers;
  for (Node* node : copies) {
    if (node->group < 0) continue;
    auto [found, added] = numbers.try_emplace(node->group, next);
    if (added) ++next;
    node->group = found->second;
  }
}

bool inline_constant_branches(Graph& graph) {
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    Node* node = graph.nodes[i];
    if (!node->is("If") || !node->input(0) || !node->input(0)->constant || node->input(0)->constant->count() != 1) continue;
    auto condition = int_values(*node->input(0)->constant);
    if (!condition) continue;
    GraphPtr body = node->get_graph((*condition)[0] ? "then_branch" : "else_branch");
    if (!body || body->outputs.size() < node->outputs.size()) continue;
    ValueMap map, results;
    std::vector<Node*> copies = copy_body(graph, *body, map);
    renumber_groups(graph, copies);
    for (size_t o = 0; o < node->outputs.size(); ++o) {
      if (!node->outputs[o]) continue;
      auto found = map.find(body->outputs[o]);
      results[node->outputs[o]] = found == map.end() ? body->outputs[o] : found->second;
    }
    graph.nodes.erase(graph.nodes.begin() + static_cast<std::ptrdiff_t>(i));
    graph.nodes.insert(graph.nodes.begin() + static_cast<std::ptrdiff_t>(i), copies.begin(), copies.end());
    substitute(graph, results);
    return true;  // its nodes may hold such branches too: come again after inference
  }
  return false;
}

// An operator that the device has no kernel for is better taken apart than run on the host.
bool has_kernel(const Node& node, int threads, const KernelRegistry* device_kernels) {
  if (is_control_flow(node) || node.domain == kCommunicationDomain) return true;
  if (device_kernels) {
    const KernelRecord* record = device_kernels->find(node.op, node.domain);
    return record && record->make;
  }
  const KernelRecord* record = cpu_kernels().find(node.op, node.domain);
  if (!record || !record->make) return false;
  return !record->unsupported || record->unsupported(make_context({&node}, threads)).empty();
}

// Random operators draw by a key of their own, made of their name; a seed of the session goes into it.
void seed_random_nodes(Graph& graph, uint64_t seed) {
  if (seed == 0) return;
  for (Node* node : graph.nodes) {
    const KernelRecord* record = cpu_kernels().find(node->op, node->domain);
    const OperatorRecord* known = find_operator(node->op, node->domain);
    bool random = (record && record->host_random) || (known && known->random);
    if (!random || node->has("seed")) continue;
    uint64_t key = (random_key(*node) ^ seed * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    auto word = static_cast<uint32_t>(key >> 32) & 0x3fffffffu;  // as a float it is finite
    if (node->op == "Dropout") {
      node->set("seed", static_cast<int64_t>(word));
    } else {
      node->set("seed", std::bit_cast<float>(word));
    }
  }
}

// Gives the inputs their types; those whose contents are compiled in or left out become plain constants.
void fix_inputs(Graph& graph, Specialised& made, const std::vector<InputSpec>& specs) {
  std::unordered_set<const Value*> gone;
  for (size_t i = 0; i < made.inputs.size(); ++i) {
    Value* v = made.inputs[i];
    if (specs[i].content) v->constant = specs[i].content;
    if (specs[i].content || !specs[i].given) {
      if (v->constant) gone.insert(v);
      made.inputs[i] = nullptr;
    } else {
      v->constant = nullptr;
      v->type = specs[i].type;
    }
  }
  std::erase_if(graph.inputs, [&](const Value* v) { return gone.count(v) > 0; });
}

}  // namespace

Specialised specialise(const Model& model, const std::vector<Value*>& inputs, const std::vector<InputSpec>& specs,
                       const std::set<std::string>& distrusted, RankContext& rank, const KernelRegistry* device_kernels) {
  // What only programs that are gone used goes too.
  std::erase_if(rank.folded, [](const auto& known) {
    return std::all_of(known.outputs.begin(), known.outputs.end(), [](const TensorPtr& t) { return t.use_count() <= 1; });
  });
  std::erase_if(rank.merged_weights, [](const auto& known) { return known.second.use_count() <= 1; });
  Specialised made;
  auto copy = std::make_shared<Model>(model);
  ValueMap map;
  copy->graph = clone(*model.graph, &map);
  copy->graph->parent = nullptr;
  for (const Value* v : inputs) made.inputs.push_back(map.at(v));
  made.model = copy;
  Graph& graph = *copy->graph;
  fix_inputs(graph, made, specs);
  remove_border_nodes(graph);

  InferOptions options;
  options.keep_hints = false;
  if (!distrusted.empty()) options.distrust = [&](const Node& node) { return distrusted.count(node.name) > 0; };
  options.evaluate = [&](const Node& node, const std::vector<TensorPtr>& in, std::vector<TensorPtr>& out) {
    return fold_node(node, in, rank, out);
  };
  auto kernel_exists = [&](const Node& node) { return has_kernel(node, rank.threads, device_kernels); };
  auto infer_and_fold = [&] {
    ShapeFacts facts = infer_shapes(*copy, options);
    if (fold_known_values(graph, facts)) remove_unused_nodes(graph);
  };
  infer_and_fold();
  while (inline_constant_branches(graph)) infer_and_fold();
  bool decomposes = std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const Node* node) { return !kernel_exists(*node); });
  if (decomposes) {
    decompose_to_functions(*copy, kernel_exists);
    infer_and_fold();
    while (inline_constant_branches(graph)) infer_and_fold();
  }
  remove_unused_nodes(graph);
  if (device_kernels) {
    recognise_for_devices(*copy, &rank.merged_weights);
    infer_and_fold();
    remove_unused_nodes(graph);
  }
  seed_random_nodes(graph, rank.random_seed);
  return made;
}

}  // namespace fretsaw
