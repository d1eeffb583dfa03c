// LayerNormalizationGrad, RMSNormalizationGrad and those of their scales. With n = (x - mean) inverse and h = g scale:
//
//   dx = inverse (h - mean(h) - n mean(h n)),   dscale = sum(g n)
//
// RMSNormalization has no mean to subtract, and no mean(h) either.
#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/fold_readers.cuh"
#include "kernels/cuda/gradients.h"
#include "kernels/cuda/normalization_operands.h"
#include "kernels/cuda/row_registers.cuh"

namespace fretsaw::cuda {
namespace {

constexpr int kMostThreads = 512;  // of a block that holds rows in registers: two rows and sums have room there

template <typename T>
struct RowGradient {
  const T *dy = nullptr, *x = nullptr, *scale = nullptr;  // [rows, n], [rows, n], [n]
  T* dx = nullptr;
  int64_t rows = 0, n = 0;
  WideOf<T> epsilon = 0;
};

template <typename Wide>
struct Two {
  Wide a, b;
};
struct AddTwo {
  template <typename Wide>
  __device__ void operator()(Two<Wide>& into, const Two<Wide>& other) const {
    into.a += other.a, into.b += other.b;
  }
};
template <typename Wide>
struct Statistics {
  Wide mean, inverse;
};

// Of the rows that a block holds. All of its threads must call it.
template <bool kCentre, typename Row>
__device__ Statistics<float> statistics_of(const Row& x, float n, float epsilon, float* shared) {
  float mean = 0, square = 0;
  if constexpr (kCentre) {
    x.each([&](float v) { mean += v; });
    mean = join_group(mean, 0.0f, shared, AddJoin{}) / n;
  }
  x.each([&](float v) { square += (v - mean) * (v - mean); });
  return {mean, 1.0f / sqrtf(join_group(square, 0.0f, shared, AddJoin{}) / n + epsilon)};
}

template <bool kCentre, typename T, int V, int kPacks>
__global__ void __launch_bounds__(kMostThreads) gradient_of_rows(RowGradient<T> a) {
  __shared__ float shared[kMostThreads / 32];
  __shared__ Two<float> shared_two[kMostThreads / 32];
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int own = row < a.rows ? static_cast<int>(a.n) : 0;
  const auto n = static_cast<float>(a.n);
  RowRegisters<T, V, kPacks> x, g;
  x.load(a.x + row * a.n, own);
  g.load(a.dy + row * a.n, own);
  const Statistics<float> s = statistics_of<kCentre>(x, n, a.epsilon, shared);
  Two<float> sums{0, 0};
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int i = x.first_of(k);
    if (i >= own) break;
    const auto scale = *reinterpret_cast<const Lanes<T, V>*>(a.scale + i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float h = widen(g.packs[k].at[j]) * widen(scale.at[j]);
      sums.a += h, sums.b += h * (widen(x.packs[k].at[j]) - s.mean);
    }
  }
  sums = join_group(sums, Two<float>{0, 0}, shared_two, AddTwo{});
  const float average = kCentre ? sums.a / n : 0.0f, along = sums.b * s.inverse * s.inverse / n;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int i = x.first_of(k);
    if (i >= own) break;
    const auto scale = *reinterpret_cast<const Lanes<T, V>*>(a.scale + i);
    Lanes<T, V> out;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float h = widen(g.packs[k].at[j]) * widen(scale.at[j]);
      out.at[j] = narrow<T>(s.inverse * (h - average - (widen(x.packs[k].at[j]) - s.mean) * along));
    }
    *reinterpret_cast<Lanes<T, V>*>(a.dx + row * a.n + i) = out;
  }
}

// A row as RowRegisters holds it, in whole words: that leaves room for sums.
template <typename T, int V, int kPacks>
struct HeldRow {
  Held<T, V> packs[kPacks];
  int n;

  __device__ __forceinline__ static int first_of(int k) { return RowRegisters<T, V, kPacks>::first_of(k); }
  // A row of row_n elements, which begins at pack `at` of x.
  __device__ __forceinline__ void load(const T* x, uint32_t at, int row_n) {
    const auto* from = reinterpret_cast<const Held<T, V>*>(x);
    n = row_n;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (first_of(k) < n) packs[k] = from[at + k * blockDim.x + threadIdx.x];
    }
  }
  // f(k, values) for each pack of the thread.
  template <typename F>
  __device__ __forceinline__ void each_pack(const F& f) const {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (first_of(k) >= n) break;
      float values[V];
      unpack<T, V>(packs[k], values);
      f(k, values);
    }
  }
  template <typename F>
  __device__ __forceinline__ void each(const F& f) const {
    each_pack([&](int, const float(&values)[V]) {
#pragma unroll
      for (int j = 0; j < V; ++j) f(values[j]);
    });
  }
};

