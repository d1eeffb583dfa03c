// Copies around convolutions: channels to the last place and back, and padding written out.
#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/convolution.h"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kTile = 32;  // rows and columns of a transposed tile

// Moves elements by their size.
template <typename F>
void with_size(DType dtype, F&& f) {
  switch (bytes_of(dtype, 1)) {
    case 2:
      return f(TypeIs<uint16_t>{});
    case 4:
      return f(TypeIs<uint32_t>{});
    case 8:
      return f(TypeIs<uint64_t>{});
    default:
      throw Error("a copy of elements of type " + std::string(name_of(dtype)), "report this as a fault");
  }
}

// One thread writes one pack: to [N, S, P] from [N, C, S] or [N, S, C].
template <typename U, int V>
__global__ void pack_few_channels(int64_t packs, int64_t C, int64_t S, int64_t P, bool from_channels_last, const U* from, U* to) {
  const int64_t packs_of_cell = P / V;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < packs; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t cell = i / packs_of_cell, first = i % packs_of_cell * V, n = cell / S, s = cell % S;
    Lanes<U, V> pack;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t c = first + v;
      pack.at[v] = c >= C ? U(0) : from_channels_last ? from[cell * C + c] : from[(n * C + c) * S + s];
    }
    reinterpret_cast<Lanes<U, V>*>(to)[i] = pack;
  }
}

// to [N, B, P] = from [N, A, B], zeros from A up to P. A block takes a tile of 32 x 32; the grid covers (B, P) and walks N.
template <typename U>
__global__ void transpose_tiles(int64_t N, int64_t A, int64_t B, int64_t P, int64_t tiles_b, const U* from, U* to) {
  __shared__ U tile[kTile][kTile + 1];
  const int64_t b0 = blockIdx.x % tiles_b * kTile, a0 = blockIdx.x / tiles_b * kTile;
  for (int64_t n = blockIdx.y; n < N; n += gridDim.y) {
    for (int row = threadIdx.y; row < kTile; row += blockDim.y) {
      const int64_t a = a0 + row, b = b0 + threadIdx.x;
      tile[row][threadIdx.x] = a < A && b < B ? from[(n * A + a) * B + b] : U(0);
    }
    __syncthreads();
    for (int row = threadIdx.y; row < kTile; row += blockDim.y) {
      const int64_t b = b0 + row, a = a0 + threadIdx.x;
      if (a < P && b < B) to[(n * B + b) * P + a] = tile[threadIdx.x][row];
    }
    __syncthreads();
  }
}

template <typename U>
void transpose(int64_t N, int64_t A, int64_t B, int64_t P, const void* from, void* to, cudaStream_t stream) {
  const int64_t tiles_b = (B + kTile - 1) / kTile, tiles_a = (P + kTile - 1) / kTile;
  const dim3 grid(static_cast<unsigned>(tiles_a * tiles_b), static_cast<unsigned>(std::min<int64_t>(N, 65535)));
  transpose_tiles<U><<<grid, dim3(kTile, 8), 0, stream>>>(N, A, B, P, tiles_b, static_cast<const U*>(from), static_cast<U*>(to));
  check_launch("transpose_tiles");
}

// Spatial extents as three, the first ones 1.
struct Extents {
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1}, begin[3] = {0, 0, 0};
};

// to [outer, out..., inner] = from [outer, in..., inner], shifted by `begin`, zeros elsewhere.
template <typename U>
__global__ void pad_cells(int64_t count, Extents e, int64_t inner, const U* from, U* to) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    int64_t rest = i / inner, at = 0, step = 1;
    bool inside = true;
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      const int64_t position = rest % e.out[d] - e.begin[d];
      rest /= e.out[d];
      inside = inside && position >= 0 && position < e.in[d];
      at += position * step;
      step *= e.in[d];
    }
    to[i] = inside ? from[(rest * step + at) * inner + i % inner] : U{};
  }
}

}  // namespace

