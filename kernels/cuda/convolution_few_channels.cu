// Convolutions of images with up to 4 channels, as a network's first one is. Libraries want channels in packs of 8, most of them zeros
// here; this is a product of tensor cores whose K runs over (row of the window, column and channel):
//
//   Y [pixels, O] = A [pixels, K] B [K, O]        A (pixel, kh, j) = patch[row of the pixel + kh][column of the pixel * C + j]
//
// The patch of X that a tile of outputs sees lies in shared memory as [row][column][channel], so that what one row of the window meets
// are neighbours, KW * C of them. K is cut in chunks of 8, which never cross a row of the window; what is beyond its end counts as 0.
#include <algorithm>

#include "kernels/cuda/convolution.h"
#include "kernels/cuda/convolution_activation.cuh"
#include "kernels/cuda/index_math.h"

namespace fretsaw::cuda {

namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kTileRows = 2 * kWarps, kTileColumns = 16;  // outputs of a block: each warp has two rows of 16
constexpr int kChunk = 8;                                 // elements of K
constexpr size_t kMostShared = 48 << 10;
constexpr int kHeld = 20;  // elements of the next tile's patch that a thread holds while the block computes

// Where a chunk of K begins in the patch, from a pixel's own beginning, and how many of its elements count.
struct Chunk {
  int offset, valid;
};

struct Tiles {
  int C, H, W, O, OH, OW, KH, KW;
  int stride_h, stride_w, top, left;             // padding before
  int64_t x_image, x_channel, x_row, x_column;   // elements from one to the next
  int pitch, patch_rows, patch_columns, chunks;  // of the patch; chunks is even
  int tiles_h, tiles_w;
  int64_t tiles;
  Divider<uint32_t> by_columns, by_channels;  // of the patch's elements, counted along its columns first, then channels, then rows
  uint32_t patch_elements;
};

int chunks_of_row(const Convolution& c) {
  return static_cast<int>((c.w[3] * c.x_channels + kChunk - 1) / kChunk);
}
int chunks_of(const Convolution& c) {
  return (static_cast<int>(c.w[2]) * chunks_of_row(c) + 1) / 2 * 2;
}
// Groups of 8 output channels that a block computes.
int column_tiles(const Convolution& c) {
  return c.w[0] <= 16 ? 2 : c.w[0] <= 32 ? 4 : 8;
}
int64_t column_blocks(const Convolution& c) {
  const int64_t channels = column_tiles(c) * 8;
  return (c.w[0] + channels - 1) / channels;
}
size_t bytes_of_column_block(const Convolution& c) {
  return static_cast<size_t>(chunks_of(c)) * static_cast<size_t>(column_tiles(c)) * 128;
}

Tiles tiles_of(const Convolution& c) {
  const auto number = [](int64_t n) { return static_cast<int>(n); };
  Tiles t{};
  t.C = number(c.x_channels), t.H = number(c.x[2]), t.W = number(c.x[3]), t.O = number(c.w[0]);
  t.OH = number(c.y[2]), t.OW = number(c.y[3]), t.KH = number(c.w[2]), t.KW = number(c.w[3]);
  t.stride_h = number(c.strides[0]), t.stride_w = number(c.strides[1]);
  t.top = number(c.pads_begin[0]), t.left = number(c.pads_begin[1]);
  const int64_t C = c.x_channels, cells = c.x[2] * c.x[3];
  const bool plain = c.x_layout == Layout::plain;
  t.x_image = C * cells, t.x_channel = plain ? cells : 1, t.x_column = plain ? 1 : C, t.x_row = c.x[3] * t.x_column;
  t.patch_rows = (kTileRows - 1) * t.stride_h + t.KH, t.patch_columns = (kTileColumns - 1) * t.stride_w + t.KW;
  t.pitch = ((kTileColumns - 1) * t.stride_w * t.C + chunks_of_row(c) * kChunk + 1) / 2 * 2;
  t.chunks = chunks_of(c);
  t.tiles_h = (t.OH + kTileRows - 1) / kTileRows, t.tiles_w = (t.OW + kTileColumns - 1) / kTileColumns;
  t.tiles = c.x[0] * t.tiles_h * t.tiles_w;
  t.patch_elements = static_cast<uint32_t>(t.patch_rows * t.C * t.patch_columns);
  t.by_columns = Divider<uint32_t>(t.patch_columns), t.by_channels = Divider<uint32_t>(t.C);
  return t;
}

size_t patch_bytes(const Tiles& t) {
  return rounded(static_cast<size_t>(t.patch_rows) * static_cast<size_t>(t.pitch) * 2);
}
size_t shared_bytes(const Convolution& c) {
  const Tiles t = tiles_of(c);
  return patch_bytes(t) + rounded(static_cast<size_t>(t.chunks) * sizeof(Chunk)) + bytes_of_column_block(c);
}

// --- the weights in the order of the threads that multiply by them ---

// to [column blocks][pairs of chunks][pairs of tiles][lane] in packs of 8: of each of the two tiles the lane's elements (k, n) with
// k = 2 (lane % 4) + {0, 1, 8, 9} and n = lane / 4. Column n of tile j is channel n / 2 * 2 NT + 2 j + n % 2, so that a thread has
// neighbouring channels of the result.
template <typename T>
__global__ void pack_few_weights(Tiles t, int row_chunks, int NT, int64_t count, const T* from, T* to) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int element = static_cast<int>(i % 8), lane = static_cast<int>(i / 8 % 32);
    const int64_t rest = i / 256;
    const int tile = static_cast<int>(rest % (NT / 2)) * 2 + element / 4, step = static_cast<int>(rest / (NT / 2) % (t.chunks / 2));
    const int64_t block = rest / (NT / 2) / (t.chunks / 2);
    const int chunk = step * 2 + element % 4 / 2, j = chunk % row_chunks * kChunk + 2 * (lane % 4) + element % 2;
    const int kh = chunk / row_chunks, n = lane / 4;
    const int64_t o = block * NT * 8 + n / 2 * 2 * NT + 2 * tile + n % 2;
    const bool real = o < t.O && kh < t.KH && j < t.KW * t.C;
    to[i] = real ? from[((o * t.C + j % t.C) * t.KH + kh) * t.KW + j / t.C] : T(0.0f);
  }
}

