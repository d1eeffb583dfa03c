// Index arithmetic for kernels: fast division, and layouts as an order of dimensions. Compiles for the host too.
#pragma once
#include <cstdint>

#include "graph/types.h"
#include "kernels/host_device.h"
#include "kernels/tensor_view.h"

namespace fretsaw::cuda {

// Divides by a number that is known before the launch. Of uint32_t: by a multiplication, for numerators below 2^31.
template <typename Index>
struct Divider {
  Index divisor = 1;

  Divider() = default;
  explicit Divider(int64_t d) : divisor(static_cast<Index>(d)) {}
  FRETSAW_HOST_DEVICE Index quotient(Index n) const { return n / divisor; }
};

template <>
struct Divider<uint32_t> {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  Divider() = default;
  explicit Divider(int64_t d) : divisor(static_cast<uint32_t>(d)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;  // 2^shift >= d: the multiplier fits 32 bits
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }
  FRETSAW_HOST_DEVICE uint32_t quotient(uint32_t n) const {
#ifdef __CUDA_ARCH__
    const uint32_t high = __umulhi(n, multiplier);
#else
    const auto high = static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> 32);
#endif
    return (high + n) >> shift;
  }
};

// n / d, and n becomes the remainder.
template <typename Index>
FRETSAW_HOST_DEVICE Index split_off(const Divider<Index>& d, Index& n) {
  const Index q = d.quotient(n);
  n -= q * d.divisor;
  return q;
}

// Dimensions in the order of memory: [N, H, W, C] for nhwc.
inline Dims physical_dims(const Dims& dims, Layout layout) {
  return layout == Layout::nhwc ? Dims{dims[0], dims[2], dims[3], dims[1]} : dims;
}
inline Dims logical_dims(const Dims& physical, Layout layout) {
  return layout == Layout::nhwc ? Dims{physical[0], physical[3], physical[1], physical[2]} : physical;
}
inline size_t physical_axis(size_t axis, Layout layout) {
  constexpr size_t kPlace[] = {0, 3, 1, 2};
  return layout == Layout::nhwc ? kPlace[axis] : axis;
}

}  // namespace fretsaw::cuda
