// MaxPoolGrad and AveragePoolGrad: each cell of dX adds up what the windows over it give back, in the order of the windows.
#include <limits>

#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/channel_pixels.cuh"
#include "kernels/cuda/gradients.h"
#include "kernels/cuda/pooling_fold.cuh"
#include "kernels/cuda/pooling_window.h"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256;

// Where thread i works in a tensor [outer, cells of three dimensions, packs].
struct Place {
  int64_t outer, pack;
  int at[3];
};
template <typename Index>
__device__ Place place_by(Index i, Index packs, const int (&cells)[3]) {
  Place p;
  p.pack = i % packs, i /= packs;
#pragma unroll
  for (int d = 2; d >= 0; --d) {
    const auto size = static_cast<Index>(cells[d]);
    p.at[d] = static_cast<int>(i % size), i /= size;
  }
  p.outer = i;
  return p;
}
__device__ inline Place place_of(int64_t i, int64_t packs, const int (&cells)[3]) {
  if (i >> 32 == 0) return place_by(static_cast<uint32_t>(i), static_cast<uint32_t>(packs), cells);
  return place_by(i, packs, cells);
}

// The output whose tap `tap` lies on this cell, along one dimension; -1 where there is none.
__device__ inline int output_at(const PoolWindow& w, int d, int cell, int tap) {
  const int from = cell + w.begin[d] - tap * w.dilation[d];
  if (from < 0) return -1;
  const int output = from / w.stride[d];
  return output * w.stride[d] == from && output < w.out[d] ? output : -1;
}

// f(output cell, tap) for each window over the cell, the windows in order.
template <typename F>
__device__ void each_window(const PoolWindow& w, const Place& p, const F& f) {
  for (int ta = w.kernel[0]; ta-- > 0;) {
    const int a = output_at(w, 0, p.at[0], ta);
    if (a < 0) continue;
    for (int tb = w.kernel[1]; tb-- > 0;) {
      const int b = output_at(w, 1, p.at[1], tb);
      if (b < 0) continue;
      for (int tc = w.kernel[2]; tc-- > 0;) {
        const int c = output_at(w, 2, p.at[2], tc);
        if (c >= 0) f((int64_t{a} * w.out[1] + b) * w.out[2] + c, (ta * w.kernel[1] + tb) * w.kernel[2] + tc);
      }
    }
  }
}

// --- maximum ---

// taps [outer, out..., packs]: the tap that each window takes: the first of the largest, or the last NaN.
template <typename T, int V, typename Tap>
__global__ void __launch_bounds__(kThreads)
    choose_taps(int64_t threads, int64_t packs, PoolWindow w, const Lanes<T, V>* x, Lanes<Tap, V>* taps) {
  using W = WideOf<T>;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < threads; i += int64_t{gridDim.x} * kThreads) {
    const Place p = place_of(i, packs, w.out);
    const Line lines[3] = {line_of(w, 0, p.at[0]), line_of(w, 1, p.at[1]), line_of(w, 2, p.at[2])};
    const Lanes<T, V>* plane = x + p.outer * w.in_cells() * packs + p.pack;
    W best[V];
    Lanes<Tap, V> chosen{};
    bool first = true;
    for (int ta = lines[0].first; ta < lines[0].last; ++ta) {
      for (int tb = lines[1].first; tb < lines[1].last; ++tb) {
        const int64_t row = (int64_t{lines[0].start + ta * w.dilation[0]} * w.in[1] + lines[1].start + tb * w.dilation[1]) * w.in[2];
        for (int tc = lines[2].first; tc < lines[2].last; ++tc) {
          const Lanes<T, V> values = plane[(row + lines[2].start + tc * w.dilation[2]) * packs];
          const auto tap = static_cast<Tap>((ta * w.kernel[1] + tb) * w.kernel[2] + tc);
#pragma unroll
          for (int v = 0; v < V; ++v) {
            const W value = widen(values.at[v]);
            if (first || is_greater(value, best[v])) best[v] = value, chosen.at[v] = tap;
          }
          first = false;
        }
      }
    }
    taps[i] = chosen;
  }
}

