// Attention and StridedAttention: reads the node, joins caches, and chooses between cuDNN's fused attention and our kernels.
#include "kernels/cuda/attention.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "graph/device_operators.h"
#include "kernels/cpu/attention_settings.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/attention_cudnn.h"

namespace fretsaw::cuda {
namespace {

// The dimensions of the node's inputs; empty where one is left out.
struct InputDims {
  Dims q, k, v, mask, past_k, past_v;
};

// One of Q, K, V or Y: [B, H, S, D], or [B, S, H * D] when the rank is 3, or a view of any tensor.
struct Heads {
  int64_t B = 0, H = 0, S = 0, D = 0;
  HeadStrides at;
  int64_t offset = 0;  // elements before the first
};

Heads dense_heads(int64_t B, int64_t H, int64_t S, int64_t D) {
  return {B, H, S, D, {H * S * D, S * D, D}};
}

Heads heads_of(const Dims& dims, int64_t heads) {
  if (dims.size() == 4) return dense_heads(dims[0], dims[1], dims[2], dims[3]);
  require(dims.size() == 3, "an input of Attention is neither [B,H,S,D] nor [B,S,H*D]", "give it one of these shapes");
  require(heads > 0 && dims[2] % heads == 0, "the hidden size is no multiple of the number of heads", "give q_num_heads and kv_num_heads");
  const int64_t D = dims[2] / heads;
  return {dims[0], heads, dims[1], D, {dims[1] * dims[2], D, dims[2]}};
}

Heads heads_of(const HeadsView& view) {
  return {view.batches, view.heads, view.rows, view.width, {view.batch, view.head, view.row}, view.offset};
}

// The operands and the result as the node says they lie.
struct Operands {
  Heads q, k, v, y;
  Dims y_dims;
};

Operands operands_of(const InputDims& in, const AttentionSettings& s) {
  require(in.q.size() == in.k.size() && in.q.size() == in.v.size(), "Q, K and V have different ranks", "give all 3 or all 4 dimensions");
  Operands o;
  o.q = heads_of(in.q, s.q_heads), o.k = heads_of(in.k, s.kv_heads), o.v = heads_of(in.v, s.kv_heads);
  o.y_dims = in.q.size() == 4 ? Dims{o.q.B, o.q.H, o.q.S, o.v.D} : Dims{o.q.B, o.q.S, o.q.H * o.v.D};
  o.y = heads_of(o.y_dims, o.q.H);
  return o;
}

Operands operands_of(const InputDims& in, const AttentionViews& views) {
  for (const auto& [dims, view] : {std::pair{&in.q, &views.q}, std::pair{&in.k, &views.k}, std::pair{&in.v, &views.v}})
    require(view->last() < count_of(*dims), "an operand of StridedAttention reaches beyond its tensor");
  return {heads_of(views.q), heads_of(views.k), heads_of(views.v), heads_of(views.y), views.shape};
}

// Where the problem's keys and values come from, and how everything is shaped.
struct Plan {
  AttentionProblem p;  // without addresses
  Heads q, fresh_k, fresh_v;
  int64_t past = 0;
  bool joins = false;  // keys and values are joined to a cache (or laid out as one)
  Dims y, present_k, present_v;
  // Offsets into scratch memory: joined keys and values that nobody takes as outputs, cuDNN's bias and hidden queries, then the kernel's
  // own.
  size_t k_at = 0, v_at = 0, bias_at = 0, hidden_at = 0, work_at = 0;
  FusedAttentionMasks masks;
};

void read_mask(AttentionProblem& p, Dims dims, DType type) {
  if (type == DType::undefined) return;
  require(dims.size() >= 1 && dims.size() <= 4, "attn_mask has no or more than 4 dimensions", "give it [S,T] or [B,H,S,T]");
  dims.insert(dims.begin(), 4 - dims.size(), 1);
  const int64_t full[] = {p.B, p.H, p.S};
  for (size_t i = 0; i < 3; ++i)
    require(dims[i] == 1 || dims[i] == full[i], "attn_mask does not broadcast to the scores", "give it [S,T] or [B,H,S,T]");
  require(dims[3] <= p.T || dims[3] == 1, "attn_mask is longer than the keys", "shorten it");
  p.mask_kind = type == DType::boolean ? MaskKind::boolean : MaskKind::added;
  p.mask_batch = dims[0] == 1 ? 0 : dims[1] * dims[2] * dims[3];
  p.mask_head = dims[1] == 1 ? 0 : dims[2] * dims[3];
  p.mask_row = dims[2] == 1 ? 0 : dims[3];
  p.mask_width = static_cast<int>(dims[3]);
  p.mask_spread = dims[3] == 1 && p.T != 1;
}

Plan plan_of(const AttentionSettings& s, const Operands& o, const InputDims& in, DType type, DType mask_type, bool has_lengths,
             bool wants_present) {
  Plan plan;
  AttentionProblem& p = plan.p;
  const Heads& q = o.q;
  Heads k = o.k, v = o.v;
  require(k.B == q.B && v.B == q.B && k.H == v.H && k.S == v.S && k.D == q.D && k.H > 0 && q.H % k.H == 0,
          "Q, K and V do not fit each other", "equal batches and head sizes; K and V of equal length; query heads a multiple of key heads");
  require(in.past_k.empty() == in.past_v.empty(), "past_key and past_value have different lengths", "give both");
  for (const auto& [past, fresh] : {std::pair{&in.past_k, &k}, std::pair{&in.past_v, &v}}) {
    if (past->empty()) continue;
    require(past->size() == 4 && (*past)[0] == fresh->B && (*past)[1] == fresh->H && (*past)[3] == fresh->D,
            "a cache of Attention does not fit K or V", "give it [B,H,P,D]");
  }
  plan.q = q, plan.fresh_k = k, plan.fresh_v = v;
  plan.past = in.past_k.empty() ? 0 : in.past_k[2];
  require(in.past_v.empty() || in.past_v[2] == plan.past, "past_key and past_value have different lengths", "give both");
  plan.joins = !in.past_k.empty() || wants_present;
  const int64_t T = k.S + plan.past;
  plan.present_k = {k.B, k.H, T, k.D}, plan.present_v = {v.B, v.H, T, v.D};
  if (plan.joins) k = dense_heads(k.B, k.H, T, k.D), v = dense_heads(v.B, v.H, T, v.D);
  plan.y = o.y_dims;
  for (int64_t n : {q.B, q.H, q.S, T, q.D, v.D}) require(n <= INT32_MAX, "a dimension of Attention is too large");
  p.type = type;
  p.B = static_cast<int>(q.B), p.H = static_cast<int>(q.H), p.G = static_cast<int>(k.H), p.S = static_cast<int>(q.S);
  p.T = static_cast<int>(T), p.D = static_cast<int>(q.D), p.V = static_cast<int>(v.D);
  p.q_at = q.at, p.k_at = k.at, p.v_at = v.at, p.y_at = o.y.at;
  p.scale = s.scale ? *s.scale : 1.0f / std::sqrt(static_cast<float>(q.D));
  p.softcap = s.softcap, p.causal = s.causal, p.left = s.left, p.right = s.right, p.past = plan.past;
  p.scores_mode = static_cast<int>(s.mode);
  read_mask(p, in.mask, mask_type);
  // How cuDNN is told about masks: plain causality by itself, everything else as a bias.
  FusedAttentionMasks& m = plan.masks;
  const bool bias = p.mask_kind != MaskKind::none || p.left >= 0 || p.right >= 0 || has_lengths;
  if (p.causal && !has_lengths) m.causal = plan.past == 0 ? CausalMask::top_left : bias ? CausalMask::none : CausalMask::bottom_right;
  if (!bias) return plan;
  m.bias_batches = p.mask_batch != 0 || has_lengths ? p.B : 1;
  m.bias_heads = p.mask_head != 0 ? p.H : 1;
  m.bias_row = (T + 7) / 8 * 8;
  return plan;
}

// Where things lie in scratch memory; the size of all but the kernel's own part, which begins at `work_at`.
void lay_out_scratch(Plan& plan, bool owns_k, bool owns_v, bool fused) {
  const auto element = static_cast<size_t>(bits_of(plan.p.type)) / 8;
  size_t end = 0;
  const auto place = [&](size_t& at, size_t bytes) { at = end, end += (bytes + 255) / 256 * 256; };
  if (plan.joins && owns_k) place(plan.k_at, bytes_of(plan.p.type, count_of(plan.present_k)));
  if (plan.joins && owns_v) place(plan.v_at, bytes_of(plan.p.type, count_of(plan.present_v)));
  const FusedAttentionMasks& m = plan.masks;
  const size_t rows = static_cast<size_t>(m.bias_batches) * static_cast<size_t>(m.bias_heads) * static_cast<size_t>(plan.p.S);
  if (fused && rows) place(plan.bias_at, rows * static_cast<size_t>(m.bias_row) * element), place(plan.hidden_at, rows * sizeof(int));
  plan.work_at = end;
}

// cuDNN reads and writes 16 bytes at once.
bool lies_even(const Plan& plan) {
  const AttentionProblem& p = plan.p;
  for (const HeadStrides& at : {p.q_at, p.k_at, p.v_at, p.y_at})
    if (at.batch % 8 || at.head % 8 || at.row % 8) return false;
  return plan.q.offset % 8 == 0 && plan.fresh_k.offset % 8 == 0 && plan.fresh_v.offset % 8 == 0;
}

bool suits_fused(const Plan& plan) {
  const AttentionProblem& p = plan.p;
  return (p.type == DType::float16 || p.type == DType::bfloat16) && p.softcap == 0 && p.S > 4 && p.T > 0 && p.B > 0 && p.D > 0 && p.V > 0 &&
         p.D % 8 == 0 && p.V % 8 == 0 && std::max(p.D, p.V) <= 256 && lies_even(plan);
}

class AttentionKernel {
 public:
  explicit AttentionKernel(const CompileContext& c) : settings_(c.node()) {
    if (c.node().domain == kDeviceDomain) views_ = read_attention_views(c.node());
    InputDims in;
    Dims* dims[] = {&in.q, &in.k, &in.v, &in.mask, &in.past_k, &in.past_v};
    for (size_t i = 0; i < std::size(dims); ++i) {
      const std::optional<Dims> known = c.input_dims(i);
      if (c.has_input(i) && !known) return;
      *dims[i] = known.value_or(Dims{});
    }
    const auto wanted = [&](size_t i) { return i < c.outputs.size() && c.outputs[i]; };
    const Plan plan = make_plan(in, c.input_dtype(0), c.input_dtype(3), c.has_input(6), wanted(1) || wanted(2));
    if (!wanted(3) && suits_fused(plan)) fused_ = make_fused_attention(gpu(c), plan.p, plan.masks);
  }

