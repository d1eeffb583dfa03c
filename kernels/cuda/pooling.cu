// MaxPool, AveragePool, LpPool: a thread folds the window of one output, or of 16 bytes of channels where they lie together.
#include <algorithm>
#include <limits>

#include "kernels/cpu/window.h"
#include "kernels/cuda/pooling_fold.cuh"
#include "kernels/cuda/pooling_window.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;

// Of a cell counted row by row, the number when the first dimension runs fastest.
__device__ inline int64_t column_major(const PoolWindow& w, int64_t cell) {
  const int64_t c = cell % w.in[2], b = cell / w.in[2] % w.in[1], a = cell / w.in[2] / w.in[1];
  return a + w.in[0] * (b + w.in[1] * c);
}

// x [outer, in..., packs], y [outer, out..., packs] in packs of V elements. Indices are of plain tensors: packs is 1, and V.
template <PoolKind kKind, typename T, int V, typename Index>
__global__ void pool_windows(Index threads, Index packs, PoolWindow w, const Lanes<T, V>* x, Lanes<T, V>* y, int64_t* indices) {
  using W = WideOf<T>;
  for (Index i = blockIdx.x * Index(blockDim.x) + threadIdx.x; i < threads; i += Index(gridDim.x) * blockDim.x) {
    const Index pack = i % packs, place = i / packs, c = place % w.out[2], ab = place / w.out[2], b = ab % w.out[1];
    const Index a = ab / w.out[1] % w.out[0], outer = ab / w.out[1] / w.out[0];
    const Line lines[3] = {line_of(w, 0, static_cast<int>(a)), line_of(w, 1, static_cast<int>(b)), line_of(w, 2, static_cast<int>(c))};
    const Lanes<T, V>* plane = x + static_cast<int64_t>(outer) * w.in_cells() * packs + pack;
    W sums[V];
#pragma unroll
    for (int v = 0; v < V; ++v) sums[v] = fold_start<kKind, T>();
    int64_t best = -1;
    for (int ta = lines[0].first; ta < lines[0].last; ++ta) {
      for (int tb = lines[1].first; tb < lines[1].last; ++tb) {
        const int64_t row = (int64_t{lines[0].start + ta * w.dilation[0]} * w.in[1] + lines[1].start + tb * w.dilation[1]) * w.in[2];
        for (int tc = lines[2].first; tc < lines[2].last; ++tc) {
          const int64_t cell = row + lines[2].start + tc * w.dilation[2];
          const Lanes<T, V> values = plane[cell * packs];
          if (kKind == PoolKind::max && (best < 0 || is_greater<W>(widen(values.at[0]), sums[0]))) best = cell;
#pragma unroll
          for (int v = 0; v < V; ++v) sums[v] = fold_one<kKind, W>(sums[v], widen(values.at[v]), w.p);
        }
      }
    }
    W divisor = 1;
    for (const Line& line : lines) divisor *= W(w.includes_padding ? line.with_padding : max(0, line.last - line.first));
    Lanes<T, V> result;
#pragma unroll
    for (int v = 0; v < V; ++v) result.at[v] = static_cast<T>(narrow<T>(fold_end<kKind, W>(sums[v], divisor, w.p)));
    y[i] = result;
    if (indices) {
      const int64_t cell = best < 0 ? 0 : best;
      indices[i] = static_cast<int64_t>(outer) * w.in_cells() + (w.column_major ? column_major(w, cell) : cell);
    }
  }
}

// Images with channels last and windows of K x K: all loads of a window are under way before the first is needed.
template <PoolKind kKind, typename T, int V, int K>
__global__ void pool_squares(uint32_t threads, uint32_t packs, PoolWindow w, const Lanes<T, V>* x, Lanes<T, V>* y) {
  using W = WideOf<T>;
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= threads) return;
  const uint32_t pack = i % packs, place = i / packs, c = place % static_cast<uint32_t>(w.out[2]),
                 nb = place / static_cast<uint32_t>(w.out[2]);
  const uint32_t b = nb % static_cast<uint32_t>(w.out[1]), n = nb / static_cast<uint32_t>(w.out[1]);
  const Line rows = line_of(w, 1, static_cast<int>(b)), columns = line_of(w, 2, static_cast<int>(c));
  const Lanes<T, V>* image = x + static_cast<int64_t>(n) * w.in_cells() * packs + pack;
  Lanes<T, V> values[K][K];
