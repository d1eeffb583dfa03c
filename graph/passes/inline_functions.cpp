// Puts the bodies of the model's own functions in place of the nodes that call them, at every depth.
#include <onnx/onnx_pb.h>

#include <filesystem>

#include "graph/errors.h"
#include "graph/io/reading.h"
#include "graph/passes.h"
#include "graph/passes/functions.h"
#include "graph/passes/upgrade.h"

namespace fretsaw {
namespace {

class Inliner {
 public:
  explicit Inliner(Model& model) : model_(model) {
    for (const Function& f : model.functions)
      if (!protos_.emplace(key(f.domain, f.name, f.overload), &f.proto).second)
        throw Error("the model has two functions named '" + f.name + "' in domain '" + f.domain + "'", "names must be unique");
    if (!model.path.empty()) files_.model_file = MappedFile::open(model.path);
    folder_ = std::filesystem::path(model.path).parent_path().string();
  }

  bool is_call(const Node& node) const { return protos_.count(key(node.domain, node.op, node.overload)) > 0; }

  void check(Graph& graph) { expanded_size(graph); }

  void run(Graph& graph) {
    std::vector<Node*> kept;
    kept.reserve(graph.nodes.size());
    for (Node* node : std::vector<Node*>(graph.nodes)) {
      for (const GraphPtr& body : bodies(*node)) run(*body);
      if (is_call(*node))
        for (Node* copy : expand(*node)) kept.push_back(copy);
      else
        kept.push_back(node);
    }
    graph.nodes = std::move(kept);
  }

 private:
  static std::string key(const std::string& domain, const std::string& name, const std::string& overload) {
    return domain + "\n" + name + "\n" + overload;
  }

  const FunctionBody& body_of(const Node& call) {
    std::string k = key(call.domain, call.op, call.overload);
    auto it = bodies_.find(k);
    if (it != bodies_.end()) return it->second;
    onnx::FunctionProto proto;
    if (!proto.ParseFromString(*protos_.at(k))) throw Error("function '" + call.op + "' does not parse", "the file is damaged");
    return bodies_.emplace(k, read_function(proto, nullptr, folder_, files_)).first->second;
  }

  std::vector<Node*> expand(Node& call) {
    const FunctionBody& function = body_of(call);
    for (const auto& [domain, version] : function.opsets)
      if (!domain.empty()) model_.opsets.try_emplace(domain, version);
    GraphPtr instance = instantiate(function, call, model_.path, [this](const Node& node) { return is_call(node); });
    run(*instance);
    return splice(*instance, call);
  }

  // How many nodes the graph has with all calls expanded. Finds recursion, and bodies that double at each level: a small file would
  // grow without bound.
  size_t expanded_size(Graph& graph) {
    size_t total = 0;
    for_each_graph(graph, [&](Graph& g) {
      for (const Node* node : g.nodes) {
        total += is_call(*node) ? expanded_size(*node) : 1;
        if (total > kMostNodes)
          throw Error("the model's functions expand to more than a million nodes", "reduce the nesting of its functions");
      }
    });
    return total;
  }

  size_t expanded_size(const Node& call) {
    std::string k = key(call.domain, call.op, call.overload);
    constexpr size_t open = SIZE_MAX;
    auto [it, added] = sizes_.emplace(k, open);
    if (!added && it->second == open)
      throw Error("function '" + call.op + "' calls itself", "ONNX functions may not be recursive").at_node(call.name, call.op);
    if (!added) return it->second;
    if (++depth_ > kDeepest) throw Error("the model's functions are nested more than 200 deep", "flatten them").at_node(call.name, call.op);
    size_t size = expanded_size(*body_of(call).graph);
    --depth_;
    return sizes_[k] = size;
  }

  static constexpr size_t kMostNodes = 1'000'000;
  static constexpr int kDeepest = 200;
  Model& model_;
  std::unordered_map<std::string, const std::string*> protos_;
  std::unordered_map<std::string, FunctionBody> bodies_;
  std::unordered_map<std::string, size_t> sizes_;
  int depth_ = 0;
  FileCache files_;
  std::string folder_;
};

}  // namespace

void inline_functions(Model& model) {
  if (model.functions.empty()) return;
  Inliner inliner(model);
  inliner.check(*model.graph);
  // Bodies come in at the newest operator set, whatever they were written in, so the model must be there first.
  constants_to_initializers(model);
  upgrade_model(model, [&](const Node& node) { return inliner.is_call(node); });
  inliner.run(*model.graph);
  model.functions.clear();
  for (auto it = model.opsets.begin(); it != model.opsets.end();) {
    bool used = it->first.empty();
    for_each_graph(*model.graph, [&](Graph& g) {
      for (const Node* node : g.nodes) used |= node->domain == it->first;
    });
    it = used ? std::next(it) : model.opsets.erase(it);
  }
}

}  // namespace fretsaw
