// Attention: softmax(scale * Q K^T + bias) V for each head, with masks, windows, caches and grouped heads. StridedAttention: the same
// through views.
#include "kernels/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "graph/device_operators.h"
#include "kernels/cpu/attention_settings.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/softmax.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

AttentionSettings::AttentionSettings(const Node& node)
    : causal(node.get_int("is_causal", 0) != 0),
      q_heads(node.get_int("q_num_heads", 0)),
      kv_heads(node.get_int("kv_num_heads", 0)),
      softcap(node.get_float("softcap", 0)),
      mode(node.get_int("qk_matmul_output_mode", 0)) {
  constexpr int64_t kWidest = int64_t{1} << 40;  // wider than any sequence; sums with it do not overflow
  left = std::min(node.get_int("left_window_size", -1), kWidest);
  right = std::min(node.get_int("right_window_size", -1), kWidest);
  if (node.has("scale")) scale = node.get_float("scale", 1);
  require(mode >= 0 && mode <= 3, "qk_matmul_output_mode is not 0 to 3", "use one of these");
  require(left >= -1 && right >= -1, "a window size of Attention is below -1", "use -1 for no window");
}

namespace {

// Rows of one head: element (b, h, s, d) stands at data[b * batch + h * head + s * row + d].
template <typename T>
struct Heads {
  const T* data = nullptr;
  int64_t B = 0, H = 0, S = 0, D = 0;
  int64_t batch = 0, head = 0, row = 0;
  StridedMatrix<T> matrix(int64_t b, int64_t h, int64_t s = 0) const { return {data + b * batch + h * head + s * row, row, 1}; }
};

// [B, H, S, D], or [B, S, H * D] when the rank is 3.
template <typename T>
Heads<T> heads_of(const TensorView& x, int64_t heads) {
  Heads<T> out;
  out.data = x.as<T>();
  if (x.rank() == 4) {
    out.B = x.dims[0], out.H = x.dims[1], out.S = x.dims[2], out.D = x.dims[3];
    out.row = out.D, out.head = out.S * out.D, out.batch = out.H * out.head;
    return out;
  }
  require(x.rank() == 3, "an input of Attention is neither [B,H,S,D] nor [B,S,H*D]", "give it one of these shapes");
  require(heads > 0 && x.dims[2] % heads == 0, "the hidden size is no multiple of the number of heads",
          "give q_num_heads and kv_num_heads");
  out.B = x.dims[0], out.S = x.dims[1], out.H = heads, out.D = x.dims[2] / heads;
  out.head = out.D, out.row = x.dims[2], out.batch = out.S * out.row;
  return out;
}

// Through a view of a StridedAttention.
template <typename T>
Heads<T> heads_of(const TensorView& x, const HeadsView& view) {
  require(view.last() < x.count(), "an operand of StridedAttention reaches beyond its tensor");
  return {x.as<T>() + view.offset, view.batches, view.heads, view.rows, view.width, view.batch, view.head, view.row};
}

// What is added to the scores of one query row.
template <typename T>
class Bias {
 public:
  Bias(RunContext& r, const AttentionSettings& s, int64_t B, int64_t H, int64_t S, int64_t T_, int64_t past, int64_t)
      : causal_(s.causal), left_(s.left), right_(s.right), S_(S), total_(T_), past_(past) {
    if (r.has_input(6)) {
      valid_ = r.input_ints(6);
      require(static_cast<int64_t>(valid_.size()) == B, "nonpad_kv_seqlen does not have one entry for each sample", "give it [B]");
      for (int64_t n : valid_) require(n >= 0 && n <= T_, "nonpad_kv_seqlen is outside the keys", "use 0 to the number of keys");
    }
    if (!r.has_input(3)) return;
    mask_ = &r.input(3);
    require(mask_->dtype == DType::boolean || mask_->dtype == dtype_of<T>(), "attn_mask is neither boolean nor of the type of Q",
            "cast it");
    require(mask_->rank() >= 1 && mask_->rank() <= 4, "attn_mask has no or more than 4 dimensions", "give it [S,T] or [B,H,S,T]");
    Dims dims = mask_->dims;
    dims.insert(dims.begin(), 4 - dims.size(), 1);
    const Dims full = {B, H, S, T_}, own = strides_of(dims);
    for (size_t i = 0; i < 3; ++i) {
      require(dims[i] == 1 || dims[i] == full[i], "attn_mask does not broadcast to the scores", "give it [S,T] or [B,H,S,T]");
      strides_[i] = dims[i] == 1 ? 0 : own[i];
    }
    width_ = dims[3];
    require(width_ <= T_ || width_ == 1, "attn_mask is longer than the keys", "shorten it");
    spread_ = width_ == 1 && T_ != 1;
  }

  bool present() const { return mask_ || causal_ || left_ >= 0 || right_ >= 0 || !valid_.empty(); }