template <typename T, int V, typename Tap>
__global__ void __launch_bounds__(kThreads)
    return_to_taps(int64_t threads, int64_t packs, PoolWindow w, const Lanes<T, V>* dy, const Lanes<Tap, V>* taps, Lanes<T, V>* dx) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < threads; i += int64_t{gridDim.x} * kThreads) {
    const Place p = place_of(i, packs, w.in);
    const int64_t base = p.outer * w.out_cells() * packs + p.pack;
    WideOf<T> sums[V] = {};
    each_window(w, p, [&](int64_t output, int tap) {
      const Lanes<Tap, V> chosen = taps[base + output * packs];
      const Lanes<T, V> g = dy[base + output * packs];
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (static_cast<int>(chosen.at[v]) == tap) sums[v] += widen(g.at[v]);
    });
    Lanes<T, V> out;
#pragma unroll
    for (int v = 0; v < V; ++v) out.at[v] = narrow<T>(sums[v]);
    dx[i] = out;
  }
}

// --- maximum of 3 by 3 cells, two cells apart (ResNet's first), channels last ---

constexpr int kNoTap = 255;

// The same taps as choose_taps.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads)
    choose_taps_of_3x3(uint32_t threads, uint32_t packs, PoolWindow w, const Lanes<T, V>* x, Lanes<uint8_t, V>* taps) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= threads) return;
  const uint32_t pack = i % packs, cell = i / packs, column = cell % w.out[2], line = cell / w.out[2];
  const int top = static_cast<int>(line % w.out[1]) * 2 - w.begin[1], left = static_cast<int>(column) * 2 - w.begin[2];
  const Lanes<T, V>* plane = x + int64_t{line / w.out[1]} * w.in_cells() * packs + pack;
  Held<T, V> held[9];
  bool inside[9];
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    const int row = top + tap / 3, at = left + tap % 3;
    inside[tap] = row >= 0 && row < w.in[1] && at >= 0 && at < w.in[2];
    if (inside[tap]) held[tap] = hold<T, V>(plane[(int64_t{row} * w.in[2] + at) * packs].at);
  }
  WideOf<T> best[V];
  Lanes<uint8_t, V> chosen{};
  bool first = true;
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    if (!inside[tap]) continue;
    WideOf<T> values[V];
    unpack<T, V>(held[tap], values);
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (first || is_greater(values[v], best[v])) best[v] = values[v], chosen.at[v] = static_cast<uint8_t>(tap);
    first = false;
  }
  taps[i] = chosen;
}

// A thread gives back to the cells (2m, 2n) to (2m + 1, 2n + 1), counted with the padding before them. The windows over them are those of
// rows m - 1 and m, columns n - 1 and n, and a cell of an even row meets tap row 2 of the first and 0 of the second, one of an odd row tap
// row 1 of the second. squares: how many m and n there are. Sums are in the order of return_to_taps.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads) return_to_3x3(uint32_t threads, uint32_t packs, PoolWindow w, uint2 squares,
                                                          const Lanes<T, V>* dy, const Lanes<uint8_t, V>* taps, Lanes<T, V>* dx) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= threads) return;
  const uint32_t pack = i % packs, square = i / packs, line = square / squares.y, outer = line / squares.x;
  const int n = static_cast<int>(square % squares.y), m = static_cast<int>(line % squares.x);
  const int64_t windows = int64_t{outer} * w.out_cells() * packs + pack;
  Lanes<T, V> g[2][2];
  Lanes<uint8_t, V> chosen[2][2];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int row = m - 1 + k / 2, column = n - 1 + k % 2;
    if (row >= 0 && row < w.out[1] && column >= 0 && column < w.out[2]) {
      const int64_t at = windows + (int64_t{row} * w.out[2] + column) * packs;
      g[k / 2][k % 2] = dy[at], chosen[k / 2][k % 2] = taps[at];
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) g[k / 2][k % 2].at[v] = narrow<T>(0), chosen[k / 2][k % 2].at[v] = kNoTap;
    }
  }
  const int64_t cells = int64_t{outer} * w.in_cells() * packs + pack;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int odd_row = k / 2, odd_column = k % 2, row = 2 * m + odd_row - w.begin[1], column = 2 * n + odd_column - w.begin[2];
    if (row < 0 || row >= w.in[1] || column < 0 || column >= w.in[2]) continue;
    Lanes<T, V> out;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      WideOf<T> sum = 0;
