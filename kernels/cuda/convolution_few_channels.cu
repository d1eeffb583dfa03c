// Convolutions of images with up to 4 channels, as a network's first one is. Libraries want channels in packs of 8, most of them zeros
// here; this is a product of tensor cores whose K runs over (plane, row of the window, element of its row):
//
//   Y [pixels, O] = A [pixels, K] B [K, O]        A (pixel, p, kh, j) = patch[p][row of the pixel + kh][first element of the pixel + j]
//
// A plain X has a plane for each channel; a channels-last X is one plane whose rows hold the channels side by side. Either way what one
// row of the window meets in a plane are neighbours: KW of them, or KW * C. K is cut in chunks of 8, which never cross a row of the window;
// what is outside it counts as 0. The patch of X that a tile of outputs sees is copied to shared memory in packs of 16 bytes, with zeros
// outside the image, while the tile before it is computed.
#include <algorithm>

#include "kernels/cuda/convolution.h"
#include "kernels/cuda/convolution_activation.cuh"
#include "kernels/cuda/index_math.h"

namespace fretsaw::cuda {

namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kBlocksEach = 4;  // of a multiprocessor
constexpr int kTileRows = 2 * kWarps, kTileColumns = 16;            // outputs of a block: each warp has two rows of 16
constexpr int kChunk = 8;                                           // elements of K
constexpr size_t kMostShared = 48 << 10;

// A chunk of K for the threads that read its elements 2 q and 2 q + 1: where it begins in the patch, from a pixel's own beginning, and a
// mask of what counts of the two.
struct alignas(8) ChunkPart {
  int offset;
  uint32_t mask;
};
constexpr int kParts = kChunk / 2;

struct Tiles {
  int C, H, O, OH, OW, KH, KW;
  int stride_h, top;
  // Of the planes' rows: elements, elements of a row of the window, from one pixel's first to the next one's, before the image.
  int row, window, step, left;
  // A patch begins `before` elements before the first pixel's, where X has a whole pack; a pixel's K begins `lead` before its window, so
  // that it is at an even place where pixels are an even number of elements apart.
  int before, lead;
  int planes, patch_rows, packs;  // of the patch; packs of 8 elements of its rows
  int row_chunks, chunks;         // of a row of the window; of K, an even number
  uint32_t tiles;
  Divider<uint32_t> in_image, in_row;   // tiles
  Divider<uint32_t> in_line, in_plane;  // packs of a patch's row, rows of a plane of it
};

Tiles tiles_of(const Convolution& c) {
  const auto number = [](int64_t n) { return static_cast<int>(n); };
  Tiles t{};
  const bool plain = c.x_layout == Layout::plain;
  const int64_t side_by_side = plain ? 1 : c.x_channels;
  t.C = number(c.x_channels), t.H = number(c.x[2]), t.O = number(c.w[0]), t.OH = number(c.y[2]), t.OW = number(c.y[3]);
  t.KH = number(c.w[2]), t.KW = number(c.w[3]), t.stride_h = number(c.strides[0]), t.top = number(c.pads_begin[0]);
  t.row = number(c.x[3] * side_by_side), t.window = number(c.w[3] * side_by_side), t.step = number(c.strides[1] * side_by_side);
  t.left = number(c.pads_begin[1] * side_by_side);
  t.planes = plain ? t.C : 1;
  t.before = (kChunk - t.left % kChunk) % kChunk, t.lead = t.step % 2 == 0 ? t.before % 2 : 0;
  t.row_chunks = (t.lead + t.window + kChunk - 1) / kChunk;
  t.chunks = (t.planes * t.KH * t.row_chunks + 1) / 2 * 2;
  t.patch_rows = (kTileRows - 1) * t.stride_h + t.KH;
  t.packs = (t.before + (kTileColumns - 1) * t.step + t.row_chunks * kChunk + kChunk - 1) / kChunk;
  const int64_t across = (c.y[3] + kTileColumns - 1) / kTileColumns, down = (c.y[2] + kTileRows - 1) / kTileRows;
  t.tiles = static_cast<uint32_t>(c.x[0] * down * across);
  t.in_image = Divider<uint32_t>(down * across), t.in_row = Divider<uint32_t>(across);
  t.in_line = Divider<uint32_t>(t.packs), t.in_plane = Divider<uint32_t>(t.patch_rows);
  return t;
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
  return static_cast<size_t>(tiles_of(c).chunks) * static_cast<size_t>(column_tiles(c)) * 128;
}

__host__ __device__ inline int patch_packs(const Tiles& t) {
  return t.planes * t.patch_rows * t.packs;
}
// Two patches, the weights, a bias for each channel, the parts of chunks.
size_t shared_bytes(const Convolution& c) {
  const Tiles t = tiles_of(c);
  const auto channels = static_cast<size_t>(column_tiles(c) * 8);
  return 2 * static_cast<size_t>(patch_packs(t)) * sizeof(uint4) + bytes_of_column_block(c) + channels * sizeof(float) +
         static_cast<size_t>(t.chunks * kParts) * sizeof(ChunkPart);
}

// Column n of the tensor cores' tile j is this channel of the block's. A thread has columns 2 (lane % 4) + {0, 1} of each tile: of the
// tiles of a group they are neighbouring channels, and of four such threads too, so that they are written as whole packs side by side.
template <int NT>
constexpr int kGroup = NT < 4 ? NT : 4;
__host__ __device__ constexpr int channel_of(int group, int tile, int n) {
  return tile / group * 8 * group + n / 2 * 2 * group + tile % group * 2 + n % 2;
}

// --- the weights in the order of the threads that multiply by them ---

// to [column blocks][pairs of chunks][pairs of tiles][lane] in packs of 8: of each of the two tiles the lane's elements (k, n) with
// k = 2 (lane % 4) + {0, 1, 8, 9} and n = lane / 4.
template <typename T>
__global__ void pack_few_weights(Tiles t, int NT, int64_t count, const T* from, T* to) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int element = static_cast<int>(i % 8), lane = static_cast<int>(i / 8 % 32);
    const int64_t rest = i / 256;
    const int tile = static_cast<int>(rest % (NT / 2)) * 2 + element / 4, step = static_cast<int>(rest / (NT / 2) % (t.chunks / 2));
    const int64_t block = rest / (NT / 2) / (t.chunks / 2);
    const int chunk = step * 2 + element % 4 / 2, line = chunk / t.row_chunks;
    const int j = chunk % t.row_chunks * kChunk + 2 * (lane % 4) + element % 2 - t.lead;
    const int side_by_side = t.C / t.planes;
    const int64_t o = block * NT * 8 + channel_of(NT < 4 ? NT : 4, tile, lane / 4);
    const bool real = o < t.O && line < t.planes * t.KH && j >= 0 && j < t.window;
    const int channel = real ? line / t.KH * side_by_side + j % side_by_side : 0;
    to[i] = real ? from[((o * t.C + channel) * t.KH + line % t.KH) * t.KW + j / side_by_side] : T(0.0f);
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
  int image, row, column;
};
__device__ inline TilePlace place_of(const Tiles& t, uint32_t tile) {
  const uint32_t image = split_off(t.in_image, tile), row = split_off(t.in_row, tile);
  return {static_cast<int>(image), static_cast<int>(row) * kTileRows, static_cast<int>(tile) * kTileColumns};
}