  // Adds it to the scores of query i; true when no key may be attended.
  bool add(int64_t b, int64_t h, int64_t i, T* scores) const {
    constexpr T kNone = -std::numeric_limits<T>::infinity();
    const int64_t offset = past_ > 0 || valid_.empty() ? past_ : valid_[static_cast<size_t>(b)] - S_;
    const int64_t position = i + offset;
    int64_t first = 0, last = total_;  // keys [first, last) are allowed by windows and lengths
    if (causal_) last = std::min(last, position + 1);
    if (left_ >= 0) first = std::max(first, position - left_);
    if (right_ >= 0) last = std::min(last, position + right_ + 1);
    if (!valid_.empty()) last = std::min(last, valid_[static_cast<size_t>(b)]);
    bool any = false;
    const int64_t base = b * strides_[0] + h * strides_[1] + i * strides_[2];
    for (int64_t t = 0; t < total_; ++t) {
      T added = t >= first && t < last ? T(0) : kNone;
      if (mask_ && added == T(0)) added = mask_at(base, t);
      any = any || added != kNone;
      scores[t] = added == kNone ? kNone : scores[t] + added;
    }
    return !any;
  }

 private:
  T mask_at(int64_t base, int64_t t) const {
    constexpr T kNone = -std::numeric_limits<T>::infinity();
    if (t >= width_ && !spread_) return kNone;
    const int64_t at = base + (spread_ ? 0 : t);
    if (mask_->dtype == DType::boolean) return mask_->as<bool>()[at] ? T(0) : kNone;
    return mask_->as<T>()[at];
  }

