// LayerNormalization and RMSNormalization: rows of neighbouring elements, held in registers where they fit. Two passes over the registers:
// first the mean, then the squares of the differences from it.
#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/normalization.h"
#include "kernels/cuda/normalization_operands.h"
#include "kernels/cuda/pointwise.h"
#include "kernels/cuda/row_registers.cuh"

namespace fretsaw::cuda {

namespace {

template <typename T>
struct RowNorm {
  const T *x = nullptr, *scale = nullptr, *bias = nullptr;  // [rows, n], [n], [n] or null
  T* y = nullptr;
  void *means = nullptr, *inverses = nullptr;  // [rows] of the type `statistics`, or null
  DType statistics = DType::float32;
  int64_t rows = 0, n = 0;
  WideOf<T> epsilon = 0;
};

template <typename Wide>
__device__ void store_statistic(void* to, DType type, int64_t row, Wide value) {
  if (!to || threadIdx.x != 0) return;
  switch (type) {
    case DType::float64:
      static_cast<double*>(to)[row] = value;
      return;
    case DType::float16:
      static_cast<__half*>(to)[row] = __float2half_rn(static_cast<float>(value));
      return;
    case DType::bfloat16:
      static_cast<__nv_bfloat16*>(to)[row] = __float2bfloat16_rn(static_cast<float>(value));
      return;
    default:
      static_cast<float*>(to)[row] = static_cast<float>(value);
  }
}

// kCentre: LayerNormalization; otherwise RMSNormalization, whose mean counts as 0.
template <bool kCentre, typename T, int V, int kPacks>
__global__ void __launch_bounds__(kMostRowThreads) normalise_rows(RowNorm<T> a) {
  __shared__ float shared[kMostRowThreads / 32];
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool real = row < a.rows;
  const auto n = static_cast<float>(a.n);
  RowRegisters<T, V, kPacks> held;
  held.load(a.x + row * a.n, real ? static_cast<int>(a.n) : 0);
  float mean = 0, square = 0;
  if constexpr (kCentre) {
    held.each([&](float v) { mean += v; });
    mean = join_group(mean, 0.0f, shared, AddJoin{}) / n;
  }
  held.each([&](float v) { square += (v - mean) * (v - mean); });
  const float inverse = 1.0f / sqrtf(join_group(square, 0.0f, shared, AddJoin{}) / n + a.epsilon);
  Lanes<T, V> scale, bias;
  held.write(
      a.y + row * a.n,
      [&](int i) {
        scale = *reinterpret_cast<const Lanes<T, V>*>(a.scale + i);
        if (a.bias) bias = *reinterpret_cast<const Lanes<T, V>*>(a.bias + i);
      },
      [&](float v, int j) {
        const float scaled = (v - mean) * inverse * widen(scale.at[j]);
        return a.bias ? scaled + widen(bias.at[j]) : scaled;
      });
  if (!real) return;
  store_statistic(a.means, a.statistics, row, mean);
  store_statistic(a.inverses, a.statistics, row, inverse);
}

constexpr int kLongThreads = 512;

// A block takes a row from memory three times.
template <bool kCentre, typename T>
__global__ void __launch_bounds__(kLongThreads) normalise_long_rows(RowNorm<T> a) {
  using Wide = WideOf<T>;
  __shared__ Wide shared[kLongThreads / 32];
  const int64_t row = blockIdx.x;
  const T* x = a.x + row * a.n;
  T* y = a.y + row * a.n;
  Wide mean = 0, square = 0;
  if constexpr (kCentre) {
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < a.n; i += kLongThreads) mean += widen(x[i]);
    mean = join_group(mean, Wide(0), shared, AddJoin{}) / static_cast<Wide>(a.n);
  }
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < a.n; i += kLongThreads) square += (widen(x[i]) - mean) * (widen(x[i]) - mean);
  const Wide inverse = Wide(1) / sqrt(join_group(square, Wide(0), shared, AddJoin{}) / static_cast<Wide>(a.n) + a.epsilon);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < a.n; i += kLongThreads) {
    const Wide scaled = (widen(x[i]) - mean) * inverse * widen(a.scale[i]);
    y[i] = narrow<T>(a.bias ? scaled + widen(a.bias[i]) : scaled);
  }
  store_statistic(a.means, a.statistics, row, mean);
  store_statistic(a.inverses, a.statistics, row, inverse);
}