// --- the product ---

__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two neighbours of the patch, of which `mask` counts. Where kPairs the address is even.
template <bool kPairs>
__device__ inline uint32_t two_of(const uint16_t* at, uint32_t mask) {
  if constexpr (kPairs) return *reinterpret_cast<const uint32_t*>(at) & mask;
  return (static_cast<uint32_t>(at[0]) | static_cast<uint32_t>(at[1]) << 16) & mask;
}

// A tile's place: the image, and its first output.
struct TilePlace {
  int64_t n;
  int row, column;
};
__device__ inline TilePlace place_of(const Tiles& t, int64_t tile) {
  const auto in_image = static_cast<uint32_t>(tile % (int64_t{t.tiles_h} * t.tiles_w));
  const int row = static_cast<int>(in_image) / t.tiles_w;
  return {tile / (int64_t{t.tiles_h} * t.tiles_w), row * kTileRows, (static_cast<int>(in_image) - row * t.tiles_w) * kTileColumns};
}

// Element `i` of the patch: its row, channel and column.
struct PatchElement {
  int row, c, column;
};
__device__ inline PatchElement patch_element(const Tiles& t, uint32_t i) {
  const uint32_t line = t.by_columns.quotient(i), row = t.by_channels.quotient(line);
  return {static_cast<int>(row), static_cast<int>(line - row * t.by_channels.divisor), static_cast<int>(i - line * t.by_columns.divisor)};
}

// A thread's elements of the part of the image that a tile sees, all loads under way at once; zeros outside the image.
__device__ inline void hold_patch(const Tiles& t, const uint16_t* x, int64_t tile, uint16_t (&held)[kHeld]) {
  const TilePlace place = place_of(t, tile);
  const int first_h = place.row * t.stride_h - t.top, first_w = place.column * t.stride_w - t.left;
  const uint16_t* image = x + place.n * t.x_image;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const uint32_t i = threadIdx.x + k * kThreads;
    held[k] = 0;
    if (i >= t.patch_elements) continue;
    const PatchElement e = patch_element(t, i);
    const int h = first_h + e.row, w = first_w + e.column;
    if (h >= 0 && h < t.H && w >= 0 && w < t.W) held[k] = image[h * t.x_row + e.c * t.x_channel + w * t.x_column];
  }
}
__device__ inline void store_patch(const Tiles& t, const uint16_t (&held)[kHeld], uint16_t* patch) {
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const uint32_t i = threadIdx.x + k * kThreads;
    if (i >= t.patch_elements) continue;
    const PatchElement e = patch_element(t, i);
    patch[e.row * t.pitch + e.column * t.C + e.c] = held[k];
  }
}

