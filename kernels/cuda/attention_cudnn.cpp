// Fused attention by cuDNN's graph API.
#include "kernels/cuda/attention_cudnn.h"

#include <cudnn_frontend.h>

#include <bit>
#include <map>

namespace fretsaw::cuda {
namespace {

namespace fe = cudnn_frontend;

enum Uid : int64_t { kQ = 1, kK, kV, kBias, kY };

class CudnnAttention : public FusedAttention {
 public:
  // False where cuDNN does not support it.
  bool build(cudnnHandle_t handle, const AttentionProblem& p, const FusedAttentionMasks& masks) {
    const fe::DataType_t type = p.type == DType::float16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16;
    graph_.set_io_data_type(type).set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
    auto q = operand("q", kQ, p.B, p.H, p.S, p.D, p.q_at), k = operand("k", kK, p.B, p.G, p.T, p.D, p.k_at),
         v = operand("v", kV, p.B, p.G, p.T, p.V, p.v_at);
    auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(false).set_attn_scale(p.scale);
    if (masks.causal == CausalMask::top_left) options.set_causal_mask(true);
    if (masks.causal == CausalMask::bottom_right) options.set_causal_mask_bottom_right(true);
    if (masks.bias_batches > 0) {
      const HeadStrides at{masks.bias_heads * p.S * masks.bias_row, p.S * masks.bias_row, masks.bias_row};
      options.set_bias(operand("bias", kBias, masks.bias_batches, masks.bias_heads, p.S, p.T, at));
    }
    auto y = graph_.sdpa(q, k, v, options)[0];
    y->set_output(true).set_uid(kY).set_dim({p.B, p.H, p.S, p.V}).set_stride({p.y_at.batch, p.y_at.head, p.y_at.row, 1});
    if (!graph_.build(handle, {fe::HeurMode_t::A}).is_good()) return false;
    int64_t bytes = 0;
    if (!graph_.get_workspace_size(bytes).is_good()) return false;
    workspace_ = static_cast<size_t>(bytes);
    return true;
  }

  size_t workspace_bytes() const override { return workspace_; }
  void run(GpuDevice& device, const AttentionProblem& p, const void* bias, void* workspace) override {
    std::unordered_map<int64_t, void*> operands = {
        {kQ, const_cast<void*>(p.q)}, {kK, const_cast<void*>(p.k)}, {kV, const_cast<void*>(p.v)}, {kY, p.y}};
    if (bias) operands[kBias] = const_cast<void*>(bias);
    fe::error_t status = graph_.execute(device.cudnn(), operands, workspace);
    if (!status.is_good())
      throw Error("cuDNN's attention failed: " + status.get_message(), "report this as a fault, with the node", ErrorCode::device);
  }

 private:
  std::shared_ptr<fe::graph::Tensor_attributes> operand(const char* name, Uid uid, int64_t B, int64_t H, int64_t rows, int64_t width,
                                                        const HeadStrides& at) {
    return graph_.tensor(
        fe::graph::Tensor_attributes().set_name(name).set_uid(uid).set_dim({B, H, rows, width}).set_stride({at.batch, at.head, at.row, 1}));
  }

  fe::graph::Graph graph_;
  size_t workspace_ = 0;
};

std::string key_of(GpuDevice& device, const AttentionProblem& p, const FusedAttentionMasks& masks) {
  std::string key = std::to_string(reinterpret_cast<uintptr_t>(&device)) + " " + std::string(name_of(p.type)) + " " +
                    std::to_string(std::bit_cast<uint32_t>(p.scale));
  for (int n : {p.B, p.H, p.G, p.S, p.T, p.D, p.V, static_cast<int>(masks.causal), masks.bias_batches, masks.bias_heads})
    key += " " + std::to_string(n);
  for (const HeadStrides& at : {p.q_at, p.k_at, p.v_at, p.y_at})
    for (int64_t n : {at.batch, at.head, at.row}) key += " " + std::to_string(n);
  return key + " " + std::to_string(masks.bias_row);
}

}  // namespace

std::shared_ptr<FusedAttention> make_fused_attention(GpuDevice& device, const AttentionProblem& p, const FusedAttentionMasks& masks) {
  // A device belongs to one thread, and its plans live no longer than its kernels.
  thread_local std::map<std::string, std::weak_ptr<FusedAttention>> plans;
  std::weak_ptr<FusedAttention>& known = plans[key_of(device, p, masks)];
  if (auto plan = known.lock()) return plan;
  auto plan = std::make_shared<CudnnAttention>();
  if (!plan->build(device.cudnn(), p, masks)) return nullptr;
  known = plan;
  return plan;
}

}  // namespace fretsaw::cuda
