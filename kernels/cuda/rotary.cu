// RotaryEmbedding: rotates pairs of elements of each head by an angle that depends on the position.
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/indexing.h"

namespace fretsaw::cuda {
namespace {

// X [B, H, S, D] or [B, S, H * D]; caches [positions, width] with position_ids [B, S], or [B, S, width] without. The first 2 * half
// elements of a head are rotated in pairs (i, i + half), or of neighbours; the others are copied. The work is counted in units of P
// pairs, or of P elements to copy.
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
  int64_t H, S, D, half, width;
  bool heads_inside, interleaved;
  Indexes positions;
};

template <typename T, int P>
void launch_rotary(RunContext& r, const RotaryCall& call) {
  const int64_t units = call.half / P + (call.D - 2 * call.half) / P, count = call.x.count() / call.D * units;
  with_count_type(count, [&]<typename N>() {
    const Rotation<N> s{Divider<N>(units),
                        Divider<N>(call.heads_inside ? call.H : call.S),
                        Divider<N>(call.heads_inside ? call.S : call.H),
                        call.D,
                        call.half,
                        call.width,
                        call.S,
                        call.heads_inside,
                        call.positions,
                        call.cosine.dims[0]};
    const auto launch = [&](auto kernel) {
      kernel<<<blocks_for(count, kThreads), kThreads, 0, stream_of(r)>>>(call.x.as<const T>(), call.cosine.as<const T>(),
                                                                         call.sine.as<const T>(), call.y.as<T>(), static_cast<N>(count), s);
    };
    if (call.interleaved) return launch(rotate_heads<T, P, true, N>);
    launch(rotate_heads<T, P, false, N>);
  });
  check_launch("rotate_heads");
}

struct RotarySettings {
  bool interleaved;
  int64_t dimension, heads;
};

void rotary(RunContext& r, const RotarySettings& s, DeviceFault* fault) {
  const TensorView &x = r.input(0), &cosine = r.input(1), &sine = r.input(2);
  require(x.rank() == 3 || x.rank() == 4, "RotaryEmbedding needs 3 or 4 dimensions", "give it [B,H,S,D] or [B,S,H*D]");
  const bool four = x.rank() == 4;
  const int64_t B = x.dims[0], S = four ? x.dims[2] : x.dims[1], H = four ? x.dims[1] : s.heads;
  require((four || H > 0) && (four || x.dims[2] % H == 0), "num_heads is missing or does not divide the hidden size", "give num_heads");
  const int64_t D = four ? x.dims[3] : x.dims[2] / H, turned = s.dimension > 0 ? s.dimension : D, half = turned / 2;
  require(turned <= D && turned % 2 == 0, "the rotated dimension is odd or larger than a head", "choose another rotary_embedding_dim");
  require(cosine.dtype == x.dtype && sine.dtype == x.dtype && cosine.dims == sine.dims && cosine.rank() >= 2,
          "the caches of RotaryEmbedding do not fit", "give two of equal shape");
  const int64_t width = cosine.dims.back();
  require(width >= half, "the caches of RotaryEmbedding are too narrow", "give half of the rotated dimension");
  Indexes positions;
  if (r.has_input(3)) {
    require(cosine.rank() == 2 && r.input(3).count() == B * S, "position_ids do not have the shape [B,S]", "give one for each token");
    positions = Indexes(r.input(3), fault);
  } else {
    require(cosine.count() == B * S * width, "caches without position_ids must be [B,S,half]", "give position_ids");
  }
  const TensorView& y = r.output(0, x.dims);
  if (y.count() == 0) return;
  const RotaryCall call{x, cosine, sine, y, H, S, D, half, width, !four, s.interleaved, positions};
  with_float_type(x.dtype, [&]<typename T>(TypeIs<T>) {
    constexpr int P = kPackOf16<T>;
    const bool aligned =
        is_16_byte_aligned(x.data) && is_16_byte_aligned(y.data) && is_16_byte_aligned(cosine.data) && is_16_byte_aligned(sine.data);
    if (aligned && half % P == 0 && D % P == 0 && width % P == 0) return launch_rotary<T, P>(r, call);
    launch_rotary<T, 1>(r, call);
  });
}

CompiledKernel make_rotary(const CompileContext& c) {
  const Node& node = c.node();
  const RotarySettings settings{node.get_int("interleaved", 0) != 0, node.get_int("rotary_embedding_dim", 0), node.get_int("num_heads", 0)};
  CompiledKernel kernel;
  kernel.overwrites = 0;  // each thread writes the elements that it has read
  kernel.run = [settings, fault = gpu(c).fault_word(node)](RunContext& r) { rotary(r, settings, fault.get()); };
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
