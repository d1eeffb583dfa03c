// LinearAttention, and its gradient, one head and step after another.
#pragma once
#include "kernels/kernel.h"

namespace fretsaw {

struct LinearAttentionNode {
  bool gated, delta;
  int64_t q_heads, kv_heads;
  double scale;  // 0: by the width of the keys

  explicit LinearAttentionNode(const Node& node);
};

// The operands of a run, all float32 or all float64. A state [keys, values] belongs to a sample and a head of the keys.
template <typename T>
struct LinearAttention {
  const T *query, *key, *value;          // [batches, steps, heads * width]
  const T *past, *decay, *beta;          // null where left out
  int64_t batches, steps, keys, values;  // keys, values: the widths of one head
  int64_t heads, group;                  // of keys and values, and how many heads of queries each has
  int64_t decays = 0, betas = 0;         // how many a head (1 or `keys`) and a step (1 or `heads`) has
  T scale;

  LinearAttention(RunContext& r, const LinearAttentionNode& node);  // Error where shapes do not fit

  int64_t state_size() const { return keys * values; }
  // A place in [batches, steps, count * width].
  int64_t at(int64_t b, int64_t t, int64_t head, int64_t count, int64_t width) const { return ((b * steps + t) * count + head) * width; }
  const T* key_of(int64_t b, int64_t t, int64_t h) const { return key + at(b, t, h, heads, keys); }
  const T* query_of(int64_t b, int64_t t, int64_t q) const { return query + at(b, t, q, heads * group, keys); }
  T beta_of(int64_t b, int64_t t, int64_t h) const { return beta[(b * steps + t) * betas + (betas == 1 ? 0 : h)]; }

  void begin(int64_t b, int64_t h, T* state) const;
  // The factor of row i of the state.
  T kept(int64_t b, int64_t t, int64_t h, int64_t i) const;
  void fade(int64_t b, int64_t t, int64_t h, T* state) const;
  // What the state, which has faded, lacks of the value (delta), or the value itself; [values].
  void missing(int64_t b, int64_t t, int64_t h, const T* state, T* difference) const;
  // All of a step: the state before it becomes that after it. `row` [values] is taken.
  void advance(int64_t b, int64_t t, int64_t h, T* state, T* row) const;
};

extern template struct LinearAttention<float>;
extern template struct LinearAttention<double>;

}  // namespace fretsaw
