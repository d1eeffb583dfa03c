// Operators that draw random numbers: RandomNormal, RandomUniform, their Like forms, Bernoulli, Multinomial, and RandomAt.
// They are those of the CPU; where these go through a logarithm, an exponential or a sum, up to rounding in float64.
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/cpu/numbers.h"
#include "kernels/cpu/random.h"
#include "kernels/cuda/indexing.h"
#include "kernels/cuda/number_types.cuh"
#include "kernels/cuda/random_place.cuh"

namespace fretsaw::cuda {
namespace {

// y[i] = draw(i)
template <typename T, typename Draw>
__global__ void __launch_bounds__(kThreads) fill_random(T* y, int64_t count, Draw draw) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) y[i] = draw(i);
}

template <typename T, typename Draw>
void launch_fill(RunContext& r, T* y, int64_t count, const Draw& draw) {
  if (count == 0) return;
  fill_random<<<blocks_for(count, kThreads), kThreads, 0, stream_of(r)>>>(y, count, draw);
  check_launch("fill_random");
}

// offset + scale * a normal or uniform number; the product is rounded before the sum, as on the CPU.
template <typename T, bool kNormal>
struct DrawNumber {
  cuda::Philox random;
  double offset, scale;
  __device__ T operator()(int64_t i) const {
    const double drawn = kNormal ? random.normal(i) : random.uniform(i);
    return rounded<T>(__dadd_rn(offset, __dmul_rn(scale, drawn)));
  }
};

// RandomNormal and RandomUniform, whose shape is an attribute, or (like = true) that of the input.
template <bool kNormal, bool kLike>
CompiledKernel make_random(const CompileContext& c) {
  const auto attribute = static_cast<DType>(c.node().get_int("dtype", kLike ? 0 : 1));
  const double a = c.node().get_float(kNormal ? "mean" : "low", 0), b = c.node().get_float(kNormal ? "scale" : "high", 1);
  const Dims shape = c.node().get_ints("shape");
  CompiledKernel kernel;
  kernel.run = [=, random = cuda::Philox(random_key(c.node()))](RunContext& r) {
    const DType dtype = attribute == DType::undefined ? r.input(0).dtype : attribute;
    const TensorView& y = sized_output(r, 0, kLike ? r.input(0).dims : shape, dtype);
    with_float_type(dtype, [&]<typename T>(TypeIs<T>) {
      launch_fill(r, y.as<T>(), y.count(), DrawNumber<T, kNormal>{random, a, kNormal ? b : b - a});
    });
  };
  return kernel;
}

template <typename T, typename P>
struct DrawTrial {
  cuda::Philox random;
  const P* probabilities;
  __device__ T operator()(int64_t i) const {
    const bool happens = static_cast<double>(random.uniform(i)) < static_cast<double>(widen(probabilities[i]));
    return rounded<T>(happens ? 1.0 : 0.0);
  }
};

CompiledKernel make_bernoulli(const CompileContext& c) {
  const auto attribute = static_cast<DType>(c.node().get_int("dtype", 0));
  CompiledKernel kernel;
  kernel.run = [=, random = cuda::Philox(random_key(c.node()))](RunContext& r) {
    const TensorView& x = r.input(0);
    const TensorView& y = sized_output(r, 0, x.dims, attribute == DType::undefined ? x.dtype : attribute);
    with_float_type(x.dtype, [&]<typename P>(TypeIs<P>) {
      with_number_type(y.dtype, [&]<typename T>(TypeIs<T>) {
        launch_fill(r, y.as<T>(), y.count(), DrawTrial<T, P>{random, x.as<const P>()});
      });
    });
  };
  return kernel;
}

// cumulative [batch, classes] = running sums of exp(x - the row's maximum); y [batch, samples]: classes drawn from them.
// One block for each row.
template <typename T, typename Y>
__global__ void __launch_bounds__(kThreads)
    draw_classes(const T* x, double* cumulative, Y* y, int64_t classes, int64_t samples, cuda::Philox random) {
  using Reduce = cub::BlockReduce<double, kThreads>;
  using Scan = cub::BlockScan<double, kThreads>;
  __shared__ union {
    typename Reduce::TempStorage reduce;
    typename Scan::TempStorage scan;
  } shared;
  __shared__ double highest;
  const int64_t row = blockIdx.x;
  x += row * classes, cumulative += row * classes, y += row * samples;
  double own = -__longlong_as_double(0x7ff0000000000000LL);
  for (int64_t k = threadIdx.x; k < classes; k += kThreads) own = max(own, static_cast<double>(widen(x[k])));
  const double found = Reduce(shared.reduce).Reduce(own, [](double a, double b) { return max(a, b); });
  if (threadIdx.x == 0) highest = found;
  __syncthreads();
  double sum = 0;
  for (int64_t begin = 0; begin < classes; begin += kThreads) {
    const int64_t k = begin + threadIdx.x;
    double value = k < classes ? exp(static_cast<double>(widen(x[k])) - highest) : 0.0, all = 0;
    Scan(shared.scan).InclusiveSum(value, value, all);
    if (k < classes) cumulative[k] = sum + value;
    sum += all;
    __syncthreads();
  }
  for (int64_t s = threadIdx.x; s < samples; s += kThreads) {
    const double wanted = random.uniform(row * samples + s) * sum;
    int64_t low = 0, high = classes - 1;  // the first class whose sum is above, or the last
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (cumulative[middle] > wanted)
        high = middle;
      else
        low = middle + 1;
    }
    y[s] = static_cast<Y>(low);
  }
}

