// Operators that make tensors from numbers that the host knows: Range and the window functions.
#include <cmath>

#include "kernels/cpu/cosine_windows.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cuda/indexing.h"
#include "kernels/cuda/number_types.cuh"

namespace fretsaw::cuda {
namespace {

// y[i] = value(i)
template <typename T, typename Value>
__global__ void __launch_bounds__(kThreads) fill(T* y, int64_t count, Value value) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) y[i] = value(i);
}

template <typename Value>
void launch_fill(RunContext& r, const TensorView& y, const Value& value) {
  using T = decltype(value(int64_t{0}));
  if (y.count() == 0) return;
  fill<T><<<blocks_for(y.count(), kThreads), kThreads, 0, stream_of(r)>>>(y.as<T>(), y.count(), value);
  check_launch("fill");
}

template <typename T>
struct Step {
  double first_number, step_number;
  int64_t first, step;

  __host__ __device__ T operator()(int64_t i) const {
    if constexpr (std::is_integral_v<T>) {  // wraps around
      return static_cast<T>(static_cast<uint64_t>(first) + static_cast<uint64_t>(i) * static_cast<uint64_t>(step));
    } else {
      using Wide = WideOf<T>;
      // The product is rounded before the sum, as on the CPU; a product in float64 is that of float32 exactly.
      const auto along = static_cast<Wide>(static_cast<double>(static_cast<Wide>(i)) * step_number);
      return narrow<T>(plus(static_cast<Wide>(first_number), along));
    }
  }
  template <typename Wide>
  __host__ __device__ static Wide plus(Wide a, Wide b) {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same_v<Wide, double>)
      return __dadd_rn(a, b);
    else
      return __fadd_rn(a, b);
#else
    return a + b;
#endif
  }
};

[[noreturn]] void refuse_range(double start, double limit) {
  throw Error("a range from " + std::to_string(start) + " to " + std::to_string(limit) + " is too long");
}

// How many numbers a range has; throws Error when it has no end or too many.
int64_t count_of_range(int64_t start, int64_t limit, int64_t delta) {
  const __int128 distance = static_cast<__int128>(limit) - start, step = delta;  // 64-bit differences may not fit 64 bits
  const __int128 count = (distance > 0) == (step > 0) && distance != 0 ? (distance + step + (step > 0 ? -1 : 1)) / step : 0;
  if (count > int64_t{1} << 48) refuse_range(static_cast<double>(start), static_cast<double>(limit));
  return static_cast<int64_t>(count);
}
int64_t count_of_range(double start, double limit, double delta) {
  const double count = std::ceil((limit - start) / delta);
  if (!std::isfinite(count) || count > 0x1p48) refuse_range(start, limit);
  return count > 0 ? static_cast<int64_t>(count) : 0;
}

CompiledKernel make_range(const CompileContext&) {
  CompiledKernel kernel;
  kernel.run = [](RunContext& r) {
    for (size_t i = 0; i < 3; ++i) {
      require(r.input(i).count() == 1, "start, limit and delta must be scalars");
      require(r.input(i).dtype == r.input(0).dtype, "start, limit and delta must have one type");
    }
    const double start = input_number(r, 0), limit = input_number(r, 1), delta = input_number(r, 2);
    require(delta != 0, "the delta of a range is 0");
    const DType type = r.input(0).dtype;
    const int64_t first = is_integer(type) ? input_int(r, 0) : 0, step = is_integer(type) ? input_int(r, 2) : 0;
    const int64_t count = is_integer(type) ? count_of_range(first, input_int(r, 1), step) : count_of_range(start, limit, delta);
    const TensorView& y = sized_output(r, 0, {count}, type);
    with_number_type(type, [&]<typename T>(TypeIs<T>) { launch_fill(r, y, Step<T>{start, delta, first, step}); });
  };
  return kernel;
}

std::string unsupported_range(const CompileContext& c) {
  return refuse_other_types(c, 0,
                            {DType::int8, DType::uint8, DType::int16, DType::uint16, DType::int32, DType::uint32, DType::int64,
                             DType::float16, DType::bfloat16, DType::float32, DType::float64});
}

template <typename T>
struct CosineSum {
  double constant, first, second, period;  // as of a CosineWindow

  __device__ T operator()(int64_t i) const {
    if (period <= 0) return rounded<T>(1.0);
    const double angle = 2 * 3.141592653589793238462643 * static_cast<double>(i) / period;
    return rounded<T>(constant - first * cos(angle) + second * cos(2 * angle));
  }
};

CompiledKernel make_window(const CompileContext& c) {
  const CosineWindow window = cosine_window_of(c.node());
  const bool periodic = c.node().get_int("periodic", 1) != 0;
  const auto dtype = static_cast<DType>(c.node().get_int("output_datatype", 1));
  CompiledKernel kernel;
  kernel.run = [=](RunContext& r) {
    const int64_t size = input_int(r, 0);
    const TensorView& y = sized_output(r, 0, {size}, dtype);
    const double period = static_cast<double>(periodic ? size : size - 1);
    with_float_type(dtype, [&]<typename T>(TypeIs<T>) {
      launch_fill(r, y, CosineSum<T>{window.constant, window.first, window.second, period});
    });
  };
  return kernel;
}

std::string unsupported_window(const CompileContext& c) {
  const auto type = static_cast<DType>(c.node().get_int("output_datatype", 1));
  const bool is_one = type == DType::float32 || type == DType::float64 || type == DType::float16 || type == DType::bfloat16;
  return is_one ? "" : "elements of type " + std::string(name_of(type));
}

}  // namespace

void register_generators(KernelRegistry& registry) {
  registry.add({.op = "Range", .make = make_range, .unsupported = unsupported_range, .host_inputs = {0, 1, 2}});
  for (const CosineWindow& window : kCosineWindows) {
    registry.add({.op = window.op, .make = make_window, .unsupported = unsupported_window, .host_inputs = {0}});
  }
}

}  // namespace fretsaw::cuda
