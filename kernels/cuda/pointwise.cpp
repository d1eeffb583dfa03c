// Elementwise operators, alone and fused, compiled at run time from the rows of the table: their records, and what runs a step.
#include "kernels/cuda/pointwise.h"

#include <algorithm>
#include <map>

#include "kernels/cuda/dropout.h"
#include "kernels/cuda/normalization_batch.h"
#include "kernels/cuda/nvrtc.h"
#include "kernels/cuda/pointwise_launch.h"
#include "kernels/cuda/pointwise_operators.h"
#include "kernels/cuda/pointwise_plan.h"
#include "kernels/cuda/sum_many.h"

namespace fretsaw::cuda {
namespace {

std::string refuse_step(const CompileContext& c, const PointStep& step) {
  const bool known = std::all_of(step.values.begin(), step.values.end(), [](const PointValue& v) { return v.dims.has_value(); });
  if (!known) return c.nodes.size() > 1 || step.reduces ? "shapes that depend on data" : "";
  if (step.reduces) return refuse_rows(step);
  for (const auto& output : step.outputs) {
    if (*step.at(output.value).dims != *step.at(step.outputs.front().value).dims) return "results of two shapes";
  }
  return "";
}

std::string unsupported_step(const CompileContext& c) {
  if (ends_in_norm_gradient(c)) return unsupported_norm_gradient(c);
  try {
    const PointStep step = read_step(c);
    return step.outputs.empty() ? "no output" : refuse_step(c, step);
  } catch (const Refused& refused) {
    return refused.reason;
  } catch (const Error& e) {
    return e.problem();
  }
}

PreparedStep prepared(const PointStep& step, const std::vector<Layout>& offered, size_t outputs) {
  return step.reduces ? prepare_rows(step, offered.size(), outputs) : prepare_points(step, offered, outputs);
}

// A step whose kernel is ready: only addresses are missing.
class ReadyStep {
 public:
  ReadyStep(PreparedStep step, int compute_capability) : step_(std::move(step)) {
    if (step_.blocks) kernel_ = kernel_of_source(step_.source, step_.name, compute_capability);
  }

  void run(RunContext& r) {
    give_addresses(step_, r, {}, step_.arguments.data());
    if (step_.blocks) launch_step(kernel_, step_.blocks, step_.threads, step_.arguments.data(), r);
  }

 private:
  PreparedStep step_;
  cudaKernel_t kernel_ = nullptr;
};

// A single node whose shapes are known when it runs: prepared again when they change.
class ShapedStep {
 public:
  ShapedStep(PointStep step, size_t inputs, size_t outputs) : step_(std::move(step)), inputs_(inputs), outputs_(outputs) {}

  void run(RunContext& r) {
    bool changed = !ready_;
    for (const auto& input : step_.inputs) {
      PointValue& v = step_.values[static_cast<size_t>(input.value)];
      if (v.kind == PointValue::Kind::literal) continue;
      const TensorView& x = r.input(input.index);
      changed |= v.dims != x.dims;
      v.dims = x.dims;
    }
    if (changed) {
      infer_dims(step_);
      ready_ =
          std::make_unique<ReadyStep>(prepared(step_, std::vector<Layout>(inputs_, Layout::plain), outputs_), gpu(r).compute_capability());
    }
    ready_->run(r);
  }

 private:
  PointStep step_;
  size_t inputs_, outputs_;
  std::unique_ptr<ReadyStep> ready_;
};

// Inputs of the context that the kernel does not read: numbers printed into it, types and axes.
std::vector<size_t> constants_unread(const CompileContext& c, const std::vector<size_t>& read) {
  std::vector<size_t> unread;
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    if (c.constants[i] && !std::count(read.begin(), read.end(), i)) unread.push_back(i);
  }
  return unread;
}

CompiledKernel make_step(const CompileContext& c) {
  if (ends_in_norm_gradient(c)) return make_norm_gradient(c);
  PointStep step;
  try {
    step = read_step(c);
  } catch (const Refused& refused) {
    throw Error(refused.reason).at_node(c.node().name, c.node().op);
  }
  if (std::any_of(step.values.begin(), step.values.end(), [](const PointValue& v) { return !v.dims; })) {
    auto shaped = std::make_shared<ShapedStep>(std::move(step), c.inputs.size(), c.outputs.size());
    return {.run = [shaped](RunContext& r) { shaped->run(r); }, .input_layouts = {}, .output_layouts = {}};
  }
  PreparedStep made = prepared(step, c.offered, c.outputs.size());
  CompiledKernel kernel{.run = {}, .input_layouts = made.input_layouts, .output_layouts = made.output_layouts};
  kernel.overwrites = made.overwrites;
  kernel.packed_inputs = constants_unread(c, made.inputs);
  kernel.joinable = joinable_points(made, gpu(c).compute_capability());
  auto ready = std::make_shared<ReadyStep>(std::move(made), gpu(c).compute_capability());
  kernel.run = [ready](RunContext& r) { ready->run(r); };
  return kernel;
}

}  // namespace

std::string unsupported_row_step(const CompileContext& c) {
  return unsupported_step(c);
}
CompiledKernel make_row_step(const CompileContext& c) {
  return make_step(c);
}

namespace {

// By operator. Filled while the registry is, read later.
std::map<std::string, KernelRecord>& general_records() {
  static std::map<std::string, KernelRecord> records;
  return records;
}

std::string unsupported_row_or_general(const CompileContext& c) {
  const std::string reason = unsupported_step(c);
  if (reason.empty() || c.nodes.size() > 1) return reason;
  const KernelRecord& general = general_records().at(c.node().op);
  return general.unsupported ? general.unsupported(c) : "";
}
CompiledKernel make_row_or_general(const CompileContext& c) {
  return c.nodes.size() > 1 || unsupported_step(c).empty() ? make_step(c) : general_records().at(c.node().op).make(c);
}

}  // namespace

KernelRecord with_row_steps(KernelRecord general) {
  KernelRecord record = general;
  record.make = make_row_or_general;
  record.unsupported = unsupported_row_or_general;
  record.leads = record.follows = true;
  general_records()[general.op] = std::move(general);
  return record;
}

void register_pointwise(KernelRegistry& registry) {
  for (const std::string& op : point_operators()) {
    if (op == "Dropout" || op == "Sum") continue;
    registry.add({.op = op, .make = make_step, .unsupported = unsupported_step, .in_place = true, .leads = true, .follows = true});
  }
  registry.add(with_row_steps(training_dropout()));
  registry.add(with_row_steps(sum_of_many()));
}

}  // namespace fretsaw::cuda