  void run(RunContext& r) const {
    const auto dims = [&](size_t i) { return r.has_input(i) ? r.input(i).dims : Dims{}; };
    const InputDims in{dims(0), dims(1), dims(2), dims(3), dims(4), dims(5)};
    Plan plan = make_plan(in, r.input(0).dtype, r.has_input(3) ? r.input(3).dtype : DType::undefined, r.has_input(6),
                          r.wants_output(1) || r.wants_output(2));
    AttentionProblem& p = plan.p;
    void* present_k = r.wants_output(1) ? r.output(1, plan.present_k).data : nullptr;
    void* present_v = r.wants_output(2) ? r.output(2, plan.present_v).data : nullptr;
    p.y = r.output(0, plan.y).data;
    if (r.wants_output(3)) p.scores = r.output(3, {p.B, p.H, p.S, p.T}).data;
    const void *fresh_k = first_of(r.input(1), plan.fresh_k), *fresh_v = first_of(r.input(2), plan.fresh_v);
    p.q = first_of(r.input(0), plan.q), p.k = plan.joins ? present_k : fresh_k, p.v = plan.joins ? present_v : fresh_v;
    if (p.mask_kind != MaskKind::none) p.mask = r.input(3).data;
    if (r.has_input(6)) {
      require(r.input(6).count() == p.B, "nonpad_kv_seqlen does not have one entry for each sample", "give it [B]");
      p.valid = r.input(6).as<int64_t>();
    }
    lay_out_scratch(plan, !present_k, !present_v, fused_ != nullptr);
    const Way way = way_of(plan);
    const size_t bytes = plan.work_at + work_bytes(way, p, gpu(r).multiprocessors());
    char* scratch = bytes ? static_cast<char*>(r.scratch(bytes)) : nullptr;
    if (plan.joins) {
      const auto past = [&](size_t i) -> const void* { return r.has_input(i) ? r.input(i).data : nullptr; };
      p.k = joined(r, plan, plan.fresh_k, fresh_k, past(4), present_k ? present_k : scratch + plan.k_at);
      p.v = joined(r, plan, plan.fresh_v, fresh_v, past(5), present_v ? present_v : scratch + plan.v_at);
    }
    if (count_of(plan.y) == 0 && !p.scores) return;
    attend(r, way, plan, scratch);
  }

