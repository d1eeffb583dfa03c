// The gradients of attention (AttentionGrad of graph/gradient_operators.h) on the device.
//
//   dV = P' dY     dP = dY V'     dS = P (dP - sum(P dP))     dQ = scale dS K     dK = scale dS' Q       P: the probabilities
#pragma once
#include <memory>

#include "kernels/cuda/attention_cudnn.h"

namespace fretsaw::cuda {

// The forward problem without a result: y_at is how dY lies; dQ, dK and dV lie as Q, K and V.
struct AttentionGradient {
  AttentionProblem p;
  const void* dy = nullptr;
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;  // null: not wanted
};

// By cuDNN, of 16 bits: the forward pass once more for the statistics of its softmax, then the backward pass. All three gradients are made.
class FusedAttentionGradient {
 public:
  virtual ~FusedAttentionGradient() = default;
  virtual size_t workspace_bytes() const = 0;
  virtual void run(GpuDevice& device, const AttentionGradient& gradient, const void* bias, void* workspace) = 0;
};
// Null where cuDNN does not support it. Problems that are alike share a plan. attention_cudnn.cpp.
std::shared_ptr<FusedAttentionGradient> make_fused_attention_gradient(GpuDevice& device, const AttentionProblem& p,
                                                                      const FusedAttentionMasks& masks);

// Any sizes and masks; probabilities and their gradients in memory, of as many heads at once as fit some of it. Takes scratch memory.
// attention_gradient_rows.cu.
size_t rows_attention_gradient_bytes(const AttentionProblem& p);
void run_rows_attention_gradient(const AttentionGradient& gradient, void* scratch, cudaStream_t stream);

}  // namespace fretsaw::cuda