// How many blocks of gradient_of_scale run at once on a multiprocessor.
template <int kPacks, int kThreads>
constexpr int kScaleBlocks = kThreads > 256 ? 1
                             : kPacks < 4   ? 3
                                            : 2;

// parts [gridDim.x, n]: the sums of g n over the rows that a block has gone through. x has fewer than 2^31 packs.
template <bool kCentre, typename T, int V, int kPacks, int kThreads>
__global__ void __launch_bounds__(kThreads, kScaleBlocks<kPacks, kThreads>) gradient_of_scale(RowGradient<T> a, float* parts) {
  let_later_begin();
  wait_for_earlier();
  __shared__ float shared[kThreads / 32];
  __shared__ Lanes<float, V> joined[kThreads > 256 ? 1 : kThreads * kPacks];  // [groups of whole warps, n] where there are several
  using Row = HeldRow<T, V, kPacks>;
  float sums[kPacks][V] = {};
  const int width = static_cast<int>(a.n), packs = width / V;
  const auto rows = static_cast<uint32_t>(a.rows);
  for (uint32_t first = blockIdx.x * blockDim.y; first < rows; first += gridDim.x * blockDim.y) {
    const uint32_t row = first + threadIdx.y;
    const int own = row < rows ? width : 0;
    Row x, g;
    x.load(a.x, row * packs, own);
    g.load(a.dy, row * packs, own);
    const Statistics<float> s = statistics_of<kCentre>(x, static_cast<float>(a.n), a.epsilon, shared);
    x.each_pack([&](int k, const float(&values)[V]) {
      float gradients[V];
      unpack<T, V>(g.packs[k], gradients);
#pragma unroll
      for (int j = 0; j < V; ++j) sums[k][j] += gradients[j] * ((values[j] - s.mean) * s.inverse);
    });
  }
  const int group = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.y) * group + static_cast<int>(threadIdx.x);
  if constexpr (kPacks == 1) {  // as it is for all groups within a warp, which are joined here
#pragma unroll
    for (int j = 0; j < V; ++j)
      for (int mask = group; mask < 32; mask *= 2) sums[0][j] += shuffle_xor(sums[0][j], mask);
  }
  const int whole = max(group, 32);
  float* part = parts + blockIdx.x * a.n;
  auto* to = whole == kThreads ? reinterpret_cast<Lanes<float, V>*>(part) : joined + thread / whole * packs;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int pack = Row::first_of(k) / V;
    if (pack >= packs || thread % whole >= group) break;
    Lanes<float, V> lanes;
#pragma unroll
    for (int j = 0; j < V; ++j) lanes.at[j] = sums[k][j];
    to[pack] = lanes;
  }
  if (whole == kThreads) return;
  __syncthreads();
  const float* from = reinterpret_cast<const float*>(joined);
  for (int column = thread; column < width; column += kThreads) {
    float sum = 0;
    for (int w = 0; w < kThreads / whole; ++w) sum += from[w * width + column];
    part[column] = sum;
  }
}

// --- rows that are too long for registers, and float64 ---

constexpr int kLongThreads = 512;

template <bool kCentre, typename T>
__device__ Statistics<WideOf<T>> long_statistics(const T* x, int64_t n, WideOf<T> epsilon, WideOf<T>* shared) {
  using Wide = WideOf<T>;
  Wide mean = 0, square = 0;
  if constexpr (kCentre) {
    for (int64_t i = threadIdx.x; i < n; i += kLongThreads) mean += widen(x[i]);
    mean = join_group(mean, Wide(0), shared, AddJoin{}) / static_cast<Wide>(n);
  }
  for (int64_t i = threadIdx.x; i < n; i += kLongThreads) square += (widen(x[i]) - mean) * (widen(x[i]) - mean);
  return {mean, Wide(1) / sqrt(join_group(square, Wide(0), shared, AddJoin{}) / static_cast<Wide>(n) + epsilon)};
}

