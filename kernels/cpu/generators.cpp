// Operators that make tensors from little: Constant, ConstantOfShape, Range, EyeLike and the window functions.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>

#include "kernels/cpu/cosine_windows.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/random_operators.h"
#include "kernels/cpu/scalar_types.h"

namespace fretsaw {

const CosineWindow& cosine_window_of(const Node& node) {
  const auto* window =
      std::find_if(std::begin(kCosineWindows), std::end(kCosineWindows), [&](const CosineWindow& w) { return node.op == w.op; });
  if (window == std::end(kCosineWindows)) throw Error(node.op + " is no window function");
  return *window;
}

namespace {

// The tensor that a Constant node's one value attribute describes.
TensorPtr constant_of(const Node& node) {
  if (node.has("value")) return node.get_tensor("value");
  if (node.has("value_int")) return make_int64(node.get_int("value_int", 0));
  if (node.has("value_ints")) return make_int64s(node.get_ints("value_ints"));
  if (node.has("value_float")) return make_float(node.get_float("value_float", 0));
  if (node.has("value_floats")) {
    const std::vector<float> values = node.get_floats("value_floats");
    auto tensor = make_tensor(DType::float32, {static_cast<int64_t>(values.size())});
    if (!values.empty()) std::memcpy(mutable_data(*tensor), values.data(), values.size() * sizeof(float));
    return tensor;
  }
  auto tensor = std::make_shared<Tensor>();
  tensor->dtype = DType::string;
  if (node.has("value_string")) {
    tensor->strings = {node.get_string("value_string", "")};
  } else if (node.has("value_strings")) {
    tensor->strings = node.get_strings("value_strings");
    tensor->dims = {static_cast<int64_t>(tensor->strings.size())};
  } else {
    throw Error("the constant has no value that can be read", "give it a dense value");
  }
  return tensor;
}

TensorView view_of(const Tensor& tensor) {
  if (tensor.is_missing()) throw Error("the constant's bytes are missing: " + tensor.missing, "put the weight file beside the model");
  const bool complete =
      tensor.dtype == DType::string ? static_cast<int64_t>(tensor.strings.size()) == tensor.count() : tensor.data || tensor.count() == 0;
  require(complete, "the constant has fewer elements than its shape says");
  TensorView view{.dtype = tensor.dtype, .dims = tensor.dims};
  // Views do not know constants; nobody writes through an input.
  view.data = const_cast<std::byte*>(tensor.data);
  if (tensor.dtype == DType::string) view.data = const_cast<std::string*>(tensor.strings.data());
  return view;
}

CompiledKernel make_constant(const CompileContext& c) {
  const TensorPtr tensor = constant_of(c.node());
  require(tensor != nullptr, "the constant has no value");
  return {[tensor](RunContext& r) {
    const TensorView from = view_of(*tensor);
    copy_view(sized_output(r, 0, from.dims, from.dtype), from, r.threads());
  }};
}

CompiledKernel make_constant_of_shape(const CompileContext& c) {
  TensorPtr value = c.node().get_tensor("value");
  if (!value) value = make_float(0);
  require(value->count() == 1, "the value must have one element");
  return {[value](RunContext& r) {
    const TensorView from = view_of(*value);
    const Dims dims = r.input_ints(0);
    TensorView& y = sized_output(r, 0, dims, from.dtype);
    ElementReader element(from);
    ElementWriter to(y);
    copy_strided(y.dtype, {y.count()}, to.data(), {1}, element.data(), {0}, r.threads());
    to.finish();
  }};
}

// How many numbers a range has; throws Error when it has no end or too many.
int64_t range_count(double start, double limit, double delta) {
  require(delta != 0, "the delta of a range is 0");
  const double count = std::ceil((limit - start) / delta);
  if (!std::isfinite(count) || count > 0x1p48)
    throw Error("a range from " + std::to_string(start) + " to " + std::to_string(limit) + " is too long");
  return count > 0 ? static_cast<int64_t>(count) : 0;
}

template <typename T>
void write_range(RunContext& r) {
  const T start = *r.input(0).as<T>(), limit = *r.input(1).as<T>(), delta = *r.input(2).as<T>();
  if constexpr (std::is_integral_v<T>) {
    require(delta != 0, "the delta of a range is 0");
    const __int128 distance = static_cast<__int128>(limit) - start, step = delta;  // 64-bit differences may not fit 64 bits
    const __int128 whole = (distance > 0) == (step > 0) && distance != 0 ? (distance + step + (step > 0 ? -1 : 1)) / step : 0;
    if (whole > (int64_t{1} << 48)) throw Error("a range from " + std::to_string(start) + " to " + std::to_string(limit) + " is too long");
    const auto count = static_cast<int64_t>(whole);
    auto* y = sized_output(r, 0, {count}, r.input(0).dtype).template as<T>();
    for (int64_t i = 0; i < count; ++i)
      y[i] = static_cast<T>(static_cast<uint64_t>(start) + static_cast<uint64_t>(i) * static_cast<uint64_t>(delta));
  } else {
    using C = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const C first = static_cast<C>(start), step = static_cast<C>(delta);
    const int64_t count = range_count(first, static_cast<C>(limit), step);
    auto* y = sized_output(r, 0, {count}, r.input(0).dtype).template as<T>();
    for (int64_t i = 0; i < count; ++i) y[i] = static_cast<T>(first + static_cast<C>(i) * step);
  }
}

CompiledKernel make_range(const CompileContext&) {
  return {[](RunContext& r) {
    for (size_t i = 0; i < 3; ++i) {
      require(r.input(i).count() == 1, "start, limit and delta must be scalars");
      require(r.input(i).dtype == r.input(0).dtype, "start, limit and delta must have one type");
    }
    dispatch<types::numbers>(r.input(0).dtype, [&]<typename T>() { write_range<T>(r); });
  }};
}

CompiledKernel make_eye_like(const CompileContext& c) {
  const auto attribute = static_cast<DType>(c.node().get_int("dtype", 0));
  const int64_t k = c.node().get_int("k", 0);
  return {[=](RunContext& r) {
    const Dims dims = r.input(0).dims;
    require(dims.size() == 2, "the input must be a matrix");
    TensorView& y = sized_output(r, 0, dims, attribute == DType::undefined ? r.input(0).dtype : attribute);
    const int64_t rows = dims[0], columns = dims[1], shift = std::clamp(k, -rows - 1, columns + 1);
    std::vector<float> values(static_cast<size_t>(y.count()), 0.0f);
    for (int64_t row = std::max<int64_t>(0, -shift); row < rows && row + shift < columns; ++row) {
      values[static_cast<size_t>(row * columns + row + shift)] = 1.0f;
    }
    store_from<float>(y.dtype, y.data, 0, y.count(), values.data());
  }};
}

CompiledKernel make_window(const CompileContext& c) {
  const CosineWindow window = cosine_window_of(c.node());
  const bool periodic = c.node().get_int("periodic", 1) != 0;
  const auto dtype = static_cast<DType>(c.node().get_int("output_datatype", 1));
  return {[=](RunContext& r) {
    const int64_t size = input_int(r, 0);
    TensorView& y = sized_output(r, 0, {size}, dtype);
    const double period = static_cast<double>(periodic ? size : size - 1);
    std::vector<double> values(static_cast<size_t>(size), 1.0);
    for (int64_t i = 0; i < size && period > 0; ++i) {
      const double angle = 2 * std::numbers::pi * static_cast<double>(i) / period;
      values[static_cast<size_t>(i)] = window.constant - window.first * std::cos(angle) + window.second * std::cos(2 * angle);
    }
    store_from<double>(dtype, y.data, 0, size, values.data());
  }};
}

}  // namespace

void register_generators(KernelRegistry& registry) {
  registry.add({.op = "Constant", .make = make_constant});
  registry.add({.op = "ConstantOfShape", .make = make_constant_of_shape});
  registry.add({.op = "Range", .make = make_range});
  registry.add({.op = "EyeLike", .make = make_eye_like});
  for (const CosineWindow& window : kCosineWindows) registry.add({.op = window.op, .make = make_window});
  register_random(registry);
}

}  // namespace fretsaw
