// LayerNormalization and RMSNormalization from the pieces that exporters below operator sets 17 and 23 write.
#include "graph/passes/patterns.h"

namespace fretsaw {
namespace {

// What the pieces say: x [..., D] is normalised over D.
struct Norm {
  Value* x = nullptr;
  double epsilon = 0;
};

Value* through_cast(Match& m, Value* v) {
  Node* cast = m.made_by(v, "Cast");
  return cast ? cast->inputs[0] : v;
}

// The value that `v` is the square of: Pow(a, 2) or Mul(a, a).
Value* square_root_of(Match& m, Value* v) {
  size_t before = m.mark();
  if (Node* pow = m.made_by(v, "Pow"); pow && is_number(pow->input(1), 2)) return pow->inputs[0];
  m.back_to(before);
  if (Node* mul = m.made_by(v, "Mul"); mul && mul->inputs.size() == 2 && mul->inputs[0] == mul->inputs[1]) return mul->inputs[0];
  m.back_to(before);
  return nullptr;
}

// mean(a * a) + epsilon over the last axis: gives a.
Value* mean_square_plus_epsilon(Match& m, Value* v, double& epsilon) {
  Value* a = nullptr;
  Node* add = m.made_by(v, "Add");
  if (!add) return nullptr;
  m.either(*add, [&](Value* mean, Value* e) {
    Node* reduce = scalar_value(e, epsilon) ? m.made_by(mean, "ReduceMean") : nullptr;
    a = reduce && reduces_last_axis(*reduce) ? square_root_of(m, reduce->inputs[0]) : nullptr;
    return a != nullptr;
  });
  return a;
}

// What stands under the square root in `v` = sqrt(u); `inverse`: `v` = 1 / sqrt(u).
Value* under_root(Match& m, Value* v, bool inverse) {
  size_t before = m.mark();
  if (inverse) {
    Value* root = nullptr;
    if (Node* reciprocal = m.made_by(v, "Reciprocal")) root = reciprocal->inputs[0];
    if (Node* div = m.made_by(v, "Div"); div && is_number(div->input(0), 1)) root = div->inputs[1];
    if (Value* u = root ? under_root(m, root, false) : nullptr) return u;
    m.back_to(before);
  } else if (Node* sqrt = m.made_by(v, "Sqrt")) {
    return sqrt->inputs[0];
  }
  if (Node* pow = m.made_by(v, "Pow"); pow && is_number(pow->input(1), inverse ? -0.5 : 0.5)) return pow->inputs[0];
  m.back_to(before);
  return nullptr;
}

// `v` = a / sqrt(u) in any form; calls test(a, u).
bool scaled_by_root(Match& m, Value* v, const std::function<bool(Value*, Value*)>& test) {
  size_t before = m.mark();
  if (Node* div = m.made_by(v, "Div"); div && div->inputs.size() == 2) {
    Value* u = under_root(m, div->inputs[1], false);
    if (u && test(div->inputs[0], u)) return true;
  }
  m.back_to(before);
  if (Node* mul = m.made_by(v, "Mul")) {
    bool found = m.either(*mul, [&](Value* a, Value* r) {
      Value* u = under_root(m, r, true);
      return u && test(a, u);
    });
    if (found) return true;
  }
  m.back_to(before);
  return false;
}

// `v` = x - mean(x) over the last axis: gives x.
Value* centred(Match& m, Value* v) {
  Node* sub = m.made_by(v, "Sub");
  Node* mean = sub ? m.made_by(sub->input(1), "ReduceMean") : nullptr;
  return mean && reduces_last_axis(*mean) && mean->inputs[0] == sub->inputs[0] ? sub->inputs[0] : nullptr;
}

bool layer_norm_core(Match& m, Value* v, Norm& norm) {
  return scaled_by_root(m, v, [&](Value* d, Value* u) {
    norm.x = centred(m, d);
    Value* squared = norm.x ? mean_square_plus_epsilon(m, u, norm.epsilon) : nullptr;
    if (!squared) return false;
    if (squared == d || centred(m, squared) == norm.x) return true;
    squared = through_cast(m, squared);
    return squared == d || centred(m, squared) == norm.x;
  });
}

bool rms_norm_core(Match& m, Value* v, Norm& norm) {
  return scaled_by_root(m, v, [&](Value* x, Value* u) {
    norm.x = x;
    return mean_square_plus_epsilon(m, u, norm.epsilon) == x;
  });
}

bool is_vector_of(const Value* v, int64_t size) {
  return v && rank_of(v) == 1 && last_dim(v) == size;
}

// Float64 would lose digits: the fused operators compute in float32.
bool computes_in_float32(const Value* x) {
  return x->type.dtype == DType::float32 || x->type.dtype == DType::float16 || x->type.dtype == DType::bfloat16;
}

std::vector<Attribute> attributes_of(const Norm& norm) {
  return {{"axis", int64_t{-1}}, {"epsilon", static_cast<float>(norm.epsilon)}, {"stash_type", int64_t{1}}};
}

// root = core(x) * scale, both operands of one element type, scale [D].
bool scaled(Match& m, Node& mul, bool (*core)(Match&, Value*, Norm&), Norm& norm, Value*& scale) {
  return m.either(mul, [&](Value* v, Value* s) {
    scale = s;
    if (core(m, v, norm)) return is_vector_of(s, last_dim(norm.x)) && computes_in_float32(norm.x) && norm.x->type.dtype == s->type.dtype;
    // Half-precision models normalise in float32: x and the result are cast.
    Node* back = m.made_by(v, "Cast");
    if (!back || !core(m, back->inputs[0], norm) || norm.x->type.dtype != DType::float32) return false;
    Node* there = m.made_by(norm.x, "Cast");
    if (!there) return false;
    norm.x = there->inputs[0];
    bool same_type = norm.x->type.dtype == s->type.dtype && back->get_int("to", 0) == static_cast<int64_t>(s->type.dtype);
    return same_type && computes_in_float32(norm.x) && is_vector_of(s, last_dim(norm.x));
  });
}

}  // namespace

void fuse_layer_normalization(Graph& graph) {
  if (!has_any(graph, {"ReduceMean"})) return;
  Matcher matcher(graph);
  matcher.run([&](Node& root) {
    Match m(matcher, root);
    Norm norm;
    Value *scale = nullptr, *bias = nullptr;
    bool found = false;
    if (root.is("Add"))
      found = m.either(root, [&](Value* v, Value* b) {
        bias = b;
        Node* mul = m.made_by(v, "Mul");
        return mul && scaled(m, *mul, layer_norm_core, norm, scale) && is_vector_of(b, last_dim(norm.x)) &&
               b->type.dtype == norm.x->type.dtype;
      });
    else if (root.is("Mul"))
      found = scaled(m, root, layer_norm_core, norm, scale);
    if (!found || !m.closed()) return;
    std::vector<Value*> inputs = {norm.x, scale};
    if (bias) inputs.push_back(bias);
    m.replace("LayerNormalization", inputs, attributes_of(norm));
  });
}

void fuse_rms_normalization(Graph& graph) {
  if (!has_any(graph, {"ReduceMean"})) return;
  Matcher matcher(graph);
  matcher.run([&](Node& root) {
    Match m(matcher, root);
    Norm norm;
    Value* scale = nullptr;
    if (!root.is("Mul") || !scaled(m, root, rms_norm_core, norm, scale) || !m.closed()) return;
    m.replace("RMSNormalization", {norm.x, scale}, attributes_of(norm));
  });
}

}  // namespace fretsaw
