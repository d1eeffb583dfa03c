// From the probabilities of an attention back to the product of its queries and keys.
#include <algorithm>
#include <cmath>

#include "graph/passes/attention_parts.h"
#include "graph/passes/patterns.h"

namespace fretsaw {
namespace {

class ScoreFinder {
 public:
  explicit ScoreFinder(const Uses& uses) : uses_(uses) {}

  std::optional<AttentionScores> find(Value* probabilities, Node& user) {
    Value* v = probabilities;
    Node* softmax = nullptr;
    while (!(softmax = taken(v, "Softmax"))) {
      v = before_result(v);
      if (!v) return std::nullopt;
    }
    const int64_t rank = rank_of(softmax->input(0)), axis = softmax->get_int("axis", -1);
    if (rank < 3 || (axis != -1 && axis != rank - 1)) return std::nullopt;
    note_dims(probabilities);
    if (!walk(softmax->inputs[0], 1) || !closed(user)) return std::nullopt;
    return std::move(found_);
  }

 private:
  // The node of this graph that makes `value`, when it has this operator.
  Node* taken(const Value* value, std::string_view op) {
    Node* node = value ? value->producer : nullptr;
    if (!node || !node->is(op) || node->graph != value->graph || value->output != 0) return nullptr;
    found_.nodes.push_back(node);
    return node;
  }

  // A Dropout that drops nothing.
  static bool keeps_all(const Node& dropout) {
    double ratio = 0.5, training = 0;
    const bool trains = dropout.input(2) && !(scalar_value(dropout.input(2), training) && training == 0);
    return !trains || (scalar_value(dropout.input(1), ratio) && ratio == 0);
  }

  // What lies between the softmax and the product with the values: casts, reshapes, and zeros in place of NaN. Null: something else.
  Value* before_result(Value* v) {
    if (Node* dropout = taken(v, "Dropout")) return keeps_all(*dropout) ? dropout->inputs[0] : nullptr;
    if (Node* cast = taken(v, "Cast")) return cast->inputs[0];
    if (Node* reshape = taken(v, "Reshape")) return keeps_rows(*reshape) ? reshape->inputs[0] : nullptr;
    Node* where = taken(v, "Where");
    Node* is_nan = where ? taken(where->inputs[0], "IsNaN") : nullptr;
    if (!is_nan || is_nan->inputs[0] != where->inputs[2] || !is_number(where->inputs[1], 0)) return nullptr;
    return where->inputs[2];
  }

  void note_dims(const Value* v) {
    auto dims = static_dims(v);
    if (dims && dims->size() == 4) found_.four_dims = dims;
  }

  // Whether a Reshape only joins or cuts the dimensions before the last two.
  static bool keeps_rows(const Node& reshape) {
    auto x = static_dims(reshape.inputs[0]), y = static_dims(reshape.out(0));
    if (!x || !y || x->size() < 3 || y->size() < 3) return false;
    return std::equal(x->end() - 2, x->end(), y->end() - 2) && count_of(*x) == count_of(*y);
  }

  // `v` times `factor` goes into the softmax, up to masks. Takes everything to the product.
  bool walk(Value* v, double factor) {
    const AttentionScores before = found_;
    if (step(v, factor)) return true;
    found_ = before;
    return false;
  }

  bool step(Value* v, double factor) {
    note_dims(v);
    if (Node* product = taken(v, "MatMul")) {
      found_.product = product;
      found_.scale = found_.softcap != 0 ? factor * found_.softcap : factor;
      return true;
    }
    if (Node* cast = taken(v, "Cast")) {
      found_.float32_softmax |= cast->get_int("to", 0) == static_cast<int64_t>(DType::float32);
      return is_float(cast->inputs[0]->type.dtype) && walk(cast->inputs[0], factor);
    }
    if (Node* reshape = taken(v, "Reshape")) return keeps_rows(*reshape) && walk(reshape->inputs[0], factor);
    if (Node* div = taken(v, "Div")) {
      double number = 0;
      return scalar_value(div->input(1), number) && number != 0 && walk(div->inputs[0], factor / number);
    }
    if (Node* mul = taken(v, "Mul")) return scaled(*mul, 0, factor) || scaled(*mul, 1, factor);
    if (Node* add = taken(v, "Add"))
      return masked(*add, 0, {MaskPart::Kind::added, add->inputs[1], factor, 0, {}}, factor) ||
             masked(*add, 1, {MaskPart::Kind::added, add->inputs[0], factor, 0, {}}, factor);
    if (Node* sub = taken(v, "Sub")) return masked(*sub, 0, {MaskPart::Kind::added, sub->inputs[1], -factor, 0, {}}, factor);
    if (Node* where = taken(v, "Where")) return chosen(*where, factor);
    if (Node* tanh = taken(v, "Tanh")) return capped(*tanh, factor);
    if (Node* max = taken(v, "Max")) return bounded(*max, factor);
    return false;
  }

  bool scaled(const Node& mul, size_t path, double factor) {
    double number = 0;
    return scalar_value(mul.input(1 - path), number) && walk(mul.inputs[path], factor * number);
  }

  bool masked(const Node& node, size_t path, MaskPart part, double factor) {
    auto dims = static_dims(node.out(0)), scores = static_dims(node.inputs[path]);
    if (found_.softcap != 0 || !dims || dims != scores) return false;
    part.scores = *dims;
    found_.masks.push_back(part);
    if (walk(node.inputs[path], factor)) return true;
    found_.masks.pop_back();
    return false;
  }

  // Where(allowed, scores, fill) or Where(refused, fill, scores): the fill is so small that its key gets no weight.
  bool chosen(const Node& where, double factor) {
    for (size_t path : {1, 2}) {
      double fill = 0;
      if (!scalar_value(where.input(3 - path), fill) || fill * factor > -1e4) continue;
      MaskPart part{path == 1 ? MaskPart::Kind::allowed : MaskPart::Kind::refused, where.inputs[0], 1, fill * factor, {}};
      if (masked(where, path, part, factor)) return true;
    }
    return false;
  }

  // cap * tanh(x / cap): the factors before it are found with those of the scale.
  bool capped(const Node& tanh, double factor) {
    if (found_.softcap != 0 || factor <= 0) return false;
    found_.softcap = factor;
    return walk(tanh.inputs[0], 1);
  }

  // Max(scores, the smallest number): it only keeps sums of masks finite.
  bool bounded(const Node& max, double factor) {
    for (size_t path : {0, 1}) {
      double bound = 0;
      if (max.inputs.size() != 2 || !scalar_value(max.input(1 - path), bound) || bound > -6e4) continue;
      if (walk(max.inputs[path], factor)) return true;
    }
    return false;
  }

  // Whether nobody outside sees what lies between.
  bool closed(const Node& user) const {
    auto inside = [&](const Node* node) {
      return node == &user || std::find(found_.nodes.begin(), found_.nodes.end(), node) != found_.nodes.end();
    };
    for (const Node* node : found_.nodes)
      for (const Value* v : node->outputs)
        if (v && (uses_.is_output(v) || !uses_.all_users(v, inside))) return false;
    return true;
  }

  const Uses& uses_;
  AttentionScores found_;
};

}  // namespace

std::optional<AttentionScores> find_scores(Value* probabilities, Node& user, const Uses& uses) {
  return ScoreFinder(uses).find(probabilities, user);
}

}  // namespace fretsaw
