// The order of samples in an epoch, without a list of them.
#pragma once
#include <cstdint>

namespace fretsaw {

// A permutation of 0 .. count - 1 that depends on the key: where `index` goes. Constant memory, so a place in the middle of an epoch is
// found again at once.
//
// A Feistel network permutes the numbers of 2 h bits, 4^h >= count; one that falls beyond `count` goes through it again until it does not
// ("cycle walking"; Black and Rogaway, "Ciphers with arbitrary finite domains").
int64_t shuffled_index(int64_t index, int64_t count, uint64_t key);

// One key of two numbers: a seed and an epoch.
uint64_t mixed_key(uint64_t seed, uint64_t number);

}  // namespace fretsaw