#pragma unroll
      for (int a = odd_row; a < 2; ++a) {
#pragma unroll
        for (int b = odd_column; b < 2; ++b) {
          const int tap = (odd_row ? 1 : 2 - 2 * a) * 3 + (odd_column ? 1 : 2 - 2 * b);
          if (chosen[a][b].at[v] == tap) sum += widen(g[a][b].at[v]);
        }
      }
      out.at[v] = narrow<T>(sum);
    }
    dx[cells + (int64_t{row} * w.in[2] + column) * packs] = out;
  }
}

// --- mean ---

template <typename T, int V>
__global__ void __launch_bounds__(kThreads)
    return_shares(int64_t threads, int64_t packs, PoolWindow w, const Lanes<T, V>* dy, Lanes<T, V>* dx) {
  using W = WideOf<T>;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < threads; i += int64_t{gridDim.x} * kThreads) {
    const Place p = place_of(i, packs, w.in);
    const int64_t base = p.outer * w.out_cells() * packs + p.pack;
    W sums[V] = {};
    each_window(w, p, [&](int64_t output, int) {
      int rest = static_cast<int>(output);
      int64_t cells = 1;
      for (int d = 2; d >= 0; --d) {
        const Line line = line_of(w, d, rest % w.out[d]);
        rest /= w.out[d];
        cells *= w.includes_padding ? line.with_padding : max(0, line.last - line.first);
      }
      const W divisor = static_cast<W>(cells);
      const Lanes<T, V> g = dy[base + output * packs];
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] += widen(g.at[v]) / divisor;
    });
    Lanes<T, V> out;
#pragma unroll
    for (int v = 0; v < V; ++v) out.at[v] = narrow<T>(sums[v]);
    dx[i] = out;
  }
}

// --- launches ---

struct Operands {
  const void *dy, *x;  // x: null of a mean
  void *dx, *taps;     // taps: scratch memory
  int64_t outer, channels;
};

// Whether it is such a maximum, of few enough packs that each thread takes one.
bool is_3x3(const PoolWindow& w, int64_t packs) {
  const bool fits = w.in[0] == 1 && w.out[0] == 1 && w.kernel[0] == 1 && w.begin[0] == 0 && packs < int64_t{1} << 26;
  const auto is = [&](int d) { return w.kernel[d] == 3 && w.stride[d] == 2 && w.dilation[d] == 1 && w.begin[d] >= 0; };
  return fits && is(1) && is(2);
}

template <typename T, int V>
void launch_3x3(const PoolWindow& w, const Operands& o, cudaStream_t stream) {
  using L = Lanes<T, V>;
  using Taps = Lanes<uint8_t, V>;
  const auto packs = static_cast<uint32_t>(o.channels / V), outputs = static_cast<uint32_t>(o.outer * w.out_cells() * packs);
  choose_taps_of_3x3<T, V>
      <<<blocks_for(outputs, kThreads), kThreads, 0, stream>>>(outputs, packs, w, static_cast<const L*>(o.x), static_cast<Taps*>(o.taps));
  check_launch("choose_taps_of_3x3");
  const auto pairs = [&](int d) { return static_cast<uint32_t>((w.in[d] - 1 + w.begin[d]) / 2 + 1); };
  const uint2 squares = {pairs(1), pairs(2)};
  const auto threads = static_cast<uint32_t>(o.outer * squares.x * squares.y * packs);
  return_to_3x3<T, V><<<blocks_for(threads, kThreads), kThreads, 0, stream>>>(threads, packs, w, squares, static_cast<const L*>(o.dy),
                                                                              static_cast<const Taps*>(o.taps), static_cast<L*>(o.dx));
  check_launch("return_to_3x3");
}

template <typename T, int V, typename Tap>
void launch_max(const PoolWindow& w, const Operands& o, cudaStream_t stream) {
  using L = Lanes<T, V>;
  using Taps = Lanes<Tap, V>;
  const int64_t packs = o.channels / V, outputs = o.outer * w.out_cells() * packs, inputs = o.outer * w.in_cells() * packs;
  choose_taps<T, V, Tap>
      <<<blocks_for(outputs, kThreads), kThreads, 0, stream>>>(outputs, packs, w, static_cast<const L*>(o.x), static_cast<Taps*>(o.taps));
  check_launch("choose_taps");
  return_to_taps<T, V, Tap><<<blocks_for(inputs, kThreads), kThreads, 0, stream>>>(inputs, packs, w, static_cast<const L*>(o.dy),
                                                                                   static_cast<const Taps*>(o.taps), static_cast<L*>(o.dx));
  check_launch("return_to_taps");
}

