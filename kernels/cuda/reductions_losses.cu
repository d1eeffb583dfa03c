// NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss. Sums are taken in double, in an order that the shape alone decides.
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/fold_readers.cuh"
#include "kernels/cuda/loss_labels.cuh"
#include "kernels/cuda/softmax.cuh"

namespace fretsaw::cuda {

namespace {

struct LossAndWeight {
  double loss, weight;
};

// scores [N, C, D...]: logarithms of probabilities, or (kSoftmax) the scores that they are made of. Losses go to y, or with their weights
// to `losses`, one for each position.
template <bool kSoftmax, typename T>
__global__ void __launch_bounds__(kMostColumnThreads)
    loss_columns(const T* scores, Columns columns, Labels labels, T* y, LossAndWeight* losses) {
  using Wide = WideOf<T>;
  const int64_t column = columns.own();
  Wide shift = 0, log_sum = 0;
  if constexpr (kSoftmax) {
    __shared__ TopAndSum<Wide> shared[kMostColumnThreads];
    const TopAndSum<Wide> all = fold_column(scores, columns, column, shared);
    shift = all.top, log_sum = static_cast<Wide>(log(all.sum));
  }
  if (column >= columns.count || threadIdx.y != 0) return;
  const int64_t at = class_at(labels, column, columns.n);
  Wide loss = 0, weight = 0;
  if (at >= 0) {
    weight = labels.weights ? widen(static_cast<const T*>(labels.weights)[at]) : Wide(1);
    loss = -(widen(scores[columns.base(column) + at * columns.inner]) - shift - log_sum) * weight;
  }
  if (losses)
    losses[column] = {static_cast<double>(loss), static_cast<double>(weight)};
  else
    y[column] = narrow<T>(loss);
}

constexpr int kSumThreads = 256;

struct AddLosses {
  __device__ void operator()(LossAndWeight& into, const LossAndWeight& other) const {
    into.loss += other.loss, into.weight += other.weight;
  }
};

// One block.
template <typename T>
__global__ void __launch_bounds__(kSumThreads) sum_losses(const LossAndWeight* losses, int64_t count, bool mean, T* y) {
  __shared__ LossAndWeight shared[kSumThreads / 32];
  LossAndWeight sum{0, 0};
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) AddLosses{}(sum, losses[i]);
  sum = join_group(sum, LossAndWeight{0, 0}, shared, AddLosses{});
  if (threadIdx.x == 0) *y = rounded_from<T>(mean ? sum.loss / sum.weight : sum.loss);
}

template <bool kSoftmax, typename T>
void launch_losses(RunContext& r, const LossSettings& s, const AxisView& view, const Labels& labels, TensorView& y) {
  const Columns columns(view);
  ColumnLaunch launch = column_launch(columns);
  if (!kSoftmax) launch = {static_cast<unsigned>((columns.count + 255) / 256), dim3(256)};  // a thread reads one score
  const auto* scores = r.input(0).as<T>();
  auto* each = s.reduction == LossReduction::none
                   ? nullptr
                   : static_cast<LossAndWeight*>(r.scratch(static_cast<size_t>(columns.count + 1) * sizeof(LossAndWeight)));
  if (columns.count > 0) {
    loss_columns<kSoftmax><<<launch.blocks, launch.threads, 0, stream_of(r)>>>(scores, columns, labels, y.as<T>(), each);
    check_launch("loss_columns");
  }
  if (!each) return;
  const bool mean = s.reduction == LossReduction::mean;
  sum_losses<<<1, kSumThreads, 0, stream_of(r)>>>(static_cast<const LossAndWeight*>(each), columns.count, mean, y.as<T>());
  check_launch("sum_losses");
}

template <bool kSoftmax>
void run_loss(RunContext& r, const LossSettings& s, DeviceFault* fault) {
  const TensorView& x = r.input(0);
  require(x.rank() >= 2, "the scores of a loss have no class dimension", "give them the shape [N,C,D1,...]");
  const TensorView& given = r.input(1);
  Dims wanted = x.dims;
  wanted.erase(wanted.begin() + 1);
  require(given.dims == wanted, "labels do not have the shape [N,D1,...] of the scores", "give one label for each");
  const TensorView* weights = r.has_input(2) ? &r.input(2) : nullptr;
  require(!weights || (weights->count() == x.dims[1] && weights->dtype == x.dtype), "the weights of a loss do not fit its classes",
          "give one for each class, of the type of the scores");
  const AxisView view = along_axis(x.dims, 1);
  if (kSoftmax && r.wants_output(1))
    launch_softmax(SoftmaxKind::log_softmax, x.dtype, x.data, r.output(1, x.dims).data, view, stream_of(r));
  if (!r.wants_output(0)) return;
  TensorView& y = r.output(0, s.reduction == LossReduction::none ? given.dims : Dims{}, x.dtype);
  const Labels labels{given.data, given.dtype, weights ? weights->data : nullptr, s.ignored.has_value(), s.ignored.value_or(0), fault};
  with_float_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_losses<kSoftmax, T>(r, s, view, labels, y);
  });
}

template <bool kSoftmax>
CompiledKernel make_loss(const CompileContext& c) {
  return {[s = LossSettings(c.node()), fault = gpu(c).fault_word(c.node())](RunContext& r) { run_loss<kSoftmax>(r, s, fault.get()); }};
}

std::string unsupported_loss(const CompileContext& c) {
  const std::string reason = refuse_other_floats(c);
  return reason.empty() ? refuse_other_types(c, 1, {DType::int64, DType::int32}) : reason;
}

}  // namespace

void register_losses(KernelRegistry& registry) {
  registry.add({.op = "NegativeLogLikelihoodLoss", .make = make_loss<false>, .unsupported = unsupported_loss});
  registry.add({.op = "SoftmaxCrossEntropyLoss", .make = make_loss<true>, .unsupported = unsupported_loss});
}

}  // namespace fretsaw::cuda