#pragma unroll
  for (int k = 0; k < K * K; ++k) {
    const int tb = k / K, tc = k % K;
    if (tb < rows.first || tb >= rows.last || tc < columns.first || tc >= columns.last) continue;
    values[tb][tc] = image[(int64_t{rows.start + tb} * w.in[2] + columns.start + tc) * packs];
  }
  W sums[V];
#pragma unroll
  for (int v = 0; v < V; ++v) sums[v] = fold_start<kKind, T>();
#pragma unroll
  for (int k = 0; k < K * K; ++k) {
    const int tb = k / K, tc = k % K;
    if (tb < rows.first || tb >= rows.last || tc < columns.first || tc >= columns.last) continue;
#pragma unroll
    for (int v = 0; v < V; ++v) sums[v] = fold_one<kKind, W>(sums[v], widen(values[tb][tc].at[v]), w.p);
  }
  const auto taps = [&](const Line& line) { return W(w.includes_padding ? line.with_padding : max(0, line.last - line.first)); };
  Lanes<T, V> result;
#pragma unroll
  for (int v = 0; v < V; ++v) result.at[v] = static_cast<T>(narrow<T>(fold_end<kKind, W>(sums[v], taps(rows) * taps(columns), w.p)));
  y[i] = result;
}

// The side of a window that pool_squares takes, or 0.
int square_side(const PoolWindow& w) {
  const int k = w.kernel[2];
  const bool flat = w.in[0] == 1 && w.out[0] == 1 && w.kernel[0] == 1;
  return flat && (k == 2 || k == 3) && w.kernel[1] == k && w.dilation[1] == 1 && w.dilation[2] == 1 ? k : 0;
}

template <PoolKind kKind, typename T, int V>
void launch(const PoolWindow& w, int64_t outer, int64_t channels, const void* x, void* y, int64_t* indices, cudaStream_t stream) {
  using L = Lanes<T, V>;
  const int64_t packs = channels / V, threads = outer * w.out_cells() * packs;
  const unsigned blocks = blocks_for(threads, kThreads);
  if constexpr (V > 1) {
    const int side = threads < std::numeric_limits<int32_t>::max() ? square_side(w) : 0;
    const auto kernel = side == 2 ? pool_squares<kKind, T, V, 2> : pool_squares<kKind, T, V, 3>;
    if (side) {
      kernel<<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
          static_cast<uint32_t>(threads), static_cast<uint32_t>(packs), w, static_cast<const L*>(x), static_cast<L*>(y));
      return check_launch("pool_squares");
    }
  }
  if (threads < std::numeric_limits<int32_t>::max()) {
    pool_windows<kKind, T, V, uint32_t><<<blocks, kThreads, 0, stream>>>(static_cast<uint32_t>(threads), static_cast<uint32_t>(packs), w,
                                                                         static_cast<const L*>(x), static_cast<L*>(y), indices);
  } else {
    pool_windows<kKind, T, V, int64_t>
        <<<blocks, kThreads, 0, stream>>>(threads, packs, w, static_cast<const L*>(x), static_cast<L*>(y), indices);
  }
  check_launch("pool_windows");
}

template <typename F>
void with_pooled_type(PoolKind kind, DType dtype, F&& f) {
  if (kind == PoolKind::max && dtype == DType::int8) return f(TypeIs<int8_t>{});
  if (kind == PoolKind::max && dtype == DType::uint8) return f(TypeIs<uint8_t>{});
  with_float_type(dtype, f);
}

template <PoolKind kKind>
void pool(const PoolWindow& w, const TensorView& x, TensorView& y, int64_t* indices, cudaStream_t stream) {
  with_pooled_type(kKind, x.dtype, [&]<typename Tag>(Tag) {
    using T = typename Tag::type;
    if constexpr (kKind == PoolKind::max || !std::is_integral_v<T>) {
      constexpr int V = kPackOf16<T>;
      if (x.layout != Layout::nhwc) return launch<kKind, T, 1>(w, x.dims[0] * x.dims[1], 1, x.data, y.data, indices, stream);
      const bool whole = x.dims[1] % V == 0 && is_16_byte_aligned(x.data) && is_16_byte_aligned(y.data);
      if (whole) return launch<kKind, T, V>(w, x.dims[0], x.dims[1], x.data, y.data, nullptr, stream);
      launch<kKind, T, 1>(w, x.dims[0], x.dims[1], x.data, y.data, nullptr, stream);
    }
  });
}

