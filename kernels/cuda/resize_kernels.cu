// Reading a tensor by tables of taps: the nearest element, or a weighted sum over one to several axes.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/convert.h"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/index_math.h"
#include "kernels/cuda/resize.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kSmall = (int64_t{1} << 31) - 1;

// The last levels of a plan; the levels before are none.
template <int kLevels>
ResizePlan<kLevels> last_levels(const ResizePlan<kMaxResized>& plan) {
  ResizePlan<kLevels> result;
  std::copy_n(plan.resized + kMaxResized - kLevels, kLevels, result.resized);
  std::copy_n(plan.kept + kMaxResized - kLevels, kLevels + 1, result.kept);
  return result;
}

// Divides an output's number by the extents of its dimensions, the last one first.
template <int kLevels, typename Index>
struct Extents {
  Divider<Index> resized[kLevels], kept[kLevels + 1];

  // The last dimension is counted in packs of `elements`.
  Extents(const ResizePlan<kLevels>& plan, int elements) {
    for (int k = 0; k < kLevels; ++k) resized[k] = Divider<Index>(plan.resized[k].out);
    for (int k = 0; k <= kLevels; ++k) kept[k] = Divider<Index>(plan.kept[k].extent);
    if (plan.kept[kLevels].extent > 1) {
      kept[kLevels] = Divider<Index>(plan.kept[kLevels].extent / elements);
    } else {
      resized[kLevels - 1] = Divider<Index>(plan.resized[kLevels - 1].out / elements);
    }
  }
};

template <typename Index>
FRETSAW_HOST_DEVICE Index remainder(const Divider<Index>& extent, Index& i) {
  const Index outer = extent.quotient(i), at = i - outer * extent.divisor;
  i = outer;
  return at;
}

// The coordinates along the axes that change, and where the kept ones lead to in the input.
template <int kLevels, typename Index>
struct Place {
  Index at[kLevels];
  Index column;  // along the last kept dimension
  int64_t base = 0;

  FRETSAW_HOST_DEVICE Place(const ResizePlan<kLevels>& plan, const Extents<kLevels, Index>& extents, Index i) {
    column = remainder(extents.kept[kLevels], i);
    for (int k = kLevels - 1; k >= 0; --k) {
      at[k] = remainder(extents.resized[k], i);
      base += static_cast<int64_t>(remainder(extents.kept[k], i)) * plan.kept[k].stride;
    }
  }
};

unsigned blocks_of(int64_t packs) {
  return static_cast<unsigned>((packs + kThreads - 1) / kThreads);
}

// --- nearest ---

// Packs of V neighbours along the last axis that changes, which is the last one but for V = 1.
template <typename T, int V, int kLevels, typename Index>
__global__ void __launch_bounds__(kThreads)
    nearest(ResizePlan<kLevels> plan, Extents<kLevels, Index> extents, const T* x, T* y, T outside, Index packs) {
  const Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= packs) return;
  const Place<kLevels, Index> place(plan, extents, i);
  int64_t base = place.base + static_cast<int64_t>(place.column) * plan.kept[kLevels].stride;
  bool extrapolated = false;
#pragma unroll
  for (int k = 0; k + 1 < kLevels; ++k) {
    const ResizedAxis& axis = plan.resized[k];
    if (axis.index) base += axis.index[place.at[k]] * axis.stride;
    extrapolated |= axis.extrapolated && axis.extrapolated[place.at[k]];
  }
  const ResizedAxis& last = plan.resized[kLevels - 1];
  Lanes<T, V> result;
#pragma unroll
  for (int e = 0; e < V; ++e) {
    const Index j = place.at[kLevels - 1] * V + e;
    const bool none = extrapolated || (last.extrapolated && last.extrapolated[j]);
    result.at[e] = none ? outside : x[base + last.index[j] * last.stride];
  }
  reinterpret_cast<Lanes<T, V>*>(y)[i] = result;
}

template <typename T, int V, int kLevels, typename Index>
void launch_nearest(const ResizePlan<kMaxResized>& all, const void* x, void* y, const Pattern& outside, cudaStream_t stream) {
  const auto plan = last_levels<kLevels>(all);
  const int64_t packs = plan.count() / V;
  T element;
  std::memcpy(&element, outside.bytes, sizeof(T));
  nearest<T, V, kLevels, Index><<<blocks_of(packs), kThreads, 0, stream>>>(plan, Extents<kLevels, Index>(plan, V), static_cast<const T*>(x),
                                                                           static_cast<T*>(y), element, static_cast<Index>(packs));
  check_launch("Resize");
}

// --- linear and cubic ---

template <typename T>
constexpr bool kWideNumber = std::is_same_v<T, double> || (std::is_integral_v<T> && sizeof(T) >= 4);
template <typename T>
using Computed = std::conditional_t<kWideNumber<T>, double, float>;

template <typename T>
__device__ Computed<T> load(T x) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<Computed<T>>(x);
  } else {
    return widen(x);
  }
}

// Integers are rounded and kept in range.
template <typename T>
__device__ T stored(Computed<T> value) {
  if constexpr (!std::is_integral_v<T>) {
    return narrow<T>(value);
  } else {
    constexpr auto kLow = static_cast<Computed<T>>(std::numeric_limits<T>::min());
    constexpr auto kHigh = static_cast<Computed<T>>(std::numeric_limits<T>::max());  // of int64: 2^63, one more than fits
    const Computed<T> whole = rint(value);
    if (whole >= kHigh) return std::numeric_limits<T>::max();
    return whole > kLow ? static_cast<T>(whole) : std::numeric_limits<T>::min();
  }
}

