// Ways to compute a convolution: which there are, and how they are saved and restored.
#include "kernels/cuda/convolution_plans.h"

#include <algorithm>

#include "kernels/cuda/cudnn_graphs.h"

namespace fretsaw::cuda {

namespace {

using PlanPtr = std::shared_ptr<ConvolutionPlan>;
using Plans = std::vector<PlanPtr>;

class DirectPlan : public ConvolutionPlan {
 public:
  explicit DirectPlan(Convolution c) : convolution_(std::move(c)) {}
  void run(GpuDevice& device, const ConvolutionAddresses& at, void*) override {
    (convolution_.of_weight ? run_direct_weight_gradient : run_direct)(convolution_, at, static_cast<cudaStream_t>(device.stream()));
  }
  std::string saved() const override { return {kDirect}; }

 private:
  Convolution convolution_;
};

class DepthwisePlan : public ConvolutionPlan {
 public:
  explicit DepthwisePlan(Convolution c) : convolution_(std::move(c)) {}
  WeightForm weight_form() const override { return WeightForm::taps_first; }
  void run(GpuDevice& device, const ConvolutionAddresses& at, void*) override {
    run_depthwise(convolution_, at, static_cast<cudaStream_t>(device.stream()));
  }
  std::string saved() const override { return {kDepthwise}; }

 private:
  Convolution convolution_;
};

class FewChannelsPlan : public ConvolutionPlan {
 public:
  explicit FewChannelsPlan(Convolution c) : convolution_(std::move(c)) {}
  WeightForm weight_form() const override { return WeightForm::few_channels; }
  bool takes_given_x() const override { return true; }
  void run(GpuDevice& device, const ConvolutionAddresses& at, void*) override {
    run_few_channels(convolution_, at, device.multiprocessors(), static_cast<cudaStream_t>(device.stream()));
  }
  std::string saved() const override { return {kFewChannels}; }

 private:
  Convolution convolution_;
};

// The convolution alone by `inner`, then a pass for bias, residual and activation.
class EpiloguePlan : public ConvolutionPlan {
 public:
  EpiloguePlan(Convolution c, PlanPtr inner) : convolution_(std::move(c)), inner_(std::move(inner)) {}
  size_t workspace() const override { return inner_->workspace(); }
  void run(GpuDevice& device, const ConvolutionAddresses& at, void* workspace) override {
    inner_->run(device, at, workspace);
    run_epilogue(convolution_, at, static_cast<cudaStream_t>(device.stream()));
  }
  std::string saved() const override {
    const std::string inner = inner_->saved();
    return inner.empty() ? "" : kWithEpilogue + inner;
  }

 private:
  Convolution convolution_;
  PlanPtr inner_;
};

// The same convolution of an input whose padding is part of it.
Convolution without_padding(Convolution c) {
  for (size_t i = 0; i < c.spatial_rank(); ++i) c.x[i + 2] += c.pads_begin[i] + c.pads_end[i];
  std::fill(c.pads_begin.begin(), c.pads_begin.end(), 0);
  std::fill(c.pads_end.begin(), c.pads_end.end(), 0);
  return c;
}

// Writes the padding out for engines that can't pad as it is asked (more on one side than on the other).
class PaddingPlan : public ConvolutionPlan {
 public:
  PaddingPlan(Convolution c, PlanPtr inner)
      : convolution_(std::move(c)),
        inner_(std::move(inner)),
        padded_(rounded(bytes_of(convolution_.dtype, count_of(without_padding(convolution_).x)))) {}
  size_t workspace() const override { return padded_ + inner_->workspace(); }
  void run(GpuDevice& device, const ConvolutionAddresses& at, void* workspace) override {
    write_padding(convolution_, at.x, workspace, static_cast<cudaStream_t>(device.stream()));
    ConvolutionAddresses inside = at;
    inside.x = workspace;
    inner_->run(device, inside, static_cast<char*>(workspace) + padded_);
  }
  std::string saved() const override {
    const std::string inner = inner_->saved();
    return inner.empty() ? "" : kWithPadding + inner;
  }

 private:
  Convolution convolution_;
  PlanPtr inner_;
  size_t padded_;
};

// The same transposed convolution with what the padding cuts off as part of its output.
Convolution with_margins(Convolution c) {
  for (size_t i = 0; i < c.spatial_rank(); ++i) c.y[i + 2] += c.pads_begin[i] + c.pads_end[i];
  std::fill(c.pads_begin.begin(), c.pads_begin.end(), 0);
  std::fill(c.pads_end.begin(), c.pads_end.end(), 0);
  return c;
}

// Computes the margins of a transposed convolution too, for engines that can't leave out as much as is asked, and cuts them off.
class CroppingPlan : public ConvolutionPlan {
 public:
  CroppingPlan(Convolution c, PlanPtr inner)
      : convolution_(std::move(c)), inner_(std::move(inner)), whole_(with_margins(convolution_).y), bytes_(whole_bytes()) {}
  size_t workspace() const override { return bytes_ + inner_->workspace(); }
  void run(GpuDevice& device, const ConvolutionAddresses& at, void* workspace) override {
    ConvolutionAddresses outside = at;
    outside.y = workspace;
    inner_->run(device, outside, static_cast<char*>(workspace) + bytes_);
    cut_margins(convolution_, whole_, workspace, at.y, static_cast<cudaStream_t>(device.stream()));
  }
  std::string saved() const override {
    const std::string inner = inner_->saved();
    return inner.empty() ? "" : kWithCropping + inner;
  }

