// Fused attention by cuDNN. The headers of cudnn-frontend compile slowly, so that only attention_cudnn.cpp takes them.
#pragma once
#include <memory>

#include "kernels/cpu/attention_settings.h"
#include "kernels/cuda/attention.h"

namespace fretsaw::cuda {

enum class CausalMask : uint8_t { none, top_left, bottom_right };

// Beside the problem's sizes, strides and scale: how masks are given.
struct FusedAttentionMasks {
  CausalMask causal = CausalMask::none;
  int bias_batches = 0, bias_heads = 0;  // bias [batches, heads, S, bias_row] in q's type, of which T columns count; 0: no bias
  int64_t bias_row = 0;
};

// An Attention without cache and lengths, by its operands' dimensions (`mask`: empty for none), without addresses.
struct AttentionForm {
  AttentionProblem p;
  FusedAttentionMasks masks;
  Dims y;                    // of the result
  bool suits_fused = false;  // sizes and types that cuDNN's attention takes
};
AttentionForm attention_form(const AttentionSettings& settings, const Dims& q, const Dims& k, const Dims& v, const Dims& mask, DType type,
                             DType mask_type);

class FusedAttention {
 public:
  virtual ~FusedAttention() = default;
  virtual size_t workspace_bytes() const = 0;
  virtual void run(GpuDevice& device, const AttentionProblem& p, const void* bias, void* workspace) = 0;
};

// Null where cuDNN does not support it. Problems that are alike share a plan.
std::shared_ptr<FusedAttention> make_fused_attention(GpuDevice& device, const AttentionProblem& p, const FusedAttentionMasks& masks);

// What masks, windows and lengths add, as such a bias; `hidden` [batches, heads, S] says of each query whether it sees no key.
void run_attention_bias(const AttentionProblem& p, const FusedAttentionMasks& masks, void* bias, int* hidden, cudaStream_t stream);
// Zeros where a query sees no key.
void clear_hidden(const AttentionProblem& p, const FusedAttentionMasks& masks, const int* hidden, cudaStream_t stream);

}  // namespace fretsaw::cuda
