// RotaryEmbedding: rotates pairs of elements of each head by an angle that depends on the position.
#include "kernels/cpu/rotary_embedding.h"

#include "kernels/cpu/attention.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

RotarySettings::RotarySettings(const Node& node)
    : interleaved(node.get_int("interleaved", 0) != 0),
      dimension(node.get_int("rotary_embedding_dim", 0)),
      heads(node.get_int("num_heads", 0)) {}

RotaryShape rotary_shape(RunContext& r, const RotarySettings& s) {
  const TensorView &x = r.input(0), &cosine = r.input(1), &sine = r.input(2);
  require(x.rank() == 3 || x.rank() == 4, "RotaryEmbedding needs 3 or 4 dimensions", "give it [B,H,S,D] or [B,S,H*D]");
  const bool four = x.rank() == 4;
  const int64_t B = x.dims[0], S = four ? x.dims[2] : x.dims[1], H = four ? x.dims[1] : s.heads;
  require(four || (H > 0 && x.dims[2] % H == 0), "num_heads is missing or does not divide the hidden size", "give num_heads");
  const int64_t D = four ? x.dims[3] : x.dims[2] / H, rotated = s.dimension > 0 ? s.dimension : D, half = rotated / 2;
  require(rotated <= D && rotated % 2 == 0, "the rotated dimension is odd or larger than a head", "choose another rotary_embedding_dim");
  require(cosine.dtype == x.dtype && sine.dtype == x.dtype && cosine.dims == sine.dims && cosine.rank() >= 2,
          "the caches of RotaryEmbedding do not fit", "give two of equal shape");
  const int64_t width = cosine.dims.back();
  require(width >= half, "the caches of RotaryEmbedding are too narrow", "give half of the rotated dimension");
  if (r.has_input(3)) {
    require(cosine.rank() == 2 && r.input(3).count() == B * S, "position_ids do not have the shape [B,S]", "give one for each token");
  } else {
    require(product(cosine.dims, 0, cosine.rank() - 1) == B * S, "caches without position_ids must be [B,S,half]", "give position_ids");
  }
  return {B, H, S, D, half, width, !four};
}

namespace {

// Rotates the first 2 * half elements of a head of D; pairs are (i, i + half), or neighbours.
template <typename T>
void rotate(const T* x, const T* cosine, const T* sine, T* y, int64_t half, int64_t D, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const T a = x[i * step], b = x[i * step + apart];
    y[i * step] = cosine[i] * a - sine[i] * b;
    y[i * step + apart] = sine[i] * a + cosine[i] * b;
  }
  for (int64_t i = 2 * half; i < D; ++i) y[i] = x[i];
}

template <typename T>
void rotate_all(RunContext& r, const RotarySettings& s) {
  const TensorView &x = r.input(0), &cosine = r.input(1), &sine = r.input(2);
  const RotaryShape shape = rotary_shape(r, s);
  const int64_t H = shape.H, S = shape.S, D = shape.D;
  std::vector<int64_t> positions;
  if (r.has_input(3)) positions = r.input_ints(3);
  for (int64_t& p : positions) p = normalise_index(p, cosine.dims[0]);
  TensorView& y = r.output(0, x.dims);
  parallel_for(shape.B * S * H, kGrainElements / (D + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // i counts heads as they lie in memory.
      const int64_t b = i / (S * H), token = shape.heads_inside ? i / H % S : i % S;
      const int64_t row = positions.empty() ? b * S + token : positions[static_cast<size_t>(b * S + token)];
      rotate(x.as<T>() + i * D, cosine.as<T>() + row * shape.width, sine.as<T>() + row * shape.width, y.as<T>() + i * D, shape.half, D,
             s.interleaved);
    }
  });
}

CompiledKernel make_plain(const CompileContext& c) {
  return {[s = RotarySettings(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { rotate_all<T>(r, s); });
  }};
}

}  // namespace

void register_rotary_embedding(KernelRegistry& registry) {
  registry.add({.op = "RotaryEmbedding", .make = any_float<make_plain>});
}

}  // namespace fretsaw
