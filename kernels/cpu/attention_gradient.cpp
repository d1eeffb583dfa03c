// AttentionGrad. For one head, with P the probabilities, and sums along rows:
//
//   dV = P' dY     dP = dY V'     dS = P (dP - sum(P dP))     dQ = scale dS K     dK = scale dS' Q
//
// The probabilities are made again from Q and K. Between dS and the products stands the derivative of the cap, where there is one.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/attention_heads.h"
#include "kernels/cpu/gradients.h"
#include "kernels/cpu/softmax.h"

namespace fretsaw {
namespace {

template <typename T>
struct Problem {
  AttentionHeads<T> dy, q, k, v, dq, dk, dv;  // those of outputs that nobody wants have no data
  T scale;
};

template <typename T>
T* mutable_row(const AttentionHeads<T>& heads, int64_t b, int64_t h, int64_t s = 0) {
  return const_cast<T*>(heads.matrix(b, h, s).data);
}

// What a block of queries needs, [rows, keys] each.
template <typename T>
struct Buffers {
  std::vector<T> weights, gradients, slopes;
  void fit(int64_t rows, int64_t keys, bool capped) {
    const auto count = static_cast<size_t>(rows * keys) + 1;
    weights.resize(count);
    gradients.resize(count);
    if (capped) slopes.resize(count);
  }
};

// The probabilities of queries [first, first + rows) of head h, and the derivatives of the cap.
template <typename T>
void weigh(const AttentionSettings& s, const Problem<T>& p, const AttentionBias<T>& bias, int64_t b, int64_t h, int64_t first, int64_t rows,
           Buffers<T>& buffers) {
  const int64_t keys = p.k.S;
  const StridedMatrix<T> k = p.k.matrix(b, h / (p.q.H / p.k.H));
  multiply_strided<T>(rows, keys, p.q.D, p.q.matrix(b, h, first), {k.data, 1, k.row}, buffers.weights.data(), keys, p.scale);
  const T cap = static_cast<T>(s.softcap);
  for (int64_t i = 0; i < rows; ++i) {
    T* row = buffers.weights.data() + i * keys;
    for (int64_t t = 0; cap != T(0) && t < keys; ++t) {
      const T bent = std::tanh(row[t] / cap);
      buffers.slopes[static_cast<size_t>(i * keys + t)] = T(1) - bent * bent;
      row[t] = cap * bent;
    }
    const bool empty = bias.present() && bias.add(b, h, first + i, row);
    if (empty)
      std::fill_n(row, keys, T(0));
    else
      run_vectorised([&]() FRETSAW_ALWAYS_INLINE { softmax_row(row, row, keys); });
  }
}

// The gradients of the products of queries and keys, from those of the probabilities.
template <typename T>
void through_softmax(const T* weights, const T* slopes, T* gradients, int64_t keys) {
  run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
    T sum = T(0);
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < keys; ++t) sum += weights[t] * gradients[t];
#pragma omp simd
    for (int64_t t = 0; t < keys; ++t) gradients[t] = weights[t] * (gradients[t] - sum);
    if (!slopes) return;
#pragma omp simd
    for (int64_t t = 0; t < keys; ++t) gradients[t] *= slopes[t];
  });
}

