// SoftmaxCrossEntropyLossGrad and NegativeLogLikelihoodLossGrad.
//
//   loss_i = -w[t] log p[t]:   d loss_i / d log p = -w[t] at t,   d loss_i / d scores = w[t] (p - 1 at t)
//
// A mean divides by the sum of the weights of the labels that are not ignored.
#include <cmath>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/gradients.h"
#include "kernels/cpu/loss_settings.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/softmax.h"

namespace fretsaw {

namespace {

// For each label its class, -1 where it is ignored, and the factor of its loss: dLoss, weight and mean.
template <typename T>
struct Labels {
  std::vector<int64_t> classes;
  std::vector<T> factors;

  Labels(RunContext& r, const LossSettings& s, int64_t C) : classes(r.input_ints(2)), factors(classes.size()) {
    const T *dloss = r.input(0).as<T>(), *weights = r.has_input(3) ? r.input(3).as<T>() : nullptr;
    require(!weights || r.input(3).count() == C, "the weights of a loss do not fit its classes", "give one for each class");
    double total = 0;
    for (size_t i = 0; i < classes.size(); ++i) {
      if (s.ignored && classes[i] == *s.ignored) {
        classes[i] = -1;
        continue;
      }
      classes[i] = normalise_index(classes[i], C);
      factors[i] = weights ? weights[classes[i]] : T(1);
      total += static_cast<double>(factors[i]);
    }
    const bool each = s.reduction == "none";
    require(r.input(0).count() == (each ? static_cast<int64_t>(classes.size()) : 1),
            "the gradient of a loss has another shape than the loss");
    for (size_t i = 0; i < classes.size(); ++i) {
      if (classes[i] < 0) continue;
      factors[i] *= each ? dloss[i] : s.reduction == "sum" ? dloss[0] : static_cast<T>(static_cast<double>(dloss[0]) / total);
    }
  }
};

// Row i of the scores [N, C, D...]: `from` [C] -> `to` [C].
template <bool kSoftmax, typename T>
void row_gradient(const T* from, T* to, int64_t C, int64_t label, T factor) {
  if (label < 0 || !kSoftmax) {
    std::fill_n(to, C, T(0));
  } else {
    run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
      softmax_row(from, to, C);
#pragma omp simd
      for (int64_t k = 0; k < C; ++k) to[k] *= factor;
    });
  }
  if (label >= 0) to[label] -= factor;
}

template <bool kSoftmax, typename T>
void of_scores(RunContext& r, const LossSettings& s) {
  const TensorView& x = r.input(1);
  require(x.rank() >= 2, "the scores of a loss have no class dimension", "give them the shape [N,C,D1,...]");
  Dims wanted = x.dims;
  wanted.erase(wanted.begin() + 1);
  require(r.input(2).dims == wanted, "labels do not have the shape [N,D1,...] of the scores", "give one label for each");
  const int64_t C = x.dims[1], inner = product(x.dims, 2, x.rank());
  const Labels<T> labels(r, s, C);
  TensorView& dx = r.output(0, x.dims, x.dtype);
  parallel_for(x.dims[0] * inner, kGrainElements / (C + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
    std::vector<T> row(static_cast<size_t>(inner == 1 ? 0 : C));
    for (int64_t i = begin; i < end; ++i) {
      const auto at = static_cast<size_t>(i);
      const int64_t base = i / inner * C * inner + i % inner;
      const T* from = x.as<T>() + base;
      T* to = dx.as<T>() + base;
      if (inner == 1) {
        row_gradient<kSoftmax>(from, to, C, labels.classes[at], labels.factors[at]);
        continue;
      }
      for (int64_t k = 0; k < C; ++k) row[static_cast<size_t>(k)] = from[k * inner];
      row_gradient<kSoftmax>(row.data(), row.data(), C, labels.classes[at], labels.factors[at]);
      for (int64_t k = 0; k < C; ++k) to[k * inner] = row[static_cast<size_t>(k)];
    }
  });
}

template <bool kSoftmax>
CompiledKernel make_plain(const CompileContext& c) {
  return {[s = LossSettings(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(1).dtype, [&]<typename T>() { of_scores<kSoftmax, T>(r, s); });
  }};
}

}  // namespace

void register_loss_gradients(KernelRegistry& registry) {
  add_gradient(registry, "SoftmaxCrossEntropyLossGrad", any_float<make_plain<true>>);
  add_gradient(registry, "NegativeLogLikelihoodLossGrad", any_float<make_plain<false>>);
}

}  // namespace fretsaw
