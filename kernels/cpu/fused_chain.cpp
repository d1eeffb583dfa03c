// Reads the elementwise nodes of a fusion group and computes them by loops.
#include "kernels/cpu/fused_chain.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector_math.h"

namespace fretsaw {

namespace {

using Kind = FusedStep::Kind;

float constant_scalar(const Node& node, size_t i, float absent) {
  const Value* value = node.input(i);
  if (!value) return absent;
  if (!value->is_constant() || value->constant->dtype != DType::float32 || value->constant->count() != 1) {
    throw Error("a parameter of a fused node is no constant float32 scalar", "report this as a fault").at_node(node.name, node.op);
  }
  return value->constant->as<float>()[0];
}

std::optional<FusedStep> read_activation(const Node& node) {
  constexpr float kHighest = std::numeric_limits<float>::infinity(), kLowest = -kHighest;
  FusedStep step{Kind::other};
  if (node.op == "Clip") {
    const float low = constant_scalar(node, 1, kLowest), high = constant_scalar(node, 2, kHighest);
    step = {Kind::clip, std::min(low, high), high};  // bounds that cross: everything becomes the upper one
    return step;
  }
  if (node.op == "Relu") step.kind = Kind::relu;
  if (node.op == "LeakyRelu") step.kind = Kind::leaky_relu, step.alpha = node.get_float("alpha", 0.01f);
  step.loop = unary_loop_of(node);
  if (!step.loop) return std::nullopt;
  return step;
}

size_t input_index(const CompileContext& c, const Value* value) {
  const auto found = std::find(c.inputs.begin(), c.inputs.end(), value);
  if (!value || found == c.inputs.end())
    throw Error("an operand of a fused node is not among the group's inputs", "report this as a fault");
  return static_cast<size_t>(found - c.inputs.begin());
}

FusedStep read_step(const CompileContext& c, const Node& node, const Value* previous) {
  if (std::optional<FusedStep> step = read_activation(node)) return *step;
  Kind kind;
  if (node.op == "Add")
    kind = Kind::add;
  else if (node.op == "Sub")
    kind = Kind::subtract;
  else if (node.op == "Mul")
    kind = Kind::multiply;
  else if (node.op == "Div")
    kind = Kind::divide;
  else
    throw Error("this operator can't be in a fusion group", "remove the mark fretsaw.group from the model").at_node(node.name, node.op);
  const bool first = node.input(0) == previous;
  if (!first && (kind == Kind::subtract || kind == Kind::divide)) {
    throw Error("the chain of a fusion group is the second operand", "remove the mark fretsaw.group").at_node(node.name, node.op);
  }
  FusedStep step{kind};
  step.operand = input_index(c, node.input(first ? 1 : 0));
  return step;
}

// f over n contiguous elements.
template <typename F>
void map_elements(float* y, int64_t n, int threads, const F& f) {
  parallel_elements(n, threads, [&](int64_t begin, int64_t end) {
    run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) y[i] = f(y[i]);
    });
  });
}

void apply_activation(const FusedStep& step, float* y, int64_t n, int threads) {
  const float a = step.alpha, b = step.beta;
  if (step.kind == Kind::linear)
    map_elements(y, n, threads, [=](float x) FRETSAW_ALWAYS_INLINE { return a * x + b; });
  else if (step.kind == Kind::clip)
    map_elements(y, n, threads, [=](float x) FRETSAW_ALWAYS_INLINE { return math::min(math::max(x, a), b); });
  else
    parallel_elements(n, threads, [&](int64_t begin, int64_t end) { step.loop(y + begin, y + begin, end - begin); });
}

// y[i] = f(y[i], x[i * stride]) for a row of n.
template <typename F>
void combine_row(float* y, const float* x, int64_t stride, int64_t n, const F& f) {
  run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
    if (stride == 0) {
      const float value = x[0];
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) y[i] = f(y[i], value);
    } else if (stride == 1) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) y[i] = f(y[i], x[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) y[i] = f(y[i], x[i * stride]);
    }
  });
}

