// SoftmaxCrossEntropyLossGrad and NegativeLogLikelihoodLossGrad.
//
//   loss_i = -w[t] log p[t]:   d loss_i / d log p = -w[t] at t,   d loss_i / d scores = w[t] (p - 1 at t)
//
// A mean divides by the sum of the weights of the labels that are not ignored.
#include "kernels/cuda/gradients.h"
#include "kernels/cuda/loss_labels.cuh"
#include "kernels/cuda/softmax.cuh"

namespace fretsaw::cuda {
namespace {

template <typename T>
__device__ WideOf<T> weight_of(const Labels& labels, int64_t at) {
  return labels.weights ? widen(static_cast<const T*>(labels.weights)[at]) : WideOf<T>(1);
}

constexpr int kSumThreads = 1024;

// One block: the weights of all labels.
template <typename T>
__global__ void __launch_bounds__(kSumThreads) sum_weights(Labels labels, int64_t count, int64_t classes, double* total) {
  __shared__ double shared[kSumThreads / 32];
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) {
    const int64_t at = class_at(labels, i, classes);
    if (at >= 0) sum += static_cast<double>(weight_of<T>(labels, at));
  }
  sum = join_group(sum, 0.0, shared, AddJoin{});
  if (threadIdx.x == 0) *total = sum;
}

// What the kernels read besides scores and labels: the gradient of the loss, one number or (each) one for each label.
struct LossGradient {
  const void* data;
  bool each;
  const double* total;  // of a mean: what it divides by
};

template <bool kSoftmax, typename T>
__global__ void __launch_bounds__(kMostColumnThreads)
    gradient_of_columns(const T* scores, Columns columns, Labels labels, LossGradient loss, T* dx) {
  using Wide = WideOf<T>;
  const int64_t column = columns.own();
  Wide top = 0, scale = 0;
  if constexpr (kSoftmax) {
    __shared__ TopAndSum<Wide> shared[kMostColumnThreads];
    const TopAndSum<Wide> all = fold_column(scores, columns, column, shared);
    top = all.top, scale = static_cast<Wide>(1 / all.sum);
  }
  if (column >= columns.count) return;
  const int64_t label = class_at(labels, column, columns.n), base = columns.base(column);
  Wide factor = 0;
  if (label >= 0) {
    factor = weight_of<T>(labels, label) * widen(static_cast<const T*>(loss.data)[loss.each ? column : 0]);
    if (loss.total) factor = static_cast<Wide>(static_cast<double>(factor) / *loss.total);
  }
#pragma unroll 4
  for (int64_t i = threadIdx.y; i < columns.n; i += blockDim.y) {
    const int64_t at = base + i * columns.inner;
    Wide value = 0;
    if constexpr (kSoftmax) {
      if (label >= 0) value = exp_of(widen(scores[at]) - top) * scale * factor;
    }
    if (i == label) value -= factor;
    dx[at] = narrow<T>(value);
  }
}

template <bool kSoftmax>
void run(RunContext& r, const LossSettings& s, DeviceFault* fault) {
  const TensorView &dloss = r.input(0), &x = r.input(1), &given = r.input(2);
  require(x.rank() >= 2, "the scores of a loss have no class dimension", "give them the shape [N,C,D1,...]");
  Dims wanted = x.dims;
  wanted.erase(wanted.begin() + 1);
  require(given.dims == wanted, "labels do not have the shape [N,D1,...] of the scores", "give one label for each");
  const TensorView* weights = r.has_input(3) ? &r.input(3) : nullptr;
  require(!weights || (weights->count() == x.dims[1] && weights->dtype == x.dtype), "the weights of a loss do not fit its classes",
          "give one for each class, of the type of the scores");
  const bool each = s.reduction == LossReduction::none;
  require(dloss.count() == (each ? given.count() : 1), "the gradient of a loss has another shape than the loss");
  TensorView& dx = r.output(0, x.dims, x.dtype);
  if (x.count() == 0) return;
  const Labels labels{given.data, given.dtype, weights ? weights->data : nullptr, s.ignored.has_value(), s.ignored.value_or(0), fault};
  double* total = s.reduction == LossReduction::mean ? static_cast<double*>(r.scratch(sizeof(double))) : nullptr;
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (total) {
      sum_weights<T><<<1, kSumThreads, 0, stream_of(r)>>>(labels, given.count(), x.dims[1], total);
      check_launch("sum_weights");
    }
    const Columns columns(along_axis(x.dims, 1));
    const ColumnLaunch launch = column_launch(columns);
    gradient_of_columns<kSoftmax, T>
        <<<launch.blocks, launch.threads, 0, stream_of(r)>>>(x.as<T>(), columns, labels, LossGradient{dloss.data, each, total}, dx.as<T>());
    check_launch("gradient_of_columns");
  });
}

template <bool kSoftmax>
CompiledKernel make_gradient(const CompileContext& c) {
  return {[s = LossSettings(c.node()), fault = gpu(c).fault_word(c.node())](RunContext& r) { run<kSoftmax>(r, s, fault.get()); }};
}

std::string unsupported(const CompileContext& c) {
  const std::string reason = refuse_mixed_floats(c, {0, 1, 3});
  return reason.empty() ? refuse_other_types(c, 2, {DType::int64, DType::int32}) : reason;
}

}  // namespace

void register_loss_gradients(KernelRegistry& registry) {
  const auto add = [&](const char* op, CompiledKernel (*make)(const CompileContext&)) {
    registry.add({.op = op, .domain = kCommunicationDomain, .make = make, .unsupported = unsupported});
  };
  add("SoftmaxCrossEntropyLossGrad", make_gradient<true>);
  add("NegativeLogLikelihoodLossGrad", make_gradient<false>);
}

}  // namespace fretsaw::cuda
