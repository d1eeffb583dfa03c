// One stage's graph: copies of its nodes and weights between the borders where values come in and go out.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

struct Border {
  Value* value = nullptr;  // of the source graph
  int peer = 0;            // the stage on the other side
  int tag = 0;             // of the route
  bool channels_last = false;
  std::string name;  // the graph input or output in the stage's graph, once it is built
};
struct StageParts {
  std::vector<Node*> nodes;     // of the source graph, in running order
  std::vector<Value*> inputs;   // of the source graph, in its order
  std::vector<Value*> outputs;  // the source's outputs that this stage gives
  std::vector<Border> receives, sends;

  std::string name_of_send(int tag) const;
  std::string name_of_receive(int tag) const;
};
// Sets the borders' names.
std::shared_ptr<Model> build_stage_graph(const Model& model, StageParts& parts, int stage);

}  // namespace fretsaw
