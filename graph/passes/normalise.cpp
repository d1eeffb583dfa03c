// The passes that bring any model to one form.
#include "graph/passes.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {

std::vector<Pass> normalise_passes() {
  return {
      {"inline-functions", inline_functions},
      {"constants-to-initializers", constants_to_initializers},
      {"upgrade-opset", upgrade_opset},
      {"remove-dead-nodes", [](Model& model) { remove_dead_nodes(*model.graph); }},
      {"inline-branches", [](Model& model) { inline_branches(model); }},
      {"unpack-sequences", unpack_sequences},
      {"remove-identities", remove_identities},
  };
}

}  // namespace fretsaw
