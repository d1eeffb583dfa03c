// What the files of kernels/cuda share: checked calls, the device behind the interface, and launching over elements.
#pragma once
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <cudnn.h>

#include <cstdint>
#include <string>

#include "graph/errors.h"
#include "kernels/cuda/device_faults.h"
#include "kernels/device.h"
#include "kernels/kernel.h"

namespace fretsaw::cuda {

// Throw Error (code device) that names the call.
void check(cudaError_t status, const char* call);
void check(cublasStatus_t status, const char* call);
void check(cudnnStatus_t status, const char* call);
#define FRETSAW_CUDA_CHECK(call) ::fretsaw::cuda::check((call), #call)

// After a kernel launch: whether it could be launched.
inline void check_launch(const char* kernel) {
  check(cudaGetLastError(), kernel);
}

class GpuDevice : public Device {
 public:
  // Made when they are first asked for, and bound to the device's stream.
  virtual cublasLtHandle_t cublas_lt() = 0;
  virtual cudnnHandle_t cudnn() = 0;
  virtual int multiprocessors() const = 0;
  virtual int compute_capability() const = 0;  // 90 for 9.0
  // Where the node's kernel leaves word of an index out of range; `synchronize` and `download` then throw an Error that names the node.
  virtual std::shared_ptr<DeviceFault> fault_word(const Node& node) = 0;
};
inline GpuDevice& gpu(const CompileContext& c) {
  return static_cast<GpuDevice&>(*c.device);
}
inline GpuDevice& gpu(const RunContext& r) {
  return static_cast<GpuDevice&>(r.device());
}
inline cudaStream_t stream_of(const RunContext& r) {
  return static_cast<cudaStream_t>(r.device().stream());
}
inline cudaStream_t stream_of(const CompileContext& c) {
  return static_cast<cudaStream_t>(c.device->stream());
}

// Blocks of `threads` that cover `count`, each thread taking `a_thread`; at most what a grid-stride loop needs to fill the device.
inline unsigned blocks_for(int64_t count, int threads, int a_thread = 1) {
  const int64_t blocks = (count + int64_t{threads} * a_thread - 1) / (int64_t{threads} * a_thread);
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > (int64_t{1} << 20) ? (int64_t{1} << 20) : blocks);
}

// The reason to refuse the node unless the dimensions of all its inputs and outputs are known when it is compiled; "" when they are.
// For kernels that make a plan for their shapes.
std::string refuse_unknown_dims(const CompileContext& c);
// The reason to refuse input `i` when its type is not one of these.
std::string refuse_other_types(const CompileContext& c, size_t i, std::initializer_list<DType> types);

// The registry of all CUDA kernels (registry.cpp), and the families that fill it, each in a file of its name.
const KernelRegistry& cuda_kernels();
void register_pointwise(KernelRegistry& registry);      // elementwise operators and casts, fused, compiled at run time
void register_reductions(KernelRegistry& registry);     // Reduce*, ArgMax, ArgMin, CumSum, softmax
void register_normalization(KernelRegistry& registry);  // Layer, RMS, Group, Instance, BatchNormalization, LRN, LpNormalization
void register_movement(KernelRegistry& registry);       // Transpose, Concat, Split, Slice, Pad, Tile, Expand, views, ...
void register_indexing(KernelRegistry& registry);       // Gather*, Scatter*, OneHot, NonZero, TopK, Range, RotaryEmbedding, ...
void register_image(KernelRegistry& registry);          // Resize, DepthToSpace, GridSample, ...
void register_matmul(KernelRegistry& registry);         // MatMul, Gemm, Einsum by cuBLASLt
void register_attention(KernelRegistry& registry);      // Attention, StridedAttention
void register_convolution(KernelRegistry& registry);    // Conv, ConvTranspose by cuDNN
void register_pooling(KernelRegistry& registry);        // *Pool, Global*Pool
void register_recurrent(KernelRegistry& registry);      // LSTM, GRU, RNN

}  // namespace fretsaw::cuda