template <typename T, int V>
void launch(const PoolWindow& w, const Operands& o, cudaStream_t stream) {
  using L = Lanes<T, V>;
  const int64_t packs = o.channels / V, inputs = o.outer * w.in_cells() * packs;
  if constexpr (V > 1) {
    if (o.x && is_3x3(w, inputs)) return launch_3x3<T, V>(w, o, stream);
  }
  if (o.x && int64_t{w.kernel[0]} * w.kernel[1] * w.kernel[2] <= 256) return launch_max<T, V, uint8_t>(w, o, stream);
  if (o.x) return launch_max<T, V, int32_t>(w, o, stream);
  return_shares<T, V>
      <<<blocks_for(inputs, kThreads), kThreads, 0, stream>>>(inputs, packs, w, static_cast<const L*>(o.dy), static_cast<L*>(o.dx));
  check_launch("return_shares");
}

size_t tap_bytes(const PoolWindow& w, int64_t planes) {
  const size_t each = int64_t{w.kernel[0]} * w.kernel[1] * w.kernel[2] <= 256 ? sizeof(uint8_t) : sizeof(int32_t);
  return static_cast<size_t>(planes * w.out_cells()) * each + 16;
}

// kMax: dY and X; otherwise dY and the shape of X.
template <bool kMax>
void run(RunContext& r, const Node& node) {
  const TensorView& dy = r.input(0);
  const Dims dims = kMax ? r.input(1).dims : Dims(r.input_ints(1));
  Dims wanted;
  const PoolWindow w = read_pool(node, dims, wanted);
  if (dy.dims != wanted)
    throw Error("a gradient of shape " + to_string(dy.dims) + " for a pooling to " + to_string(wanted), "give that of its result");
  TensorView& dx = r.output(0, dims, dy.dtype, dy.layout);
  if (dx.count() == 0) return;
  const bool last = dy.layout == Layout::nhwc;
  Operands o{dy.data, kMax ? r.input(1).data : nullptr, dx.data, nullptr, last ? dims[0] : dims[0] * dims[1], last ? dims[1] : 1};
  if (kMax) o.taps = r.scratch(tap_bytes(w, dims[0] * dims[1]));
  with_float_type(dy.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int V = kPackOf16<T>;
    const bool aligned = is_16_byte_aligned(o.dy) && is_16_byte_aligned(o.dx) && is_16_byte_aligned(o.x);
    if (aligned && o.channels % V == 0) return launch<T, V>(w, o, stream_of(r));
    launch<T, 1>(w, o, stream_of(r));
  });
}

template <bool kMax>
CompiledKernel make_gradient(const CompileContext& c) {
  CompiledKernel kernel{[node = Node(c.node())](RunContext& r) { run<kMax>(r, node); }};
  if (kMax)
    take_images(c, {0, 1}, kernel);
  else
    take_images(c, {0}, kernel);
  return kernel;
}

template <bool kMax>
std::string unsupported(const CompileContext& c) {
  const std::string reason = kMax ? refuse_mixed_floats(c, {0, 1}) : refuse_mixed_floats(c, {0});
  if (!reason.empty()) return reason;
  const std::optional<Shape>& shape = c.input_types.at(0).shape;
  return shape && (shape->size() < 3 || shape->size() > 5) ? std::to_string(shape->size()) + " dimensions" : "";
}

}  // namespace

void register_pooling_gradients(KernelRegistry& registry) {
  const char* domain = kCommunicationDomain;
  registry.add({.op = "MaxPoolGrad", .domain = domain, .make = make_gradient<true>, .unsupported = unsupported<true>});
  registry.add(
      {.op = "AveragePoolGrad", .domain = domain, .make = make_gradient<false>, .unsupported = unsupported<false>, .host_inputs = {1}});
}

}  // namespace fretsaw::cuda