void combine(Kind kind, float* y, const float* x, int64_t stride, int64_t n) {
  switch (kind) {
    case Kind::add:
      combine_row(y, x, stride, n, [](float a, float b) FRETSAW_ALWAYS_INLINE { return a + b; });
      break;
    case Kind::subtract:
      combine_row(y, x, stride, n, [](float a, float b) FRETSAW_ALWAYS_INLINE { return a - b; });
      break;
    case Kind::multiply:
      combine_row(y, x, stride, n, [](float a, float b) FRETSAW_ALWAYS_INLINE { return a * b; });
      break;
    default:
      combine_row(y, x, stride, n, [](float a, float b) FRETSAW_ALWAYS_INLINE { return a / b; });
      break;
  }
}

// Strides of `x` in elements for each dimension of `dims`; 0 where it broadcasts. Throws Error when it does not.
Dims operand_strides(const TensorView& x, const Dims& dims) {
  if (x.rank() > dims.size()) throw Error("an operand of a fused node has too many dimensions", "check the model's shapes");
  Dims own(x.rank(), 1);
  if (x.layout == Layout::nhwc) {
    own = {x.dims[1] * x.dims[2] * x.dims[3], 1, x.dims[3] * x.dims[1], x.dims[1]};
  } else {
    for (size_t i = x.rank(); i-- > 1;) own[i - 1] = own[i] * x.dims[i];
  }
  Dims strides(dims.size(), 0);
  for (size_t i = 0; i < x.rank(); ++i) {
    const size_t at = dims.size() - x.rank() + i;
    if (x.dims[i] != 1 && x.dims[i] != dims[at]) {
      throw Error("shapes " + to_string(x.dims) + " and " + to_string(dims) + " do not broadcast in a fused node",
                  "check the model's shapes");
    }
    strides[at] = x.dims[i] == 1 ? 0 : own[i];
  }
  return strides;
}

void apply_binary(const FusedStep& step, TensorView& y, const TensorView& x, int threads) {
  Dims strides = operand_strides(x, y.dims), dims = y.dims;
  if (y.layout == Layout::nhwc) {  // dimensions in the order of memory
    dims = {dims[0], dims[2], dims[3], dims[1]};
    strides = {strides[0], strides[2], strides[3], strides[1]};
  }
  // Neighbouring dimensions that run on in the operand too become one.
  for (size_t i = dims.size(); i-- > 1;) {
    if (strides[i - 1] == strides[i] * dims[i]) {
      dims[i - 1] *= dims[i], strides[i - 1] = strides[i];
      dims.erase(dims.begin() + static_cast<int64_t>(i)), strides.erase(strides.begin() + static_cast<int64_t>(i));
    }
  }
  const int64_t row = dims.empty() ? 1 : dims.back(), row_stride = dims.empty() ? 0 : strides.back();
  const int64_t rows = row ? y.count() / row : 0;
  parallel_for(rows, kGrainElements / (row + 1) + 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t rest = i, offset = 0;
      for (size_t d = dims.size() - 1; d-- > 0;) {
        offset += rest % dims[d] * strides[d];
        rest /= dims[d];
      }
      combine(step.kind, y.as<float>() + i * row, x.as<float>() + offset, row_stride, row);
    }
  });
}

}  // namespace

std::vector<FusedStep> read_chain(const CompileContext& c) {
  std::vector<FusedStep> steps;
  for (size_t i = 1; i < c.nodes.size(); ++i) steps.push_back(read_step(c, *c.nodes[i], c.nodes[i - 1]->out(0)));
  return steps;
}

void apply_steps(RunContext& r, const std::vector<FusedStep>& steps, size_t first, TensorView& y) {
  if (y.count() == 0) return;
  for (size_t i = first; i < steps.size(); ++i) {
    if (steps[i].is_binary())
      apply_binary(steps[i], y, r.input(steps[i].operand), r.threads());
    else
      apply_activation(steps[i], y.as<float>(), y.count(), r.threads());
  }
}

}  // namespace fretsaw
