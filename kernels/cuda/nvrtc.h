// CUDA sources compiled while the program runs, kept in the process and on disk.
#pragma once
#include <cuda_runtime.h>

#include <string>

namespace fretsaw::cuda {

// The machine code of a source for devices of this compute capability (90 for 9.0), or PTX where this NVRTC is older than the device.
// Throws Error with NVRTC's messages. Needs no device. Products and sums are not contracted, so that an expression gives the same bits
// wherever it is compiled into.
std::string compile_source(const std::string& source, int compute_capability);

// The kernel `name` of a source, ready to be launched on any device of this compute capability. Each source is compiled once.
cudaKernel_t kernel_of_source(const std::string& source, const std::string& name, int compute_capability);

}  // namespace fretsaw::cuda
