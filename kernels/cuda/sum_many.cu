// Sum of many tensors of one shape, in their order.
#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/sum_many.h"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256, kMost = 256;  // tensors of one launch

struct Addresses {
  const void* at[kMost];
  int count;
};

// y = the sum of the tensors, or y + the sum where `goes_on`.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_tensors(const __grid_constant__ Addresses from, int64_t count, bool goes_on, T* y) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    WideOf<T> sum = goes_on ? widen(y[i]) : WideOf<T>(0);
#pragma unroll 8
    for (int k = 0; k < from.count; ++k) sum += widen(static_cast<const T*>(from.at[k])[i]);
    y[i] = narrow<T>(sum);
  }
}

CompiledKernel make_sum(const CompileContext&) {
  return {[](RunContext& r) {
    TensorView& y = r.output(0, r.input(0).dims, r.input(0).dtype);
    if (y.count() == 0) return;
    with_float_type(y.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (size_t first = 0; first < r.input_count(); first += kMost) {
        Addresses addresses{};
        for (size_t i = first; i < std::min(first + kMost, r.input_count()); ++i) {
          require(r.input(i).dims == y.dims, "the tensors of a sum differ in shape");
          addresses.at[addresses.count++] = r.input(i).data;
        }
        sum_tensors<T><<<blocks_for(y.count(), kThreads), kThreads, 0, stream_of(r)>>>(addresses, y.count(), first > 0, y.as<T>());
        check_launch("sum_tensors");
      }
    });
  }};
}

std::string unsupported_sum(const CompileContext& c) {
  if (std::string reason = refuse_unknown_dims(c); !reason.empty()) return reason;
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    // In halves each sum would be rounded: the few that there are have an elementwise form.
    if (std::string reason = refuse_other_types(c, i, {DType::float32, DType::float64}); !reason.empty()) return reason;
    if (c.input_dtype(i) != c.input_dtype(0) || c.input_dims(i) != c.input_dims(0)) return "many tensors of several shapes or types";
  }
  return "";
}

}  // namespace

KernelRecord sum_of_many() {
  // Not in place: the second launch reads what the first one would have written over.
  return {.op = "Sum", .make = make_sum, .unsupported = unsupported_sum};
}

}  // namespace fretsaw::cuda
