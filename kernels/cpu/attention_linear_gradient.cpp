// LinearAttentionGrad: a walk back through time. Some of the states are made first, as many as stretches of steps between them are long;
// those of a stretch when the walk comes to it.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/attention_linear.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/gradients.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scalar_types.h"

namespace fretsaw {
namespace {

// Where the gradients go; null where nobody asks for one.
template <typename T>
struct Results {
  T *query, *key, *value, *past, *decay;
  T* beta;  // for each head, [batches, steps, heads]
};

// One sample and head.
template <typename T>
class Walk {
 public:
  Walk(const LinearAttention<T>& x, const T* dy, const T* last, const Results<T>& to)
      : x_(x),
        dy_(dy),
        last_(last),
        to_(to),
        stretch_(std::max<int64_t>(1, static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(x.steps)))))),
        marks_(size((x.steps + stretch_ - 1) / stretch_ * x.state_size())),
        states_(size((stretch_ + 1) * x.state_size())),
        faded_(size(x.state_size())),
        g_(faded_.size()),
        missing_(size(x.values)),
        written_(missing_.size()),
        dw_(missing_.size()) {}

  void run(int64_t b, int64_t h) {
    b_ = b, h_ = h;
    const int64_t each = x_.state_size();
    std::vector<T>& state = faded_;
    x_.begin(b, h, state.data());
    for (int64_t t = 0; t < x_.steps; ++t) {
      if (t % stretch_ == 0) std::copy_n(state.data(), each, marks_.data() + t / stretch_ * each);
      x_.advance(b, t, h, state.data(), missing_.data());
    }
    if (last_)
      std::copy_n(last_ + (b * x_.heads + h) * each, each, g_.data());
    else
      std::fill(g_.begin(), g_.end(), T(0));
    for (int64_t end = x_.steps; end > 0;) {
      const int64_t begin = (end - 1) / stretch_ * stretch_;
      std::copy_n(marks_.data() + begin / stretch_ * each, each, states_.data());
      for (int64_t t = begin; t < end; ++t) {
        T* after = states_.data() + (t - begin + 1) * each;
        std::copy_n(after - each, each, after);
        x_.advance(b, t, h, after, missing_.data());
      }
      for (int64_t t = end; t-- > begin;) back(t, states_.data() + (t - begin) * each);
      end = begin;
    }
    if (to_.past) std::copy_n(g_.data(), each, to_.past + (b * x_.heads + h) * each);
  }

 private:
  static size_t size(int64_t n) { return static_cast<size_t>(n); }

  // g_, the gradient of the state after step t, becomes that of the state before it. `before`: the two states.
  void back(int64_t t, const T* before) {
    read_back(t, before + x_.state_size());
    std::copy_n(before, x_.state_size(), faded_.data());
    x_.fade(b_, t, h_, faded_.data());
    write_back(t);
    fade_back(t);
  }

  // y = scale q S for each head of queries.
  void read_back(int64_t t, const T* state) {
    if (!dy_) return clear_queries(t);
    for (int64_t q = h_ * x_.group; q < (h_ + 1) * x_.group; ++q) {
      const T *query = x_.query_of(b_, t, q), *dy = dy_ + x_.at(b_, t, q, x_.heads * x_.group, x_.values);
      T* dq = to_.query ? to_.query + x_.at(b_, t, q, x_.heads * x_.group, x_.keys) : nullptr;
      for (int64_t i = 0; i < x_.keys; ++i) {
        const T scaled = x_.scale * query[i];
        const int64_t row = i * x_.values;
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t e = 0; e < x_.values; ++e) {
          sum += state[row + e] * dy[e];
          g_[size(row + e)] += scaled * dy[e];
        }
        if (dq) dq[i] = x_.scale * sum;
      }
    }
  }
  void clear_queries(int64_t t) {
    if (to_.query) std::fill_n(to_.query + x_.at(b_, t, h_ * x_.group, x_.heads * x_.group, x_.keys), x_.group * x_.keys, T(0));
  }

  // S = faded + k w, with w = beta (v - k faded) or v.
  void write_back(int64_t t) {
    const T* k = x_.key_of(b_, t, h_);
    const T rate = x_.beta ? x_.beta_of(b_, t, h_) : T(1);
    x_.missing(b_, t, h_, faded_.data(), missing_.data());
    std::fill(dw_.begin(), dw_.end(), T(0));
#pragma omp simd
    for (int64_t e = 0; e < x_.values; ++e) written_[size(e)] = rate * missing_[size(e)];
    T* dk = to_.key ? to_.key + x_.at(b_, t, h_, x_.heads, x_.keys) : nullptr;
    for (int64_t i = 0; i < x_.keys; ++i) {
      const T* g = g_.data() + i * x_.values;
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t e = 0; e < x_.values; ++e) {
        sum += g[e] * written_[size(e)];
        dw_[size(e)] += k[i] * g[e];
      }
      if (dk) dk[i] = sum;
    }
    if (x_.beta && to_.beta) {
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t e = 0; e < x_.values; ++e) sum += dw_[size(e)] * missing_[size(e)];
      to_.beta[(b_ * x_.steps + t) * x_.heads + h_] = sum;
    }
    for (T& d : dw_) d *= rate;
    if (to_.value) std::copy(dw_.begin(), dw_.end(), to_.value + x_.at(b_, t, h_, x_.heads, x_.values));
    if (!x_.beta) return;
    for (int64_t i = 0; i < x_.keys; ++i) {
      T *g = g_.data() + i * x_.values, sum = 0;
      const T* faded = faded_.data() + i * x_.values;
#pragma omp simd reduction(+ : sum)
      for (int64_t e = 0; e < x_.values; ++e) {
        sum += faded[e] * dw_[size(e)];
        g[e] -= k[i] * dw_[size(e)];
      }
      if (dk) dk[i] -= sum;
    }
  }

  // faded = e^decay S, row by row.
  void fade_back(int64_t t) {
    if (!x_.decay) return;
    T* to = to_.decay ? to_.decay + x_.at(b_, t, h_, x_.heads, x_.decays) : nullptr;
    if (to) std::fill_n(to, x_.decays, T(0));
    for (int64_t i = 0; i < x_.keys; ++i) {
      const T factor = x_.kept(b_, t, h_, i);
      T *g = g_.data() + i * x_.values, sum = 0;
      const T* faded = faded_.data() + i * x_.values;
#pragma omp simd reduction(+ : sum)
      for (int64_t e = 0; e < x_.values; ++e) {
        sum += g[e] * faded[e];
        g[e] *= factor;
      }
      if (to) to[x_.decays == 1 ? 0 : i] += sum;
    }
  }

  const LinearAttention<T>& x_;
  const T *dy_, *last_;
  const Results<T>& to_;
  int64_t stretch_, b_ = 0, h_ = 0;
  std::vector<T> marks_, states_, faded_, g_, missing_, written_, dw_;
};

