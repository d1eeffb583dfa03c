// Transposes through shared memory: tiles are read along one dimension and written along another, both in wide accesses.
#include <algorithm>

#include "kernels/cuda/index_math.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;
constexpr size_t kMaxOuter = 8;

template <typename T>
constexpr int kTile = sizeof(T) <= 4 ? 64 : 32;
// Elements between the rows of a tile: an odd number of 4-byte words, so that a column lies in different banks.
template <typename T>
constexpr int kPitch = kTile<T> + (sizeof(T) < 4 ? 4 / static_cast<int>(sizeof(T)) : 1);

struct Transpose {
  int64_t reads = 0, writes = 0;         // extents of the dimension that is dense in `from`, and of the one that is dense in `to`
  int64_t from_pitch = 0, to_pitch = 0;  // of `writes` in `from`, of `reads` in `to`
  Divider<uint32_t> read_tiles, write_tiles;
  int outer = 0;  // the other dimensions
  Divider<uint32_t> extents[kMaxOuter];
  int64_t from_strides[kMaxOuter] = {}, to_strides[kMaxOuter] = {};
};

// Where a block's tile begins.
struct TilePlace {
  int64_t from = 0, to = 0;     // of the batch
  int64_t read = 0, write = 0;  // within it
};

FRETSAW_HOST_DEVICE TilePlace place_of(const Transpose& t, uint32_t block, int tile) {
  TilePlace place;
  uint32_t rest = t.read_tiles.quotient(block);
  place.read = static_cast<int64_t>(block - rest * t.read_tiles.divisor) * tile;
  const uint32_t batch = t.write_tiles.quotient(rest);
  place.write = static_cast<int64_t>(rest - batch * t.write_tiles.divisor) * tile;
  rest = batch;
  for (int k = t.outer - 1; k >= 0; --k) {
    const uint32_t next = t.extents[k].quotient(rest);
    const int64_t at = rest - next * t.extents[k].divisor;
    place.from += at * t.from_strides[k];
    place.to += at * t.to_strides[k];
    rest = next;
  }
  return place;
}

// tile[r][w] = from[w][r]; 16 bytes of one row of `from` at a time.
template <typename T>
__device__ void load_wide(const Transpose& t, const TilePlace& place, const T* from, T (*tile)[kPitch<T>]) {
  constexpr int kElements = 16 / sizeof(T), kLanes = kTile<T> / kElements;
  const int r = static_cast<int>(threadIdx.x) % kLanes * kElements, first = static_cast<int>(threadIdx.x) / kLanes;
  if (place.read + r >= t.reads) return;
  const T* column = from + place.from + place.read + r;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int w = first; w < kTile<T>; w += kThreads / kLanes) {
      if (place.write + w >= t.writes) continue;
      const uint4 row = *reinterpret_cast<const uint4*>(column + (place.write + w) * t.from_pitch);
      tile[r][w] = row.x, tile[r + 1][w] = row.y, tile[r + 2][w] = row.z, tile[r + 3][w] = row.w;
    }
  } else {  // two rows at a time, so that whole words are stored
    const int w = 2 * first;
    uint4 even{}, odd{};
    if (place.write + w < t.writes) even = *reinterpret_cast<const uint4*>(column + (place.write + w) * t.from_pitch);
    if (place.write + w + 1 < t.writes) odd = *reinterpret_cast<const uint4*>(column + (place.write + w + 1) * t.from_pitch);
    const uint32_t evens[4] = {even.x, even.y, even.z, even.w}, odds[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      *reinterpret_cast<uint32_t*>(&tile[r + 2 * k][w]) = (evens[k] & 0xffffu) | odds[k] << 16;
      *reinterpret_cast<uint32_t*>(&tile[r + 2 * k + 1][w]) = evens[k] >> 16 | (odds[k] & 0xffff0000u);
    }
  }
}

template <typename T>
__device__ void load_narrow(const Transpose& t, const TilePlace& place, const T* from, T (*tile)[kPitch<T>]) {
#pragma unroll 4
  for (int i = threadIdx.x; i < kTile<T> * kTile<T>; i += kThreads) {
    const int r = i % kTile<T>, w = i / kTile<T>;
    if (place.read + r < t.reads && place.write + w < t.writes) {
      tile[r][w] = from[place.from + (place.write + w) * t.from_pitch + place.read + r];
    }
  }
}

