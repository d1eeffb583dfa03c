// Attention: softmax(scale * Q K^T + bias) V for each head, with masks, windows, caches and grouped heads. StridedAttention: the same
// through views.
#include "kernels/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "graph/device_operators.h"
#include "kernels/cpu/attention_heads.h"
#include "kernels/cpu/families.h"
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

template <typename T>
using Heads = AttentionHeads<T>;

// Through a view of a StridedAttention.
template <typename T>
Heads<T> heads_of(const TensorView& x, const HeadsView& view) {
  require(view.last() < x.count(), "an operand of StridedAttention reaches beyond its tensor");
  return {x.as<T>() + view.offset, view.batches, view.heads, view.rows, view.width, view.batch, view.head, view.row};
}

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
void attend(const AttentionSettings& s, const Problem<T>& p, const AttentionBias<T>& bias, int64_t b, int64_t h, int64_t first,
            int64_t rows) {
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
  std::vector<int64_t> valid;
  if (r.has_input(6)) {
    valid = r.input_ints(6);
    require(static_cast<int64_t>(valid.size()) == p.q.B, "nonpad_kv_seqlen does not have one entry for each sample", "give it [B]");
    for (int64_t n : valid) require(n >= 0 && n <= p.k.S, "nonpad_kv_seqlen is outside the keys", "use 0 to the number of keys");
  }
  const AttentionBias<T> bias(s, {p.q.B, p.q.H, p.q.S, p.k.S}, past, r.has_input(3) ? &r.input(3) : nullptr, std::move(valid));
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
  p.q = attention_heads<T>(q, s.q_heads);
  const Heads<T> k = attention_heads<T>(r.input(1), s.kv_heads), v = attention_heads<T>(r.input(2), s.kv_heads);
  require(k.B == p.q.B && v.B == p.q.B && k.H == v.H && k.S == v.S && k.D == p.q.D && k.H > 0 && p.q.H % k.H == 0,
          "Q, K and V do not fit each other", "equal batches and head sizes; K and V of equal length; query heads a multiple of key heads");
  const int64_t past = r.has_input(4) ? r.input(4).rank() == 4 ? r.input(4).dims[2] : 0 : 0;
  std::vector<T> own_k, own_v;
  p.k = with_cache(r, k, 4, 1, own_k), p.v = with_cache(r, v, 5, 2, own_v);
  require(p.k.S == p.v.S, "past_key and past_value have different lengths", "give both");
  const Dims y_dims = q.rank() == 4 ? Dims{p.q.B, p.q.H, p.q.S, p.v.D} : Dims{p.q.B, p.q.S, p.q.H * p.v.D};
  TensorView& y = r.output(0, y_dims);
  p.y = attention_heads<T>(y, p.q.H);
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

CompiledKernel make_strided_attention_plain(const CompileContext& c) {
  return {[s = AttentionSettings(c.node()), views = read_attention_views(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() {
      for (size_t i : {1, 2}) require(r.input(i).dtype == r.input(0).dtype, "inputs of StridedAttention have different types");
      run_strided_attention<T>(r, s, views);
    });
  }};
}

}  // namespace

void register_attention(KernelRegistry& registry) {
  registry.add({.op = "Attention", .make = any_float<make_attention_plain>});
  registry.add({.op = "StridedAttention", .domain = kDeviceDomain, .make = any_float<make_strided_attention_plain>});
  register_rotary_embedding(registry);
  register_linear_attention(registry);
}

}  // namespace fretsaw