template <PoolKind kKind>
CompiledKernel make_pool(const CompileContext& c) {
  if (kKind == PoolKind::lp && c.node().get_int("p", 2) < 1) throw Error("LpPool with p below 1", "use 1 or more");
  const bool wants_indices = c.outputs.size() > 1 && c.outputs[1];
  const Layout layout = wants_indices ? Layout::plain : offered_layout(c);
  CompiledKernel kernel{[node = Node(c.node()), layout](RunContext& r) {
    const TensorView& x = r.input(0);
    Dims y_dims;
    const PoolWindow w = read_pool(node, x.dims, y_dims);
    TensorView& y = r.output(0, y_dims, x.dtype, layout);
    int64_t* indices = r.wants_output(1) ? r.output(1, y_dims, DType::int64).as<int64_t>() : nullptr;
    if (y.count() > 0) pool<kKind>(w, x, y, indices, stream_of(r));
  }};
  kernel.input_layouts = {layout};
  kernel.output_layouts.assign(std::max<size_t>(c.outputs.size(), 1), Layout::plain);
  kernel.output_layouts[0] = layout;
  return kernel;
}

template <PoolKind kKind>
std::string why_not(const CompileContext& c) {
  const std::string reason =
      kKind == PoolKind::max
          ? refuse_other_types(c, 0, {DType::float32, DType::float16, DType::bfloat16, DType::float64, DType::int8, DType::uint8})
          : refuse_other_types(c, 0, {DType::float32, DType::float16, DType::bfloat16, DType::float64});
  if (!reason.empty()) return reason;
  const std::optional<Shape>& shape = c.input_types.at(0).shape;
  return shape && (shape->size() < 3 || shape->size() > 5) ? std::to_string(shape->size()) + " dimensions" : "";
}

}  // namespace

PoolWindow read_pool(const Node& node, const Dims& x, Dims& y) {
  if (x.size() < 3 || x.size() > 5) throw Error("a pooling of shape " + to_string(x), "give it [N,C,D1,...]");
  Window window = read_window(node, x.size() - 2);
  const Dims spatial = spatial_of(x);
  resolve_padding(window, spatial);
  const bool same = window.auto_pad == "SAME_UPPER" || window.auto_pad == "SAME_LOWER";
  const Dims out = output_spatial(window, spatial, node.get_int("ceil_mode", 0) != 0 && !same);
  if (count_of(spatial) > std::numeric_limits<int32_t>::max())
    throw Error("a pooling over " + to_string(spatial), "it has too many cells for one image");
  PoolWindow w;
  for (size_t i = 0; i < spatial.size(); ++i) {
    const size_t d = 3 - spatial.size() + i;
    const auto set = [](int& to, int64_t value) { to = static_cast<int>(value); };
    set(w.in[d], spatial[i]), set(w.out[d], out[i]), set(w.kernel[d], window.kernel[i]), set(w.stride[d], window.strides[i]);
    set(w.dilation[d], window.dilations[i]), set(w.begin[d], window.pads_begin[i]), set(w.end[d], window.pads_end[i]);
  }
  w.p = static_cast<int>(node.get_int("p", 2));
  w.includes_padding = node.get_int("count_include_pad", 0) != 0;
  w.column_major = node.get_int("storage_order", 0) != 0;
  y = {x[0], x[1]};
  y.insert(y.end(), out.begin(), out.end());
  return w;
}

void register_pooling(KernelRegistry& registry) {
  registry.add({.op = "MaxPool", .make = make_pool<PoolKind::max>, .unsupported = why_not<PoolKind::max>});
  registry.add({.op = "AveragePool", .make = make_pool<PoolKind::average>, .unsupported = why_not<PoolKind::average>});
  registry.add({.op = "LpPool", .make = make_pool<PoolKind::lp>, .unsupported = why_not<PoolKind::lp>});
  register_global_pooling(registry);
}

}  // namespace fretsaw::cuda