template <typename T>
void run_gradient(RunContext& r, const LinearAttentionNode& node) {
  const LinearAttention<T> x(r, node);
  const auto given = [&](size_t i, const Dims& dims) -> const T* {
    if (!r.has_input(i)) return nullptr;
    require(r.input(i).dims == dims && r.input(i).dtype == r.input(0).dtype,
            "a gradient that is not of the shape and type of LinearAttention's result", "give that of the forward node's output");
    return r.input(i).as<T>();
  };
  const T* dy = given(6, {x.batches, x.steps, node.q_heads * x.values});
  const T* last = given(7, {x.batches, x.heads, x.keys, x.values});
  const auto made = [&](size_t o) -> T* { return r.wants_output(o) ? r.output(o, r.input(o).dims).template as<T>() : nullptr; };
  Results<T> to{made(0), made(1), made(2), made(3), made(4), made(5)};
  // Heads may share a beta.
  std::vector<T> of_heads;
  T* dbeta = to.beta;
  if (dbeta) {
    of_heads.resize(static_cast<size_t>(x.batches * x.steps * x.heads));
    to.beta = of_heads.data();
  }
  parallel_for(x.batches * x.heads, 1, r.threads(), [&](int64_t begin, int64_t end) {
    Walk<T> walk(x, dy, last, to);
    for (int64_t unit = begin; unit < end; ++unit) walk.run(unit / x.heads, unit % x.heads);
  });
  for (int64_t i = 0; dbeta && i < x.batches * x.steps * x.betas; ++i) {
    const int64_t each = x.heads / x.betas;
    T sum = 0;
    for (int64_t h = 0; h < each; ++h) sum += of_heads[static_cast<size_t>(i * each + h)];
    dbeta[i] = sum;
  }
}

CompiledKernel make_plain(const CompileContext& c) {
  return {[node = LinearAttentionNode(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { run_gradient<T>(r, node); });
  }};
}

}  // namespace

void register_linear_attention_gradient(KernelRegistry& registry) {
  add_gradient(registry, "LinearAttentionGrad", any_float<make_plain>);
}

}  // namespace fretsaw
