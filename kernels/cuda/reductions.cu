// The Reduce operators: which elements go into which result. The folds are in reductions_*.cu.
#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/reduced_dims.h"
#include "kernels/cuda/index_math.h"
#include "kernels/cuda/pointwise.h"
#include "kernels/cuda/reductions.h"

namespace fretsaw::cuda {

AxisView along_axis(const Dims& dims, size_t axis) {
  return {product(dims, 0, axis), dims[axis], product(dims, axis + 1, dims.size())};
}

std::string refuse_other_floats(const CompileContext& c) {
  return refuse_other_types(c, 0, {DType::float32, DType::float16, DType::bfloat16, DType::float64});
}

std::string refuse_other_numbers(const CompileContext& c, bool booleans) {
  const DType type = c.input_dtype(0);
  const bool known = is_integer(type) ? bits_of(type) >= 8 : booleans && type == DType::boolean;
  return known ? "" : refuse_other_floats(c);
}

namespace {

// For each dimension in the order of memory whether it goes.
std::vector<bool> physical_flags(const std::vector<bool>& reduce, Layout layout) {
  std::vector<bool> flags(reduce.size());
  for (size_t i = 0; i < reduce.size(); ++i) flags[physical_axis(i, layout)] = reduce[i];
  return flags;
}

struct Settings {
  bool keep = true, none_when_empty = false;
};

// f folds input 0, seen as a ReductionPlan, into the output.
using FoldFunction = void (*)(RunContext&, const ReductionPlan&, TensorView&);

void run_reduction(RunContext& r, const Settings& s, FoldFunction f) {
  const TensorView& x = r.input(0);
  const std::vector<int64_t> axes = r.has_input(1) ? r.input_ints(1) : std::vector<int64_t>{};
  const std::vector<bool> reduce = reduced_dimensions(axes, x.rank(), s.none_when_empty);
  TensorView& y = r.output(0, reduced_dims(x.dims, reduce, s.keep), x.dtype);
  f(r, plan_reduction(physical_dims(x.dims, x.layout), physical_flags(reduce, x.layout)), y);
}

// Whether an nhwc image can be reduced as it lies: the results have then the order of a plain tensor.
bool takes_nhwc(const CompileContext& c, const Settings& s) {
  const std::optional<Dims> dims = c.input_dims(0);
  if (!dims || dims->size() != 4 || c.offered.empty() || c.offered[0] != Layout::nhwc) return false;
  std::vector<int64_t> axes;
  if (c.has_input(1)) {
    if (!c.constants[1] || c.constants[1]->dtype != DType::int64) return false;
    const auto* data = reinterpret_cast<const int64_t*>(c.constants[1]->data);
    axes.assign(data, data + c.constants[1]->count());
  }
  const std::vector<bool> reduce = reduced_dimensions(axes, 4, s.none_when_empty);
  return reduce[1] || (reduce[2] && reduce[3]);
}

CompiledKernel compile_reduction(const CompileContext& c, FoldFunction f) {
  const Settings s{c.node().get_int("keepdims", 1) != 0, c.node().get_int("noop_with_empty_axes", 0) != 0};
  CompiledKernel kernel{[s, f](RunContext& r) { run_reduction(r, s, f); }};
  if (takes_nhwc(c, s)) {
    kernel.input_layouts.assign(c.inputs.size(), Layout::plain);
    kernel.input_layouts[0] = Layout::nhwc;
  }
  return kernel;
}

template <SumTerm kTerm, SumFinish kFinish>
CompiledKernel make_sum(const CompileContext& c) {
  return compile_reduction(c, [](RunContext& r, const ReductionPlan& shape, TensorView& y) { reduce_sum(r, shape, y, kTerm, kFinish); });
}
CompiledKernel make_product(const CompileContext& c) {
  return compile_reduction(c, reduce_product);
}
template <bool kLarger>
CompiledKernel make_extreme(const CompileContext& c) {
  return compile_reduction(c, [](RunContext& r, const ReductionPlan& shape, TensorView& y) { reduce_extreme(r, shape, y, kLarger); });
}
CompiledKernel make_log_sum_exp(const CompileContext& c) {
  return compile_reduction(c, reduce_log_sum_exp);
}

std::string unsupported_numbers(const CompileContext& c) {
  return refuse_other_numbers(c);
}
std::string unsupported_ordered(const CompileContext& c) {
  return refuse_other_numbers(c, true);
}

}  // namespace

void register_reductions(KernelRegistry& registry) {
  const auto add = [&](const char* op, CompiledKernel (*make)(const CompileContext&), bool ordered = false) {
    const auto unsupported = ordered ? unsupported_ordered : unsupported_numbers;
    registry.add(with_row_steps({.op = op, .make = make, .unsupported = unsupported, .host_inputs = {1}}));
  };
  add("ReduceSum", make_sum<SumTerm::plain, SumFinish::none>);
  add("ReduceMean", make_sum<SumTerm::plain, SumFinish::mean>);
  add("ReduceL1", make_sum<SumTerm::magnitude, SumFinish::none>);
  add("ReduceL2", make_sum<SumTerm::square, SumFinish::root>);
  add("ReduceSumSquare", make_sum<SumTerm::square, SumFinish::none>);
  add("ReduceLogSum", make_sum<SumTerm::plain, SumFinish::log>);
  add("ReduceLogSumExp", make_log_sum_exp);
  add("ReduceProd", make_product);
  add("ReduceMin", make_extreme<false>, true);
  add("ReduceMax", make_extreme<true>, true);
  cuda::register_arg_reductions(registry);
  cuda::register_cumulative(registry);
  cuda::register_softmax(registry);
  cuda::register_losses(registry);
}

}  // namespace fretsaw::cuda