template <bool kCentre, typename T>
void launch_norm(const RowNorm<T>& a, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, double>) {
    const bool aligned = is_16_byte_aligned(a.x) && is_16_byte_aligned(a.y) && is_16_byte_aligned(a.scale) && is_16_byte_aligned(a.bias);
    const RowShape shape = row_shape(a.n, aligned && a.n % kPackOf16<T> == 0 ? kPackOf16<T> : 1);
    if (shape.fits) {
      with_row_shape<T>(shape, [&]<int V, int kPacks>() {
        const dim3 threads(static_cast<unsigned>(shape.threads), static_cast<unsigned>(shape.rows_a_block));
        const auto blocks = static_cast<unsigned>((a.rows + shape.rows_a_block - 1) / shape.rows_a_block);
        normalise_rows<kCentre, T, V, kPacks><<<blocks, threads, 0, stream>>>(a);
      });
      return check_launch("normalise_rows");
    }
  }
  normalise_long_rows<kCentre><<<static_cast<unsigned>(a.rows), kLongThreads, 0, stream>>>(a);
  check_launch("normalise_long_rows");
}

struct RowSettings {
  int64_t axis = -1;
  float epsilon = 1e-5f;
  DType statistics = DType::float32;
};

template <bool kCentre>
void run_row_norm(RunContext& r, const RowSettings& s) {
  const TensorView& x = r.input(0);
  const size_t axis = normalise_axis(s.axis, x.rank());
  const Dims row(x.dims.begin() + static_cast<std::ptrdiff_t>(axis), x.dims.end());
  Dims reduced = x.dims;
  for (size_t d = axis; d < x.rank(); ++d) reduced[d] = 1;
  TensorView& y = r.output(0, x.dims);
  void* means = r.wants_output(1) ? r.output(1, reduced, s.statistics).data : nullptr;
  void* inverses = r.wants_output(2) ? r.output(2, reduced, s.statistics).data : nullptr;
  if (x.count() == 0) return;
  RowOperands operands(r, row, {1, 2});
  const void *scale = operands(1), *bias = kCentre ? operands(2) : nullptr;
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RowNorm<T> a{x.as<T>(), static_cast<const T*>(scale), static_cast<const T*>(bias), y.as<T>(), means, inverses, s.statistics};
    a.rows = product(x.dims, 0, axis), a.n = count_of(row), a.epsilon = static_cast<WideOf<T>>(s.epsilon);
    launch_norm<kCentre>(a, stream_of(r));
  });
}

template <bool kCentre>
CompiledKernel make_row_norm(const CompileContext& c) {
  const Node& node = c.node();
  const RowSettings s{node.get_int("axis", -1), node.get_float("epsilon", 1e-5f), static_cast<DType>(node.get_int("stash_type", 1))};
  return {[s](RunContext& r) { run_row_norm<kCentre>(r, s); }};
}

std::string unsupported_row_norm(const CompileContext& c) {
  const auto statistics = static_cast<DType>(c.node().get_int("stash_type", 1));
  if (!is_float(statistics) || bits_of(statistics) < 16) return "statistics of type " + std::string(name_of(statistics));
  return refuse_other_norm_types(c);
}

}  // namespace

void register_row_normalization(KernelRegistry& registry) {
  registry.add(with_row_steps({.op = "LayerNormalization", .make = make_row_norm<true>, .unsupported = unsupported_row_norm}));
  registry.add(with_row_steps({.op = "RMSNormalization", .make = make_row_norm<false>, .unsupported = unsupported_row_norm}));
}

}  // namespace fretsaw::cuda
