// The random numbers of kernels/cpu/random.h on the device: they depend on a key and an element's index alone.
#pragma once
#include <cstdint>

namespace fretsaw::cuda {

// Philox 4x32 with 10 rounds. One counter makes the numbers of four neighbouring elements.
struct Philox {
  uint32_t key[2];

  __host__ __device__ explicit Philox(uint64_t k) : key{static_cast<uint32_t>(k), static_cast<uint32_t>(k >> 32)} {}

  __host__ __device__ uint4 block(uint64_t counter) const {
    uint4 x = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      const uint64_t a = uint64_t{0xD2511F53u} * x.x, b = uint64_t{0xCD9E8D57u} * x.z;
      x = {static_cast<uint32_t>(b >> 32) ^ x.y ^ k0, static_cast<uint32_t>(b), static_cast<uint32_t>(a >> 32) ^ x.w ^ k1,
           static_cast<uint32_t>(a)};
    }
    return x;
  }
  // Of the four numbers of a counter, the one of element `index`.
  __host__ __device__ static uint32_t word(const uint4& x, uint64_t index) {
    return index % 4 == 0 ? x.x : index % 4 == 1 ? x.y : index % 4 == 2 ? x.z : x.w;
  }

  // Uniform in [0, 1) with 24 bits.
  __host__ __device__ float uniform(uint64_t index) const { return static_cast<float>(word(block(index / 4), index) >> 8) * 0x1p-24f; }

  // Normal with mean 0 and deviation 1 (Box and Muller: two uniform numbers make two normal ones).
  __host__ __device__ double normal(uint64_t index) const {
    constexpr double kPi = 3.141592653589793238462643;
    const uint4 bits = block(index / 4);
    const uint64_t pair = index / 2 * 2;
    const double radius = sqrt(-2 * log((word(bits, pair) + 1.0) * 0x1p-32)), angle = 2 * kPi * word(bits, pair + 1) * 0x1p-32;
    return radius * (index % 2 ? sin(angle) : cos(angle));
  }
};

}  // namespace fretsaw::cuda
