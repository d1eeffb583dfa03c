// Walks from each CrossEntropy back to the product that makes its scores.
#include "graph/training/pad_classes.h"

#include <vector>

#include "graph/communication_schemas.h"
#include "graph/passes/rewrite.h"
#include "graph/passes/strided_view.h"

namespace fretsaw {
namespace {

constexpr int64_t kPack = 8, kColumns = 64;  // elements of 16 bits: 16 bytes, and a line of the device's cache
constexpr int64_t kFewest = 1024;            // of fewer classes the scores are small

bool is_half(const Value* v) {
  return v->type.dtype == DType::float16 || v->type.dtype == DType::bfloat16;
}

// The constant shape of a Reshape; none where it is computed.
std::optional<Dims> shape_of_reshape(const Node& reshape) {
  const Value* shape = reshape.input(1);
  return shape && shape->constant ? int_values(*shape->constant) : std::nullopt;
}

void set_last_dim(Value& v, int64_t columns) {
  v.type.shape->back() = Dim(columns);
}

// How scores come about: weights [K, C] (or [C, K] of a Gemm that turns them), biases [C], and the values that have C columns.
struct Scores {
  Node* product = nullptr;
  std::vector<Node*> reshapes;
  std::vector<std::pair<Node*, size_t>> biases;  // inputs of nodes
  std::vector<Value*> values;
};

class ClassPadder {
 public:
  explicit ClassPadder(Graph& graph) : graph_(graph), uses_(graph) {}

  int run() {
    int changed = 0;
    for (Node* node : std::vector<Node*>(graph_.nodes)) {
      Scores scores;
      if (node->op != "CrossEntropy" || node->domain != kCommunicationDomain || node->has("classes") || !find(*node, scores)) continue;
      pad(*node, scores);
      ++changed;
    }
    if (changed > 0) sort_nodes(graph_);
    return changed;
  }

 private:
  bool find(const Node& loss, Scores& scores) const {
    const Value* value = loss.input(0);
    if (!is_half(value) || !value->type.shape || !value->type.shape->back().known()) return false;
    const int64_t classes = value->type.shape->back().value;
    if (classes < kFewest || classes % kPack == 0) return false;
    const Node* user = &loss;
    while (true) {
      Node* node = value->producer;
      if (!node || node->graph != &graph_ || uses_.only_user(value) != user || !has_columns(*value, classes)) return false;
      scores.values.push_back(node->outputs[0]);
      if (node->is("MatMul") || node->is("Gemm")) return take_product(*node, classes, scores);
      if (node->is("Reshape") && keeps_columns(*node, classes)) {
        scores.reshapes.push_back(node);
        value = node->input(0);
      } else if (node->is("Add")) {
        const size_t bias = is_bias(node->input(0), classes) ? 0 : 1;
        if (!is_bias(node->input(bias), classes)) return false;
        scores.biases.emplace_back(node, bias);
        value = node->input(1 - bias);
      } else {
        return false;
      }
      user = node;
    }
  }
  bool take_product(Node& product, int64_t classes, Scores& scores) const {
    const Value* bias = product.input(2);
    if (bias && !is_bias(bias, classes)) return false;
    if (bias) scores.biases.emplace_back(&product, 2);
    const auto weights = static_dims(product.input(1));
    scores.product = &product;
    return weights && weights->size() == 2 && (*weights)[axis_of_classes(product)] == classes;
  }
  static bool has_columns(const Value& v, int64_t classes) {
    return v.type.shape && !v.type.shape->empty() && v.type.shape->back().value == classes;
  }
  static bool keeps_columns(const Node& reshape, int64_t classes) {
    const auto dims = shape_of_reshape(reshape);
    return dims && !dims->empty() && dims->back() == classes;
  }
  static bool is_bias(const Value* v, int64_t classes) { return v && static_dims(v) == Dims{classes}; }
  static size_t axis_of_classes(const Node& product) { return product.is("Gemm") && product.get_int("transB", 0) != 0 ? 0 : 1; }

  void pad(Node& loss, const Scores& scores) {
    const int64_t classes = loss.input(0)->type.shape->back().value, columns = (classes + kColumns - 1) / kColumns * kColumns;
    for (const auto& [node, bias] : scores.biases) node->inputs[bias] = padded(node->inputs[bias], 0, columns);
    Value*& weights = scores.product->inputs[1];
    const size_t axis = axis_of_classes(*scores.product);
    Node* turned = weights->producer;
    if (turned && turned->is("Transpose") && turned->graph == &graph_ && uses_.only_user(weights) == scores.product) {
      turned->inputs[0] = padded(turned->inputs[0], 1 - axis, columns);  // whole packs before they are turned
      (*weights->type.shape)[axis] = Dim(columns);
    } else {
      weights = padded(weights, axis, columns);
    }
    for (Node* reshape : scores.reshapes) {
      Dims dims = *shape_of_reshape(*reshape);
      dims.back() = columns;
      reshape->inputs[1] = graph_.add_constant(graph_.fresh_name(reshape->name + "_shape"), make_int64s(dims));
    }
    for (Value* v : scores.values) set_last_dim(*v, columns);
    loss.set("classes", classes);
  }

  // Zeros behind the value's elements along the axis.
  Value* padded(Value* value, size_t axis, int64_t size) {
    Dims pads(2 * value->type.shape->size(), 0);
    pads[value->type.shape->size() + axis] = size - (*value->type.shape)[axis].value;
    Value* amounts = graph_.add_constant(graph_.fresh_name(value->name + "_pads"), make_int64s(pads));
    Node* node = graph_.add_node("Pad", {value, amounts}, {graph_.fresh_name(value->name + "_padded")});
    node->name = node->outputs[0]->name;
    node->outputs[0]->type = value->type;
    (*node->outputs[0]->type.shape)[axis] = Dim(size);
    return node->outputs[0];
  }

  Graph& graph_;
  Uses uses_;
};

}  // namespace

int pad_classes(Model& model) {
  return ClassPadder(*model.graph).run();
}

}  // namespace fretsaw
