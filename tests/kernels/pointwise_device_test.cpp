// Elementwise operators on a device: every operator in every type, fused steps, layouts.
#include <limits>
#include <memory>

#include "kernels/cpu/scalar_types.h"
#include "tests/kernels/fused_step.h"
#include "tests/kernels/test_data.h"

namespace fretsaw::testing {
namespace {

// --- every operator of the table in every type ---

struct Operator {
  const char* op;
  TypeSet types;
  size_t operands;
};
const Operator kOperators[] = {
#define FRETSAW_UNARY(name, set, expression) {#name, types::set, 1},
#define FRETSAW_UNARY_ATTR(name, set, a_name, a_value, b_name, b_value, expression) {#name, types::set, 1},
#define FRETSAW_UNARY_CHOICE(name, set, attribute, choice1, expression1, choice2, expression2) {#name, types::set, 1},
#define FRETSAW_TEST(name, set, a_name, a_value, b_name, b_value, expression) {#name, types::set, 1},
#define FRETSAW_BINARY(name, set, expression) {#name, types::set, 2},
#define FRETSAW_BINARY_ATTR(name, set, a_name, a_value, expression) {#name, types::set, 2},
#define FRETSAW_BINARY_CHOICE(name, set, attribute, choice1, expression1, choice2, expression2) {#name, types::set, 2},
#define FRETSAW_BINARY_MIXED(name, set, expression) {#name, types::set, 2},
#define FRETSAW_COMPARISON(name, set, expression) {#name, types::set, 2},
#define FRETSAW_VARIADIC(name, set, combine, finish) {#name, types::set, 3},
#include "graph/operators/elementwise.inc"
};

// Small numbers, large ones and the ends of the type. Floats have infinities and NaN too.
std::vector<double> varied_values(DType dtype, size_t n, uint32_t seed) {
  const bool floating = is_float(dtype), without_sign = contains(types::unsigned_integers | types::booleans, dtype);
  std::vector<double> values = spread_values(static_cast<int64_t>(n), without_sign ? 0 : -4, dtype == DType::boolean ? 2 : 5, seed);
  std::vector<double> special = {0, 1, 2, 100, 7};
  if (!without_sign) special.insert(special.end(), {-1, -2, -100});
  if (floating) special.insert(special.end(), {-0.0, INFINITY, -INFINITY, NAN, 1e-3, 0.5, -0.25, 3e4});
  for (size_t i = 0; i < special.size() && dtype != DType::boolean; ++i) values[(i * 5 + seed) % n] = special[i];
  return values;
}

std::vector<Attribute> attributes_for(const std::string& op, DType dtype) {
  if (op == "BitShift") return {attribute("direction", std::string(static_cast<int>(dtype) % 2 ? "LEFT" : "RIGHT"))};
  if (op == "Mod" && is_float(dtype)) return {attribute("fmod", int64_t{1})};
  return {};
}

// Runs what was added to a step, each result wanted outside, and begins another.
class Batch {
 public:
  Batch(Device& device, Tolerance tolerance) : device_(device), tolerance_(tolerance) {}
  FusedStep& step() { return *step_; }
  void want(const std::string& what, Value* v) {
    names_.push_back(what);
    values_.push_back(v);
  }
  bool full() const { return values_.size() >= 16; }
  void flush() {
    if (values_.empty()) return;
    const std::vector<RuntimeValue> got = step_->run_fused(device_, step_->context(values_));
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(difference(got[i], step_->wanted(values_[i]), tolerance_), "") << names_[i];
    step_ = std::make_unique<FusedStep>();
    names_.clear(), values_.clear();
  }