void pack_channels(DType dtype, int64_t N, int64_t C, int64_t S, int64_t P, bool from_channels_last, const void* from, void* to,
                   cudaStream_t stream) {
  if (N * S * P == 0) return;
  with_size(dtype, [&]<typename Tag>(Tag) {
    using U = typename Tag::type;
    constexpr int V = kPackOf16<U>;
    if (!from_channels_last && C > V) return transpose<U>(N, C, S, P, from, to, stream);
    const auto* source = static_cast<const U*>(from);
    auto* target = static_cast<U*>(to);
    const int64_t elements = N * S * P;
    if (P % V == 0) {
      pack_few_channels<U, V>
          <<<blocks_for(elements / V, kThreads), kThreads, 0, stream>>>(elements / V, C, S, P, from_channels_last, source, target);
    } else {
      pack_few_channels<U, 1>
          <<<blocks_for(elements, kThreads), kThreads, 0, stream>>>(elements, C, S, P, from_channels_last, source, target);
    }
    check_launch("pack_few_channels");
  });
}

void unpack_channels(DType dtype, int64_t N, int64_t C, int64_t S, const void* from, void* to, cudaStream_t stream) {
  if (N * C * S == 0) return;
  with_size(dtype, [&]<typename Tag>(Tag) { transpose<typename Tag::type>(N, S, C, S, from, to, stream); });
}

void write_padding(const Convolution& c, const void* from, void* to, cudaStream_t stream) {
  Extents e;
  const size_t rank = c.spatial_rank();
  int64_t cells = 1;
  for (size_t i = 0; i < rank; ++i) {
    const size_t at = 3 - rank + i;
    e.in[at] = c.x[i + 2];
    e.begin[at] = c.pads_begin[i];
    e.out[at] = c.pads_begin[i] + c.x[i + 2] + c.pads_end[i];
    cells *= e.out[at];
  }
  const int64_t outer = c.channels_last ? c.x[0] : c.x[0] * c.x[1], inner = c.channels_last ? c.x[1] : 1;
  const size_t inner_bytes = bytes_of(c.dtype, inner);
  if (inner_bytes % 16 == 0 && is_16_byte_aligned(from)) {
    const int64_t packs = static_cast<int64_t>(inner_bytes / 16), count = outer * cells * packs;
    pad_cells<uint4>
        <<<blocks_for(count, kThreads), kThreads, 0, stream>>>(count, e, packs, static_cast<const uint4*>(from), static_cast<uint4*>(to));
  } else {
    with_size(c.dtype, [&]<typename Tag>(Tag) {
      using U = typename Tag::type;
      const int64_t count = outer * cells * inner;
      pad_cells<U><<<blocks_for(count, kThreads), kThreads, 0, stream>>>(count, e, inner, static_cast<const U*>(from), static_cast<U*>(to));
    });
  }
  check_launch("pad_cells");
}

void cut_margins(const Convolution& c, const Dims& whole, const void* from, void* to, cudaStream_t stream) {
  // As [N, C, D...] or [N, D..., C], in which the spatial dimensions begin later.
  const auto in_memory = [&](Dims dims) {
    if (c.channels_last) std::rotate(dims.begin() + 1, dims.begin() + 2, dims.end());
    return dims;
  };
  Dims begin(whole.size(), 0);
  std::copy(c.pads_begin.begin(), c.pads_begin.end(), begin.begin() + 2);
  begin = in_memory(begin);
  StridedCopy copy;
  copy.element_bytes = bytes_of(c.dtype, 1);
  copy.dims = in_memory(c.y), copy.from_strides = strides_of(in_memory(whole));
  int64_t offset = 0;
  for (size_t d = 0; d < begin.size(); ++d) offset += begin[d] * copy.from_strides[d];
  copy.to = to, copy.from = static_cast<const char*>(from) + bytes_of(c.dtype, offset);
  copy_strided(copy, stream);
}

}  // namespace fretsaw::cuda
