// Formulas over values of the graph: `g * (1 - y * y)` adds a Mul, a Sub and a Mul.
#pragma once
#include "graph/gradients.h"

namespace fretsaw {

// A value in a formula. Numbers take the element type of the value that they meet.
struct Term {
  GradientContext* context = nullptr;
  Value* value = nullptr;

  Term(GradientContext& c, Value* v) : context(&c), value(v) {}
  operator Value*() const { return value; }  // NOLINT: a term is its value
  Term made(const char* op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {}) const {
    return {*context, context->add(op, std::move(inputs), std::move(attributes), value->type.dtype)};
  }
  Term number(double x) const { return {*context, context->number(x, value->type.dtype)}; }
};

inline Term operator+(const Term& a, const Term& b) {
  return a.made("Add", {a, b});
}
inline Term operator-(const Term& a, const Term& b) {
  return a.made("Sub", {a, b});
}
inline Term operator*(const Term& a, const Term& b) {
  return a.made("Mul", {a, b});
}
inline Term operator/(const Term& a, const Term& b) {
  return a.made("Div", {a, b});
}
inline Term operator+(const Term& a, double b) {
  return a + a.number(b);
}
inline Term operator-(const Term& a, double b) {
  return a - a.number(b);
}
inline Term operator*(const Term& a, double b) {
  return a * a.number(b);
}
inline Term operator/(const Term& a, double b) {
  return a / a.number(b);
}
inline Term operator+(double a, const Term& b) {
  return b.number(a) + b;
}
inline Term operator-(double a, const Term& b) {
  return b.number(a) - b;
}
inline Term operator*(double a, const Term& b) {
  return b.number(a) * b;
}
inline Term operator/(double a, const Term& b) {
  return b.number(a) / b;
}
inline Term operator-(const Term& a) {
  return a.made("Neg", {a});
}
// A function of one operand: apply("Exp", x).
inline Term apply(const char* op, const Term& x) {
  return x.made(op, {x});
}

// A boolean for each element.
struct Condition {
  GradientContext* context;
  Value* value;
};
inline Condition compare(const char* op, const Term& a, const Term& b) {
  return {a.context, a.context->add(op, {a, b}, {}, DType::boolean)};
}
inline Condition operator<(const Term& a, const Term& b) {
  return compare("Less", a, b);
}
inline Condition operator>(const Term& a, const Term& b) {
  return compare("Greater", a, b);
}
inline Condition operator<=(const Term& a, const Term& b) {
  return compare("LessOrEqual", a, b);
}
inline Condition operator>=(const Term& a, const Term& b) {
  return compare("GreaterOrEqual", a, b);
}
inline Condition operator==(const Term& a, const Term& b) {
  return compare("Equal", a, b);
}
inline Condition operator<(const Term& a, double b) {
  return a < a.number(b);
}
inline Condition operator>(const Term& a, double b) {
  return a > a.number(b);
}
inline Condition operator<=(const Term& a, double b) {
  return a <= a.number(b);
}
inline Condition operator==(const Term& a, double b) {
  return a == a.number(b);
}
inline Condition both(const Condition& a, const Condition& b) {
  return {a.context, a.context->add("And", {a.value, b.value}, {}, DType::boolean)};
}
inline Term where(const Condition& c, const Term& yes, const Term& no) {
  return yes.made("Where", {c.value, yes, no});
}
inline Term where(const Condition& c, const Term& yes, double no) {
  return where(c, yes, yes.number(no));
}
inline Term where(const Condition& c, double yes, const Term& no) {
  return where(c, no.number(yes), no);
}
// 1 where it holds, else 0, of the type of `like`.
inline Term as_number(const Condition& c, const Term& like) {
  return like.made("Cast", {c.value}, {{"to", static_cast<int64_t>(like.value->type.dtype)}});
}

inline Term cast_to(DType type, const Term& x) {
  if (x.value->type.dtype == type) return x;
  return {*x.context, x.context->add("Cast", {x}, {{"to", static_cast<int64_t>(type)}}, type)};
}
// What a formula of these operands gives; in 16 bits it is computed in float32, and the result rounded.
template <typename Formula, typename... Operands>
Term in_float32(const Formula& formula, const Term& first, const Operands&... others) {
  const DType type = first.value->type.dtype;
  if (bits_of(type) >= 32) return formula(first, others...);
  return cast_to(type, formula(cast_to(DType::float32, first), cast_to(DType::float32, others)...));
}

// All axes but that of the channels [N, C, ...].
inline std::vector<int64_t> all_but_channels(size_t rank) {
  std::vector<int64_t> axes = {0};
  for (size_t d = 2; d < rank; ++d) axes.push_back(static_cast<int64_t>(d));
  return axes;
}

// g divided by the number of elements of x that make one of y. (reduction_gradients.cpp)
Term divided_by_count(GradientContext& c, const Term& g, Value* x, Value* y);

// The gradient of the first input alone.
inline std::vector<Value*> only_first(GradientContext& c, Value* gradient) {
  std::vector<Value*> found = c.none();
  found[0] = gradient;
  return found;
}

}  // namespace fretsaw
