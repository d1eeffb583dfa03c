// NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss.
#include <cmath>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/loss_settings.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/softmax.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

namespace {

// log_prob [N, C, D...], labels [N, D...], weights [C] (input 2, may be left out) -> output 0.
template <typename T>
void reduce_loss(RunContext& r, const LossSettings& s, const T* log_prob, const Dims& dims, DType type) {
  const TensorView& labels = r.input(1);
  Dims wanted = dims;
  wanted.erase(wanted.begin() + 1);
  require(labels.dims == wanted, "labels do not have the shape [N,D1,...] of the scores", "give one label for each");
  const int64_t C = dims[1], inner = product(dims, 2, dims.size());
  const T* weights = r.has_input(2) ? r.input(2).as<T>() : nullptr;
  require(!weights || r.input(2).count() == C, "the weights of a loss do not fit its classes", "give one for each class");
  const std::vector<int64_t> label = r.input_ints(1);
  TensorView& y = r.output(0, s.reduction == "none" ? labels.dims : Dims{}, type);
  double total = 0, total_weight = 0;
  for (int64_t i = 0; i < labels.count(); ++i) {
    const int64_t target = label[static_cast<size_t>(i)];
    T loss = 0;
    if (!s.ignored || target != *s.ignored) {
      const int64_t at = normalise_index(target, C);
      const T weight = weights ? weights[at] : T(1);
      loss = -log_prob[(i / inner * C + at) * inner + i % inner] * weight;
      total += loss, total_weight += weight;
    }
    if (s.reduction == "none") y.as<T>()[i] = loss;
  }
  if (s.reduction != "none") y.as<T>()[0] = static_cast<T>(s.reduction == "sum" ? total : total / total_weight);
}

void check_scores(const TensorView& x) {
  require(x.rank() >= 2, "the scores of a loss have no class dimension", "give them the shape [N,C,D1,...]");
}

CompiledKernel make_likelihood_plain(const CompileContext& c) {
  return {[s = LossSettings(c.node())](RunContext& r) {
    const TensorView& x = r.input(0);
    check_scores(x);
    dispatch<types::wide_floats>(x.dtype, [&]<typename T>() { reduce_loss(r, s, x.as<T>(), x.dims, x.dtype); });
  }};
}

template <typename T>
void cross_entropy(RunContext& r, const LossSettings& s, std::vector<T>& own) {
  const TensorView& x = r.input(0);
  check_scores(x);
  const int64_t C = x.dims[1], inner = product(x.dims, 2, x.rank());
  T* log_prob;
  if (r.wants_output(1)) {
    log_prob = r.output(1, x.dims).template as<T>();
  } else {
    own.resize(static_cast<size_t>(x.count()) + 1);
    log_prob = own.data();
  }
  std::vector<T> row(static_cast<size_t>(C));
  for (int64_t i = 0; i < x.dims[0] * inner; ++i) {
    const int64_t base = i / inner * C * inner + i % inner;
    for (int64_t k = 0; k < C; ++k) row[static_cast<size_t>(k)] = x.as<T>()[base + k * inner];
    run_vectorised([&]() FRETSAW_ALWAYS_INLINE { log_softmax_row(row.data(), row.data(), C); });
    for (int64_t k = 0; k < C; ++k) log_prob[base + k * inner] = row[static_cast<size_t>(k)];
  }
  if (r.wants_output(0)) reduce_loss(r, s, log_prob, x.dims, x.dtype);
}

CompiledKernel make_cross_entropy_plain(const CompileContext& c) {
  return {[s = LossSettings(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() {
      std::vector<T> own;
      cross_entropy<T>(r, s, own);
    });
  }};
}

}  // namespace

void register_losses(KernelRegistry& registry) {
  registry.add({.op = "NegativeLogLikelihoodLoss", .make = any_float<make_likelihood_plain>});
  registry.add({.op = "SoftmaxCrossEntropyLoss", .make = any_float<make_cross_entropy_plain>});
}

}  // namespace fretsaw
