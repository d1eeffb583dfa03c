// CrossEntropy and CrossEntropyGrad: a block a row, each row read once in 16-byte packs wherever it begins.
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/gradients.h"
#include "kernels/cuda/loss_labels.cuh"
#include "kernels/cuda/product_types.cuh"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 512;

struct Settings {
  explicit Settings(const Node& node) : smoothing(node.get_float("label_smoothing", 0)) {
    if (node.has("ignore_index")) ignores = true, ignored = node.get_int("ignore_index", 0);
    if (node.has("classes")) classes = node.get_int("classes", 0);
  }
  // How many of a row's scores count.
  int64_t classes_of(int64_t columns) const {
    require(classes <= columns, "more classes than scores in a row");
    return classes > 0 ? classes : columns;
  }
  float smoothing;
  int64_t classes = 0;  // 0: all
  bool ignores = false;
  int64_t ignored = 0;
};

// The class of a row; -1 where it counts for nothing or is none of the classes.
__device__ int64_t class_of(const Settings& s, const int64_t* target, int64_t row, int64_t classes, DeviceFault* fault) {
  const int64_t label = target[row];
  if (s.ignores && label == s.ignored) return -1;
  if (label >= 0 && label < classes) return label;
  *reinterpret_cast<longlong2*>(fault) = make_longlong2(label, classes + 1);
  return -1;
}

// A row in three pieces: `head` elements up to the first multiple of 16 bytes, packs, and the rest.
template <typename T>
struct Pieces {
  static constexpr int V = Bits16<T>::size;
  __device__ Pieces(const T* row, int64_t n) {
    const auto into = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    head = into == 0 ? 0 : V - into;
    if (head > n) head = static_cast<int>(n);
    packs = (n - head) / V;
    rest = head + packs * V;
  }
  int head;
  int64_t packs, rest;
};

// sum(e^(x - top)), of numbers seen one after the other.
struct Exponentials {
  float top, sum, all;  // all: of the numbers themselves

