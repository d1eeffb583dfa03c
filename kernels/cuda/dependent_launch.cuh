// Kernels that begin while the one before them on the stream still runs its last blocks ("programmatic dependent launch", compute
// capability 9.0): what they do before `wait_for_earlier` overlaps with it. In steps of many small kernels that is most of the time
// between them.
//
//   __global__ void kernel(...) {
//     let_later_begin();
//     ... indexes, reads of constants ...
//     wait_for_earlier();
//     ... everything else ...
//   }
//   launch_dependent(kernel, blocks, threads, stream, arguments...);
//
// Each thread waits before it reads what is no constant, and before it writes. The wait ends when the kernel before has ended, which for
// its part has waited for the one before it: so all earlier work has.
#pragma once
#include <utility>

#include "kernels/cuda/dependent_launch.h"

namespace fretsaw::cuda {

__device__ inline void wait_for_earlier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void let_later_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

template <typename... Parameters, typename... Arguments>
void launch_dependent(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute = dependent_attribute();
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks, config.blockDim = threads, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = 1;
  FRETSAW_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...));
}

}  // namespace fretsaw::cuda
