// Builds models around single operators and differentiates them, by rules and by differences.
#include "tests/kernels/gradient_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "graph/errors.h"
#include "graph/gradients.h"
#include "graph/passes.h"
#include "kernels/cpu/convert.h"
#include "tests/kernels/interpreter.h"

namespace fretsaw::testing {

namespace {

constexpr double kStep = 1e-5;
constexpr int kDirections = 4;

using Numbers = std::vector<double>;

Numbers random_numbers(size_t n, double low, double high, uint32_t seed) {
  Numbers out;
  uint32_t state = seed * 2654435761U + 1;
  for (size_t i = 0; i < n; ++i) {
    state = state * 1664525U + 1013904223U;
    out.push_back(low + (high - low) * (state >> 8) / static_cast<double>(1 << 24));
  }
  return out;
}

Numbers numbers_of(const RuntimeValue& value) {
  Numbers out(static_cast<size_t>(value.tensor.count()));
  load_as<double>(value.tensor.dtype, value.tensor.data, 0, value.tensor.count(), out.data());
  return out;
}

RuntimeValue float_value(DType dtype, const Dims& dims, const Numbers& numbers) {
  RuntimeValue value = make_value(dtype, dims);
  store_from<double>(dtype, value.tensor.data, 0, value.tensor.count(), numbers.data());
  return value;
}

// In what a case is computed.
struct Form {
  DType type = DType::float64;
  DType numbers = DType::float64;  // what the operands are rounded to
  bool symbolic = false;           // sizes are not known beforehand
  int threads = 1;
  std::optional<size_t> only;  // of the wanted inputs, from the first on, the one that is wanted
};

TensorPtr tensor_from(const RuntimeValue& value) {
  auto tensor = make_tensor(value.tensor.dtype, value.tensor.dims);
  if (tensor->bytes() > 0) std::memcpy(mutable_data(*tensor), value.tensor.data, tensor->bytes());
  return tensor;
}

bool contains(const std::vector<size_t>& list, size_t i) {
  return std::find(list.begin(), list.end(), i) != list.end();
}

// The operator in a model, its loss, and the values that are given.
struct Built {
  Model model;
  Value* loss = nullptr;
  std::vector<Value*> wanted;          // those of the inputs whose gradients are asked for
  std::vector<RuntimeValue> given;     // what the graph's inputs get
  std::vector<size_t> wanted_indexes;  // of `wanted` among the graph's inputs
};

Shape symbols(const Dims& dims, size_t input) {
  Shape shape;
  for (size_t d = 0; d < dims.size(); ++d) shape.push_back(Dim(fmt::format("n{}_{}", input, d)));
  return shape;
}

class Builder {
 public:
  Builder(const GradientCase& c, const Form& form) : c_(c), type_(form.type), form_(form) {}

  Built build() {
    built_.model.ir_version = 10;
    built_.model.opsets = {{"", newest_opset()}};
    built_.model.graph = std::make_shared<Graph>();
    std::vector<Value*> operands;
    for (size_t i = 0; i < c_.inputs.size(); ++i) operands.push_back(operand(i));
    std::vector<std::string> names;
    for (size_t o = 0; o < c_.outputs; ++o) names.push_back(contains(c_.left_out, o) ? "" : fmt::format("y{}", o));
    Node* node = graph().add_node(c_.op, operands, names, c_.attributes);
    node->name = "it";
    infer_shapes(built_.model);
    add_loss(*node);
    graph().outputs = {built_.loss};
    infer_shapes(built_.model);
    return std::move(built_);
  }

 private:
  Graph& graph() { return *built_.model.graph; }

  Value* operand(size_t i) {
    const RuntimeValue& x = c_.inputs[i];
    if (x.kind == RuntimeValue::Kind::absent) return nullptr;
    const bool is_wide = x.tensor.dtype == DType::float64;
    if (!is_wide && !contains(c_.fed, i)) return graph().add_constant(fmt::format("x{}", i), tensor_from(x));
    const DType type = is_wide ? type_ : x.tensor.dtype;
    const bool open = form_.symbolic && is_wide;
    Value* v = graph().add_value(fmt::format("x{}", i), Type::tensor(type, open ? symbols(x.tensor.dims, i) : shape_of(x.tensor.dims)));
    if (is_wide && !contains(c_.frozen, i)) {
      if (!form_.only || *form_.only == differentiable_) {
        built_.wanted.push_back(v);
        built_.wanted_indexes.push_back(graph().inputs.size());
      }
      ++differentiable_;
    }
    graph().inputs.push_back(v);
    built_.given.push_back(is_wide ? rounded(x.tensor.dims, numbers_of(x)) : x);
    return v;
  }
  RuntimeValue rounded(const Dims& dims, const Numbers& numbers) const {
    return float_value(type_, dims, numbers_of(float_value(form_.numbers, dims, numbers)));
  }

