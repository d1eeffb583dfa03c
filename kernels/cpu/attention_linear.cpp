// LinearAttention: a state that each step may fade, and adds an outer product of a key and a value to; queries read it.
#include "kernels/cpu/attention_linear.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

LinearAttentionNode::LinearAttentionNode(const Node& node)
    : q_heads(node.get_int("q_num_heads", 0)), kv_heads(node.get_int("kv_num_heads", 0)), scale(node.get_float("scale", 0)) {
  const std::string rule = node.get_string("update_rule", "gated_delta");
  gated = rule == "gated" || rule == "gated_delta";
  delta = rule == "delta" || rule == "gated_delta";
  require(gated || delta || rule == "linear", "update_rule is none of linear, gated, delta and gated_delta");
  require(q_heads > 0 && kv_heads > 0 && q_heads % kv_heads == 0, "q_num_heads must be a multiple of kv_num_heads, and both positive");
}

namespace {

const TensorView* optional_input(RunContext& r, size_t i) {
  return r.has_input(i) ? &r.input(i) : nullptr;
}

}  // namespace

template <typename T>
LinearAttention<T>::LinearAttention(RunContext& r, const LinearAttentionNode& node)
    : heads(node.kv_heads), group(node.q_heads / node.kv_heads) {
  const TensorView &q = r.input(0), &k = r.input(1), &v = r.input(2);
  require(q.rank() == 3 && k.rank() == 3 && v.rank() == 3 && q.dims[2] % node.q_heads == 0 && v.dims[2] % heads == 0,
          "queries, keys and values must be [B, T, heads * width]");
  batches = q.dims[0], steps = q.dims[1], keys = q.dims[2] / node.q_heads, values = v.dims[2] / heads;
  require(k.dims == Dims({batches, steps, heads * keys}) && v.dims == Dims({batches, steps, heads * values}),
          "keys and values do not fit the queries");
  query = q.as<T>(), key = k.as<T>(), value = v.as<T>();
  const TensorView *state = optional_input(r, 3), *fading = node.gated ? optional_input(r, 4) : nullptr,
                   *rates = node.delta ? optional_input(r, 5) : nullptr;
  require(!state || state->dims == Dims({batches, heads, keys, values}), "the past state must be [B, heads, key width, value width]");
  require(!node.gated || (fading && fading->count() > 0) || batches * steps == 0, "a gated rule needs the decay");
  require(!node.delta || (rates && rates->count() > 0) || batches * steps == 0, "a delta rule needs beta");
  for (const TensorView* x : {&k, &v, state, fading, rates})
    require(!x || x->dtype == q.dtype, "operands of float32 and float64 at once", "give all of them in one type");
  past = state ? state->as<T>() : nullptr;
  decay = fading ? fading->as<T>() : nullptr;
  beta = rates ? rates->as<T>() : nullptr;
  if (fading) {
    require(fading->rank() == 3 && fading->dims[0] == batches && fading->dims[1] == steps &&
                (fading->dims[2] == heads || fading->dims[2] == heads * keys),
            "the decay must be [B, T, heads] or [B, T, heads * key width]");
    decays = fading->dims[2] / heads;
  }
  if (rates) {
    require(rates->rank() == 3 && rates->dims[0] == batches && rates->dims[1] == steps && (rates->dims[2] == heads || rates->dims[2] == 1),
            "beta must be [B, T, heads] or [B, T, 1]");
    betas = rates->dims[2];
  }
  scale = static_cast<T>(node.scale != 0 ? node.scale : 1 / std::sqrt(static_cast<double>(std::max<int64_t>(keys, 1))));
}

template <typename T>
void LinearAttention<T>::begin(int64_t b, int64_t h, T* state) const {
  if (past)
    std::copy_n(past + (b * heads + h) * state_size(), state_size(), state);
  else
    std::fill_n(state, state_size(), T(0));
}

template <typename T>
T LinearAttention<T>::kept(int64_t b, int64_t t, int64_t h, int64_t i) const {
  return std::exp(decay[at(b, t, h, heads, decays) + (decays == 1 ? 0 : i)]);
}

template <typename T>
void LinearAttention<T>::fade(int64_t b, int64_t t, int64_t h, T* state) const {
  if (!decay) return;
  for (int64_t i = 0; i < keys; ++i) {
    const T factor = kept(b, t, h, i);
#pragma omp simd
    for (int64_t e = 0; e < values; ++e) state[i * values + e] *= factor;
  }
}

template <typename T>
void LinearAttention<T>::missing(int64_t b, int64_t t, int64_t h, const T* state, T* difference) const {
  std::copy_n(value + at(b, t, h, heads, values), values, difference);
  if (!beta) return;
  const T* k = key_of(b, t, h);
  for (int64_t i = 0; i < keys; ++i)
#pragma omp simd
    for (int64_t e = 0; e < values; ++e) difference[e] -= k[i] * state[i * values + e];
}

template <typename T>
void LinearAttention<T>::advance(int64_t b, int64_t t, int64_t h, T* state, T* row) const {
  fade(b, t, h, state);
  missing(b, t, h, state, row);
  const T rate = beta ? beta_of(b, t, h) : T(1);
  const T* k = key_of(b, t, h);
  for (int64_t i = 0; i < keys; ++i) {
    const T share = rate * k[i];
#pragma omp simd
    for (int64_t e = 0; e < values; ++e) state[i * values + e] += share * row[e];
  }
}

template struct LinearAttention<float>;
template struct LinearAttention<double>;

namespace {

template <typename T>
void run_forward(RunContext& r, const LinearAttentionNode& node) {
  const LinearAttention<T> x(r, node);
  T* y = r.wants_output(0) ? r.output(0, {x.batches, x.steps, node.q_heads * x.values}).template as<T>() : nullptr;
  T* last = r.wants_output(1) ? r.output(1, {x.batches, x.heads, x.keys, x.values}).template as<T>() : nullptr;
  parallel_for(x.batches * x.heads, 1, r.threads(), [&](int64_t begin, int64_t end) {
    std::vector<T> state(static_cast<size_t>(x.state_size())), row(static_cast<size_t>(x.values));
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit / x.heads, h = unit % x.heads;
      x.begin(b, h, state.data());
      for (int64_t t = 0; t < x.steps; ++t) {
        x.advance(b, t, h, state.data(), row.data());
        for (int64_t q = h * x.group; y && q < (h + 1) * x.group; ++q) {
          const T* query = x.query_of(b, t, q);
          std::fill(row.begin(), row.end(), T(0));
          for (int64_t i = 0; i < x.keys; ++i)
#pragma omp simd
            for (int64_t e = 0; e < x.values; ++e) row[static_cast<size_t>(e)] += query[i] * state[static_cast<size_t>(i * x.values + e)];
          T* to = y + x.at(b, t, q, node.q_heads, x.values);
#pragma omp simd
          for (int64_t e = 0; e < x.values; ++e) to[e] = x.scale * row[static_cast<size_t>(e)];
        }
      }
      if (last) std::copy(state.begin(), state.end(), last + unit * x.state_size());
    }
  });
}

CompiledKernel make_plain(const CompileContext& c) {
  return {[node = LinearAttentionNode(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { run_forward<T>(r, node); });
  }};
}

}  // namespace

void register_linear_attention(KernelRegistry& registry) {
  registry.add({.op = "LinearAttention", .make = any_float<make_plain>});
}

}  // namespace fretsaw
