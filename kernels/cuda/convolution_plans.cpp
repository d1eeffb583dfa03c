// Ways to compute a convolution, and the choice among them by timing.
#include <algorithm>
#include <bit>
#include <map>
#include <mutex>

#include "kernels/cuda/convolution.h"
#include "kernels/cuda/cudnn_graphs.h"
#include "kernels/cuda/disk_cache.h"
#include "kernels/cuda/matmul_simple.h"

namespace fretsaw::cuda {

namespace {

using PlanPtr = std::shared_ptr<ConvolutionPlan>;
using Plans = std::vector<PlanPtr>;

size_t rounded(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}
void* after(void* memory, size_t bytes) {
  return static_cast<char*>(memory) + rounded(bytes);
}

// What `saved` of the plans begins with; the rest is the inner plan's.
constexpr char kCudnn = 'c', kWithEpilogue = 'e', kWithPadding = 'p', kDepthwise = 'd', kDirect = 'x';

class DirectPlan : public ConvolutionPlan {
 public:
  explicit DirectPlan(Convolution c) : convolution_(std::move(c)) {}
  void run(GpuDevice& device, const ConvolutionAddresses& at, void*) override {
    run_direct(convolution_, at, static_cast<cudaStream_t>(device.stream()));
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

PlanPtr restore_plan(GpuDevice& device, const Convolution& c, const std::string& saved) {
  if (saved.empty()) return nullptr;
  const std::string rest = saved.substr(1);
  switch (saved[0]) {
    case kDirect:
      return std::make_shared<DirectPlan>(c);
    case kDepthwise:
      return has_depthwise(c) ? std::make_shared<DepthwisePlan>(c) : nullptr;
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
    default:
      return nullptr;
  }
}

// cuDNN describes a transposed convolution as the gradient of one whose output is X: it must have just that many cells.
bool cudnn_can_describe(const Convolution& c) {
  for (size_t i = 0; i < c.spatial_rank(); ++i) {
    if (c.pads_begin[i] < 0 || c.pads_end[i] < 0) return false;
    const int64_t room = c.y[i + 2] + c.pads_begin[i] + c.pads_end[i] - c.dilations[i] * (c.w[i + 2] - 1) - 1;
    if (c.transposed && (room < 0 || room / c.strides[i] + 1 != c.x[i + 2])) return false;
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

Plans candidates(GpuDevice& device, const Convolution& c) {
  Plans plans;
  const size_t limit = candidates_for(c);
  if (has_depthwise(c)) plans.push_back(std::make_shared<DepthwisePlan>(c));
  if (!cudnn_can_describe(c)) return {std::make_shared<DirectPlan>(c)};
  const size_t before = plans.size();
  add_cudnn_plans(device, c, limit, plans);
  const bool pads = std::any_of(c.pads_begin.begin(), c.pads_begin.end(), [](int64_t p) { return p > 0; }) ||
                    std::any_of(c.pads_end.begin(), c.pads_end.end(), [](int64_t p) { return p > 0; });
  if (plans.size() == before && pads && !c.transposed) {
    Plans inner;
    add_cudnn_plans(device, without_padding(c), limit, inner);
    for (PlanPtr& plan : inner) plans.push_back(std::make_shared<PaddingPlan>(c, std::move(plan)));
  }
  if (plans.empty() || (c.is_depthwise() && !has_depthwise(c))) plans.push_back(std::make_shared<DirectPlan>(c));
  return plans;
}

// Memory to time with.
class TimingMemory {
 public:
  TimingMemory(GpuDevice& device, const Convolution& c, size_t workspace) : device_(device) {
    const int64_t counts[] = {count_of(c.x), count_of(c.w), c.bias ? c.y[1] : 0, c.residual ? count_of(c.y) : 0, count_of(c.y)};
    size_t total = workspace;
    for (int64_t n : counts) total += rounded(bytes_of(c.dtype, n));
    block_ = device.allocate(total);
    void* pieces[5];
    void* next = block_;
    for (size_t i = 0; i < 5; ++i) {
      pieces[i] = next;
      fill_noise(c.dtype, next, counts[i], static_cast<cudaStream_t>(device.stream()));
      next = after(next, bytes_of(c.dtype, counts[i]));
    }
    at_ = {pieces[0], pieces[1], pieces[2], pieces[3], pieces[4]};
    workspace_ = next;
  }
  ~TimingMemory() { device_.release(block_); }
  TimingMemory(const TimingMemory&) = delete;
  TimingMemory& operator=(const TimingMemory&) = delete;
  const ConvolutionAddresses& addresses() const { return at_; }
  void* workspace() const { return workspace_; }

 private:
  GpuDevice& device_;
  void* block_ = nullptr;
  void* workspace_ = nullptr;
  ConvolutionAddresses at_;
};

// Null where the device has no memory left: then nothing is timed.
std::unique_ptr<TimingMemory> timing_memory(GpuDevice& device, const Convolution& c, size_t workspace) {
  try {
    return std::make_unique<TimingMemory>(device, c, workspace);
  } catch (const Error&) {
    return nullptr;
  }
}

// Microseconds of a run, as it is in a captured program: launches from the host cost nothing there.
double time_of(GpuDevice& device, ConvolutionPlan& plan, const TimingMemory& memory) {
  constexpr int kRuns = 8, kRounds = 3;
  plan.run(device, memory.addresses(), memory.workspace());
  device.synchronize();
  device.begin_capture();
  try {
    for (int i = 0; i < kRuns; ++i) plan.run(device, memory.addresses(), memory.workspace());
  } catch (...) {
    device.abandon_capture();
    throw;
  }
  const auto work = device.end_capture();
  device.launch(*work);
  double best = 1e30;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = device.record(true);
    device.launch(*work);
    const auto end = device.record(true);
    end->wait();
    best = std::min(best, end->us_since(*start));
  }
  return best / kRuns;
}

// The fastest of those that run; null when none does.
PlanPtr fastest(GpuDevice& device, const Plans& plans, const TimingMemory& memory) {
  PlanPtr best;
  double least = 0;
  for (const PlanPtr& plan : plans) {
    try {
      double us = 0;
      if (plans.size() > 1) {
        us = time_of(device, *plan, memory);
      } else {
        plan->run(device, memory.addresses(), memory.workspace());
        device.synchronize();
      }
      if (!best || us < least) best = plan, least = us;
    } catch (const Error&) {
      cudaGetLastError();
    }
  }
  return best;
}

// What was decided for a key in this process, and the plans that are in use; all devices share it.
struct Decisions {
  std::mutex mutex;
  std::map<std::string, std::string> saved;
  std::map<std::pair<GpuDevice*, std::string>, std::weak_ptr<ConvolutionPlan>> alive;
};
Decisions& decisions() {
  static Decisions all;
  return all;
}

std::string identity_of(GpuDevice& device) {
  static std::mutex mutex;
  static std::map<int, std::string> names;
  const std::lock_guard lock(mutex);
  std::string& name = names[device.index()];
  if (name.empty()) {
    cudaDeviceProp properties;
    FRETSAW_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
    int driver = 0;
    FRETSAW_CUDA_CHECK(cudaDriverGetVersion(&driver));
    name = std::string(properties.name) + ", driver for CUDA " + std::to_string(driver) + ", " + cudnn_identity();
  }
  return name;
}

std::string recall(const std::string& key) {
  {
    const std::lock_guard lock(decisions().mutex);
    const auto found = decisions().saved.find(key);
    if (found != decisions().saved.end()) return found->second;
  }
  return read_cache("convolution", key).value_or("");
}

void remember(const std::string& key, const std::string& saved) {
  if (saved.empty()) return;
  {
    const std::lock_guard lock(decisions().mutex);
    decisions().saved[key] = saved;
  }
  write_cache("convolution", key, saved);
}

}  // namespace

double Convolution::multiplications() const {
  const double taps = static_cast<double>(count_of(w)) / static_cast<double>(std::max<int64_t>(w[0] * w[1], 1));
  const int64_t cells = transposed ? count_of(x) / std::max<int64_t>(x[1], 1) : count_of(y) / std::max<int64_t>(y[1], 1);
  return taps * static_cast<double>(cells) * static_cast<double>(x[1]) * static_cast<double>(y[1]) / static_cast<double>(groups);
}

std::string Convolution::key() const {
  std::string text = std::string(transposed ? "transposed " : "") + std::string(name_of(dtype)) + (channels_last ? " last" : " first") +
                     (tf32 ? " tf32" : "") + " groups " + std::to_string(groups);
  for (const Dims* dims : {&x, &w, &y, &strides, &dilations, &pads_begin, &pads_end}) text += " " + to_string(*dims);
  text += std::string(bias ? " bias" : "") + (residual ? " residual" : "");
  text += " activation " + std::to_string(static_cast<int>(activation.kind)) + " " + std::to_string(std::bit_cast<uint32_t>(activation.a)) +
          " " + std::to_string(std::bit_cast<uint32_t>(activation.b));
  return text;
}

PlanPtr choose_plan(GpuDevice& device, const Convolution& c) {
  const std::string key = "1 " + identity_of(device) + " " + c.key();
  const auto slot = std::make_pair(&device, key);
  {
    const std::lock_guard lock(decisions().mutex);
    if (PlanPtr plan = decisions().alive[slot].lock()) return plan;
  }
  PlanPtr plan = restore_plan(device, c, recall(key));
  if (!plan) {
    const Plans plans = candidates(device, c);
    size_t workspace = 0;
    for (const PlanPtr& candidate : plans) workspace = std::max(workspace, candidate->workspace());
    const std::unique_ptr<TimingMemory> memory = timing_memory(device, c, workspace);
    plan = memory ? fastest(device, plans, *memory) : plans.front();
    if (!plan) plan = std::make_shared<DirectPlan>(c);
    if (memory) remember(key, plan->saved());
  }
  const std::lock_guard lock(decisions().mutex);
  decisions().alive[slot] = plan;
  return plan;
}

}  // namespace fretsaw::cuda