// Starts the copies of a tile's patch; packs outside the image become zeros, and none is partly outside.
__device__ inline void fetch_patch(const Tiles& t, const uint16_t* x, uint32_t tile, uint4* patch) {
  const TilePlace place = place_of(t, tile);
  const int first = place.column * t.step - t.left - t.before, top = place.row * t.stride_h - t.top, count = patch_packs(t);
  const uint16_t* image = x + static_cast<int64_t>(place.image) * t.planes * t.H * t.row;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    auto pack = static_cast<uint32_t>(i);
    uint32_t line = split_off(t.in_line, pack);
    const auto plane = static_cast<int>(split_off(t.in_plane, line));
    const int h = top + static_cast<int>(line), at = first + static_cast<int>(pack) * kChunk;
    const bool inside = h >= 0 && h < t.H && at >= 0 && at < t.row;
    const uint16_t* from = inside ? image + (static_cast<int64_t>(plane) * t.H + h) * t.row + at : x;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(patch + i))),
                 "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
  }
}
__device__ inline void close_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ inline void wait_for_all_but_last_group() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
}

__device__ inline uint32_t pack_two(float low, float high, __half) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}
__device__ inline uint32_t pack_two(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}

// One pixel's channels of this thread, at `first` of each tile's sums and after it; `y` is the pixel's first that the thread has.
template <typename T, int NT>
__device__ inline void store_pixel(const float (&sums)[NT][4], int first, T* y, int channels_left) {
  constexpr int G = kGroup<NT>;
#pragma unroll
  for (int group = 0; group < NT / G; ++group) {
    if (group * 8 * G >= channels_left) return;
    Lanes<uint32_t, G> out;
#pragma unroll
    for (int j = 0; j < G; ++j) out.at[j] = pack_two(sums[group * G + j][first], sums[group * G + j][first + 1], T{});
    *reinterpret_cast<Lanes<uint32_t, G>*>(y + group * 8 * G) = out;
  }
}