template <typename T, int NT>
struct Outputs {
  const T* bias;
  T* y;
  FusedActivation f;
  int64_t channel;  // the first of this thread's 2 NT

  // One pixel's channels of this thread, `sums` those of each tile at `first` and after it.
  __device__ void store(const Tiles& t, int64_t pixel, const float (&sums)[NT][4], int first) const {
    constexpr int V = NT < 4 ? 4 : 8;
#pragma unroll
    for (int part = 0; part < 2 * NT / V; ++part) {
      const int64_t o = channel + part * V;
      if (o >= t.O) return;
      Lanes<T, V> out;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const float sum = sums[(part * V + v) / 2][first + v % 2] + (bias ? widen(bias[o + v]) : 0.0f);
        out.at[v] = narrow<T>(fused_activation(f, sum));
      }
      *reinterpret_cast<Lanes<T, V>*>(y + pixel * t.O + o) = out;
    }
  }
};

template <typename T, int NT, bool kPairs>
__global__ void __launch_bounds__(kThreads, 3)
    multiply_patches(const __grid_constant__ Tiles t, int row_chunks, const uint16_t* x, const uint4* w, Outputs<T, NT> outputs) {
  extern __shared__ __align__(16) char shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, g = lane / 4, q = lane % 4;
  const int steps = t.chunks / 2, packs = steps * (NT / 2) * 32;
  uint4* weights = reinterpret_cast<uint4*>(shared);
  Chunk* chunks = reinterpret_cast<Chunk*>(weights + packs);
  uint16_t* patch = reinterpret_cast<uint16_t*>(chunks + t.chunks);
  for (int i = static_cast<int>(threadIdx.x); i < packs; i += kThreads) weights[i] = w[int64_t{blockIdx.y} * packs + i];
  for (int i = static_cast<int>(threadIdx.x); i < t.chunks; i += kThreads) {
    const int kh = i / row_chunks, j = i % row_chunks * kChunk;
    const bool real = kh < t.KH;
    chunks[i] = {real ? kh * t.pitch + j : 0, real ? min(kChunk, t.KW * t.C - j) : 0};
  }
  outputs.channel = int64_t{blockIdx.y} * NT * 8 + q * 2 * NT;
  uint16_t held[kHeld];
  hold_patch(t, x, blockIdx.x, held);  // a block has a tile
  for (int64_t tile = blockIdx.x; tile < t.tiles; tile += gridDim.x) {
    const TilePlace place = place_of(t, tile);
    __syncthreads();  // the last tile's patch has been read
    store_patch(t, held, patch);
    __syncthreads();
    if (tile + gridDim.x < t.tiles) hold_patch(t, x, tile + gridDim.x, held);
    float sums[2][NT][4] = {};
    const uint16_t* own = patch + 2 * warp * t.stride_h * t.pitch + g * t.stride_w * t.C + 2 * q;
    const int half = 8 * t.stride_w * t.C, next_row = t.stride_h * t.pitch;
    for (int step = 0; step < steps; ++step) {
      uint32_t a[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const Chunk chunk = chunks[2 * step + k];
        const int counts = chunk.valid - 2 * q;
        const uint32_t mask = counts >= 2 ? 0xffffffffu : counts == 1 ? 0xffffu : 0u;
        const uint16_t* at = own + chunk.offset;
        a[0][2 * k] = two_of<kPairs>(at, mask), a[0][2 * k + 1] = two_of<kPairs>(at + half, mask);
        a[1][2 * k] = two_of<kPairs>(at + next_row, mask), a[1][2 * k + 1] = two_of<kPairs>(at + next_row + half, mask);
      }
#pragma unroll
      for (int j = 0; j < NT / 2; ++j) {
        const uint4 b = weights[(step * (NT / 2) + j) * 32 + lane];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply(sums[m][2 * j], a[m], b.x, b.y, T{});
          multiply(sums[m][2 * j + 1], a[m], b.z, b.w, T{});
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int oh = place.row + 2 * warp + m, ow = place.column + g;
      const int64_t line = (place.n * t.OH + oh) * t.OW;
      if (oh < t.OH && ow < t.OW) outputs.store(t, line + ow, sums[m], 0);
      if (oh < t.OH && ow + 8 < t.OW) outputs.store(t, line + ow + 8, sums[m], 2);
    }
  }
}

template <typename T, int NT, bool kPairs>
void launch(const Convolution& c, const ConvolutionAddresses& at, int multiprocessors, cudaStream_t stream) {
  const Tiles t = tiles_of(c);
  const dim3 blocks(static_cast<unsigned>(std::min<int64_t>(t.tiles, int64_t{3} * multiprocessors)),
                    static_cast<unsigned>(column_blocks(c)));
  const Outputs<T, NT> outputs{c.bias ? static_cast<const T*>(at.bias) : nullptr, static_cast<T*>(at.y), c.activation, 0};
  multiply_patches<T, NT, kPairs><<<blocks, kThreads, shared_bytes(c), stream>>>(
      t, chunks_of_row(c), static_cast<const uint16_t*>(at.given_x), static_cast<const uint4*>(at.w), outputs);
  check_launch("multiply_patches");
}

template <typename T>
void launch_for_columns(const Convolution& c, const ConvolutionAddresses& at, int multiprocessors, cudaStream_t stream) {
  const bool pairs = c.strides[1] * c.x_channels % 2 == 0;
  switch (column_tiles(c)) {
    case 2:
      return pairs ? launch<T, 2, true>(c, at, multiprocessors, stream) : launch<T, 2, false>(c, at, multiprocessors, stream);
    case 4:
      return pairs ? launch<T, 4, true>(c, at, multiprocessors, stream) : launch<T, 4, false>(c, at, multiprocessors, stream);
    default:
      return pairs ? launch<T, 8, true>(c, at, multiprocessors, stream) : launch<T, 8, false>(c, at, multiprocessors, stream);
  }
}

}  // namespace