  __device__ void add(float x) {
    all += x;
    if (x == -INFINITY) return;  // e^(x - top) = 0, whatever came before
    if (x <= top) {
      sum += __expf(x - top);
    } else {
      sum = sum * __expf(top - x) + 1;
      top = x;
    }
  }
};
struct ExponentialsJoin {
  __device__ void operator()(Exponentials& into, const Exponentials& other) const {
    into.all += other.all;
    if (other.sum == 0) return;
    const float top = fmaxf(into.top, other.top);
    into.sum = (into.sum == 0 ? 0 : into.sum * __expf(into.top - top)) + other.sum * __expf(other.top - top);
    into.top = top;
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) cross_entropy(const T* scores, const int64_t* target, int64_t columns, int64_t n, Settings s,
                                                          float* losses, float* lse, DeviceFault* fault) {
  __shared__ Exponentials shared[kThreads / 32];
  const int64_t row = blockIdx.x;
  const T* x = scores + row * columns;
  const Pieces<T> pieces(x, n);
  const Exponentials start{-INFINITY, 0, 0};
  Exponentials own = start;
  for (int64_t i = threadIdx.x; i < pieces.head; i += kThreads) own.add(static_cast<float>(widen(x[i])));
#pragma unroll 4
  for (int64_t p = threadIdx.x; p < pieces.packs; p += kThreads) {
    const Bits16<T> pack = load_bits(x + pieces.head + p * Pieces<T>::V);
#pragma unroll
    for (int v = 0; v < Pieces<T>::V; ++v) own.add(pack.at(v));
  }
  for (int64_t i = pieces.rest + threadIdx.x; i < n; i += kThreads) own.add(static_cast<float>(widen(x[i])));
  own = join_group(own, start, shared, ExponentialsJoin{});
  if (threadIdx.x > 0) return;
  const int64_t label = class_of(s, target, row, n, fault);
  const float log_sum = own.top + logf(own.sum);
  if (lse) lse[row] = log_sum;
  if (label < 0) {
    losses[row] = 0;
    return;
  }
  const float mean = s.smoothing > 0 ? s.smoothing * own.all / static_cast<float>(n) : 0.0f;  // which may be infinite
  losses[row] = log_sum - (1 - s.smoothing) * static_cast<float>(widen(x[label])) - mean;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_gradient(const float* dloss, const T* scores, const int64_t* target, const float* lse, int64_t columns, int64_t n,
                           Settings s, T* dscores, DeviceFault* fault) {
  const int64_t row = blockIdx.x, label = class_of(s, target, row, n, fault);
  const T* x = scores + row * columns;
  T* dx = dscores + row * columns;  // may be the same memory: each thread reads what it writes itself
  const Pieces<T> pieces(x, n);     // those of dx too: both tensors begin at a multiple of 16 bytes
  const float factor = label < 0 ? 0.0f : dloss[row], shift = lse[row], all = s.smoothing / static_cast<float>(n);
  const auto gradient = [&](float score, int64_t at) {
    return factor * (__expf(score - shift) - all - (at == label ? 1 - s.smoothing : 0.0f));
  };
  for (int64_t i = threadIdx.x; i < pieces.head; i += kThreads) dx[i] = narrow<T>(gradient(static_cast<float>(widen(x[i])), i));
#pragma unroll 4
  for (int64_t p = threadIdx.x; p < pieces.packs; p += kThreads) {
    const int64_t at = pieces.head + p * Pieces<T>::V;
    const Bits16<T> pack = load_bits(x + at);
    Bits16<T> made;
#pragma unroll
    for (int v = 0; v < Pieces<T>::V; ++v) made.elements[v] = narrow<T>(gradient(pack.at(v), at + v));
    *reinterpret_cast<uint4*>(dx + at) = made.bits;
  }
  for (int64_t i = pieces.rest + threadIdx.x; i < n; i += kThreads) dx[i] = narrow<T>(gradient(static_cast<float>(widen(x[i])), i));
  for (int64_t i = n + threadIdx.x; i < columns; i += kThreads) dx[i] = narrow<T>(0.0f);
}

void check(const TensorView& scores, const TensorView& target) {
  require(scores.rank() == 2, "scores are no rows of classes");
  require(target.rank() == 1 && target.dims[0] == scores.dims[0], "there is not one target for each row of scores");
}

CompiledKernel make_cross_entropy(const CompileContext& c) {
  return {[s = Settings(c.node()), fault = gpu(c).fault_word(c.node())](RunContext& r) {
    const TensorView &scores = r.input(0), &target = r.input(1);
    check(scores, target);
    const int64_t rows = scores.dims[0], columns = scores.dims[1], n = s.classes_of(columns);
    float* losses = r.output(0, {rows}, DType::float32).as<float>();
    float* lse = r.wants_output(1) ? r.output(1, {rows}, DType::float32).as<float>() : nullptr;
    if (rows == 0) return;
    with_float_type(scores.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (sizeof(T) <= 4)
        cross_entropy<T><<<static_cast<unsigned>(rows), kThreads, 0, stream_of(r)>>>(scores.as<T>(), target.as<int64_t>(), columns, n, s,
                                                                                     losses, lse, fault.get());
    });
    check_launch("cross_entropy");
  }};
}

CompiledKernel make_cross_entropy_gradient(const CompileContext& c) {
  const auto run = [s = Settings(c.node()), fault = gpu(c).fault_word(c.node())](RunContext& r) {
    const TensorView &dloss = r.input(0), &scores = r.input(1), &target = r.input(2), &lse = r.input(3);
    check(scores, target);
    const int64_t rows = scores.dims[0], columns = scores.dims[1], n = s.classes_of(columns);
    require(dloss.count() == rows && lse.count() == rows, "a gradient and a logarithm are wanted for each row of scores");
    TensorView& dx = r.output(0, scores.dims, scores.dtype);
    if (rows == 0) return;
    with_float_type(scores.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (sizeof(T) <= 4)
        cross_entropy_gradient<T><<<static_cast<unsigned>(rows), kThreads, 0, stream_of(r)>>>(
            dloss.as<float>(), scores.as<T>(), target.as<int64_t>(), lse.as<float>(), columns, n, s, dx.as<T>(), fault.get());
    });
    check_launch("cross_entropy_gradient");
  };
  return {.run = run, .overwrites = 1};
}

template <size_t kScores>
std::string unsupported(const CompileContext& c) {
  const std::string reason = refuse_other_types(c, kScores, {DType::float32, DType::float16, DType::bfloat16});
  return reason.empty() ? refuse_other_types(c, kScores + 1, {DType::int64}) : reason;
}

}  // namespace

void register_cross_entropy(KernelRegistry& registry) {
  registry.add({.op = "CrossEntropy", .domain = kCommunicationDomain, .make = make_cross_entropy, .unsupported = unsupported<0>});
  registry.add(
      {.op = "CrossEntropyGrad", .domain = kCommunicationDomain, .make = make_cross_entropy_gradient, .unsupported = unsupported<1>});
}

}  // namespace fretsaw::cuda
