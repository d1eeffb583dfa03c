// RotaryEmbedding: rotates pairs of elements of each head by an angle that depends on the position.
#include "kernels/cpu/rotary_embedding.h"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/indexing.h"

namespace fretsaw::cuda {
namespace {

// A RotaryShape as the kernel needs it. The work is counted in units of P pairs, or of P elements to copy.
template <typename N>
struct Rotation {
  Divider<N> units, inner, middle;  // of a head; heads or positions that lie next to each other; the other of the two
  int64_t D, half, width, batch_positions;
  bool heads_inside;  // [B, S, H * D]
  Indexes positions;  // no data: the caches have a row for each token
  int64_t cache_rows;

  // The row of the caches for head `head` as they lie in memory; -1 where there is none.
  __device__ int64_t row_of(N head) const {
    const N line = inner.quotient(head), within = head - line * inner.divisor;  // of [B * middle, inner]
    const N batch = middle.quotient(line);
    const N position = heads_inside ? line - batch * middle.divisor : within;
    const int64_t token = static_cast<int64_t>(batch) * batch_positions + position;
    return positions.data ? positions.within(token, cache_rows) : token;
  }
};

template <typename T, int P>
__device__ Lanes<T, P> load(const T* from) {
  return *reinterpret_cast<const Lanes<T, P>*>(from);
}
template <typename T, int P>
__device__ void store(T* to, const Lanes<T, P>& pack) {
  *reinterpret_cast<Lanes<T, P>*>(to) = pack;
}

// Rotates P pairs: the first elements are those of `a`, or with kInterleaved every other one of a and b.
template <typename T, int P, bool kInterleaved>
__device__ void rotate(Lanes<T, P>& a, Lanes<T, P>& b, const Lanes<T, P>& cosine, const Lanes<T, P>& sine) {
  T both[2 * P];
#pragma unroll
  for (int i = 0; i < P; ++i) both[i] = a.at[i], both[P + i] = b.at[i];
#pragma unroll
  for (int i = 0; i < P; ++i) {
    T &first = both[kInterleaved ? 2 * i : i], &second = both[kInterleaved ? 2 * i + 1 : P + i];
    const auto x = widen(first), y = widen(second), c = widen(cosine.at[i]), s = widen(sine.at[i]);
    first = narrow<T>(c * x - s * y);
    second = narrow<T>(s * x + c * y);
  }
#pragma unroll
  for (int i = 0; i < P; ++i) a.at[i] = both[i], b.at[i] = both[P + i];
}

template <typename T, int P, bool kInterleaved, typename N>
__global__ void __launch_bounds__(kThreads) rotate_heads(const T* x, const T* cosine, const T* sine, T* y, N count, Rotation<N> s) {
  let_later_begin();
  wait_for_earlier();
  const N step = static_cast<N>(gridDim.x) * blockDim.x;
  for (N at = static_cast<N>(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) {
    const N head = s.units.quotient(at);
    const int64_t begin = static_cast<int64_t>(head) * s.D, pair = static_cast<int64_t>(at - head * s.units.divisor) * P;
    if (pair >= s.half) {
      const int64_t place = begin + s.half + pair;  // pairs take two elements, the copied ones one
      store<T, P>(y + place, load<T, P>(x + place));
      continue;
    }
    const int64_t first = begin + (kInterleaved ? 2 * pair : pair), second = first + (kInterleaved ? P : s.half);
    Lanes<T, P> a = load<T, P>(x + first), b = load<T, P>(x + second);
    const int64_t row = s.row_of(head);
    if (row >= 0) {
      const int64_t angle = row * s.width + pair;
      rotate<T, P, kInterleaved>(a, b, load<T, P>(cosine + angle), load<T, P>(sine + angle));
    } else {
#pragma unroll
      for (int i = 0; i < P; ++i) a.at[i] = b.at[i] = narrow<T>(WideOf<T>(0));
    }
    store<T, P>(y + first, a);
    store<T, P>(y + second, b);
  }
}

struct RotaryCall {
  const TensorView &x, &cosine, &sine, &y;
  const RotaryShape& shape;
  bool interleaved;
  Indexes positions;
};

template <typename T, int P>
void launch_rotary(RunContext& r, const RotaryCall& call) {
  const RotaryShape& shape = call.shape;
  const int64_t units = shape.half / P + (shape.D - 2 * shape.half) / P, count = call.x.count() / shape.D * units;
  with_count_type(count, [&]<typename N>() {
    const Rotation<N> s{Divider<N>(units),
                        Divider<N>(shape.heads_inside ? shape.H : shape.S),
                        Divider<N>(shape.heads_inside ? shape.S : shape.H),
                        shape.D,
                        shape.half,
                        shape.width,
                        shape.S,
                        shape.heads_inside,
                        call.positions,
                        call.cosine.dims[0]};
    const auto launch = [&](auto kernel) {
      launch_dependent(kernel, blocks_for(count, kThreads), kThreads, stream_of(r), call.x.as<const T>(), call.cosine.as<const T>(),
                       call.sine.as<const T>(), call.y.as<T>(), static_cast<N>(count), s);
    };
    if (call.interleaved) return launch(rotate_heads<T, P, true, N>);
    launch(rotate_heads<T, P, false, N>);
  });
}

void rotary(RunContext& r, const RotarySettings& s, DeviceFault* fault) {
  const TensorView &x = r.input(0), &cosine = r.input(1), &sine = r.input(2);
  const RotaryShape shape = rotary_shape(r, s);
  const Indexes positions = r.has_input(3) ? Indexes(r.input(3), fault) : Indexes();
  const TensorView& y = r.output(0, x.dims);
  if (y.count() == 0) return;
  const RotaryCall call{x, cosine, sine, y, shape, s.interleaved, positions};
  with_float_type(x.dtype, [&]<typename T>(TypeIs<T>) {
    constexpr int P = kPackOf16<T>;
    const bool aligned =
        is_16_byte_aligned(x.data) && is_16_byte_aligned(y.data) && is_16_byte_aligned(cosine.data) && is_16_byte_aligned(sine.data);
    if (aligned && shape.half % P == 0 && shape.D % P == 0 && shape.width % P == 0) return launch_rotary<T, P>(r, call);
    launch_rotary<T, 1>(r, call);
  });
}

CompiledKernel make_rotary(const CompileContext& c) {
  CompiledKernel kernel;
  kernel.overwrites = 0;  // each thread writes the elements that it has read
  kernel.run = [settings = RotarySettings(c.node()), fault = gpu(c).fault_word(c.node())](RunContext& r) {
    rotary(r, settings, fault.get());
  };
  return kernel;
}

std::string unsupported_rotary(const CompileContext& c) {
  const std::string reason = refuse_other_types(c, 0, {DType::float16, DType::bfloat16, DType::float32, DType::float64});
  return reason.empty() ? refuse_other_types(c, 3, {DType::int32, DType::int64}) : reason;
}

}  // namespace

void register_rotary(KernelRegistry& registry) {
  registry.add({.op = "RotaryEmbedding", .make = make_rotary, .unsupported = unsupported_rotary});
}

}  // namespace fretsaw::cuda
