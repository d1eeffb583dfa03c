// Gelu, Swish, HardSwish and Mish from the arithmetic that exporters write.
#include <algorithm>
#include <cmath>

#include "graph/passes/patterns.h"

namespace fretsaw {
namespace {

constexpr size_t kMostFactors = 8;

// A product taken apart: number * factors[0] * factors[1] ...; values in `whole` are not taken apart.
struct Product {
  double number = 1;
  DType type = DType::float32;  // the coarsest type of a number in it
  std::vector<Value*> factors;
};

bool take_apart(Match& m, Value* v, const std::vector<Value*>& whole, Product& p) {
  if (p.factors.size() > kMostFactors) return false;
  double number = 0;
  if (scalar_value(v, number) && v->constant->dims.size() <= 1) {
    p.number *= number;
    if (v->constant->dtype == DType::float16 || v->constant->dtype == DType::bfloat16) p.type = v->constant->dtype;
    return true;
  }
  bool stop = std::find(whole.begin(), whole.end(), v) != whole.end();
  if (Node* mul = stop ? nullptr : m.made_by(v, "Mul"); mul && mul->inputs.size() == 2)
    return take_apart(m, mul->inputs[0], whole, p) && take_apart(m, mul->inputs[1], whole, p);
  size_t before = m.mark();
  if (Node* div = stop ? nullptr : m.made_by(v, "Div");
      div && scalar_value(div->input(1), number) && div->inputs[1]->constant->dims.size() <= 1) {
    p.number /= number;
    return take_apart(m, div->inputs[0], whole, p);
  }
  m.back_to(before);
  if (Node* pow = stop ? nullptr : m.made_by(v, "Pow"); pow && scalar_value(pow->input(1), number) && (number == 2 || number == 3)) {
    for (int i = 0; i < static_cast<int>(number); ++i)
      if (!take_apart(m, pow->inputs[0], whole, p)) return false;
    return true;
  }
  m.back_to(before);
  p.factors.push_back(v);
  return true;
}

// Whether `v` is number * x^power. If not, nothing is taken.
bool is_product(Match& m, Value* v, double number, Value* x, size_t power) {
  const size_t before = m.mark();
  Product p;
  if (take_apart(m, v, {x}, p) && p.factors.size() == power && near(p.number, number, p.type) &&
      std::all_of(p.factors.begin(), p.factors.end(), [&](const Value* f) { return f == x; }))
    return true;
  m.back_to(before);
  return false;
}

// Whatever is multiplied, at every level, in what makes `v`.
void operands_of_product(const Value* v, std::vector<Value*>& values) {
  const Node* node = v->producer;
  if (!node || node->graph != v->graph || (!node->is("Mul") && !node->is("Pow") && !node->is("Div"))) return;
  for (Value* operand : node->inputs)
    if (operand && !operand->constant && values.size() < 2 * kMostFactors) {
      values.push_back(operand);
      operands_of_product(operand, values);
    }
}

// Whether `v` is number + other, for a scalar number; gives the other. If not, nothing is taken: `v` may be what the pattern works on.
Value* plus_number(Match& m, Value* v, double number) {
  const size_t before = m.mark();
  Value* other = nullptr;
  Node* add = m.made_by(v, "Add");
  if (add && m.either(*add, [&](Value* a, Value* b) { return is_number(b, number) && (other = a); })) return other;
  m.back_to(before);
  return nullptr;
}

// x where `v` = x / sqrt(2): the other operand of the node that makes it.
Value* erf_argument(Match& m, Value* v) {
  for (std::string_view op : {"Div", "Mul"}) {
    size_t before = m.mark();
    Node* node = m.made_by(v, op);
    if (!node || node->inputs.size() != 2) {
      m.back_to(before);
      continue;
    }
    for (Value* x : node->inputs)
      if (x && !x->constant && is_product(m, v, std::sqrt(0.5), x, 1)) return x;
    m.back_to(before);
  }
  return nullptr;
}

// x where `v` = sqrt(2 / pi) * (x + 0.044715 x^3), or sqrt(2 / pi) * x * (1 + 0.044715 x^2).
Value* tanh_argument(Match& m, Value* v) {
  constexpr double pi = 3.14159265358979323846, cubic = 0.044715;
  size_t before = m.mark();
  Product p;
  if (!take_apart(m, v, {}, p) || !near(p.number, std::sqrt(2 / pi), p.type)) return nullptr;
  if (p.factors.size() == 1) {
    Value* x = nullptr;
    Node* add = m.made_by(p.factors[0], "Add");
    if (add) m.either(*add, [&](Value* a, Value* b) { return is_product(m, b, cubic, a, 3) && (x = a); });
    return x;
  }
  // x may be a product itself: it is whichever value the bracket is a polynomial of.
  m.back_to(before);
  for (Value* bracket : p.factors) {
    Value* rest = plus_number(m, bracket, 1);
    std::vector<Value*> values;
    if (rest) operands_of_product(rest, values);
    const size_t with_bracket = m.mark();
    for (Value* x : values) {
      Product again;
      if (is_product(m, rest, cubic, x, 2) && take_apart(m, v, {x, bracket}, again) && near(again.number, p.number, again.type) &&
          again.factors.size() == 2 && std::find(again.factors.begin(), again.factors.end(), x) != again.factors.end())
        return x;
      m.back_to(with_bracket);
    }
    m.back_to(before);
  }
  return nullptr;
}

// root = 0.5 * x * (1 + f(...x...)): looks for the bracket among the factors of root, two levels down.
struct Gelu {
  Value* x = nullptr;
  bool tanh = false;
};

bool find_bracket(Match& m, Value* v, int depth, Value*& bracket, Gelu& gelu) {
  size_t before = m.mark();
  if (Value* inner = plus_number(m, v, 1)) {
    if (Node* erf = m.made_by(inner, "Erf")) gelu = {erf_argument(m, erf->inputs[0]), false};
    if (Node* tanh = m.made_by(inner, "Tanh")) gelu = {tanh_argument(m, tanh->inputs[0]), true};
    if (gelu.x) {
      bracket = v;
      return true;
    }
  }
  m.back_to(before);
  Node* mul = depth > 0 ? m.made_by(v, "Mul") : nullptr;
  if (mul)
    for (Value* operand : mul->inputs)
      if (operand && find_bracket(m, operand, depth - 1, bracket, gelu)) return true;
  m.back_to(before);
  return false;
}

bool match_gelu(Match& m, Node& root, Gelu& gelu) {
  Value* bracket = nullptr;
  Product p;
  if (!root.is("Mul") || !find_bracket(m, root.outputs[0], 3, bracket, gelu)) return false;
  if (!take_apart(m, root.outputs[0], {gelu.x, bracket}, p) || p.factors.size() != 2 || !near(p.number, 0.5, p.type)) return false;
  return (p.factors[0] == gelu.x && p.factors[1] == bracket) || (p.factors[1] == gelu.x && p.factors[0] == bracket);
}

}  // namespace

void fuse_gelu(Graph& graph) {
  if (!has_any(graph, {"Erf", "Tanh"})) return;
  Matcher matcher(graph);
  matcher.run([&](Node& root) {
    Match m(matcher, root);
    Gelu gelu;
    if (!match_gelu(m, root, gelu) || !m.closed()) return;
    std::vector<Attribute> attributes;
    if (gelu.tanh) attributes.push_back({"approximate", std::string("tanh")});
    m.replace("Gelu", {gelu.x}, attributes);
  });
}

// x * sigmoid(alpha x), x * hardsigmoid(x) with the slope 1/6, x * tanh(softplus(x)).
void fuse_swish(Graph& graph) {
  if (!has_any(graph, {"Sigmoid", "HardSigmoid", "Softplus"})) return;
  Matcher matcher(graph);
  matcher.run([&](Node& root) {
    if (!root.is("Mul")) return;
    Match m(matcher, root);
    Value* x = nullptr;
    std::string op;
    double alpha = 1;
    bool found = m.either(root, [&](Value* a, Value* gate) {
      x = a;
      if (Node* sigmoid = m.made_by(gate, "Sigmoid")) {
        op = "Swish";
        if (sigmoid->inputs[0] == x) return true;
        Node* mul = m.made_by(sigmoid->inputs[0], "Mul");
        return mul && m.either(*mul, [&](Value* b, Value* number) {
          return b == x && scalar_value(number, alpha) && number->constant->dims.size() <= 1;
        });
      }
      if (Node* hard = m.made_by(gate, "HardSigmoid")) {
        op = "HardSwish";
        return hard->inputs[0] == x && near(hard->get_float("alpha", 0.2F), 1.0 / 6, DType::float32) &&
               near(hard->get_float("beta", 0.5F), 0.5, DType::float32);
      }
      op = "Mish";
      Node* tanh = m.made_by(gate, "Tanh");
      Node* softplus = tanh ? m.made_by(tanh->inputs[0], "Softplus") : nullptr;
      return softplus && softplus->inputs[0] == x;
    });
    if (!found || !m.closed()) return;
    std::vector<Attribute> attributes;
    if (op == "Swish" && alpha != 1) attributes.push_back({"alpha", static_cast<float>(alpha)});
    m.replace(op, {x}, attributes);
  });
}

}  // namespace fretsaw
