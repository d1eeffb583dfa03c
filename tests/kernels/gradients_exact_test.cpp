// Gradients that differences do not show, of operators that do not compute in float64 or jump, against numbers worked out here.
#include <gtest/gtest.h>

#include "graph/gradients.h"
#include "tests/graph/text_model.h"
#include "tests/kernels/gradient_case.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::testing {

namespace {

using Doubles = std::vector<double>;

// The gradients of these inputs of a model in the newest opset whose output is a loss.
std::vector<RuntimeValue> gradients_of(const std::string& text, const std::vector<std::string>& wanted,
                                       const std::vector<RuntimeValue>& given) {
  Model model = parse_model(static_cast<int>(newest_opset()), text);
  run_passes(model, normalise_passes());
  infer_shapes(model);
  std::vector<Value*> values;
  for (const std::string& name : wanted)
    for (Value* v : model.graph->inputs)
      if (v->name == name) values.push_back(v);
  const Gradients gradients = add_gradients(model, model.graph->outputs[0], values);
  for (const Value* v : values) {
    EXPECT_NE(gradients.of(v), nullptr) << v->name;
    if (gradients.of(v)) model.graph->outputs.push_back(gradients.of(v));
  }
  verify(*model.graph);
  std::vector<RuntimeValue> results = Interpreter(std::move(model)).run(given);
  results.erase(results.begin());
  return results;
}

void expect_near(const RuntimeValue& got, const Dims& dims, const Doubles& wanted, double tolerance, const std::string& what) {
  EXPECT_EQ(got.tensor.dims, dims) << what;
  const Doubles numbers = doubles_of(got);
  ASSERT_EQ(numbers.size(), wanted.size()) << what;
  double most = 0;
  for (double w : wanted) most = std::max(most, std::abs(w));
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(numbers[i], wanted[i], tolerance * most) << what << ", element " << i;
}

std::string sizes(const Dims& dims) {  // as the text of a model has it
  if (dims.empty()) return "";
  std::string text;
  for (int64_t d : dims) text += (text.empty() ? "" : ",") + std::to_string(d);
  return "[" + text + "]";
}

// --- scales of quantised numbers: each gets the sum of g (x - zero point) over its elements ---

struct Scales {
  Dims x, scales;
  std::string attributes;
  std::vector<size_t> scale_of;  // of each element of x
  DType from = DType::uint8;
  bool zeros = true;
  DType type = DType::float32, result = DType::float32;
};

const char* text_name(DType type) {
  return type == DType::float32 ? "float" : type == DType::float8e4m3fn ? "float8e4m3fn" : name_of(type).data();
}

void expect_scales(const Scales& c, bool open) {
  const std::string what = c.attributes + " of " + sizes(c.x) + " with scales " + sizes(c.scales) + (open ? ", sizes open" : "");
  std::string symbols = c.x.size() == 2 ? "[n,m]" : c.x.size() == 3 ? "[n,m,k]" : "[n]";
  const std::string x = open ? symbols : sizes(c.x), from = text_name(c.from), type = text_name(c.type), result = text_name(c.result);
  const std::string attributes = c.attributes.empty() ? "" : "<" + c.attributes + ">";
  const std::string text = "g (" + from + x + " x, " + type + sizes(c.scales) + " s" +
                           (c.zeros ? ", " + from + sizes(c.scales) + " z" : std::string()) + ", " + result + x + " t) => (" + result +
                           " loss) { y = DequantizeLinear" + attributes + (c.zeros ? "(x, s, z)" : "(x, s)") +
                           " p = Mul(y, t) loss = ReduceSum<keepdims=0>(p) }";
  const int64_t count = count_of(c.x), scales = count_of(c.scales);
  Doubles whole, zeros, wanted(static_cast<size_t>(scales), 0);
  for (int64_t i = 0; i < count; ++i) whole.push_back(static_cast<double>(i * 7 % 23));
  for (int64_t i = 0; i < scales; ++i) zeros.push_back(c.zeros ? static_cast<double>(3 + i * 5 % 11) : 0);
  const RuntimeValue weights = tensor_as(c.result, c.x, spread_values(count, 0.5, 1.5, 3)), numbers = tensor_as(c.from, c.x, whole);
  const Doubles g = doubles_of(weights);
  whole = doubles_of(numbers);
  for (size_t i = 0; i < whole.size(); ++i) wanted[c.scale_of[i]] += g[i] * (whole[i] - zeros[c.scale_of[i]]);
  std::vector<RuntimeValue> given = {numbers, tensor_as(c.type, c.scales, spread_values(scales, 0.1, 0.9, 5))};
  if (c.zeros) given.push_back(tensor_as(c.from, c.scales, zeros));
  given.push_back(weights);
  const std::vector<RuntimeValue> found = gradients_of(text, {"s"}, given);
  ASSERT_EQ(found.size(), 1U) << what;
  EXPECT_EQ(found[0].tensor.dtype, c.type) << what;
  expect_near(found[0], c.scales, wanted, c.type == DType::float32 && c.result == DType::float32 ? 1e-6 : 1e-2, what);
}

// The scales of elements [outer, axis, inner], `each` along the axis having one.
std::vector<size_t> along(int64_t outer, int64_t axis, int64_t inner, int64_t each, bool blocked) {
  std::vector<size_t> found;
  const int64_t blocks = (axis + each - 1) / each;
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t a = 0; a < axis; ++a)
      for (int64_t i = 0; i < inner; ++i) found.push_back(static_cast<size_t>(blocked ? (o * blocks + a / each) * inner + i : a));
  return found;
}