 private:
  enum class Way : uint8_t { fused, decode, tiled, rows };

  Plan make_plan(const InputDims& in, DType type, DType mask_type, bool has_lengths, bool wants_present) const {
    const Operands operands = views_ ? operands_of(in, *views_) : operands_of(in, settings_);
    return plan_of(settings_, operands, in, type, mask_type, has_lengths, wants_present);
  }
  static const void* first_of(const TensorView& x, const Heads& heads) { return offset_by(x.data, heads.offset, x.dtype); }

  Way way_of(const Plan& plan) const {
    if (fused_) return Way::fused;
    if (takes_decode_attention(plan.p)) return Way::decode;
    return takes_tiled_attention(plan.p) ? Way::tiled : Way::rows;
  }
  size_t work_bytes(Way way, const AttentionProblem& p, int multiprocessors) const {
    if (way == Way::fused) return fused_->workspace_bytes();
    if (way == Way::decode) return decode_attention_bytes(p, multiprocessors);
    return way == Way::rows ? rows_attention_bytes(p, multiprocessors) : 0;
  }

  static const void* joined(RunContext& r, const Plan& plan, const Heads& fresh, const void* data, const void* past, void* to) {
    const JoinedCache cache{static_cast<int>(fresh.B),
                            static_cast<int>(fresh.H),
                            static_cast<int>(plan.past),
                            static_cast<int>(fresh.S),
                            static_cast<int>(fresh.D),
                            past,
                            data,
                            fresh.at,
                            to};
    join_cache(cache, static_cast<size_t>(bits_of(plan.p.type)) / 8, stream_of(r));
    return to;
  }

