// A small reference interpreter: a model's nodes one after another with the CPU kernels, for tests of kernels.
//
// Everything is decided anew for each node from the values that are there; nothing is planned, reused or run in parallel.
#pragma once
#include <string>
#include <vector>

#include "graph/ir.h"
#include "kernels/kernel.h"

namespace fretsaw::testing {

struct InterpreterOptions {
  int threads = 1;
  // Kernels are compiled without shapes, as for models whose shapes depend on data.
  bool hide_shapes = false;
  // [N, C, H, W] inputs of the graph are handed over in this layout, so that kernels meet layouts other than the plain one.
  Layout layout = Layout::plain;
  // Nodes run on this device where it has a kernel for them; by default on test_device().
  Device* device = nullptr;
};

// A constant as kernels see it; shares its bytes.
RuntimeValue value_of(const TensorPtr& tensor);
// The same tensor in another layout (a copy).
RuntimeValue reordered(const RuntimeValue& value, Layout layout);

class Interpreter {
 public:
  // Brings the model to the newest opset and infers its types.
  explicit Interpreter(Model model, InterpreterOptions options = {});

  // The graph's outputs, plain, in order. `inputs` are those of the graph, in order; fewer when the last have defaults.
  std::vector<RuntimeValue> run(const std::vector<RuntimeValue>& inputs) const;
  const Graph& graph() const { return *model_.graph; }

 private:
  Model model_;
  InterpreterOptions options_;
};

// Runs one node on its own: the short way for a test of one kernel.
std::vector<RuntimeValue> run_node(const Node& node, const std::vector<RuntimeValue*>& inputs, const InterpreterOptions& options = {});

}  // namespace fretsaw::testing
