// SquaredSum: one launch for up to kTensors tensors, whose addresses are parameters of the kernel.
#include <algorithm>

#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/gradients.h"
#include "kernels/cuda/number_types.cuh"

namespace fretsaw::cuda {
namespace {

constexpr int kTensors = 128, kThreads = 512;
constexpr int64_t kPiece = 1 << 15;  // elements of a block

struct Tensors {
  const void* data[kTensors];
  int64_t count[kTensors];
  int first_block[kTensors + 1];  // of each tensor; behind the last one: how many there are
  int tensors;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) square_pieces(const __grid_constant__ Tensors all, float* sums) {
  __shared__ float shared[kThreads / 32];
  const int block = static_cast<int>(blockIdx.x);
  int low = 0, high = all.tensors;  // the last tensor that begins at this block or before
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (all.first_block[middle] <= block ? low : high) = middle;
  }
  const T* x = static_cast<const T*>(all.data[low]);
  const int64_t begin = (block - all.first_block[low]) * kPiece;
  const int64_t end = begin + kPiece < all.count[low] ? begin + kPiece : all.count[low];
  float sum = 0;
#pragma unroll 8
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const auto value = static_cast<float>(widen(x[i]));
    sum += value * value;
  }
  sum = join_group(sum, 0.0f, shared, AddJoin{});
  if (threadIdx.x == 0) sums[block] = sum;
}

// One block: the pieces' sums in an order that their number decides.
__global__ void __launch_bounds__(kThreads) add_pieces(const float* sums, int count, float* total) {
  __shared__ double shared[kThreads / 32];
  double sum = 0;
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) sum += static_cast<double>(sums[i]);
  sum = join_group(sum, 0.0, shared, AddJoin{});
  if (threadIdx.x == 0) *total = static_cast<float>(sum);
}

int blocks_of(int64_t count) {
  return static_cast<int>((count + kPiece - 1) / kPiece);
}

template <typename T>
void square(RunContext& r, size_t inputs, float* sums) {
  int done = 0;  // blocks
  for (size_t first = 0; first < inputs; first += kTensors) {
    Tensors some = {};
    for (size_t i = first; i < std::min(inputs, first + kTensors); ++i) {
      const TensorView& x = r.input(i);
      if (x.count() == 0) continue;
      some.data[some.tensors] = x.data, some.count[some.tensors] = x.count();
      some.first_block[some.tensors + 1] = some.first_block[some.tensors] + blocks_of(x.count());
      ++some.tensors;
    }
    const int blocks = some.first_block[some.tensors];
    if (blocks == 0) continue;
    square_pieces<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(r)>>>(some, sums + done);
    check_launch("square_pieces");
    done += blocks;
  }
}

CompiledKernel make_squared_sum(const CompileContext& c) {
  const size_t inputs = c.node().inputs.size();
  return {[inputs](RunContext& r) {
    int blocks = 0;
    for (size_t i = 0; i < inputs; ++i) blocks += blocks_of(r.input(i).count());
    auto* sums = static_cast<float*>(r.scratch(sizeof(float) * static_cast<size_t>(std::max(blocks, 1))));
    with_float_type(r.input(0).dtype, [&](auto tag) { square<typename decltype(tag)::type>(r, inputs, sums); });
    add_pieces<<<1, kThreads, 0, stream_of(r)>>>(sums, blocks, r.output(0, {}, DType::float32).as<float>());
    check_launch("add_pieces");
  }};
}

std::string unsupported(const CompileContext& c) {
  for (size_t i = 0; i < c.node().inputs.size(); ++i) {
    const std::string reason = refuse_other_types(c, i, {c.input_dtype(0)});
    if (!reason.empty()) return reason;
  }
  return refuse_other_types(c, 0, {DType::float32, DType::float16, DType::bfloat16, DType::float64});
}

}  // namespace

void register_squared_sum(KernelRegistry& registry) {
  registry.add({.op = "SquaredSum", .domain = kCommunicationDomain, .make = make_squared_sum, .unsupported = unsupported});
}

}  // namespace fretsaw::cuda
