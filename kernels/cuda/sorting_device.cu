// The k first of slices that are sorted whole, some slices at a time so that the scratch memory stays small.
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_segmented_radix_sort.cuh>

#include "kernels/cuda/sorting.h"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kAtOnce = int64_t{1} << 26;  // elements
constexpr int64_t kLong = int64_t{1} << 16;    // slices that the whole device sorts one after another, rather than a block each

// keys [count, extent] and the elements' indexes for the slices from `first` on
template <typename Key>
__global__ void __launch_bounds__(kThreads) write_keys(Slices s, int64_t first, int64_t count, Key* keys, int* indexes) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x, end = count * s.extent;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < end; at += step) {
    const int64_t slice = at / s.extent, i = at % s.extent;
    keys[at] = key_at<Key>(s, s.at(first + slice, i));
    indexes[at] = static_cast<int>(i);
  }
}

__global__ void __launch_bounds__(kThreads)
    write_first(Slices s, int64_t first, int64_t count, const int* indexes, TopKOutputs out, int element_bytes) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x, end = count * s.k;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < end; at += step) {
    const int64_t slice = at / s.k, rank = at % s.k;
    out.put(s, first + slice, rank, indexes[slice * s.extent + rank], element_bytes);
  }
}

struct Begin {
  int64_t extent;
  __host__ __device__ int64_t operator()(int64_t segment) const { return segment * extent; }
};

// Returns the bytes of temporary memory it needs; sorts when it has it.
template <typename Key>
size_t sort_slices(void* temporary, size_t bytes, cub::DoubleBuffer<Key>& keys, cub::DoubleBuffer<int>& indexes, int64_t count,
                   int64_t extent, cudaStream_t stream) {
  constexpr int kBits = 8 * sizeof(Key);
  if (count == 1) {
    FRETSAW_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, indexes, extent, 0, kBits, stream));
    return bytes;
  }
  const auto begins = thrust::make_transform_iterator(thrust::counting_iterator<int64_t>(0), Begin{extent});
  FRETSAW_CUDA_CHECK(cub::DeviceSegmentedRadixSort::SortPairs(temporary, bytes, keys, indexes, count * extent, count, begins, begins + 1, 0,
                                                              kBits, stream));
  return bytes;
}

template <typename Key>
void sort_all(RunContext& r, const Slices& s, int64_t slices, const TopKOutputs& out) {
  const int64_t group = s.extent >= kLong ? 1 : std::min(slices, kAtOnce / s.extent), n = group * s.extent;
  const cudaStream_t stream = stream_of(r);
  cub::DoubleBuffer<Key> keys;
  cub::DoubleBuffer<int> indexes;
  // The last group may have one slice, and another need of temporary memory.
  const size_t bytes = std::max(sort_slices<Key>(nullptr, 0, keys, indexes, group, s.extent, stream),
                                sort_slices<Key>(nullptr, 0, keys, indexes, 1, s.extent, stream));
  const auto pairs = static_cast<size_t>(n) * 2 * (sizeof(Key) + sizeof(int));
  auto* scratch = static_cast<std::byte*>(r.scratch((pairs + 15) / 16 * 16 + bytes));
  auto* first_keys = reinterpret_cast<Key*>(scratch);
  auto* first_indexes = reinterpret_cast<int*>(first_keys + 2 * n);
  for (int64_t first = 0; first < slices; first += group) {
    const int64_t count = std::min(group, slices - first);
    keys = cub::DoubleBuffer<Key>(first_keys, first_keys + n);
    indexes = cub::DoubleBuffer<int>(first_indexes, first_indexes + n);
    write_keys<Key><<<blocks_for(count * s.extent, kThreads), kThreads, 0, stream>>>(s, first, count, keys.Current(), indexes.Current());
    check_launch("write_keys");
    sort_slices<Key>(scratch + (pairs + 15) / 16 * 16, bytes, keys, indexes, count, s.extent, stream);
    write_first<<<blocks_for(count * s.k, kThreads), kThreads, 0, stream>>>(s, first, count, indexes.Current(), out, bits_of(s.type) / 8);
    check_launch("write_first");
  }
}

}  // namespace

void top_k_by_sorting(RunContext& r, const Slices& s, int64_t slices, const TopKOutputs& out) {
  with_key_type(s.type, [&]<typename Key>() { sort_all<Key>(r, s, slices, out); });
}

}  // namespace fretsaw::cuda