  // Each output times numbers of its shape, which running it shows.
  void add_loss(const Node& node) {
    Model alone = clone(built_.model);
    std::vector<size_t> present;
    for (size_t o = 0; o < node.outputs.size(); ++o) {
      if (!node.outputs[o]) continue;
      present.push_back(o);
      alone.graph->outputs.push_back(alone.graph->nodes[0]->outputs[o]);
    }
    const std::vector<RuntimeValue> results = Interpreter(std::move(alone)).run(built_.given);
    for (size_t k = 0; k < std::min(results.size(), c_.in_loss); ++k) {
      const size_t o = present[k];
      const TensorView& y = results[k].tensor;
      if (!is_float(y.dtype)) continue;
      Value* term = node.outputs[o];
      if (y.dtype != type_) term = graph().add_node("Cast", {term}, {fmt::format("cast{}", o)}, {{"to", int64_t(type_)}})->outputs[0];
      const Numbers numbers = random_numbers(static_cast<size_t>(y.count()), c_.least, c_.most, 100 + static_cast<uint32_t>(o));
      Dims dims = y.dims;
      if (!node.outputs[o]->type.shape) {  // so that the sum below is known to be a scalar
        dims = {y.count()};
        Value* flat = graph().add_constant(fmt::format("f{}", o), make_int64s({-1}));
        term = graph().add_node("Reshape", {term, flat}, {fmt::format("r{}", o)})->outputs[0];
      }
      Value* weights = graph().add_constant(fmt::format("w{}", o), tensor_from(rounded(dims, numbers)));
      term = graph().add_node("Mul", {term, weights}, {fmt::format("m{}", o)})->outputs[0];
      term = graph().add_node("ReduceSum", {term}, {fmt::format("s{}", o)}, {{"keepdims", int64_t{0}}})->outputs[0];
      built_.loss = built_.loss ? graph().add_node("Add", {built_.loss, term}, {fmt::format("l{}", o)})->outputs[0] : term;
    }
  }

