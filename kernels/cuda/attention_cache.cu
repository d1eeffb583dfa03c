// The cache of keys or values that goes on: what was there, then the new rows.
#include "kernels/cuda/attention.h"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256;

// Sizes and strides in units of U.
template <typename U>
__global__ void join_kernel(JoinedCache c, int64_t count) {
  const int T = c.P + c.S;
  const U *past = static_cast<const U*>(c.past), *fresh = static_cast<const U*>(c.fresh);
  U* to = static_cast<U*>(c.to);
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / c.D, head = row / T;
    const int d = static_cast<int>(i - row * c.D), t = static_cast<int>(row - head * T);
    to[i] = t < c.P ? past[(head * c.P + t) * c.D + d]
                    : fresh[head / c.G * c.fresh_at.batch + head % c.G * c.fresh_at.head + (t - c.P) * c.fresh_at.row + d];
  }
}

template <typename U>
void launch(JoinedCache c, size_t element, cudaStream_t stream) {
  const auto units = static_cast<int64_t>(sizeof(U) / element);
  c.D = static_cast<int>(c.D / units);
  c.fresh_at = {c.fresh_at.batch / units, c.fresh_at.head / units, c.fresh_at.row / units};
  const int64_t count = int64_t{c.B} * c.G * (c.P + c.S) * c.D;
  if (count == 0) return;
  join_kernel<U><<<blocks_for(count, kThreads, 2), kThreads, 0, stream>>>(c, count);
  check_launch("join_cache");
}

}  // namespace

void join_cache(const JoinedCache& c, size_t element, cudaStream_t stream) {
  const auto units = static_cast<int64_t>(16 / element);
  bool wide = c.D % units == 0 && c.fresh_at.batch % units == 0 && c.fresh_at.head % units == 0 && c.fresh_at.row % units == 0;
  for (const void* base : {c.past, c.fresh, static_cast<const void*>(c.to)}) wide = wide && reinterpret_cast<uintptr_t>(base) % 16 == 0;
  if (wide) return launch<uint4>(c, element, stream);
  if (element == 4) return launch<uint32_t>(c, element, stream);
  launch<uint16_t>(c, element, stream);
}

}  // namespace fretsaw::cuda