// Everything that flows through key head g of sample b: it alone writes their rows.
template <typename T>
void of_group(const AttentionSettings& s, const Problem<T>& p, const AttentionBias<T>& bias, int64_t b, int64_t g) {
  const int64_t keys = p.k.S, shared = p.q.H / p.k.H, most = std::clamp<int64_t>(65536 / (keys + 1), 1, p.q.S);
  thread_local Buffers<T> buffers;
  buffers.fit(most, keys, s.softcap != 0);
  const StridedMatrix<T> k = p.k.matrix(b, g), v = p.v.matrix(b, g);
  const bool scores = p.dq.data || p.dk.data;
  T beta = T(0);  // the first block of queries writes, the others add
  for (int64_t h = g * shared; h < (g + 1) * shared; ++h) {
    for (int64_t first = 0; first < p.q.S; first += most, beta = T(1)) {
      const int64_t rows = std::min(most, p.q.S - first);
      const StridedMatrix<T> dy = p.dy.matrix(b, h, first), q = p.q.matrix(b, h, first);
      T *weights = buffers.weights.data(), *gradients = buffers.gradients.data();
      weigh(s, p, bias, b, h, first, rows, buffers);
      if (p.dv.data) multiply_strided<T>(keys, p.v.D, rows, {weights, 1, keys}, dy, mutable_row(p.dv, b, g), p.dv.row, T(1), beta);
      if (!scores) continue;
      multiply_strided<T>(rows, keys, p.v.D, dy, {v.data, 1, v.row}, gradients, keys);
      for (int64_t i = 0; i < rows; ++i)
        through_softmax<T>(weights + i * keys, s.softcap != 0 ? buffers.slopes.data() + i * keys : nullptr, gradients + i * keys, keys);
      if (p.dq.data) multiply_strided<T>(rows, p.q.D, keys, {gradients, keys, 1}, k, mutable_row(p.dq, b, h, first), p.dq.row, p.scale);
      if (p.dk.data) multiply_strided<T>(keys, p.q.D, rows, {gradients, 1, keys}, q, mutable_row(p.dk, b, g), p.dk.row, p.scale, beta);
    }
  }
}

template <typename T>
void run_gradient(RunContext& r, const AttentionSettings& s) {
  for (size_t i : {1, 2, 3}) {
    require(r.input(i).rank() == r.input(0).rank(), "dY, Q, K and V have different ranks", "give all 3 or all 4 dimensions");
    require(r.input(i).dtype == r.input(0).dtype, "inputs of AttentionGrad have different types", "cast them");
  }
  Problem<T> p;
  p.q = attention_heads<T>(r.input(1), s.q_heads), p.dy = attention_heads<T>(r.input(0), p.q.H);
  p.k = attention_heads<T>(r.input(2), s.kv_heads), p.v = attention_heads<T>(r.input(3), s.kv_heads);
  require(p.k.B == p.q.B && p.v.B == p.q.B && p.k.H == p.v.H && p.k.S == p.v.S && p.k.D == p.q.D && p.k.H > 0 && p.q.H % p.k.H == 0,
          "Q, K and V do not fit each other", "equal batches and head sizes; K and V of equal length; query heads a multiple of key heads");
  require(p.dy.B == p.q.B && p.dy.H == p.q.H && p.dy.S == p.q.S && p.dy.D == p.v.D, "dY has another shape than Attention's result");
  p.scale = s.scale ? static_cast<T>(*s.scale) : T(1) / std::sqrt(static_cast<T>(p.q.D));
  AttentionHeads<T>* made[] = {&p.dq, &p.dk, &p.dv};
  for (size_t o = 0; o < 3; ++o) {
    if (!r.wants_output(o)) continue;
    TensorView& out = r.output(o, r.input(o + 1).dims, r.input(0).dtype);
    std::fill_n(out.as<T>(), p.q.S == 0 || p.k.S == 0 ? out.count() : 0, T(0));  // no query or no key: nothing is added
    *made[o] = attention_heads<T>(out, o == 0 ? s.q_heads : s.kv_heads);
  }
  if (p.k.S == 0 || p.q.S == 0) return;
  const AttentionBias<T> bias(s, {p.q.B, p.q.H, p.q.S, p.k.S}, 0, r.has_input(4) ? &r.input(4) : nullptr, {});
  for_each_batch(p.q.B * p.k.H, r.threads(), [&](int64_t i) { of_group(s, p, bias, i / p.k.H, i % p.k.H); });
}

CompiledKernel make_plain(const CompileContext& c) {
  return {[s = AttentionSettings(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { run_gradient<T>(r, s); });
  }};
}

}  // namespace

void register_attention_gradient(KernelRegistry& registry) {
  add_gradient(registry, "AttentionGrad", any_float<make_plain>);
}

}  // namespace fretsaw