TEST(GradientOfScales, IsTheSumOverTheirElements) {
  const std::vector<size_t> one(24, 0);
  std::vector<Scales> cases = {
      {{2, 3, 4}, {}, "", one},
      {{2, 3, 4}, {1}, "", one},
      {{2, 3, 4}, {}, "", one, DType::int32, false},
      {{2, 3, 4}, {3}, "", along(2, 3, 4, 1, false)},
      {{2, 3, 4}, {4}, "axis=-1", along(6, 4, 1, 1, false), DType::int8},
      {{2, 3, 4}, {2}, "axis=0", along(1, 2, 12, 1, false), DType::int16, false},
      {{2, 4}, {2, 2}, "axis=1, block_size=2", along(2, 4, 1, 2, true)},
      {{2, 5}, {2, 3}, "axis=1, block_size=2", along(2, 5, 1, 2, true), DType::int8},
      {{2, 5, 3}, {2, 2, 3}, "axis=-2, block_size=3", along(2, 5, 3, 3, true)},
      {{1, 3, 2}, {1, 1, 1}, "axis=1, block_size=4", std::vector<size_t>(6, 0)},
      {{7}, {7}, "", along(1, 7, 1, 1, false), DType::int8, false},
      {{2, 3, 4}, {3}, "", along(2, 3, 4, 1, false), DType::float8e4m3fn, false},
  };
  for (const DType type : {DType::float16, DType::bfloat16}) {
    for (size_t i : {0, 3, 7}) {
      Scales c = cases[i];
      c.type = c.result = type;
      cases.push_back(c);
      if (i == 7) continue;
      c.result = DType::float32, c.attributes = "output_dtype=1";
      cases.push_back(c);
    }
  }
  for (const Scales& c : cases)
    for (const bool open : {false, true}) expect_scales(c, open);
}

