// Random numbers that depend on a key and an element's index alone, so that cutting or threading an operator changes nothing.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "graph/ir.h"

namespace fretsaw {

// Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): a bijection of 128-bit counters.
class Philox {
 public:
  explicit Philox(uint64_t key) : key_{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)} {}

  std::array<uint32_t, 4> block(uint64_t counter, uint64_t stream = 0) const {
    std::array<uint32_t, 4> x = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), static_cast<uint32_t>(stream),
                                 static_cast<uint32_t>(stream >> 32)};
    uint32_t k0 = key_[0], k1 = key_[1];
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      const uint64_t a = uint64_t{0xD2511F53u} * x[0], b = uint64_t{0xCD9E8D57u} * x[2];
      x = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ k0, static_cast<uint32_t>(b), static_cast<uint32_t>(a >> 32) ^ x[3] ^ k1,
           static_cast<uint32_t>(a)};
    }
    return x;
  }

  // Uniform in [0, 1) with 24 bits, for element `index`.
  float uniform(uint64_t index) const { return static_cast<float>(block(index / 4)[index % 4] >> 8) * 0x1p-24f; }

  // Normal with mean 0 and deviation 1, for element `index` (Box and Muller: two uniform numbers make two normal ones).
  double normal(uint64_t index) const {
    const std::array<uint32_t, 4> bits = block(index / 4);
    const size_t pair = index % 4 / 2 * 2;
    const double radius = std::sqrt(-2 * std::log((bits[pair] + 1.0) * 0x1p-32)), angle = 2 * std::numbers::pi * bits[pair + 1] * 0x1p-32;
    return radius * (index % 2 ? std::sin(angle) : std::cos(angle));
  }

 private:
  std::array<uint32_t, 2> key_;
};

// The node's seed where it has one, otherwise a key made of its name.
uint64_t random_key(const Node& node);

// Of DropoutMask (graph/gradient_operators.h): the key of a node's masks in one step, and the index of a mask's first element among those
// of the whole batch. The elements that follow have the next indexes: what a sample has in the mask lies in one piece.
uint64_t mask_key(uint64_t node, uint64_t counter);
uint64_t first_of_mask(const Dims& dims, int64_t first_sample, int64_t samples);

}  // namespace fretsaw
