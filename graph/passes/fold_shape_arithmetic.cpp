// Shape arithmetic whose result inference knows, as constants.
#include "graph/passes.h"

namespace fretsaw {

int fold_shape_arithmetic(Model& model, const ShapeFacts& facts) {
  Graph& graph = *model.graph;
  std::unordered_map<const Value*, Value*> constants;
  for (Node* node : graph.nodes)
    for (Value*& v : node->inputs) {
      if (!v || !v->producer) continue;
      auto it = facts.known.find(v);
      if (it == facts.known.end()) continue;
      Value*& constant = constants[v];
      if (!constant) {
        constant = graph.add_constant(graph.fresh_name(v->name + "_folded"), it->second);
        constant->source = v->source_name();
      }
      v = constant;
    }
  return constants.empty() ? 0 : remove_dead_nodes(graph);
}

}  // namespace fretsaw