CompiledKernel make_multinomial(const CompileContext& c) {
  const auto dtype = static_cast<DType>(c.node().get_int("dtype", 6));
  const int64_t samples = c.node().get_int("sample_size", 1);
  require(dtype == DType::int32 || dtype == DType::int64, "the output must be int32 or int64");
  CompiledKernel kernel;
  kernel.run = [=, random = cuda::Philox(random_key(c.node()))](RunContext& r) {
    const TensorView& x = r.input(0);  // [batch, classes], logarithms of probabilities, not normalised
    require(x.rank() == 2 && x.dims[1] > 0, "the input must be [batch, classes]");
    const TensorView& y = sized_output(r, 0, {x.dims[0], samples}, dtype);
    if (y.count() == 0) return;
    auto* cumulative = static_cast<double*>(r.scratch(static_cast<size_t>(x.count()) * sizeof(double)));
    const auto blocks = static_cast<unsigned>(x.dims[0]);
    with_float_type(x.dtype, [&]<typename T>(TypeIs<T>) {
      const auto launch = [&]<typename Y>(Y* to) {
        draw_classes<<<blocks, kThreads, 0, stream_of(r)>>>(x.as<const T>(), cumulative, to, x.dims[1], samples, random);
      };
      if (dtype == DType::int32) return launch(y.as<int32_t>());
      launch(y.as<int64_t>());
    });
    check_launch("draw_classes");
  };
  return kernel;
}

// The number of an element's place in the whole batch; with limits, 1 where it is below that of the element.
struct DrawAtPlace {
  RandomPlace place;
  uint64_t key;
  int64_t count;
  bool normal;
  const float* limits;  // null: none
  int64_t limit_step;   // 0: one for all
  __device__ float operator()(int64_t i) const {
    const cuda::Philox random = place.random(key);
    const uint64_t at = place.first(count) + static_cast<uint64_t>(i);
    const float number = normal ? static_cast<float>(random.normal(at)) : random.uniform(at);
    if (!limits) return number;
    return number < limits[i * limit_step] ? 1.0f : 0.0f;
  }
};

CompiledKernel make_random_at(const CompileContext& c) {
  const bool normal = c.node().get_int("normal", 0) != 0;
  const auto key = static_cast<uint64_t>(c.node().get_int("key", 0));
  return {[normal, key](RunContext& r) {
    require(r.input(1).count() == 2, "the samples at hand are not given by two numbers");
    const RandomPlace place{r.input(1).as<const int64_t>(), r.input(2).as<const int64_t>()};
    const TensorView& y = sized_output(r, 0, Dims(r.input_ints(0)), DType::float32);
    const bool limited = r.has_input(3), one_limit = limited && r.input(3).count() == 1;
    require(!limited || one_limit || r.input(3).count() == y.count(), "the limits have another shape than the numbers");
    launch_fill(r, y.as<float>(), y.count(),
                DrawAtPlace{place, key, y.count(), normal, limited ? r.input(3).as<const float>() : nullptr, one_limit ? 0 : 1});
  }};
}

std::string unsupported_random_at(const CompileContext& c) {
  for (size_t i : {1, 2}) {
    if (std::string reason = refuse_other_types(c, i, {DType::int64}); !reason.empty()) return reason;
  }
  return refuse_other_types(c, 3, {DType::float32});
}

std::string refuse_no_float(DType type) {
  const bool is_one = type == DType::float32 || type == DType::float64 || type == DType::float16 || type == DType::bfloat16;
  return is_one ? "" : "elements of type " + std::string(name_of(type));
}
template <bool kLike>
std::string unsupported_random(const CompileContext& c) {
  const auto attribute = static_cast<DType>(c.node().get_int("dtype", kLike ? 0 : 1));
  return refuse_no_float(attribute == DType::undefined ? c.input_dtype(0) : attribute);
}
std::string unsupported_bernoulli(const CompileContext& c) {
  const auto attribute = static_cast<DType>(c.node().get_int("dtype", 0));
  if (attribute != DType::undefined && attribute != DType::boolean && !is_integer(attribute)) {
    if (const std::string reason = refuse_no_float(attribute); !reason.empty()) return reason;
  }
  return attribute != DType::undefined && bits_of(attribute) < 8 ? "4-bit elements" : refuse_no_float(c.input_dtype(0));
}
std::string unsupported_by_first(const CompileContext& c) {
  return refuse_no_float(c.input_dtype(0));
}

}  // namespace

void register_random(KernelRegistry& registry) {
  const auto add = [&](const char* op, auto make, auto unsupported) {
    registry.add({.op = op, .make = make, .unsupported = unsupported, .host_random = true});
  };
  add("RandomNormal", make_random<true, false>, unsupported_random<false>);
  add("RandomNormalLike", make_random<true, true>, unsupported_random<true>);
  add("RandomUniform", make_random<false, false>, unsupported_random<false>);
  add("RandomUniformLike", make_random<false, true>, unsupported_random<true>);
  add("Bernoulli", make_bernoulli, unsupported_bernoulli);
  add("Multinomial", make_multinomial, unsupported_by_first);
  registry.add(
      {.op = "RandomAt", .domain = "ai.fretsaw", .make = make_random_at, .unsupported = unsupported_random_at, .host_inputs = {0}});
}

}  // namespace fretsaw::cuda
