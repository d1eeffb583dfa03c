// Where numbers that are drawn while a model is trained stand in the whole batch (DropoutMask, RandomAt), as the CPU has it.
#pragma once
#include <cstdint>

#include "kernels/cuda/random.cuh"

namespace fretsaw::cuda {

// In device memory: the first sample at hand and how many there are, and the counter that every step moves on.
struct RandomPlace {
  const int64_t *samples, *counter;

  // The key is that of mask_key (kernels/cpu/random.h).
  __device__ Philox random(uint64_t key) const {
    return Philox((key ^ static_cast<uint64_t>(*counter) * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u);
  }
  // Of `count` numbers the first one's index, as first_of_mask gives it.
  __device__ uint64_t first(int64_t count) const { return samples[1] > 0 ? static_cast<uint64_t>(count / samples[1] * samples[0]) : 0; }
};

}  // namespace fretsaw::cuda