  const GradientCase& c_;
  DType type_;
  Form form_;
  size_t differentiable_ = 0;
  Built built_;
};

std::set<std::string>& operators_made() {
  static std::set<std::string> names;
  return names;
}

// The gradients of the wanted inputs by the rules; zeros where there is none.
std::vector<Numbers> by_rules(const GradientCase& c, const Form& form = {}) {
  Built built = Builder(c, form).build();
  const Gradients gradients = add_gradients(built.model, built.loss, built.wanted);
  verify(*built.model.graph);
  for (const Node* node : built.model.graph->nodes)
    if (!node->domain.empty()) operators_made().insert(node->op);
  std::vector<size_t> present;
  for (size_t k = 0; k < built.wanted.size(); ++k) {
    Value* g = gradients.of(built.wanted[k]);
    if (!g) continue;
    const Type &found = g->type, &own = built.wanted[k]->type;
    if (found.dtype != own.dtype || !found.shape || found.shape->size() != own.shape->size() || (is_static(*own.shape) && !(found == own)))
      throw Error(fmt::format("the gradient of '{}', {}, is inferred as {}", built.wanted[k]->name, to_string(own), to_string(found)));
    built.model.graph->outputs.push_back(g);
    present.push_back(k);
  }
  const std::vector<RuntimeValue> results = Interpreter(std::move(built.model), {.threads = form.threads}).run(built.given);
  std::vector<Numbers> found;
  for (size_t i : built.wanted_indexes) found.emplace_back(static_cast<size_t>(built.given[i].tensor.count()), 0.0);
  for (size_t k = 0; k < present.size(); ++k) {
    const RuntimeValue &g = results[k + 1], &x = built.given[built.wanted_indexes[present[k]]];
    if (g.tensor.dims != x.tensor.dims)
      throw Error(
          fmt::format("the gradient of input {} has the shape {}, not {}", present[k], to_string(g.tensor.dims), to_string(x.tensor.dims)));
    found[present[k]] = numbers_of(g);
  }
  return found;
}

double dot(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double range_of(const Numbers& a) {
  double most = 0;
  for (double x : a) most = std::max(most, std::abs(x));
  return most;
}

// What gradients of this size are compared by.
double scale_of(double range) {
  return std::max(1e-6, range);
}

// Along random directions of one input at a time. A difference of two losses is no more exact than the losses are: each is a sum of terms
// that were rounded, and dividing by the step makes that larger.
std::string differs_from_differences(const GradientCase& c, const std::vector<Numbers>& gradients) {
  const Built built = Builder(c, {}).build();
  const Interpreter forward(clone(built.model));
  for (size_t k = 0; k < built.wanted.size(); ++k) {
    const RuntimeValue& x = built.given[built.wanted_indexes[k]];
    const Numbers at = numbers_of(x);
    for (int trial = 0; trial < kDirections; ++trial) {
      const Numbers direction = random_numbers(at.size(), -1, 1, static_cast<uint32_t>(trial) + 11);
      double loss[2];
      for (int side : {0, 1}) {
        Numbers moved = at;
        for (size_t i = 0; i < at.size(); ++i) moved[i] += (side ? kStep : -kStep) * direction[i];
        std::vector<RuntimeValue> given = built.given;
        given[built.wanted_indexes[k]] = float_value(DType::float64, x.tensor.dims, moved);
        loss[side] = numbers_of(forward.run(given)[0])[0];
      }
      const double measured = (loss[1] - loss[0]) / (2 * kStep), expected = dot(gradients[k], direction);
      const double scale = scale_of(range_of(gradients[k]) * std::sqrt(static_cast<double>(at.size())));
      const double noise = std::numeric_limits<double>::epsilon() * (std::abs(loss[0]) + std::abs(loss[1])) / (2 * kStep);
      if (!(std::abs(measured - expected) <= c.tolerance * scale + noise))
        return fmt::format("input {} along direction {}: the rule says {:.9g}, differences {:.9g}", k, trial, expected, measured);
    }
  }
  return "";
}

std::string differs(const std::vector<Numbers>& got, const std::vector<Numbers>& wanted, double tolerance, const std::string& what) {
  for (size_t k = 0; k < wanted.size(); ++k) {
    const double scale = scale_of(range_of(wanted[k]));
    for (size_t i = 0; i < wanted[k].size(); ++i)
      if (!(std::abs(got[k][i] - wanted[k][i]) <= tolerance * scale))
        return fmt::format("{}: element {} of input {} is {:.9g}, not {:.9g}", what, i, k, got[k][i], wanted[k][i]);
  }
  return "";
}

}  // namespace

RuntimeValue Draw::operator()(const Dims& dims, double low, double high) {
  return float_value(DType::float64, dims, random_numbers(static_cast<size_t>(count_of(dims)), low, high, next++));
}

const std::set<std::string>& gradient_operators_made() {
  return operators_made();
}

std::string gradient_failure(const GradientCase& c) {
  std::string form = "float64", failure;
  try {
    const std::vector<Numbers> gradients = by_rules(c);
    failure = differs_from_differences(c, gradients);
    if (!failure.empty()) return failure;
    const auto check = [&](const std::string& name, const Form& how, const std::vector<Numbers>& wanted, double tolerance) {
      form = name;
      if (failure.empty()) failure = differs(by_rules(c, how), wanted, tolerance, form);
    };
    check("three threads", {.threads = 3}, gradients, 1e-12);
    if (c.symbolic) check("symbolic shapes", {.symbolic = true}, gradients, 1e-9);
    // Another rule may compute it then: ONNX's function for Attention, for a mask that learns, has its scale in float32.
    for (size_t k = 0; k < gradients.size() && gradients.size() > 1; ++k) check("one input alone", {.only = k}, {gradients[k]}, 1e-7);
    if (!c.narrow) return failure;
    for (const auto& [type, tolerance] :
         {std::pair(DType::float32, 1e-4), std::pair(DType::float16, 0.05), std::pair(DType::bfloat16, 0.05)}) {
      if (type == DType::bfloat16 && !c.coarse) continue;
      form = "float64 at numbers of " + std::string(name_of(type));
      const std::vector<Numbers> there = by_rules(c, {.numbers = type});
      check(std::string(name_of(type)), {.type = type, .numbers = type}, there, tolerance);
      if (c.symbolic && bits_of(type) < 32)
        check(std::string(name_of(type)) + " with symbolic shapes", {.type = type, .numbers = type, .symbolic = true}, there, tolerance);
    }
    return failure;
  } catch (const Error& e) {
    return form + ": " + e.what();
  }
}

void note_gradient_operators(const GradientCase& c) {
  for (bool symbolic : {false, c.symbolic}) by_rules(c, {.symbolic = symbolic});
}

}  // namespace fretsaw::testing