bool has_few_channels(const Convolution& c) {
  if (c.dtype != DType::float16 && c.dtype != DType::bfloat16) return false;
  if (!c.channels_last || c.transposed || c.groups != 1 || c.spatial_rank() != 2 || c.residual) return false;
  if (c.x_channels < 1 || c.x_channels > 4 || c.w[0] % 8 != 0 || c.dilations != Dims{1, 1}) return false;
  if (c.w[2] > 15 || c.w[3] > 15 || c.strides[0] > 8 || c.strides[1] > 8) return false;
  if (c.x[2] >= 1 << 24 || c.x[3] >= 1 << 24 || column_blocks(c) > 65535) return false;
  return shared_bytes(c) <= kMostShared && tiles_of(c).patch_elements <= kHeld * kThreads;
}

size_t few_channels_weight_bytes(const Convolution& c) {
  return bytes_of_column_block(c) * static_cast<size_t>(column_blocks(c));
}

void pack_few_channels_weights(const Convolution& c, const void* from, void* to, cudaStream_t stream) {
  const auto count = static_cast<int64_t>(few_channels_weight_bytes(c) / 2);
  with_float_type(c.dtype, [&]<typename Tag>(Tag) {
    using T = typename Tag::type;
    if constexpr (sizeof(T) == 2) {
      pack_few_weights<T><<<blocks_for(count, kThreads), kThreads, 0, stream>>>(tiles_of(c), chunks_of_row(c), column_tiles(c), count,
                                                                                static_cast<const T*>(from), static_cast<T*>(to));
      check_launch("pack_few_weights");
    }
  });
}

void run_few_channels(const Convolution& c, const ConvolutionAddresses& at, int multiprocessors, cudaStream_t stream) {
  if (c.dtype == DType::float16)
    launch_for_columns<__half>(c, at, multiprocessors, stream);
  else
    launch_for_columns<__nv_bfloat16>(c, at, multiprocessors, stream);
}

}  // namespace fretsaw::cuda
