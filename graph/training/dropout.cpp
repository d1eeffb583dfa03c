// Dropout by masks that depend on the step and on each element's place in the batch.
#include "graph/training/dropout.h"

#include <optional>
#include <vector>

#include "graph/communication_schemas.h"
#include "graph/passes.h"
#include "graph/passes/narrow_floats.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

bool is_true(const Value* value) {
  return value && value->constant && value->constant->data && value->constant->bytes() == 1 && *value->constant->data != std::byte{0};
}

std::optional<double> ratio_of(const Node& node) {
  if (!node.input(1)) return 0.5;
  std::vector<double> numbers;
  if (!node.input(1)->constant || !float_values(node.input(1), numbers) || numbers.size() != 1) return std::nullopt;
  return numbers[0];
}

// FNV-1a of the node's name: its own generator, whatever graph it stands in.
int64_t key_of(const Node& node) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : node.name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
  return static_cast<int64_t>(hash);
}

class DropoutWriter {
 public:
  DropoutWriter(Graph& graph, const std::string& counter) : graph_(graph), counter_name_(counter) {}

  bool run() {
    for (Node* node : std::vector<Node*>(graph_.nodes)) {
      if (!node->is("Dropout") || !is_true(node->input(2)) || !is_float(node->input(0)->type.dtype)) continue;
      const std::optional<double> ratio = ratio_of(*node);
      if (ratio && *ratio > 0 && *ratio < 1) rewrite(*node, *ratio);
    }
    sort_nodes(graph_);
    return samples_ != nullptr;
  }

 private:
  void rewrite(Node& node, double ratio) {
    Value* x = node.input(0);
    const DType type = x->type.dtype;
    const auto add = [&](const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes,
                         const std::string& domain = "") {
      Node* made = graph_.add_node(op, std::move(inputs), {graph_.fresh_name(node.name + "/" + op)}, std::move(attributes), domain);
      made->name = made->outputs[0]->name;
      return made;
    };
    if (!samples_) samples_ = input(kSamplesAtHand, Shape{Dim(2)}), counter_ = input(counter_name_, Shape{});
    Node* mask = add("DropoutMask", {add("Shape", {x}, {})->outputs[0], samples_, counter_},
                     {{"ratio", static_cast<float>(ratio)}, {"key", key_of(node)}}, kCommunicationDomain);
    if (Value* given = node.out(1)) set_output(*mask, 0, given);
    mask->outputs[0]->type = Type::tensor(DType::boolean, *x->type.shape);
    Value* scale = graph_.add_constant(graph_.fresh_name(node.name + "/scale"), float_tensor(type, {}, {1 / (1 - ratio)}));
    Value* factor = add("Mul", {add("Cast", {mask->outputs[0]}, {{"to", static_cast<int64_t>(type)}})->outputs[0], scale}, {})->outputs[0];
    Node* product = add("Mul", {x, factor}, {});
    set_output(*product, 0, node.out(0));
    std::erase(graph_.nodes, &node);
  }
  Value* input(const std::string& name, Shape shape) {
    Value* value = graph_.add_value(name, Type::tensor(DType::int64, std::move(shape)));
    graph_.inputs.push_back(value);
    return value;
  }

  Graph& graph_;
  std::string counter_name_;
  Value *samples_ = nullptr, *counter_ = nullptr;
};

}  // namespace

bool count_dropouts(Model& model, const std::string& counter) {
  register_communication_schemas();
  if (!DropoutWriter(*model.graph, counter).run()) return false;
  model.opsets[kCommunicationDomain] = 1;
  infer_shapes(model);
  return true;
}

}  // namespace fretsaw