template <int NT, typename F>
__device__ inline void for_each_sum(float (&sums)[2][NT][4], const F& f) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[m][j][e] = f(sums[m][j][e]);
    }
  }
}
template <int NT>
__device__ inline void activate(const FusedActivation& f, float (&sums)[2][NT][4]) {
  if (f.kind == FusedActivation::Kind::relu) {  // the usual one, without a choice for each sum
    for_each_sum<NT>(sums, [](float x) { return x < 0 ? 0.0f : x; });
  } else if (f.kind != FusedActivation::Kind::none) {
    for_each_sum<NT>(sums, [&f](float x) { return fused_activation(f, x); });
  }
}

template <typename T, int NT, bool kPairs>
__global__ void __launch_bounds__(kThreads, kBlocksEach)
    multiply_patches(const __grid_constant__ Tiles t, const uint16_t* x, const uint4* w, const T* bias, T* y, FusedActivation activation) {
  extern __shared__ uint4 shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, g = lane / 4, q = lane % 4;
  const int steps = t.chunks / 2, packs = steps * (NT / 2) * 32, first_channel = static_cast<int>(blockIdx.y) * NT * 8;
  uint4* weights = shared + 2 * patch_packs(t);
  float* biases = reinterpret_cast<float*>(weights + packs);
  ChunkPart* parts = reinterpret_cast<ChunkPart*>(biases + NT * 8);
  fetch_patch(t, x, blockIdx.x, shared);  // a block has a tile
  close_group();
  for (int i = static_cast<int>(threadIdx.x); i < packs; i += kThreads) weights[i] = w[int64_t{blockIdx.y} * packs + i];
  for (int i = static_cast<int>(threadIdx.x); i < NT * 8; i += kThreads)
    biases[i] = bias && first_channel + i < t.O ? widen(bias[first_channel + i]) : 0.0f;
  const int pitch = t.packs * kChunk;
  for (int i = static_cast<int>(threadIdx.x); i < t.chunks * kParts; i += kThreads) {
    const int chunk = i / kParts, line = chunk / t.row_chunks, j = chunk % t.row_chunks * kChunk, plane = line / t.KH, kh = line % t.KH;
    const int first = j + i % kParts * 2 - t.lead;  // element of the window's row
    const bool real = plane < t.planes;
    const auto counts = [&](int element) { return real && element >= 0 && element < t.window; };
    parts[i] = {real ? (plane * t.patch_rows + kh) * pitch + j : 0, (counts(first) ? 0xffffu : 0) | (counts(first + 1) ? 0xffff0000u : 0)};
  }
  const int own = 2 * warp * t.stride_h * pitch + t.before - t.lead + g * t.step + 2 * q;
  const int half = 8 * t.step, next_row = t.stride_h * pitch;
  uint32_t turn = 0;
  for (uint32_t tile = blockIdx.x; tile < t.tiles; tile += gridDim.x, ++turn) {
    const int buffer = static_cast<int>(turn % 2) * patch_packs(t), other = patch_packs(t) - buffer;
    if (tile + gridDim.x < t.tiles) fetch_patch(t, x, tile + gridDim.x, shared + other);
    close_group();
    wait_for_all_but_last_group();
    __syncthreads();
    float sums[2][NT][4];
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[0][j][e] = sums[1][j][e] = biases[channel_of(kGroup<NT>, j, 2 * q + e % 2)];
    }
    const uint16_t* patch = reinterpret_cast<const uint16_t*>(shared + buffer) + own;
    for (int step = 0; step < steps; ++step) {
      uint32_t a[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const ChunkPart part = parts[(2 * step + k) * kParts + q];
        const uint16_t* at = patch + part.offset;
        a[0][2 * k] = two_of<kPairs>(at, part.mask), a[0][2 * k + 1] = two_of<kPairs>(at + half, part.mask);
        a[1][2 * k] = two_of<kPairs>(at + next_row, part.mask), a[1][2 * k + 1] = two_of<kPairs>(at + next_row + half, part.mask);
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
    __syncthreads();  // the patch has been read
    activate<NT>(activation, sums);
    const TilePlace place = place_of(t, tile);
    const int channel = first_channel + q * 2 * kGroup<NT>;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int oh = place.row + 2 * warp + m, ow = place.column + g;
      if (oh >= t.OH) continue;
      T* line = y + ((int64_t{place.image} * t.OH + oh) * t.OW + ow) * t.O + channel;
      if (ow < t.OW) store_pixel<T, NT>(sums[m], 0, line, t.O - channel);
      if (ow + 8 < t.OW) store_pixel<T, NT>(sums[m], 2, line + int64_t{8} * t.O, t.O - channel);
    }
  }
}