template <bool kCentre, typename T>
__global__ void __launch_bounds__(kLongThreads) gradient_of_long_rows(RowGradient<T> a) {
  using Wide = WideOf<T>;
  __shared__ Wide shared[kLongThreads / 32];
  __shared__ Two<Wide> shared_two[kLongThreads / 32];
  const int64_t at = int64_t{blockIdx.x} * a.n;
  const T *x = a.x + at, *g = a.dy + at;
  const Statistics<Wide> s = long_statistics<kCentre>(x, a.n, a.epsilon, shared);
  Two<Wide> sums{0, 0};
  for (int64_t i = threadIdx.x; i < a.n; i += kLongThreads) {
    const Wide h = widen(g[i]) * widen(a.scale[i]);
    sums.a += h, sums.b += h * (widen(x[i]) - s.mean);
  }
  sums = join_group(sums, Two<Wide>{0, 0}, shared_two, AddTwo{});
  const auto n = static_cast<Wide>(a.n);
  const Wide average = kCentre ? sums.a / n : Wide(0), along = sums.b * s.inverse * s.inverse / n;
  for (int64_t i = threadIdx.x; i < a.n; i += kLongThreads)
    a.dx[at + i] = narrow<T>(s.inverse * (widen(g[i]) * widen(a.scale[i]) - average - (widen(x[i]) - s.mean) * along));
}

template <bool kCentre, typename T>
__global__ void __launch_bounds__(kLongThreads) measure_rows(RowGradient<T> a, Statistics<WideOf<T>>* statistics) {
  __shared__ WideOf<T> shared[kLongThreads / 32];
  const int64_t row = blockIdx.x;
  const Statistics<WideOf<T>> s = long_statistics<kCentre>(a.x + row * a.n, a.n, a.epsilon, shared);
  if (threadIdx.x == 0) statistics[row] = s;
}

// parts [gridDim.y * blockDim.y, n]. A thread takes a column of every so many rows.
template <typename T>
__global__ void __launch_bounds__(256) gradient_of_long_scale(RowGradient<T> a, const Statistics<WideOf<T>>* statistics, WideOf<T>* parts) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, part = int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
  if (column >= a.n) return;
  WideOf<T> sum = 0;
#pragma unroll 4
  for (int64_t row = part; row < a.rows; row += int64_t{gridDim.y} * blockDim.y) {
    const Statistics<WideOf<T>> s = statistics[row];
    sum += widen(a.dy[row * a.n + column]) * ((widen(a.x[row * a.n + column]) - s.mean) * s.inverse);
  }
  parts[part * a.n + column] = sum;
}

template <typename T>
RowShape register_shape(const RowGradient<T>& a) {
  if constexpr (std::is_same_v<T, double>) return {};
  const bool aligned = is_16_byte_aligned(a.x) && is_16_byte_aligned(a.dy) && is_16_byte_aligned(a.dx) && is_16_byte_aligned(a.scale);
  RowShape shape = row_shape(a.n, aligned && a.n % kPackOf16<T> == 0 ? kPackOf16<T> : 1);
  shape.fits = shape.fits && shape.threads <= kMostThreads;
  return shape;
}

template <bool kCentre, typename T>
void launch_rows(const RowGradient<T>& a, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, double>) {
    if (const RowShape shape = register_shape(a); shape.fits) {
      with_row_shape<T>(shape, [&]<int V, int kPacks>() {
        const dim3 threads(static_cast<unsigned>(shape.threads), static_cast<unsigned>(shape.rows_a_block));
        const auto blocks = static_cast<unsigned>((a.rows + shape.rows_a_block - 1) / shape.rows_a_block);
        gradient_of_rows<kCentre, T, V, kPacks><<<blocks, threads, 0, stream>>>(a);
      });
      return check_launch("gradient_of_rows");
    }
  }
  gradient_of_long_rows<kCentre><<<static_cast<unsigned>(a.rows), kLongThreads, 0, stream>>>(a);
  check_launch("gradient_of_long_rows");
}

// f.operator()<V, kPacks, kThreads>() for the numbers of a shape that fits: in blocks of 256 threads wherever a row takes no more.
template <typename T, typename F>
void with_scale_shape(const RowShape& shape, int64_t n, const F& f) {
  const auto with_vector = [&]<int V>() {
    if (shape.threads > 256) return f.template operator()<V, 4, kMostThreads>();
    if (shape.packs == 1) return f.template operator()<V, 1, 256>();
    if (n <= int64_t{3} * V * shape.threads) return f.template operator()<V, 3, 256>();
    f.template operator()<V, 4, 256>();
  };
  if (shape.vector == 1)
    with_vector.template operator()<1>();
  else
    with_vector.template operator()<kPackOf16<T>>();
}