 private:
  size_t whole_bytes() const { return rounded(bytes_of(convolution_.dtype, count_of(whole_))); }

  Convolution convolution_;
  PlanPtr inner_;
  Dims whole_;
  size_t bytes_;
};

// A plan of cuDNN, told apart from the others where it is saved.
class LibraryPlan : public ConvolutionPlan {
 public:
  explicit LibraryPlan(PlanPtr plan) : plan_(std::move(plan)) {}
  size_t workspace() const override { return plan_->workspace(); }
  void run(GpuDevice& device, const ConvolutionAddresses& at, void* workspace) override { plan_->run(device, at, workspace); }
  std::string saved() const override {
    const std::string inner = plan_->saved();
    return inner.empty() ? "" : kCudnn + inner;
  }

 private:
  PlanPtr plan_;
};

// cuDNN describes a transposed convolution as the gradient of one whose output is X: it must have just that many cells.
bool cudnn_can_describe(const Convolution& c) {
  for (size_t i = 0; i < c.spatial_rank(); ++i) {
    if (c.pads_begin[i] < 0 || c.pads_end[i] < 0) return false;
    if (!c.transposed) continue;
    const int64_t room = c.y[i + 2] + c.pads_begin[i] + c.pads_end[i] - c.dilations[i] * (c.w[i + 2] - 1) - 1;
    if (room < 0 || room / c.strides[i] + 1 != c.x[i + 2]) return false;
  }
  return true;
}

void add_cudnn_plans(GpuDevice& device, const Convolution& c, size_t limit, Plans& plans) {
  const size_t before = plans.size();
  for (PlanPtr& plan : cudnn_plans(device, c, true, limit)) plans.push_back(std::make_shared<LibraryPlan>(std::move(plan)));
  // In float32 the engines that take in the rest are not those that are fastest without it.
  if (!c.has_epilogue() || (plans.size() > before && c.dtype != DType::float32)) return;
  for (PlanPtr& plan : cudnn_plans(device, c, false, limit))
    plans.push_back(std::make_shared<EpiloguePlan>(c, std::make_shared<LibraryPlan>(std::move(plan))));
}

// More candidates where a choice is worth more.
size_t candidates_for(const Convolution& c) {
  const double work = c.multiplications();
  return work < 2e6 ? 1 : work < 2e8 ? 4 : 8;
}

}  // namespace

PlanPtr direct_plan(const Convolution& c) {
  return std::make_shared<DirectPlan>(c);
}

PlanPtr restore_plan(GpuDevice& device, const Convolution& c, const std::string& saved) {
  if (saved.empty()) return nullptr;
  const std::string rest = saved.substr(1);
  switch (saved[0]) {
    case kDirect:
      return direct_plan(c);
    case kDepthwise:
      return has_depthwise(c) ? std::make_shared<DepthwisePlan>(c) : nullptr;
    case kFewChannels:
      return has_few_channels(c) ? std::make_shared<FewChannelsPlan>(c) : nullptr;
    case kPatches:
      return has_patches(c) ? patches_plan(device, c) : nullptr;
    case kCudnn: {
      PlanPtr plan = restored_cudnn_plan(device, rest);
      return plan ? std::make_shared<LibraryPlan>(std::move(plan)) : nullptr;
    }
    case kWithEpilogue: {
      PlanPtr inner = restore_plan(device, c, rest);
      return inner ? std::make_shared<EpiloguePlan>(c, std::move(inner)) : nullptr;
    }
    case kWithPadding: {
      PlanPtr inner = restore_plan(device, without_padding(c), rest);
      return inner ? std::make_shared<PaddingPlan>(c, std::move(inner)) : nullptr;
    }
    case kWithCropping: {
      PlanPtr inner = restore_plan(device, with_margins(c), rest);
      return inner ? std::make_shared<CroppingPlan>(c, std::move(inner)) : nullptr;
    }
    default:
      return nullptr;
  }
}

Plans candidate_plans(GpuDevice& device, const Convolution& c) {
  Plans plans;
  const size_t limit = candidates_for(c);
  if (has_depthwise(c)) plans.push_back(std::make_shared<DepthwisePlan>(c));
  if (has_few_channels(c)) plans.push_back(std::make_shared<FewChannelsPlan>(c));
  if (has_patches(c)) plans.push_back(patches_plan(device, c));
  if (!cudnn_can_describe(c)) return {direct_plan(c)};
  const size_t before = plans.size();
  add_cudnn_plans(device, c, limit, plans);
  const bool pads = std::any_of(c.pads_begin.begin(), c.pads_begin.end(), [](int64_t p) { return p > 0; }) ||
                    std::any_of(c.pads_end.begin(), c.pads_end.end(), [](int64_t p) { return p > 0; });
  if (plans.size() == before && pads && (!c.transposed || !c.has_epilogue())) {
    Plans inner;
    add_cudnn_plans(device, c.transposed ? with_margins(c) : without_padding(c), limit, inner);
    for (PlanPtr& plan : inner) {
      if (c.transposed)
        plans.push_back(std::make_shared<CroppingPlan>(c, std::move(plan)));
      else
        plans.push_back(std::make_shared<PaddingPlan>(c, std::move(plan)));
    }
  }
  const bool of_groups = c.groups > 1 && (c.of_weight || c.transposed);  // which libraries may do slowly
  if (plans.empty() || of_groups || (c.is_depthwise() && !has_depthwise(c))) plans.push_back(direct_plan(c));
  return plans;
}

}  // namespace fretsaw::cuda