template <typename T, int NT, bool kPairs>
void launch(const Convolution& c, const ConvolutionAddresses& at, int multiprocessors, cudaStream_t stream) {
  const Tiles t = tiles_of(c);
  const dim3 blocks(std::min(t.tiles, static_cast<uint32_t>(kBlocksEach * multiprocessors)), static_cast<unsigned>(column_blocks(c)));
  multiply_patches<T, NT, kPairs><<<blocks, kThreads, shared_bytes(c), stream>>>(
      t, static_cast<const uint16_t*>(at.given_x), static_cast<const uint4*>(at.w), c.bias ? static_cast<const T*>(at.bias) : nullptr,
      static_cast<T*>(at.y), c.activation);
  check_launch("multiply_patches");
}

template <typename T>
void launch_for_columns(const Convolution& c, const ConvolutionAddresses& at, int multiprocessors, cudaStream_t stream) {
  const bool pairs = tiles_of(c).step % 2 == 0;
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
  if (!c.channels_last || c.transposed || c.of_weight || c.groups != 1 || c.spatial_rank() != 2 || c.residual) return false;
  if (c.x_channels < 1 || c.x_channels > 4 || c.w[0] % 8 != 0 || c.dilations != Dims{1, 1}) return false;
  if (c.w[2] > 15 || c.w[3] > 15 || c.strides[0] > 8 || c.strides[1] > 8) return false;
  if (c.x[2] >= 1 << 24 || c.x[3] >= 1 << 24 || column_blocks(c) > 65535) return false;
  if (c.x[0] * c.y[2] * c.y[3] >= int64_t{1} << 31) return false;  // which bounds the number of tiles
  const Tiles t = tiles_of(c);
  return t.row % kChunk == 0 && shared_bytes(c) <= kMostShared;
}

size_t few_channels_weight_bytes(const Convolution& c) {
  return bytes_of_column_block(c) * static_cast<size_t>(column_blocks(c));
}

void pack_few_channels_weights(const Convolution& c, const void* from, void* to, cudaStream_t stream) {
  const auto count = static_cast<int64_t>(few_channels_weight_bytes(c) / 2);
  with_float_type(c.dtype, [&]<typename Tag>(Tag) {
    using T = typename Tag::type;
    if constexpr (sizeof(T) == 2) {
      pack_few_weights<T><<<blocks_for(count, kThreads), kThreads, 0, stream>>>(tiles_of(c), column_tiles(c), count,
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