// Rounded to integers and back: as if nothing were rounded, inside of the integers' range; scales get what the rounding leaves.
void expect_straight_through(const Scales& c) {
  const std::string what = sizes(c.x) + " " + sizes(c.scales) + " " + c.attributes + " " + std::string(name_of(c.from));
  const std::string attributes = c.attributes.empty() ? "" : "<" + c.attributes + ">", type(text_name(c.type)), from(text_name(c.from));
  const std::string text = "g (" + type + sizes(c.x) + " x, " + type + sizes(c.scales) + " s, " + from + sizes(c.scales) + " z, " + type +
                           sizes(c.x) + " t) => (" + type + " loss) { q = QuantizeLinear" + attributes + "(x, s, z) y = DequantizeLinear" +
                           attributes + "(q, s, z) p = Mul(y, t) loss = ReduceSum<keepdims=0>(p) }";
  const int64_t count = count_of(c.x), scales = count_of(c.scales);
  const bool is_signed = c.from == DType::int8;
  const double lowest = is_signed ? -128 : 0, highest = is_signed ? 127 : 255;
  Doubles zeros;
  for (int64_t i = 0; i < scales; ++i) zeros.push_back(static_cast<double>(i * 5 % 11) + (is_signed ? 0 : 100));
  const RuntimeValue x = tensor_as(c.type, c.x, spread_values(count, -2, 2, 7)),
                     s = tensor_as(c.type, c.scales, spread_values(scales, 0.008, 0.012, 5)),
                     weights = tensor_as(c.type, c.x, spread_values(count, 0.5, 1.5, 3));
  const Doubles numbers = doubles_of(x), steps = doubles_of(s), g = doubles_of(weights);
  Doubles of_x, of_s(static_cast<size_t>(scales), 0);
  int beyond = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const size_t k = c.scale_of[i];
    const double whole = std::nearbyint(numbers[i] / steps[k]) + zeros[k], kept = std::clamp(whole, lowest, highest);
    beyond += whole != kept;
    of_x.push_back(whole == kept ? g[i] : 0);
    of_s[k] += g[i] * (kept - zeros[k] - (whole == kept ? numbers[i] / steps[k] : 0));
  }
  EXPECT_TRUE(beyond > 0 && beyond < count) << what;
  const std::vector<RuntimeValue> found = gradients_of(text, {"x", "s"}, {x, s, tensor_as(c.from, c.scales, zeros), weights});
  ASSERT_EQ(found.size(), 2U) << what;
  expect_near(found[0], c.x, of_x, c.type == DType::float32 ? 1e-6 : 1e-2, what);
  expect_near(found[1], c.scales, of_s, c.type == DType::float32 ? 1e-5 : 1e-2, what);
}

TEST(GradientOfRounding, GoesStraightThrough) {
  const std::vector<size_t> one(24, 0);
  for (const Scales& c : std::vector<Scales>{
           {{2, 3, 4}, {}, "", one},
           {{2, 3, 4}, {1}, "", one, DType::int8},
           {{2, 3, 4}, {3}, "", along(2, 3, 4, 1, false)},
           {{2, 3, 4}, {4}, "axis=-1", along(6, 4, 1, 1, false), DType::int8},
           {{2, 5, 3}, {2, 2, 3}, "axis=-2, block_size=3", along(2, 5, 3, 3, true), DType::int8},
       })
    expect_straight_through(c);
}

// --- equal numbers ---

TEST(GradientOfUnique, GoesToTheFirstOfEqualNumbers) {
  const RuntimeValue x = tensor<double>({2, 3}, {3, 1, 3, 2, 1, 2}), t = tensor<double>({3}, {10, 20, 30});
  const auto text = [](const std::string& attributes) {
    return "g (double[2,3] x, double[3] t) => (double loss) { y, i, j, n = Unique<" + attributes +
           ">(x) p = Mul(y, t) loss = ReduceSum<keepdims=0>(p) }";
  };
  EXPECT_EQ(values_of<double>(gradients_of(text("sorted=1"), {"x"}, {x, t})[0]), (Doubles{30, 10, 0, 20, 0, 0}));
  EXPECT_EQ(values_of<double>(gradients_of(text("sorted=0"), {"x"}, {x, t})[0]), (Doubles{10, 20, 0, 30, 0, 0}));
}

TEST(GradientOfUnique, GoesToTheFirstOfEqualRows) {
  const RuntimeValue x = tensor<double>({4, 2}, {5, 1, 2, 2, 5, 1, 2, 2}), t = tensor<double>({2, 2}, {1, 2, 3, 4});
  const std::string text =
      "g (double[4,2] x, double[2,2] t) => (double loss) { y = Unique<axis=0>(x) p = Mul(y, t) loss = ReduceSum<keepdims=0>(p) }";
  EXPECT_EQ(values_of<double>(gradients_of(text, {"x"}, {x, t})[0]), (Doubles{3, 4, 1, 2, 0, 0, 0, 0}));
}

// --- CausalConvWithState becomes ONNX's function, whose activation is in float32 ---