// sum = the weighted sum over the taps of axes k and later, for V neighbours along the last kept dimension.
template <int k, typename T, int V, int kLevels, typename Index>
__device__ __forceinline__ void weighted_sum(const ResizePlan<kLevels>& plan, const Index* at, const T* x, Computed<T> (&sum)[V]) {
  if constexpr (k == kLevels) {
    const Lanes<T, V> values = *reinterpret_cast<const Lanes<T, V>*>(x);
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] = load(values.at[e]);
  } else {
    const ResizedAxis& axis = plan.resized[k];
    const auto* weights = static_cast<const Computed<T>*>(axis.weight);
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] = 0;
#pragma unroll 1
    for (int64_t t = 0; t < axis.taps; ++t) {
      const int64_t entry = t * axis.out + static_cast<int64_t>(at[k]);
      const int64_t index = axis.index ? axis.index[entry] : 0;
      const Computed<T> weight = axis.index ? weights[entry] : 1;
      Computed<T> part[V];
      weighted_sum<k + 1, T, V, kLevels>(plan, at, x + index * axis.stride, part);
#pragma unroll
      for (int e = 0; e < V; ++e) sum[e] += weight * part[e];
    }
  }
}

template <typename T, int V, int kLevels, typename Index>
__global__ void __launch_bounds__(kThreads)
    smooth(ResizePlan<kLevels> plan, Extents<kLevels, Index> extents, const T* x, T* y, float outside, Index packs) {
  const Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= packs) return;
  const Place<kLevels, Index> place(plan, extents, i);
  bool extrapolated = false;
#pragma unroll
  for (int k = 0; k < kLevels; ++k) extrapolated |= plan.resized[k].extrapolated && plan.resized[k].extrapolated[place.at[k]];
  Computed<T> sum[V];
  if (extrapolated) {
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] = static_cast<Computed<T>>(outside);
  } else {
    weighted_sum<0, T, V, kLevels>(plan, place.at, x + place.base + static_cast<int64_t>(place.column) * V, sum);
  }
  Lanes<T, V> result;
#pragma unroll
  for (int e = 0; e < V; ++e) result.at[e] = stored<T>(sum[e]);
  reinterpret_cast<Lanes<T, V>*>(y)[i] = result;
}

template <typename T, int V, int kLevels, typename Index>
void launch_smooth(const ResizePlan<kMaxResized>& all, const void* x, void* y, float outside, cudaStream_t stream) {
  const auto plan = last_levels<kLevels>(all);
  const int64_t packs = plan.count() / V;
  smooth<T, V, kLevels, Index><<<blocks_of(packs), kThreads, 0, stream>>>(plan, Extents<kLevels, Index>(plan, V), static_cast<const T*>(x),
                                                                          static_cast<T*>(y), outside, static_cast<Index>(packs));
  check_launch("Resize");
}

template <typename F>
void with_smooth_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::int8:
      return f(TypeIs<int8_t>{});
    case DType::uint8:
      return f(TypeIs<uint8_t>{});
    case DType::int32:
      return f(TypeIs<int32_t>{});
    case DType::int64:
      return f(TypeIs<int64_t>{});
    default:
      return with_float_type(dtype, f);
  }
}

// Whether a kernel of two levels and 32-bit indexes serves.
bool is_usual(const ResizePlan<kMaxResized>& plan) {
  return !plan.resized[kMaxResized - 3].index && plan.count() <= kSmall;
}

}  // namespace

bool computes_in_double(DType dtype) {
  return dtype == DType::float64 || dtype == DType::int32 || dtype == DType::int64;
}

void resize_nearest(ResizePlan<kMaxResized> plan, size_t element_bytes, const void* x, void* y, float outside, DType dtype,
                    cudaStream_t stream) {
  unsigned char bytes[16] = {};
  store_from<float>(dtype, bytes, 0, 1, &outside);
  const Pattern pattern(bytes, element_bytes);
  // Neighbours that stay together are moved several at a time.
  while (element_bytes < 16 && plan.kept[kMaxResized].extent % 2 == 0 && is_16_byte_aligned(x) && is_16_byte_aligned(y)) {
    element_bytes *= 2;
    plan.kept[kMaxResized].extent /= 2;
    for (int k = 0; k < kMaxResized; ++k) plan.kept[k].stride /= 2, plan.resized[k].stride /= 2;
  }
  const bool at_end = plan.kept[kMaxResized].extent == 1;
  const int64_t columns = plan.resized[kMaxResized - 1].out;
  with_unit(element_bytes, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int V = kPackOf16<T>;
    if (!is_usual(plan)) return launch_nearest<T, 1, kMaxResized, int64_t>(plan, x, y, pattern, stream);
    if (at_end && columns % V == 0 && is_16_byte_aligned(y)) return launch_nearest<T, V, 2, uint32_t>(plan, x, y, pattern, stream);
    launch_nearest<T, 1, 2, uint32_t>(plan, x, y, pattern, stream);
  });
}

void resize_smooth(const ResizePlan<kMaxResized>& plan, const void* x, void* y, float outside, DType dtype, cudaStream_t stream) {
  const int64_t neighbours = plan.kept[kMaxResized].extent;
  with_smooth_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int V = kPackOf16<T>;
    if (!is_usual(plan)) return launch_smooth<T, 1, kMaxResized, int64_t>(plan, x, y, outside, stream);
    if (neighbours % V == 0 && is_16_byte_aligned(x) && is_16_byte_aligned(y)) {
      return launch_smooth<T, V, 2, uint32_t>(plan, x, y, outside, stream);
    }
    launch_smooth<T, 1, 2, uint32_t>(plan, x, y, outside, stream);
  });
}

}  // namespace fretsaw::cuda
