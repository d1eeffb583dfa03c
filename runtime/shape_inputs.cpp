// Which inputs of a graph decide shapes by their contents: [2, -1] in "Reshape(x, shape)" does, the pixels of an image don't.
#include <unordered_map>
#include <unordered_set>

#include "runtime/program.h"

namespace fretsaw {
namespace {

// The operands whose contents, not only their shape, decide the shape of an output.
const std::unordered_map<std::string, std::vector<int>>& shape_operands() {
  static const std::unordered_map<std::string, std::vector<int>> table = {
      {"Reshape", {1}},         {"Expand", {1}},
      {"Slice", {1, 2, 3, 4}},  {"Tile", {1}},
      {"ConstantOfShape", {0}}, {"Range", {0, 1, 2}},
      {"Resize", {1, 2, 3}},    {"Upsample", {1}},
      {"Pad", {1, 3}},          {"TopK", {1}},
      {"Unsqueeze", {1}},       {"Squeeze", {1}},
      {"Split", {1}},           {"OneHot", {1}},
      {"ReduceSum", {1}},       {"ReduceMean", {1}},
      {"ReduceMax", {1}},       {"ReduceMin", {1}},
      {"ReduceProd", {1}},      {"ReduceL1", {1}},
      {"ReduceL2", {1}},        {"ReduceLogSum", {1}},
      {"ReduceLogSumExp", {1}}, {"ReduceSumSquare", {1}},
      {"CenterCropPad", {1}},   {"AffineGrid", {1}},
      {"SplitToSequence", {1}}, {"Col2Im", {1, 2}},
      {"BlackmanWindow", {0}},  {"HannWindow", {0}},
      {"HammingWindow", {0}},   {"DFT", {1, 2}},
      {"STFT", {1, 3}},         {"MelWeightMatrix", {0, 1, 2}},
      {"MaxUnpool", {2}},       {"CumSum", {1}},
  };
  return table;
}

// Shape arithmetic looks through these; anything else makes data.
bool passes_integers(const Node& node) {
  static const std::unordered_set<std::string> ops = {
      "Add",
      "Sub",
      "Mul",
      "Div",
      "Mod",
      "Neg",
      "Abs",
      "Min",
      "Max",
      "Concat",
      "Gather",
      "Slice",
      "Squeeze",
      "Unsqueeze",
      "Cast",
      "CastLike",
      "Reshape",
      "Identity",
      "ReduceProd",
      "ReduceSum",
      "ReduceMax",
      "ReduceMin",
      "Range",
      "ConstantOfShape",
      "Where",
      "Equal",
      "Greater",
      "Less",
      "GreaterOrEqual",
      "LessOrEqual",
      "Not",
      "And",
      "Or",
      "Split",
      "Expand",
      "Tile",
      "Floor",
      "Ceil",
      "Round",
      "Sqrt",
      "Pow",
      "Flatten",
      "ScatterElements",
      "ScatterND",
      "GatherElements",
      "GatherND",
      "Clip",
      "Pad",
      "Transpose",
      "Sign",
  };
  return node.domain.empty() && ops.count(node.op) > 0;
}

void collect_roots(const Graph& graph, std::vector<const Value*>& roots) {
  for (const Node* node : graph.nodes) {
    if (node->domain.empty()) {
      auto found = shape_operands().find(node->op);
      if (found != shape_operands().end()) {
        for (int i : found->second) {
          if (const Value* v = node->input(static_cast<size_t>(i))) roots.push_back(v);
        }
      }
    }
    for (const GraphPtr& body : bodies(*node)) collect_roots(*body, roots);
  }
}

}  // namespace

std::vector<bool> inputs_that_decide_shapes(const Graph& graph, const std::vector<Value*>& inputs) {
  std::vector<const Value*> work;
  collect_roots(graph, work);
  std::unordered_set<const Value*> seen(work.begin(), work.end());
  while (!work.empty()) {
    const Value* v = work.back();
    work.pop_back();
    const Node* node = v->producer;
    if (!node || !(passes_integers(*node) || node->op == "Recv")) continue;  // Shape and Size need no contents
    for (const Value* in : node->inputs) {
      if (in && seen.insert(in).second) work.push_back(in);
    }
  }
  std::vector<bool> decides;
  for (const Value* v : inputs) decides.push_back(seen.count(v) > 0);
  return decides;
}

}  // namespace fretsaw