template <typename T>
__device__ void store_wide(const Transpose& t, const TilePlace& place, T* to, const T (*tile)[kPitch<T>]) {
  constexpr int kElements = 16 / sizeof(T), kLanes = kTile<T> / kElements;
  const int w = static_cast<int>(threadIdx.x) % kLanes * kElements;
  if (place.write + w >= t.writes) return;
#pragma unroll
  for (int r = static_cast<int>(threadIdx.x) / kLanes; r < kTile<T>; r += kThreads / kLanes) {
    if (place.read + r >= t.reads) continue;
    const auto* words = reinterpret_cast<const uint32_t*>(&tile[r][w]);
    *reinterpret_cast<uint4*>(to + place.to + (place.read + r) * t.to_pitch + place.write + w) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <typename T>
__device__ void store_narrow(const Transpose& t, const TilePlace& place, T* to, const T (*tile)[kPitch<T>]) {
#pragma unroll 4
  for (int i = threadIdx.x; i < kTile<T> * kTile<T>; i += kThreads) {
    const int w = i % kTile<T>, r = i / kTile<T>;
    if (place.read + r < t.reads && place.write + w < t.writes) {
      to[place.to + (place.read + r) * t.to_pitch + place.write + w] = tile[r][w];
    }
  }
}

template <typename T, bool kWideLoads, bool kWideStores>
__global__ void __launch_bounds__(kThreads) transpose_tiles(Transpose t, T* to, const T* from) {
  __shared__ T tile[kTile<T>][kPitch<T>];
  const TilePlace place = place_of(t, blockIdx.x, kTile<T>);
  if constexpr (kWideLoads) {
    load_wide<T>(t, place, from, tile);
  } else {
    load_narrow<T>(t, place, from, tile);
  }
  __syncthreads();
  if constexpr (kWideStores) {
    store_wide<T>(t, place, to, tile);
  } else {
    store_narrow<T>(t, place, to, tile);
  }
}

template <typename T>
void launch(const Transpose& t, T* to, const T* from, bool wide_loads, bool wide_stores, unsigned blocks, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2 || sizeof(T) == 4) {
    if (wide_loads && wide_stores) {
      transpose_tiles<T, true, true><<<blocks, kThreads, 0, stream>>>(t, to, from);
    } else if (wide_loads) {
      transpose_tiles<T, true, false><<<blocks, kThreads, 0, stream>>>(t, to, from);
    } else if (wide_stores) {
      transpose_tiles<T, false, true><<<blocks, kThreads, 0, stream>>>(t, to, from);
    } else {
      transpose_tiles<T, false, false><<<blocks, kThreads, 0, stream>>>(t, to, from);
    }
  } else {
    transpose_tiles<T, false, false><<<blocks, kThreads, 0, stream>>>(t, to, from);
  }
  check_launch("transpose");
}

// The dimensions of the copy as a batch of matrices; `tile` is the side of a tile.
Transpose transpose_of(const StridedCopy& copy, size_t along, int tile) {
  const size_t last = copy.dims.size() - 1;
  Transpose t;
  t.reads = copy.dims[along];
  t.writes = copy.dims[last];
  t.from_pitch = copy.from_strides[last];
  t.read_tiles = Divider<uint32_t>((t.reads + tile - 1) / tile);
  t.write_tiles = Divider<uint32_t>((t.writes + tile - 1) / tile);
  int64_t to_stride = count_of(copy.dims);
  for (size_t k = 0; k < last; ++k) {
    to_stride /= copy.dims[k];
    if (k == along) {
      t.to_pitch = to_stride;
      continue;
    }
    t.extents[t.outer] = Divider<uint32_t>(copy.dims[k]);
    t.from_strides[t.outer] = copy.from_strides[k];
    t.to_strides[t.outer++] = to_stride;
  }
  return t;
}

}  // namespace

void copy_transposed(const StridedCopy& copy, size_t along, cudaStream_t stream) {
  with_unit(copy.element_bytes, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int64_t kElements = 16 / sizeof(T);
    const Transpose t = transpose_of(copy, along, kTile<T>);
    const auto is_wide = [](int64_t v) { return v % kElements == 0; };
    const bool wide_loads = is_wide(t.reads) && is_wide(t.from_pitch) && std::all_of(t.from_strides, t.from_strides + t.outer, is_wide) &&
                            reinterpret_cast<uintptr_t>(copy.from) % 16 == 0;
    const bool wide_stores = is_wide(t.writes) && reinterpret_cast<uintptr_t>(copy.to) % 16 == 0;
    const int64_t blocks = count_of(copy.dims) / t.reads / t.writes * t.read_tiles.divisor * t.write_tiles.divisor;
    launch(t, static_cast<T*>(copy.to), static_cast<const T*>(copy.from), wide_loads, wide_stores, static_cast<unsigned>(blocks), stream);
  });
}

}  // namespace fretsaw::cuda