 private:
  Device& device_;
  Tolerance tolerance_;
  std::unique_ptr<FusedStep> step_ = std::make_unique<FusedStep>();
  std::vector<std::string> names_;
  std::vector<Value*> values_;
};

TEST(PointwiseDevice, EveryOperatorInEveryTypeGivesWhatTheCpuGives) {
  FRETSAW_DEVICE_OR_SKIP(device);
  for (int number = 1; number <= static_cast<int>(DType::int2); ++number) {
    const auto dtype = static_cast<DType>(number);
    Batch batch(*device, tolerance_of(dtype));
    std::vector<Value*> inputs;
    for (const Operator& row : kOperators) {
      if (!contains(row.types & ~types::strings, dtype)) continue;
      for (size_t i = inputs.size(); i < 3; ++i) {
        const Dims dims = i == 1 ? Dims{83} : Dims{5, 83};
        const auto values = varied_values(dtype, static_cast<size_t>(count_of(dims)), static_cast<uint32_t>(i + 1));
        inputs.push_back(batch.step().input(tensor_as(dtype, dims, values)));
      }
      const std::vector<Value*> operands(inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(row.operands));
      batch.want(std::string(row.op) + " " + std::string(name_of(dtype)),
                 batch.step().add(row.op, operands, attributes_for(row.op, dtype)));
      if (batch.full()) batch.flush(), inputs.clear();
    }
    batch.flush();
  }
}

TEST(PointwiseDevice, CastsBetweenAllTypes) {
  FRETSAW_DEVICE_OR_SKIP(device);
  constexpr TypeSet castable = types::ordered | types::float8s;
  std::vector<double> values = spread_values(300, -300, 300);
  const double special[] = {0,     -0.0,  1,    255,  256,   448,  449, 464, 465,      1e9,       -1e9,
                            65504, 65520, 3e38, 1e-9, 1e-40, 0.75, 2.5, 3.5, INFINITY, -INFINITY, NAN};
  std::copy(std::begin(special), std::end(special), values.begin());
  for (int from = 1; from <= static_cast<int>(DType::int2); ++from) {
    if (!contains(castable, static_cast<DType>(from))) continue;
    Batch batch(*device, {0, 0});
    Value* x = nullptr;
    for (int to = 1; to <= static_cast<int>(DType::int2); ++to) {
      if (!contains(castable, static_cast<DType>(to))) continue;
      for (int64_t saturate : {1, 0}) {
        if (!saturate && !contains(types::float8s, static_cast<DType>(to))) continue;
        if (!x) x = batch.step().input(tensor_as(static_cast<DType>(from), {300}, values));
        Value* y = batch.step().add("Cast", {x}, {attribute("to", int64_t{to}), attribute("saturate", saturate)});
        batch.want(std::string(name_of(static_cast<DType>(from))) + " to " + std::string(name_of(static_cast<DType>(to))), y);
        if (batch.full()) batch.flush(), x = nullptr;
      }
    }
    batch.flush();
  }
}

TEST(PointwiseDevice, PowerMixesTypes) {
  FRETSAW_DEVICE_OR_SKIP(device);
  constexpr DType kinds[] = {DType::float32, DType::float16, DType::int32, DType::uint8, DType::int64, DType::float64};
  for (DType base : kinds) {
    for (DType exponent : kinds) {
      Batch batch(*device, tolerance_of(base));
      const std::string what = std::string(name_of(base)) + " " + std::string(name_of(exponent)) + " ";
      Value* x = batch.step().input(random_tensor(base, {4, 60}, 1, 1, 5));
      for (double fixed : {2.0, 3.0, 0.5, -0.5, -1.0}) {
        if (contains(types::unsigned_integers, exponent) && fixed < 0) continue;
        Value* e = batch.step().constant(tensor_as(exponent, {1, 1}, {fixed}));
        batch.want(what + std::to_string(fixed), batch.step().add("Pow", {x, e}));
      }
      batch.want(what, batch.step().add("Pow", {x, batch.step().input(random_tensor(exponent, {60}, 2, 0, 3))}));
      batch.flush();
    }
  }
}

TEST(PointwiseDevice, WhereMovesElementsOfAnyType) {
  FRETSAW_DEVICE_OR_SKIP(device);
  for (int number = 1; number <= static_cast<int>(DType::int2); ++number) {
    const auto dtype = static_cast<DType>(number);
    if (dtype == DType::string || bits_of(dtype) < 8) continue;
    const size_t bytes = static_cast<size_t>(bits_of(dtype)) / 8;
    RuntimeValue x = make_value(dtype, {7, 33}), y = make_value(dtype, {33});
    for (size_t i = 0; i < 7 * 33 * bytes; ++i)
      x.tensor.as<uint8_t>()[i] = dtype == DType::boolean ? i % 2 : static_cast<uint8_t>(i * 3 % 0x70);
    SCOPED_TRACE(name_of(dtype));
    FusedStep step;
    std::vector<double> flags;
    for (int i = 0; i < 7; ++i) flags.push_back(i % 2);
    Value* z = step.add("Where", {step.input(tensor_as(DType::boolean, {7, 1}, flags)), step.input(x), step.input(y)});
    EXPECT_EQ(difference(step.run_fused(*device, step.context({z}))[0], step.wanted(z), {0, 0}), "");
  }
}

// --- broadcasting, layouts, sizes ---

TEST(PointwiseDevice, BroadcastsInBothLayouts) {
  FRETSAW_DEVICE_OR_SKIP(device);
  const std::pair<Dims, Dims> shapes[] = {
      {{}, {}},
      {{1}, {}},
      {{0, 3}, {3}},
      {{7, 768}, {768}},
      {{7, 767}, {767}},
      {{700, 3}, {700, 1}},
      {{4, 1}, {1, 5}},
      {{3, 1, 5}, {2, 1}},
      {{2, 3, 4, 5, 6}, {3, 1, 5, 1}},
      {{2, 12, 7, 7}, {12, 1, 1}},
      {{2, 12, 8, 8}, {1, 12, 1, 1}},
      {{2, 12, 8, 8}, {2, 12, 1, 1}},
      {{2, 12, 8, 8}, {2, 1, 8, 8}},
      {{2, 12, 8, 8}, {8}},
      {{2, 12, 8, 8}, {2, 12, 8, 8}},
      {{2, 12, 8, 8}, {1, 12, 8, 8}},
      {{2, 13, 5, 3}, {1, 13, 1, 3}},
      {{2, 12, 1, 8}, {12, 8, 1}},
      {{1200, 1001}, {1001}},
  };
  for (const auto& [a, b] : shapes) {
    for (DType dtype : {DType::float32, DType::float16, DType::int8}) {
      for (Layout layout : {Layout::plain, Layout::nhwc}) {
        SCOPED_TRACE(to_string(a) + to_string(b) + std::string(name_of(dtype)) + (layout == Layout::nhwc ? " nhwc" : ""));
        FusedStep step;
        Value* x = step.input(random_tensor(dtype, a, 1));
        Value* difference = step.add("Sub", {x, step.input(random_tensor(dtype, b, 2))});
        expect_step(*device, step, {difference}, layout, a.size() == 4 ? a : Dims{-1});
      }
    }
  }
}

TEST(PointwiseDevice, ShapesThatAreKnownWhenItRuns) {
  FRETSAW_DEVICE_OR_SKIP(device);
  for (const auto& [a, b] : std::vector<std::pair<Dims, Dims>>{{{3, 40}, {40}}, {{3, 40}, {3, 40}}, {{2, 3, 5}, {3, 1}}, {{0, 4}, {1}}}) {
    for (const char* op : {"Add", "Less", "Max", "Pow"}) {
      FusedStep step;
      Value* y =
          step.add(op, {step.input(random_tensor(DType::float32, a, 1, 1, 3)), step.input(random_tensor(DType::float32, b, 2, 1, 3))});
      CompileContext c = step.context({y});
      for (Type& type : c.input_types) type.shape = std::nullopt;
      for (Type& type : c.output_types) type.shape = std::nullopt;
      EXPECT_EQ(difference(step.run_fused(*device, c)[0], step.wanted(y), tolerance_of(DType::float32)), "")
          << op << to_string(a) << to_string(b);
    }
  }
}

// --- fused elementwise steps ---

TEST(PointwiseDevice, ChainsWithBiasResidualAndSeveralResults) {
  FRETSAW_DEVICE_OR_SKIP(device);
  for (DType dtype : kHalfAndWide) {
    for (int64_t n : {768, 61}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(n));
      FusedStep step;
      Value* x = step.input(random_tensor(dtype, {2, 33, n}, 1));
      Value* biased = step.add("Add", {x, step.constant(random_tensor(dtype, {n}, 2))});
      Value* sum = step.add("Add", {biased, step.input(random_tensor(dtype, {2, 33, n}, 3))});
      Value* gelu = step.add("Gelu", {sum});
      Value* half = step.add("Mul", {gelu, step.constant(tensor_as(dtype, {}, {0.5}))});
      Value* limited = step.add("Clip", {half, step.constant(tensor_as(dtype, {}, {-0.1})), step.input(tensor_as(dtype, {1}, {0.9}))});
      expect_step(*device, step, {sum, limited});
    }
  }
}

TEST(PointwiseDevice, GatesAndSmallerValuesBetween) {
  FRETSAW_DEVICE_OR_SKIP(device);
  for (Layout layout : {Layout::plain, Layout::nhwc}) {
    const Dims dims{2, 24, 6, 6};
    FusedStep step;
    Value* x = step.input(random_tensor(DType::float32, dims, 1));
    Value* scale = step.add("HardSigmoid", {step.input(random_tensor(DType::float32, {2, 24, 1, 1}, 2))});  // smaller than the result
    Value* gated = step.add("Mul", {x, scale});
    Value* y = step.add("Add", {gated, step.input(random_tensor(DType::float32, dims, 3))});
    Value* z = step.add("Relu", {y});
    expect_step(*device, step, {y, z}, layout, dims);
  }
  FusedStep step;
  Value* gate = step.input(random_tensor(DType::bfloat16, {17, 256}, 1));
  Value* y = step.add("Mul", {step.add("Swish", {gate}), step.input(random_tensor(DType::bfloat16, {17, 256}, 2))});
  expect_step(*device, step, {y});
}

TEST(PointwiseDevice, TypesMixInOneStep) {
  FRETSAW_DEVICE_OR_SKIP(device);
  FusedStep step;
  Value* index = step.input(random_tensor(DType::int64, {1, 40}, 1, 0, 40));
  Value* x = step.input(random_tensor(DType::float16, {30, 40}, 2));
  Value* wide = step.add("Cast", {x}, {attribute("to", static_cast<int64_t>(DType::float32))});
  Value* rest = step.add("Mod", {index, step.constant(tensor_as(DType::int64, {1}, {7}))});
  Value* even = step.add("Less", {rest, step.constant(tensor_as(DType::int64, {}, {3}))});
  Value* both = step.add("And", {even, step.add("Not", {step.input(tensor_as(DType::boolean, {30, 1}, std::vector<double>(30, 0)))})});
  Value* chosen = step.add("Where", {both, wide, step.add("Neg", {wide})});
  Value* small = step.add("Cast", {chosen}, {attribute("to", static_cast<int64_t>(DType::int8))});
  Value* mask = step.add("Equal", {small, step.add("CastLike", {index, small})});
  expect_step(*device, step, {chosen, small, mask});
}

TEST(PointwiseDevice, RefusesWhatIsNoOneSpace) {
  FRETSAW_DEVICE_OR_SKIP(device);
  FusedStep step;
  Value* small = step.add("Exp", {step.input(random_tensor(DType::float32, {8}, 1))});
  Value* large = step.add("Add", {small, step.input(random_tensor(DType::float32, {3, 8}, 2))});
  CompileContext c = step.context({small, large});
  c.device = device;
  EXPECT_NE(why_unsupported_on_device(c), "");
  c = step.context({large});
  c.device = device;
  EXPECT_EQ(why_unsupported_on_device(c), "");
}

TEST(PointwiseDevice, DropoutInInferenceCopies) {
  FRETSAW_DEVICE_OR_SKIP(device);
  FusedStep step;
  Value* y = step.add("Dropout", {step.input(random_tensor(DType::float32, {5, 7}, 1))}, {}, 2);
  expect_step(*device, step, {y, step.output(1)});
}

}  // namespace
}  // namespace fretsaw::testing
