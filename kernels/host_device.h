// Marks functions that the CPU's kernels and a device's share. Compiled for the host alone they are plain inline functions.
#pragma once

#ifdef __CUDACC__
#define FRETSAW_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FRETSAW_HOST_DEVICE inline
#endif

namespace fretsaw {

// A product that is rounded by itself: a device would otherwise fuse it with a sum, and give other indexes than the CPU.
FRETSAW_HOST_DEVICE double product_of(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

}  // namespace fretsaw
