// What the files of the reduction family share.
#pragma once
#include <optional>

#include "graph/types.h"
#include "kernels/cpu/reductions.h"
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

// A tensor [outer, n, inner] seen along its middle dimension.
struct AxisView {
  int64_t outer = 1, n = 1, inner = 1;
};
AxisView along_axis(const Dims& dims, size_t axis);

// The rows of the table of reductions: z is the sum of a term of each element, then a function of z.
enum class SumTerm : uint8_t { plain, magnitude, square };
enum class SumFinish : uint8_t { none, mean, root, log };

// Fold input 0, seen as `shape`, into `y`. They ask for their scratch memory.
void reduce_sum(RunContext& r, const ReductionPlan& shape, TensorView& y, SumTerm term, SumFinish finish);
void reduce_product(RunContext& r, const ReductionPlan& shape, TensorView& y);
void reduce_extreme(RunContext& r, const ReductionPlan& shape, TensorView& y, bool larger);
void reduce_log_sum_exp(RunContext& r, const ReductionPlan& shape, TensorView& y);

// The reason to refuse input 0 unless its type is known to be a float of 16, 32 or 64 bits, or an integer, or (where allowed) boolean.
std::string refuse_other_numbers(const CompileContext& c, bool booleans = false);
std::string refuse_other_floats(const CompileContext& c);

void register_arg_reductions(KernelRegistry& registry);  // ArgMax, ArgMin
void register_cumulative(KernelRegistry& registry);      // CumSum, CumProd
void register_softmax(KernelRegistry& registry);         // Softmax, LogSoftmax, Hardmax
void register_losses(KernelRegistry& registry);          // NegativeLogLikelihoodLoss, SoftmaxCrossEntropyLoss

}  // namespace fretsaw::cuda
