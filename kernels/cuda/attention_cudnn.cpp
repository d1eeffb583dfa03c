// Fused attention and its backward pass by cuDNN's graph API.
#include "kernels/cuda/attention_cudnn.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <bit>
#include <map>

#include "kernels/cuda/attention_gradient.h"

namespace fretsaw::cuda {
namespace {

namespace fe = cudnn_frontend;

enum Uid : int64_t { kQ = 1, kK, kV, kBias, kY, kStats, kDy, kDq, kDk, kDv };

using Operands = std::unordered_map<int64_t, void*>;
using TensorOfGraph = std::shared_ptr<fe::graph::Tensor_attributes>;

// One of cuDNN's graphs, with the operands of attention.
class AttentionGraph {
 public:
  AttentionGraph(const AttentionProblem& p, const FusedAttentionMasks& masks) : p_(p), masks_(masks) {
    const fe::DataType_t type = p.type == DType::float16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16;
    graph_.set_io_data_type(type).set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
  }

  void add_forward(bool with_stats) {
    auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(with_stats);
    set_masks(options);
    const auto made = graph_.sdpa(q(), k(), v(), options);
    lay_out(made[0], kY, p_.S, p_.V, p_.y_at);
    if (with_stats) lay_out(made[1], kStats, p_.S, 1, stats_at()).set_data_type(fe::DataType_t::FLOAT);
  }

  // deterministic: dQ is added up in one order, in memory that grows with S * T; else by atomics, so its last bits differ from run to run.
  void add_backward(bool deterministic) {
    auto options = fe::graph::SDPA_backward_attributes().set_name("attention_gradient").set_deterministic_algorithm(deterministic);
    set_masks(options);
    const TensorOfGraph y = operand("y", kY, p_.B, p_.H, p_.S, p_.V, p_.y_at), dy = operand("dy", kDy, p_.B, p_.H, p_.S, p_.V, p_.y_at),
                        stats = operand("stats", kStats, p_.B, p_.H, p_.S, 1, stats_at());
    stats->set_data_type(fe::DataType_t::FLOAT);
    const auto made = graph_.sdpa_backward(q(), k(), v(), y, dy, stats, options);
    lay_out(made[0], kDq, p_.S, p_.D, p_.q_at);
    lay_out(made[1], kDk, p_.T, p_.D, p_.k_at, p_.G);
    lay_out(made[2], kDv, p_.T, p_.V, p_.v_at, p_.G);
  }

  // False where cuDNN does not support it.
  bool build(cudnnHandle_t handle) {
    int64_t bytes = 0;
    if (!graph_.build(handle, {fe::HeurMode_t::A}).is_good() || !graph_.get_workspace_size(bytes).is_good()) return false;
    workspace_ = static_cast<size_t>(bytes);
    return true;
  }
  size_t workspace_bytes() const { return workspace_; }

  void run(GpuDevice& device, Operands operands, void* workspace) {
    fe::error_t status = graph_.execute(device.cudnn(), operands, workspace);
    if (!status.is_good())
      throw Error("cuDNN's attention failed: " + status.get_message(), "report this as a fault, with the node", ErrorCode::device);
  }

 private:
  TensorOfGraph operand(const char* name, Uid uid, int64_t B, int64_t H, int64_t rows, int64_t width, const HeadStrides& at) {
    return graph_.tensor(
        fe::graph::Tensor_attributes().set_name(name).set_uid(uid).set_dim({B, H, rows, width}).set_stride({at.batch, at.head, at.row, 1}));
  }
  TensorOfGraph q() { return operand("q", kQ, p_.B, p_.H, p_.S, p_.D, p_.q_at); }
  TensorOfGraph k() { return operand("k", kK, p_.B, p_.G, p_.T, p_.D, p_.k_at); }
  TensorOfGraph v() { return operand("v", kV, p_.B, p_.G, p_.T, p_.V, p_.v_at); }
  HeadStrides stats_at() const { return {int64_t{p_.H} * p_.S, p_.S, 1}; }

  fe::graph::Tensor_attributes& lay_out(const TensorOfGraph& made, Uid uid, int64_t rows, int64_t width, const HeadStrides& at,
                                        int64_t heads = 0) const {
    return made->set_output(true)
        .set_uid(uid)
        .set_dim({p_.B, heads > 0 ? heads : p_.H, rows, width})
        .set_stride({at.batch, at.head, at.row, 1});
  }

  // Of the forward and of the backward pass.
  template <typename Options>
  void set_masks(Options& options) {
    options.set_attn_scale(p_.scale);
    if (masks_.causal == CausalMask::top_left) options.set_causal_mask(true);
    if (masks_.causal == CausalMask::bottom_right) options.set_causal_mask_bottom_right(true);
    if (masks_.bias_batches == 0) return;
    const HeadStrides at{masks_.bias_heads * p_.S * masks_.bias_row, p_.S * masks_.bias_row, masks_.bias_row};
    options.set_bias(operand("bias", kBias, masks_.bias_batches, masks_.bias_heads, p_.S, p_.T, at));
  }

