// The order of samples in an epoch.
#include "runtime/training/sample_order.h"

#include <bit>

#include "kernels/cpu/random.h"

namespace fretsaw {
namespace {

constexpr int kRounds = 6;

}  // namespace

int64_t shuffled_index(int64_t index, int64_t count, uint64_t key) {
  const int half = (std::bit_width(static_cast<uint64_t>(count > 1 ? count - 1 : 1)) + 1) / 2;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  const Philox random(key);
  auto at = static_cast<uint64_t>(index);
  do {
    uint64_t left = at >> half, right = at & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const uint64_t mixed = left ^ (random.block(right, round)[0] & mask);
      left = right;
      right = mixed;
    }
    at = left << half | right;
  } while (at >= static_cast<uint64_t>(count));
  return static_cast<int64_t>(at);
}

uint64_t mixed_key(uint64_t seed, uint64_t number) {
  const auto bits = Philox(seed).block(number, 1);
  return uint64_t{bits[0]} << 32 | bits[1];
}

}  // namespace fretsaw