// Its gradients in this type against those of its parts in float64.
void expect_causal(const std::string& activation, int64_t length, bool biased, bool continued, DType type) {
  const std::string what = activation + " of " + std::to_string(length) + (biased ? ", bias" : "") + (continued ? ", past state" : "");
  const std::vector<Dims> dims = {{2, 3, length}, {3, 1, 4}, {3}, {2, 3, 3}, {2, 3, length}, {2, 3, 3}};
  const auto text = [&](const std::string& of, const std::string& body) {
    std::string inputs;
    for (size_t i = 0; i < dims.size(); ++i) inputs += (i ? ", " : "") + of + sizes(dims[i]) + " " + "xwbptu"[i];
    return "g (" + inputs + ") => (" + of + " loss) <int64[1] begin = {" + std::to_string(length) + "}, int64[1] end = {" +
           std::to_string(length + 3) + "}, int64[1] axis = {2}> { " + body +
           " m = Mul(y, t) n = Mul(s, u) a = ReduceSum<keepdims=0>(m) c = ReduceSum<keepdims=0>(n) loss = Add(a, c) }";
  };
  std::string operands = "x, w", parts = continued ? "j = Concat<axis=2>(p, x)" : "z = Sub(p, p) j = Concat<axis=2>(z, x)";
  if (biased || continued) operands += biased ? ", b" : ", ";
  if (continued) operands += ", p";
  parts += std::string(" v = Conv<group=3>(j, w") + (biased ? ", b)" : ")");
  parts += activation == "none" ? " y = Identity(v)" : " e = Sigmoid(v) y = Mul(v, e)";
  parts += " s = Slice(j, begin, end, axis)";
  std::vector<std::string> wanted = {"x", "w"};
  if (biased) wanted.push_back("b");
  if (continued) wanted.push_back("p");
  std::vector<RuntimeValue> given, exact;
  for (size_t i = 0; i < dims.size(); ++i) {
    given.push_back(tensor_as(type, dims[i], spread_values(count_of(dims[i]), -1, 1, static_cast<uint32_t>(i + 1))));
    exact.push_back(tensor_as(DType::float64, dims[i], doubles_of(given.back())));
  }
  const std::string whole = "y, s = CausalConvWithState<activation=\"" + activation + "\">(" + operands + ")";
  const auto found = gradients_of(text(text_name(type), whole), wanted, given), right = gradients_of(text("double", parts), wanted, exact);
  ASSERT_EQ(found.size(), wanted.size()) << what;
  for (size_t i = 0; i < wanted.size(); ++i)
    expect_near(found[i], right[i].tensor.dims, doubles_of(right[i]), type == DType::float32 ? 1e-5 : 1e-2, what + ": " + wanted[i]);
}

TEST(GradientOfCausalConvWithState, IsThatOfItsParts) {
  for (const char* activation : {"silu", "swish", "none"})
    for (const int64_t length : {6, 2})
      for (const bool biased : {false, true})
        for (const bool continued : {false, true})
          for (const DType type : {DType::float32, DType::float16}) expect_causal(activation, length, biased, continued, type);
}

// --- matrices of a rank that is 2 less than their size: differences see nothing but rounding ---

TEST(GradientOfDet, IsZeroWhereAllCofactorsAre) {
  const std::string text = "g (double[2,4,4] x, double[2] t) => (double loss) { y = Det(x) p = Mul(y, t) loss = ReduceSum<keepdims=0>(p) }";
  Doubles x = {1, 2, 3, 4, 2, -1, 0, 5, 3, 1, 3, 9, 4, 3, 6, 13};  // the third row is the sum of two, the last that of two others
  Doubles y = {1, 1, 0, 2, 0, 0, 0, 0, 3, 1, 0, 2, 4, 2, 0, 4};
  x.insert(x.end(), y.begin(), y.end());
  for (double g : values_of<double>(gradients_of(text, {"x"}, {tensor({2, 4, 4}, x), tensor<double>({2}, {1, -2})})[0]))
    EXPECT_NEAR(g, 0, 1e-13);
}

}  // namespace

}  // namespace fretsaw::testing