  AttentionProblem p_;  // sizes and strides
  FusedAttentionMasks masks_;
  fe::graph::Graph graph_;
  size_t workspace_ = 0;
};

Operands inputs_of(const AttentionProblem& p, const void* bias) {
  Operands operands = {{kQ, const_cast<void*>(p.q)}, {kK, const_cast<void*>(p.k)}, {kV, const_cast<void*>(p.v)}};
  if (bias) operands[kBias] = const_cast<void*>(bias);
  return operands;
}

class CudnnAttention : public FusedAttention {
 public:
  CudnnAttention(const AttentionProblem& p, const FusedAttentionMasks& masks) : graph_(p, masks) { graph_.add_forward(false); }
  bool build(cudnnHandle_t handle) { return graph_.build(handle); }

  size_t workspace_bytes() const override { return graph_.workspace_bytes(); }
  void run(GpuDevice& device, const AttentionProblem& p, const void* bias, void* workspace) override {
    Operands operands = inputs_of(p, bias);
    operands[kY] = p.y;
    graph_.run(device, std::move(operands), workspace);
  }

 private:
  AttentionGraph graph_;
};

// Its workspace: the result, the statistics, then that of either pass.
class CudnnAttentionGradient : public FusedAttentionGradient {
 public:
  CudnnAttentionGradient(const AttentionProblem& p, const FusedAttentionMasks& masks)
      : forward_(p, masks), backward_(p, masks), backward_by_atomics_(p, masks) {
    forward_.add_forward(true);
    backward_.add_backward(true);
    backward_by_atomics_.add_backward(false);
    const auto rounded = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
    const size_t rows = static_cast<size_t>(p.B) * static_cast<size_t>(p.H) * static_cast<size_t>(p.S);
    stats_at_ = rounded(rows * static_cast<size_t>(p.V) * 2);
    work_at_ = stats_at_ + rounded(rows * sizeof(float));
  }
  bool build(cudnnHandle_t handle) {
    if (!forward_.build(handle)) return false;
    if (backward_.build(handle) && backward_.workspace_bytes() <= kDeterministicBytes) return true;
    backward_ = backward_by_atomics_;
    return backward_.build(handle);
  }

  size_t workspace_bytes() const override { return work_at_ + std::max(forward_.workspace_bytes(), backward_.workspace_bytes()); }
  void run(GpuDevice& device, const AttentionGradient& a, const void* bias, void* workspace) override {
    char* scratch = static_cast<char*>(workspace);
    Operands operands = inputs_of(a.p, bias);
    operands[kY] = scratch, operands[kStats] = scratch + stats_at_;
    forward_.run(device, operands, scratch + work_at_);
    operands[kDy] = const_cast<void*>(a.dy), operands[kDq] = a.dq, operands[kDk] = a.dk, operands[kDv] = a.dv;
    backward_.run(device, std::move(operands), scratch + work_at_);
  }

 private:
  // The most memory that is spent on results that repeat to the bit.
  static constexpr size_t kDeterministicBytes = size_t{1} << 30;

  AttentionGraph forward_, backward_, backward_by_atomics_;
  size_t stats_at_ = 0, work_at_ = 0;
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

// A device belongs to one thread, and its plans live no longer than its kernels.
template <typename Made, typename Interface>
std::shared_ptr<Interface> shared_plan(std::map<std::string, std::weak_ptr<Interface>>& plans, GpuDevice& device, const AttentionProblem& p,
                                       const FusedAttentionMasks& masks) {
  std::weak_ptr<Interface>& known = plans[key_of(device, p, masks)];
  if (auto plan = known.lock()) return plan;
  auto plan = std::make_shared<Made>(p, masks);
  if (!plan->build(device.cudnn())) return nullptr;
  known = plan;
  return plan;
}

}  // namespace

std::shared_ptr<FusedAttention> make_fused_attention(GpuDevice& device, const AttentionProblem& p, const FusedAttentionMasks& masks) {
  thread_local std::map<std::string, std::weak_ptr<FusedAttention>> plans;
  return shared_plan<CudnnAttention>(plans, device, p, masks);
}

std::shared_ptr<FusedAttentionGradient> make_fused_attention_gradient(GpuDevice& device, const AttentionProblem& p,
                                                                      const FusedAttentionMasks& masks) {
  thread_local std::map<std::string, std::weak_ptr<FusedAttentionGradient>> plans;
  return shared_plan<CudnnAttentionGradient>(plans, device, p, masks);
}

}  // namespace fretsaw::cuda
