// The host's side of kernels that begin before the one before them has ended (dependent_launch.cuh says what they must keep to).
#pragma once
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

// Whether the calling thread's device begins kernels so.
inline bool has_dependent_launch() {
  int device = 0, major = 0;
  FRETSAW_CUDA_CHECK(cudaGetDevice(&device));
  FRETSAW_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major >= 9;
}

inline cudaLaunchAttribute dependent_attribute() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = has_dependent_launch() ? 1 : 0;
  return attribute;
}

}  // namespace fretsaw::cuda
