// Many small steps with one body are one kernel: its arguments are those of all members, and each block finds the member that it is of.
#include "kernels/cuda/pointwise_launch.h"

#include <cstring>
#include <limits>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dependent_launch.h"

namespace fretsaw::cuda {

void give_addresses(const PreparedStep& step, RunContext& r, StepPlace place, uint64_t* arguments) {
  uintptr_t low_bits = 0;
  uint64_t* next = arguments;
  const auto add = [&](const void* address) {
    const auto number = reinterpret_cast<uintptr_t>(address);
    low_bits |= number;
    *next++ = number;
  };
  for (size_t i : step.inputs) add(r.input(place.first_input + i).data);
  for (const PreparedStep::Output& o : step.outputs)
    add(r.output(place.first_output + o.index, o.dims, o.dtype, step.output_layouts[o.index]).data);
  arguments[step.arguments.size() - 1] = low_bits % 16 == 0;
}

void launch_step(cudaKernel_t kernel, uint64_t blocks, unsigned threads, void* arguments, RunContext& r) {
  void* pointers[] = {arguments};
  cudaLaunchAttribute attribute = dependent_attribute();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks)), config.blockDim = dim3(threads), config.stream = stream_of(r);
  config.attrs = &attribute, config.numAttrs = 1;
  FRETSAW_CUDA_CHECK(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers));
}

namespace {

constexpr size_t kMostArgumentBytes = 32000;  // a kernel takes 32764 at most

// Members that one kernel runs.
class JoinedLaunch {
 public:
  JoinedLaunch(std::vector<const PreparedStep*> steps, std::vector<StepPlace> places, int compute_capability)
      : steps_(std::move(steps)), places_(std::move(places)), threads_(steps_.front()->threads) {
    std::vector<uint32_t> ends;
    for (const PreparedStep* step : steps_) {
      arguments_.insert(arguments_.end(), step->arguments.begin(), step->arguments.end());
      ends.push_back(static_cast<uint32_t>(blocks_ += step->blocks));
    }
    const size_t words = arguments_.size();
    arguments_.resize(words + (ends.size() + 1) / 2);
    std::memcpy(arguments_.data() + words, ends.data(), ends.size() * sizeof(uint32_t));
    kernel_ = kernel_of_source(joined_source(*steps_.front(), steps_.size()), steps_.front()->name, compute_capability);
  }

  void run(RunContext& r) {
    uint64_t* own = arguments_.data();
    for (size_t m = 0; m < steps_.size(); ++m) {
      give_addresses(*steps_[m], r, places_[m], own);
      own += steps_[m]->arguments.size();
    }
    launch_step(kernel_, blocks_, threads_, arguments_.data(), r);
  }

 private:
  std::vector<const PreparedStep*> steps_;
  std::vector<StepPlace> places_;
  unsigned threads_;
  uint64_t blocks_ = 0;
  std::vector<uint64_t> arguments_;
  cudaKernel_t kernel_ = nullptr;
};

class JoinablePoints : public JoinableKernel {
 public:
  JoinablePoints(PreparedStep step, int compute_capability) : step_(std::move(step)), compute_capability_(compute_capability) {}
  const std::string& kind() const override { return step_.source; }

  // As many kernels as their arguments need.
  CompiledKernel join(const std::vector<std::shared_ptr<const JoinableKernel>>& members) const override {
    auto launches = std::make_shared<std::vector<JoinedLaunch>>();
    std::vector<const PreparedStep*> steps;
    std::vector<StepPlace> places;
    StepPlace next;
    uint64_t blocks = 0;
    const size_t most = kMostArgumentBytes / (step_.arguments.size() * sizeof(uint64_t) + sizeof(uint32_t));
    const auto finish = [&] {
      if (!steps.empty()) launches->emplace_back(std::move(steps), std::move(places), compute_capability_);
      steps.clear(), places.clear(), blocks = 0;
    };
    for (const auto& member : members) {
      const PreparedStep& step = static_cast<const JoinablePoints&>(*member).step_;
      if (steps.size() >= most || blocks + step.blocks > std::numeric_limits<int32_t>::max()) finish();
      steps.push_back(&step), places.push_back(next), blocks += step.blocks;
      next.first_input += step.input_layouts.size(), next.first_output += step.output_layouts.size();
    }
    finish();
    CompiledKernel kernel;
    kernel.run = [launches, members](RunContext& r) {
      for (JoinedLaunch& launch : *launches) launch.run(r);
    };
    return kernel;
  }

 private:
  PreparedStep step_;
  int compute_capability_;
};

}  // namespace

std::shared_ptr<const JoinableKernel> joinable_points(const PreparedStep& step, int compute_capability) {
  if (step.body.empty() || step.blocks == 0) return nullptr;
  return std::make_shared<JoinablePoints>(step, compute_capability);
}

}  // namespace fretsaw::cuda