template <bool kCentre, typename T>
void launch_scale(RunContext& r, const RowGradient<T>& a, T* y) {
  using Wide = WideOf<T>;
  const cudaStream_t stream = stream_of(r);
  const int64_t multiprocessors = gpu(r).multiprocessors();
  if constexpr (!std::is_same_v<T, double>) {
    if (const RowShape shape = register_shape(a); shape.fits && a.rows * (a.n / shape.vector) >> 31 == 0) {
      return with_scale_shape<T>(shape, a.n, [&]<int V, int kPacks, int kThreads>() {
        const dim3 threads(static_cast<unsigned>(shape.threads), static_cast<unsigned>(kThreads / shape.threads));
        const int64_t blocks = std::min((a.rows + threads.y - 1) / threads.y, kScaleBlocks<kPacks, kThreads> * multiprocessors);
        auto* parts = static_cast<float*>(r.scratch(static_cast<size_t>(blocks * a.n) * sizeof(float)));
        launch_dependent(gradient_of_scale<kCentre, T, V, kPacks, kThreads>, static_cast<unsigned>(blocks), threads, stream, a, parts);
        check_launch("gradient_of_scale");
        launch_join_columns<float>(parts, blocks, a.n, FloatStore<T>{y}, stream);
      });
    }
  }
  constexpr int64_t kRows = 8;  // of a block
  const int64_t columns = (a.n + 31) / 32, most = std::max<int64_t>((a.rows + kRows * 8 - 1) / (kRows * 8), 1);
  const int64_t blocks = std::clamp<int64_t>(multiprocessors * 8 / columns, 1, std::min<int64_t>(most, 1024));
  const size_t row_bytes = (static_cast<size_t>(a.rows) * sizeof(Statistics<Wide>) + 255) / 256 * 256;
  auto* statistics = static_cast<Statistics<Wide>*>(r.scratch(row_bytes + static_cast<size_t>(blocks * kRows * a.n) * sizeof(Wide)));
  auto* parts = reinterpret_cast<Wide*>(reinterpret_cast<char*>(statistics) + row_bytes);
  measure_rows<kCentre><<<static_cast<unsigned>(a.rows), kLongThreads, 0, stream>>>(a, statistics);
  check_launch("measure_rows");
  gradient_of_long_scale<T>
      <<<dim3(static_cast<unsigned>(columns), static_cast<unsigned>(blocks)), dim3(32, kRows), 0, stream>>>(a, statistics, parts);
  check_launch("gradient_of_long_scale");
  launch_join_columns<Wide>(parts, blocks * kRows, a.n, FloatStore<T>{y}, stream);
}

struct RowSettings {
  int64_t axis = -1;
  float epsilon = 1e-5f;
};

// kScale: the gradient of the scale.
template <bool kCentre, bool kScale>
void run(RunContext& r, const RowSettings& s) {
  const TensorView &dy = r.input(0), &x = r.input(1);
  require(dy.dims == x.dims, "the gradient differs from the norm's input in shape", "give that of the norm's result");
  const size_t axis = normalise_axis(s.axis, x.rank());
  const Dims row(x.dims.begin() + static_cast<std::ptrdiff_t>(axis), x.dims.end());
  TensorView& made = r.output(0, kScale ? row : x.dims, x.dtype);
  if (x.count() == 0) return r.device().clear(made.data, made.bytes());
  const void* scale = nullptr;
  if constexpr (!kScale) {
    RowOperands operands(r, row, {2});
    scale = operands(2);
  }
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RowGradient<T> a{dy.as<T>(), x.as<T>(), static_cast<const T*>(scale)};
    a.rows = product(x.dims, 0, axis), a.n = count_of(row), a.epsilon = static_cast<WideOf<T>>(s.epsilon);
    if constexpr (kScale) {
      launch_scale<kCentre, T>(r, a, made.as<T>());
    } else {
      a.dx = made.as<T>();
      launch_rows<kCentre, T>(a, stream_of(r));
    }
  });
}

template <bool kCentre, bool kScale>
CompiledKernel make_gradient(const CompileContext& c) {
  const RowSettings s{c.node().get_int("axis", -1), c.node().get_float("epsilon", 1e-5f)};
  return {[s](RunContext& r) { run<kCentre, kScale>(r, s); }};
}

std::string unsupported(const CompileContext& c) {
  return refuse_mixed_floats(c, {0, 1, 2});
}

}  // namespace

void register_row_normalization_gradients(KernelRegistry& registry) {
  const auto add = [&](const char* op, CompiledKernel (*make)(const CompileContext&)) {
    registry.add({.op = op, .domain = kCommunicationDomain, .make = make, .unsupported = unsupported});
  };
  add("LayerNormalizationGrad", make_gradient<true, false>);
  add("LayerNormalizationGradScale", make_gradient<true, true>);
  add("RMSNormalizationGrad", make_gradient<false, false>);
  add("RMSNormalizationGradScale", make_gradient<false, true>);
}

}  // namespace fretsaw::cuda
