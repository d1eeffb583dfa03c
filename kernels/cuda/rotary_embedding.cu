// RotaryEmbedding: rotates pairs of elements of each head by an angle that depends on the position.
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/element_packs.cuh"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256;

// X [B, H, S, D] (heads_first) or [B, S, H, D]; cosines and sines [positions, width], or [B, S, width] without `ids` [B, S].
struct Rotation {
  int B, H, S, D, half, width, positions;
  bool heads_first, interleaved;
};

// A thread for each pair, and for each pair of elements that are only copied.
template <typename T>
__global__ void rotate(Rotation s, int64_t count, const T* x, const T* cosine, const T* sine, const int64_t* ids, T* y) {
  const int pairs = (s.D + 1) / 2;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t head = i / pairs;
    const int pair = static_cast<int>(i - head * pairs);
    const T* from = x + head * s.D;
    T* to = y + head * s.D;
    if (pair >= s.half) {
      for (int d = 2 * pair; d < min(2 * pair + 2, s.D); ++d) to[d] = from[d];
      continue;
    }
    const int64_t b = head / (int64_t{s.S} * s.H), token = b * s.S + (s.heads_first ? head % s.S : head / s.H % s.S);
    int64_t row = token;
    if (ids) {
      row = ids[token] < 0 ? ids[token] + s.positions : ids[token];
      row = row < 0 ? 0 : row >= s.positions ? s.positions - 1 : row;  // never outside the memory
    }
    const WideOf<T> c = widen(cosine[row * s.width + pair]), n = widen(sine[row * s.width + pair]);
    const int at = s.interleaved ? 2 * pair : pair, apart = s.interleaved ? 1 : s.half;
    const WideOf<T> a = widen(from[at]), o = widen(from[at + apart]);
    to[at] = narrow<T>(c * a - n * o);
    to[at + apart] = narrow<T>(n * a + c * o);
  }
}

struct RotarySettings {
  bool interleaved;
  int64_t dimension, heads;
};

Rotation read_rotation(const RotarySettings& settings, const TensorView& x, const TensorView& cosine, const TensorView& sine,
                       bool has_ids) {
  require(x.rank() == 3 || x.rank() == 4, "RotaryEmbedding needs 3 or 4 dimensions", "give it [B,H,S,D] or [B,S,H*D]");
  Rotation s;
  s.heads_first = x.rank() == 4, s.interleaved = settings.interleaved;
  const int64_t H = s.heads_first ? x.dims[1] : settings.heads;
  require(H > 0 && (s.heads_first || x.dims[2] % H == 0), "num_heads is missing or does not divide the hidden size", "give num_heads");
  s.B = static_cast<int>(x.dims[0]), s.H = static_cast<int>(H), s.S = static_cast<int>(s.heads_first ? x.dims[2] : x.dims[1]);
  s.D = static_cast<int>(s.heads_first ? x.dims[3] : x.dims[2] / H);
  const int64_t rotated = settings.dimension > 0 ? settings.dimension : s.D;
  require(rotated <= s.D && rotated % 2 == 0, "the rotated dimension is odd or larger than a head", "choose another rotary_embedding_dim");
  s.half = static_cast<int>(rotated / 2);
  require(cosine.dtype == x.dtype && sine.dtype == x.dtype && cosine.dims == sine.dims && cosine.rank() >= 2,
          "the caches of RotaryEmbedding do not fit", "give two of equal shape");
  s.width = static_cast<int>(cosine.dims.back()), s.positions = static_cast<int>(cosine.dims[0]);
  require(s.width >= s.half, "the caches of RotaryEmbedding are too narrow", "give half of the rotated dimension");
  require(has_ids ? cosine.rank() == 2 : cosine.count() == int64_t{s.B} * s.S * s.width,
          "caches without position_ids must be [B,S,half], with them [positions,half]", "check position_ids");
  return s;
}

CompiledKernel make_rotary(const CompileContext& c) {
  const RotarySettings settings{c.node().get_int("interleaved", 0) != 0, c.node().get_int("rotary_embedding_dim", 0),
                                c.node().get_int("num_heads", 0)};
  return {[settings](RunContext& r) {
    const TensorView &x = r.input(0), &cosine = r.input(1), &sine = r.input(2);
    const Rotation s = read_rotation(settings, x, cosine, sine, r.has_input(3));
    require(!r.has_input(3) || r.input(3).count() == int64_t{s.B} * s.S, "position_ids do not have the shape [B,S]",
            "give one for each token");
    const int64_t* ids = r.has_input(3) ? r.input(3).as<int64_t>() : nullptr;
    TensorView& y = r.output(0, x.dims);
    const int64_t count = int64_t{s.B} * s.H * s.S * ((s.D + 1) / 2);
    if (count == 0) return;
    with_float_type(x.dtype, [&]<typename T>(TypeIs<T>) {
      rotate<T>
          <<<blocks_for(count, kThreads), kThreads, 0, stream_of(r)>>>(s, count, x.as<T>(), cosine.as<T>(), sine.as<T>(), ids, y.as<T>());
    });
    check_launch("rotate");
  }};
}

std::string unsupported(const CompileContext& c) {
  if (std::string reason = refuse_other_types(c, 0, {DType::float32, DType::float16, DType::bfloat16, DType::float64}); !reason.empty())
    return reason;
  return refuse_other_types(c, 3, {DType::int64});
}

}  // namespace

void register_rotary_embedding(KernelRegistry& registry) {
  registry.add({.op = "RotaryEmbedding", .make = make_rotary, .unsupported = unsupported});
}

}  // namespace fretsaw::cuda
