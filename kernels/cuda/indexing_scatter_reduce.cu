// Scattering with a reduction: updates sorted by their target, then reduced in order.
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/indexing_scatter.h"
#include "kernels/cuda/number_types.cuh"

namespace fretsaw::cuda {
namespace {

template <typename T>
__device__ T combined(ScatterReduction reduction, T old, T update) {
  if constexpr (std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>) {
    return narrow<T>(combined(reduction, widen(old), widen(update)));
  } else {
    return scattered(reduction, old, update);
  }
}

// One thread for each element of the updates; those at the first update of a row reduce all of that row's.
template <typename T, typename N>
__global__ void __launch_bounds__(kThreads) reduce_sorted(ScatterReduction reduction, T* y, const T* updates, N count, Divider<N> inner,
                                                          N rows, N items, const N* targets, const N* order) {
  const N step = static_cast<N>(gridDim.x) * blockDim.x, width = inner.divisor;
  for (N at = static_cast<N>(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) {
    const N first = inner.quotient(at), column = at - first * width, target = targets[first];
    if (target == rows || (first > 0 && targets[first - 1] == target)) continue;
    T& element = y[static_cast<uint64_t>(target) * width + column];
    T value = element;
    for (N k = first; k < items && targets[k] == target; ++k) {
      value = combined(reduction, value, updates[static_cast<uint64_t>(order[k]) * width + column]);
    }
    element = value;
  }
}

template <typename N>
size_t sort_pairs(void* temporary, size_t bytes, cub::DoubleBuffer<N>& keys, cub::DoubleBuffer<N>& values, const Updates& u,
                  cudaStream_t stream) {
  const int bits = std::bit_width(static_cast<uint64_t>(u.rows));
  FRETSAW_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, values, u.items, 0, bits < 1 ? 1 : bits, stream));
  return bytes;
}

}  // namespace

template <typename N>
size_t bytes_to_order(const Updates& u) {
  cub::DoubleBuffer<N> keys, values;
  return 4 * static_cast<size_t>(u.items) * sizeof(N) + 16 + sort_pairs<N>(nullptr, 0, keys, values, u, nullptr);
}

template <typename N>
Ordered<N> bring_together(RunContext& r, const Updates& u, void* scratch) {
  auto* at = static_cast<N*>(scratch);
  cub::DoubleBuffer<N> targets(at, at + 2 * u.items), order(at + u.items, at + 3 * u.items);
  const auto end = reinterpret_cast<uintptr_t>(at + 4 * u.items);
  auto* temporary = reinterpret_cast<void*>((end + 15) / 16 * 16);
  cub::DoubleBuffer<N> keys, values;
  const size_t bytes = sort_pairs<N>(nullptr, 0, keys, values, u, nullptr);
  sort_pairs<N>(temporary, bytes, targets, order, u, stream_of(r));
  return {targets.Current(), order.Current()};
}

template <typename N>
void reduce_in_order(RunContext& r, ScatterReduction reduction, const Updates& u, void* scratch) {
  const Ordered<N> sorted = bring_together<N>(r, u, scratch);
  const DType type = u.y.dtype;
  if (type == DType::boolean) {  // of 0 and 1, whatever is not a sum or product then
    reduction = reduction == ScatterReduction::add || reduction == ScatterReduction::max ? ScatterReduction::max : ScatterReduction::min;
  }
  with_number_type(type, [&]<typename T>(TypeIs<T>) {
    const int64_t count = u.items * u.inner;
    reduce_sorted<T, N><<<blocks_for(count, kThreads), kThreads, 0, stream_of(r)>>>(
        reduction, u.y.as<T>(), u.updates.as<const T>(), static_cast<N>(count), Divider<N>(u.inner), static_cast<N>(u.rows),
        static_cast<N>(u.items), sorted.targets, sorted.order);
  });
  check_launch("reduce_sorted");
}

template size_t bytes_to_order<uint32_t>(const Updates&);
template size_t bytes_to_order<uint64_t>(const Updates&);
template Ordered<uint32_t> bring_together<uint32_t>(RunContext&, const Updates&, void*);
template Ordered<uint64_t> bring_together<uint64_t>(RunContext&, const Updates&, void*);
template void reduce_in_order<uint32_t>(RunContext&, ScatterReduction, const Updates&, void*);
template void reduce_in_order<uint64_t>(RunContext&, ScatterReduction, const Updates&, void*);

}  // namespace fretsaw::cuda