  bool causal_;
  int64_t left_, right_, S_, total_, past_;
  const TensorView* mask_ = nullptr;
  int64_t strides_[3] = {0, 0, 0}, width_ = 0;
  bool spread_ = false;
  std::vector<int64_t> valid_;
};

// past [B, H, P, D] and the new rows one after another, as [B, H, P + S, D].
template <typename T>
void join_cache(const TensorView* past, const Heads<T>& fresh, T* to) {
  const int64_t P = past ? past->dims[2] : 0;
  for (int64_t b = 0; b < fresh.B; ++b) {
    for (int64_t h = 0; h < fresh.H; ++h) {
      T* rows = to + (b * fresh.H + h) * (P + fresh.S) * fresh.D;
      if (P) std::copy_n(past->as<T>() + (b * fresh.H + h) * P * fresh.D, P * fresh.D, rows);
      for (int64_t s = 0; s < fresh.S; ++s) std::copy_n(fresh.matrix(b, h, s).data, fresh.D, rows + (P + s) * fresh.D);
    }
  }
}

template <typename T>
Heads<T> dense_heads(const T* data, int64_t B, int64_t H, int64_t S, int64_t D) {
  return {data, B, H, S, D, H * S * D, S * D, D};
}

// K or V with its cache, in the output that wants it or in memory of its own.
template <typename T>
Heads<T> with_cache(RunContext& r, const Heads<T>& fresh, size_t past_input, size_t output, std::vector<T>& own) {
  const TensorView* past = r.has_input(past_input) ? &r.input(past_input) : nullptr;
  if (past) {
    require(past->rank() == 4 && past->dims[0] == fresh.B && past->dims[1] == fresh.H && past->dims[3] == fresh.D,
            "a cache of Attention does not fit K or V", "give it [B,H,P,D]");
  }
  if (!past && !r.wants_output(output)) return fresh;
  const int64_t S = fresh.S + (past ? past->dims[2] : 0);
  T* to;
  if (r.wants_output(output)) {
    to = r.output(output, {fresh.B, fresh.H, S, fresh.D}).template as<T>();
  } else {
    own.resize(static_cast<size_t>(fresh.B * fresh.H * S * fresh.D) + 1);
    to = own.data();
  }
  join_cache(past, fresh, to);
  return dense_heads<T>(to, fresh.B, fresh.H, S, fresh.D);
}

template <typename T>
struct Problem {
  Heads<T> q, k, v, y;
  T scale;
  T* debug = nullptr;  // qk_matmul_output [B, Hq, S, T]
};

// Queries [first, first + rows) of one head.
template <typename T>
void attend(const AttentionSettings& s, const Problem<T>& p, const Bias<T>& bias, int64_t b, int64_t h, int64_t first, int64_t rows) {
  const int64_t keys = p.k.S, kv = h / (p.q.H / p.k.H);
  thread_local std::vector<T> scores;
  scores.resize(static_cast<size_t>(rows * keys) + 1);
  const StridedMatrix<T> k = p.k.matrix(b, kv);
  multiply_strided<T>(rows, keys, p.q.D, p.q.matrix(b, h, first), {k.data, 1, k.row}, scores.data(), keys, p.scale);
  const auto show = [&](int64_t mode, int64_t i) {
    if (p.debug && s.mode == mode) std::copy_n(scores.data() + i * keys, keys, p.debug + ((b * p.q.H + h) * p.q.S + first + i) * keys);
  };
  const T cap = static_cast<T>(s.softcap);
  for (int64_t i = 0; i < rows; ++i) {
    T* row = scores.data() + i * keys;
    show(0, i);
    if (cap != T(0)) {
      for (int64_t t = 0; t < keys; ++t) row[t] = cap * std::tanh(row[t] / cap);
    }
    show(1, i);
    const bool empty = bias.present() && bias.add(b, h, first + i, row);
    show(2, i);
    if (empty)
      std::fill_n(row, keys, T(0));
    else
      run_vectorised([&]() FRETSAW_ALWAYS_INLINE { softmax_row(row, row, keys); });
    show(3, i);
  }
  const StridedMatrix<T> y = p.y.matrix(b, h, first);
  multiply_strided<T>(rows, p.v.D, keys, {scores.data(), keys, 1}, p.v.matrix(b, kv), const_cast<T*>(y.data), y.row);
}

// The operands and the result of `p` are in their places.
template <typename T>
void attend_all(RunContext& r, const AttentionSettings& s, Problem<T>& p, int64_t past) {
  p.scale = s.scale ? static_cast<T>(*s.scale) : T(1) / std::sqrt(static_cast<T>(p.q.D));
  const Bias<T> bias(r, s, p.q.B, p.q.H, p.q.S, p.k.S, past, 0);
  // Scores of so many queries at once that they stay in the cache.
  const int64_t rows = std::clamp<int64_t>(65536 / (p.k.S + 1), 1, p.q.S), blocks = (p.q.S + rows - 1) / rows;
  for_each_batch(p.q.B * p.q.H * blocks, r.threads(), [&](int64_t i) {
    const int64_t head = i / blocks, first = i % blocks * rows;
    attend(s, p, bias, head / p.q.H, head % p.q.H, first, std::min(rows, p.q.S - first));
  });
}

template <typename T>
void run_attention(RunContext& r, const AttentionSettings& s) {
  const TensorView& q = r.input(0);
  require(q.rank() == r.input(1).rank() && q.rank() == r.input(2).rank(), "Q, K and V have different ranks",
          "give all 3 or all 4 dimensions");
  Problem<T> p;
  p.q = heads_of<T>(q, s.q_heads);
  const Heads<T> k = heads_of<T>(r.input(1), s.kv_heads), v = heads_of<T>(r.input(2), s.kv_heads);
  require(k.B == p.q.B && v.B == p.q.B && k.H == v.H && k.S == v.S && k.D == p.q.D && k.H > 0 && p.q.H % k.H == 0,
          "Q, K and V do not fit each other", "equal batches and head sizes; K and V of equal length; query heads a multiple of key heads");
  const int64_t past = r.has_input(4) ? r.input(4).rank() == 4 ? r.input(4).dims[2] : 0 : 0;
  std::vector<T> own_k, own_v;
  p.k = with_cache(r, k, 4, 1, own_k), p.v = with_cache(r, v, 5, 2, own_v);
  require(p.k.S == p.v.S, "past_key and past_value have different lengths", "give both");
  const Dims y_dims = q.rank() == 4 ? Dims{p.q.B, p.q.H, p.q.S, p.v.D} : Dims{p.q.B, p.q.S, p.q.H * p.v.D};
  TensorView& y = r.output(0, y_dims);
  p.y = heads_of<T>(y, p.q.H);
  if (r.wants_output(3)) p.debug = r.output(3, {p.q.B, p.q.H, p.q.S, p.k.S}).template as<T>();
  if (y.count() != 0) attend_all(r, s, p, past);
}

template <typename T>
void run_strided_attention(RunContext& r, const AttentionSettings& s, const AttentionViews& views) {
  Problem<T> p;
  p.q = heads_of<T>(r.input(0), views.q), p.k = heads_of<T>(r.input(1), views.k), p.v = heads_of<T>(r.input(2), views.v);
  TensorView& y = r.output(0, views.shape);
  p.y = heads_of<T>(y, views.y);
  if (y.count() != 0) attend_all(r, s, p, 0);
}

CompiledKernel make_attention_plain(const CompileContext& c) {
  return {[s = AttentionSettings(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() {
      for (size_t i : {1, 2, 4, 5})
        require(!r.has_input(i) || r.input(i).dtype == r.input(0).dtype, "inputs of Attention have different types", "cast them");
      run_attention<T>(r, s);
    });
  }};
}

CompiledKernel make_attention(const CompileContext& c) {
  return make_any_float(c, make_attention_plain);
}

CompiledKernel make_strided_attention_plain(const CompileContext& c) {
  return {[s = AttentionSettings(c.node()), views = read_attention_views(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() {
      for (size_t i : {1, 2}) require(r.input(i).dtype == r.input(0).dtype, "inputs of StridedAttention have different types");
      run_strided_attention<T>(r, s, views);
    });
  }};
}

CompiledKernel make_strided_attention(const CompileContext& c) {
  return make_any_float(c, make_strided_attention_plain);
}

}  // namespace

void register_attention(KernelRegistry& registry) {
  registry.add({.op = "Attention", .make = make_attention});
  registry.add({.op = "StridedAttention", .domain = kDeviceDomain, .make = make_strided_attention});
  register_rotary_embedding(registry);
}

}  // namespace fretsaw