  void attend(RunContext& r, Way way, const Plan& plan, char* scratch) const {
    const AttentionProblem& p = plan.p;
    const int multiprocessors = gpu(r).multiprocessors();
    void* work = scratch + plan.work_at;
    if (way == Way::decode) return run_decode_attention(p, work, multiprocessors, stream_of(r));
    if (way == Way::tiled) return run_tiled_attention(p, stream_of(r));
    if (way == Way::rows) return run_rows_attention(p, work, multiprocessors, stream_of(r));
    const bool bias = plan.masks.bias_batches > 0;
    auto* hidden = reinterpret_cast<int*>(scratch + plan.hidden_at);
    if (bias) run_attention_bias(p, plan.masks, scratch + plan.bias_at, hidden, stream_of(r));
    fused_->run(gpu(r), p, bias ? scratch + plan.bias_at : nullptr, work);
    if (bias) clear_hidden(p, plan.masks, hidden, stream_of(r));
  }

  AttentionSettings settings_;
  std::optional<AttentionViews> views_;  // of a StridedAttention
  std::shared_ptr<FusedAttention> fused_;
};

std::string unsupported(const CompileContext& c) {
  if (std::string reason = refuse_other_types(c, 0, {DType::float32, DType::float16, DType::bfloat16}); !reason.empty()) return reason;
  for (size_t i : {1, 2, 4, 5}) {
    if (c.has_input(i) && c.input_dtype(i) != c.input_dtype(0)) return "inputs of different types";
  }
  if (c.has_input(3) && c.input_dtype(3) != DType::boolean && c.input_dtype(3) != c.input_dtype(0)) return "a mask of another type";
  return refuse_other_types(c, 6, {DType::int64});
}

CompiledKernel make_attention(const CompileContext& c) {
  const auto kernel = std::make_shared<AttentionKernel>(c);
  return {[kernel](RunContext& r) { kernel->run(r); }};
}

}  // namespace

AttentionForm attention_form(const AttentionSettings& settings, const Dims& q, const Dims& k, const Dims& v, const Dims& mask, DType type,
                             DType mask_type) {
  const InputDims in{q, k, v, mask, {}, {}};
  const Plan plan = plan_of(settings, operands_of(in, settings), in, type, mask_type, false, false);
  return {plan.p, plan.masks, plan.y, suits_fused(plan)};
}

void register_attention(KernelRegistry& registry) {
  registry.add({.op = "Attention", .make = make_attention, .unsupported = unsupported});
  registry.add({.op = "StridedAttention", .domain = kDeviceDomain, .make = make_attention, .unsupported = unsupported});
}

}  // namespace fretsaw::cuda
