// The k first of slices of any length: each block selects them by radix where there are more than it can sort, then sorts them.
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/cuda/sorting.h"

namespace fretsaw::cuda {
namespace {

constexpr int kDigitBits = 11, kBins = 1 << kDigitBits;  // floats that are alike still spread over many bins
constexpr int kScanned = 4;                              // neighbouring elements that a thread looks at while it collects

template <typename Key, int kBlock, int kItems>
struct Selection {
  static constexpr int kCapacity = kBlock * kItems;
  using Sort = cub::BlockRadixSort<Key, kBlock, kItems, int>;
  using Scan = cub::BlockScan<unsigned, kBlock>;
  struct Collecting {
    typename Scan::TempStorage scan;
    unsigned histogram[kBins];
    Key keys[kCapacity];
    int indexes[kCapacity];
    Key digit;
    unsigned below;
  };
  union Storage {
    typename Sort::TempStorage sort;
    Collecting collecting;
  };
};

// Of the keys that agree with `prefix` in the bits from `high` up: the digit of bits [low, high) that the one of rank `rank` has, and how
// many have a lower one.
template <typename Key, int kBlock, typename Collecting>
__device__ void find_digit(const Slices& s, int64_t slice, Key prefix, int low, int high, unsigned rank, Collecting& shared) {
  using Scan = cub::BlockScan<unsigned, kBlock>;
  constexpr int kOwn = (kBins + kBlock - 1) / kBlock;  // bins of a thread
  for (int bin = threadIdx.x; bin < kBins; bin += kBlock) shared.histogram[bin] = 0;
  __syncthreads();
  const Key digits = static_cast<Key>((Key{1} << (high - low)) - 1);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < s.extent; i += kBlock) {
    const Key key = key_at<Key>(s, s.at(slice, i));
    const bool agrees = high == 8 * sizeof(Key) || (key ^ prefix) >> high == 0;
    if (agrees) atomicAdd(&shared.histogram[key >> low & digits], 1u);
  }
  __syncthreads();
  unsigned own[kOwn], sum = 0, before = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int bin = static_cast<int>(threadIdx.x) * kOwn + i;
    sum += own[i] = bin < kBins ? shared.histogram[bin] : 0;
  }
  Scan(shared.scan).ExclusiveSum(sum, before);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (rank >= before && rank < before + own[i]) {
      shared.digit = static_cast<Key>(threadIdx.x * kOwn + i);
      shared.below = before;
    }
    before += own[i];
  }
  __syncthreads();
}

// Puts the k first of the slice into shared memory, by ascending index.
template <typename Key, int kBlock, typename Collecting>
__device__ void collect(const Slices& s, int64_t slice, Collecting& shared) {
  using Scan = cub::BlockScan<unsigned, kBlock>;
  Key last = 0;                             // the key of the last one, found digit by digit
  auto equal = static_cast<unsigned>(s.k);  // how many of that key are wanted, in the end
  for (int high = 8 * sizeof(Key); high > 0;) {
    const int low = high > kDigitBits ? high - kDigitBits : 0;
    find_digit<Key, kBlock>(s, slice, last, low, high, equal - 1, shared);
    last |= shared.digit << low;
    equal -= shared.below;
    high = low;
    __syncthreads();
  }
  unsigned lower_before = 0, equal_before = 0;
  for (int64_t begin = 0; begin < s.extent; begin += kBlock * kScanned) {
    const int64_t first = begin + static_cast<int64_t>(threadIdx.x) * kScanned;
    Key keys[kScanned];
    unsigned found = 0, place = 0, all = 0;  // lower ones in the low half, equal ones in the high half
#pragma unroll
    for (int u = 0; u < kScanned; ++u) {
      if (first + u >= s.extent) continue;
      keys[u] = key_at<Key>(s, s.at(slice, first + u));
      found += keys[u] < last ? 1u : keys[u] == last ? 1u << 16 : 0u;
    }
    Scan(shared.scan).ExclusiveSum(found, place, all);
    unsigned lower = lower_before + (place & 0xffff), same = equal_before + (place >> 16);
#pragma unroll
    for (int u = 0; u < kScanned; ++u) {
      if (first + u >= s.extent) continue;
      const bool is_lower = keys[u] < last, is_same = keys[u] == last;
      if (is_lower || (is_same && same < equal)) {
        const unsigned at = lower + min(same, equal);
        shared.keys[at] = keys[u];
        shared.indexes[at] = static_cast<int>(first + u);
      }
      lower += is_lower, same += is_same;
    }
    lower_before += all & 0xffff;
    equal_before += all >> 16;
    __syncthreads();
  }
}

template <typename Key, int kBlock, int kItems>
__global__ void __launch_bounds__(kBlock) top_k_of_block(Slices s, int64_t slices, TopKOutputs out, int element_bytes) {
  using Parts = Selection<Key, kBlock, kItems>;
  __shared__ typename Parts::Storage shared;
  const bool selects = s.extent > Parts::kCapacity;
  for (int64_t slice = blockIdx.x; slice < slices; slice += gridDim.x) {
    if (selects) collect<Key, kBlock>(s, slice, shared.collecting);
    Key keys[kItems];
    int indexes[kItems];
#pragma unroll
    for (int u = 0; u < kItems; ++u) {
      // Elements beyond the last sort after all others, because the sort is stable.
      const int i = static_cast<int>(threadIdx.x) * kItems + u;
      keys[u] = static_cast<Key>(~Key{0}), indexes[u] = 0;
      if (selects && i < s.k) keys[u] = shared.collecting.keys[i], indexes[u] = shared.collecting.indexes[i];
      if (!selects && i < s.extent) keys[u] = key_at<Key>(s, s.at(slice, i)), indexes[u] = i;
    }
    __syncthreads();
    typename Parts::Sort(shared.sort).Sort(keys, indexes);
#pragma unroll
    for (int u = 0; u < kItems; ++u) {
      const int rank = static_cast<int>(threadIdx.x) * kItems + u;
      if (rank < s.k) out.put(s, slice, rank, indexes[u], element_bytes);
    }
    __syncthreads();
  }
}

constexpr int kFewThreads = 128, kFewItems = 4, kManyThreads = 1024, kManyItems = 2;
constexpr int kCapacity = kManyThreads * kManyItems;

}  // namespace

bool fits_block(const Slices& s, int64_t slices) {
  // A few long slices are better sorted by the whole device than read again and again by a few blocks.
  return s.k <= kCapacity && (s.extent <= int64_t{1} << 18 || slices > 8);
}

void top_k_by_blocks(RunContext& r, const Slices& s, int64_t slices, const TopKOutputs& out) {
  const int element_bytes = bits_of(s.type) / 8;
  const auto blocks = blocks_for(slices, 1);
  with_key_type(s.type, [&]<typename Key>() {
    if (s.extent <= kFewThreads * kFewItems) {
      top_k_of_block<Key, kFewThreads, kFewItems><<<blocks, kFewThreads, 0, stream_of(r)>>>(s, slices, out, element_bytes);
    } else {
      top_k_of_block<Key, kManyThreads, kManyItems><<<blocks, kManyThreads, 0, stream_of(r)>>>(s, slices, out, element_bytes);
    }
  });
  check_launch("top_k_of_block");
}

}  // namespace fretsaw::cuda
