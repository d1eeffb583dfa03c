// The choice among the ways to compute a convolution: by timing, remembered in the process and on disk.
#include <algorithm>
#include <bit>
#include <map>
#include <mutex>

#include "kernels/cuda/convolution_plans.h"
#include "kernels/cuda/cudnn_graphs.h"
#include "kernels/cuda/disk_cache.h"
#include "kernels/cuda/matmul_simple.h"

namespace fretsaw::cuda {

namespace {

using PlanPtr = std::shared_ptr<ConvolutionPlan>;
using Plans = std::vector<PlanPtr>;

// Memory to time with.
class TimingMemory {
 public:
  TimingMemory(GpuDevice& device, const Convolution& c, size_t workspace) : device_(device) {
    const int64_t weights = has_few_channels(c) ? static_cast<int64_t>(few_channels_weight_bytes(c) / bytes_of(c.dtype, 1)) : 0;
    const int64_t counts[] = {count_of(c.x), std::max(count_of(c.w), weights),     c.bias ? c.y[1] : 0, c.residual ? count_of(c.y) : 0,
                              count_of(c.y), count_of(c.x) / c.x[1] * c.x_channels};
    size_t total = workspace;
    for (int64_t n : counts) total += rounded(bytes_of(c.dtype, n));
    block_ = device.allocate(total);
    void* pieces[6];
    void* next = block_;
    for (size_t i = 0; i < 6; ++i) {
      pieces[i] = next;
      fill_noise(c.dtype, next, counts[i], static_cast<cudaStream_t>(device.stream()));
      next = static_cast<char*>(next) + rounded(bytes_of(c.dtype, counts[i]));
    }
    at_ = {pieces[5], pieces[0], pieces[1], pieces[2], pieces[3], pieces[4]};
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

// What a plan costs: its run, after the copy of X to more channels where it wants one.
void run_all(GpuDevice& device, const Convolution& c, ConvolutionPlan& plan, const TimingMemory& memory) {
  const ConvolutionAddresses& at = memory.addresses();
  if (c.x[1] != c.x_channels && !plan.takes_given_x()) {
    const int64_t cells = count_of(Dims(c.x.begin() + 2, c.x.end()));
    pack_channels(c.dtype, c.x[0], c.x_channels, cells, c.x[1], c.x_layout == Layout::nhwc, at.given_x, const_cast<void*>(at.x),
                  static_cast<cudaStream_t>(device.stream()));
  }
  plan.run(device, at, memory.workspace());
}

// Microseconds of a run, as it is in a captured program: launches from the host cost nothing there.
double time_of(GpuDevice& device, const Convolution& c, ConvolutionPlan& plan, const TimingMemory& memory) {
  constexpr int kRuns = 8, kRounds = 3;
  run_all(device, c, plan, memory);
  device.synchronize();
  device.begin_capture();
  try {
    for (int i = 0; i < kRuns; ++i) run_all(device, c, plan, memory);
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
PlanPtr fastest(GpuDevice& device, const Convolution& c, const Plans& plans, const TimingMemory& memory) {
  PlanPtr best;
  double least = 0;
  for (const PlanPtr& plan : plans) {
    try {
      double us = 0;
      if (plans.size() > 1) {
        us = time_of(device, c, *plan, memory);
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
  if (of_weight) return static_cast<double>(count_of(y)) * static_cast<double>(count_of(w) / std::max<int64_t>(w[1], 1));
  const double taps = static_cast<double>(count_of(w)) / static_cast<double>(std::max<int64_t>(w[0] * w[1], 1));
  const int64_t cells = transposed ? count_of(x) / std::max<int64_t>(x[1], 1) : count_of(y) / std::max<int64_t>(y[1], 1);
  return taps * static_cast<double>(cells) * static_cast<double>(x[1]) * static_cast<double>(y[1]) / static_cast<double>(groups);
}

std::string Convolution::key() const {
  std::string text = std::string(of_weight    ? "of weight "
                                 : transposed ? "transposed "
                                              : "") +
                     std::string(name_of(dtype)) + (channels_last ? " last" : " first") + (tf32 ? " tf32" : "") + " groups " +
                     std::to_string(groups);
  for (const Dims* dims : {&x, &w, &y, &strides, &dilations, &pads_begin, &pads_end}) text += " " + to_string(*dims);
  text += " of " + std::to_string(x_channels) + (x_layout == Layout::nhwc ? " last" : " first");
  text += std::string(bias ? " bias" : "") + (residual ? " residual" : "");
  text += " activation " + std::to_string(static_cast<int>(activation.kind)) + " " + std::to_string(std::bit_cast<uint32_t>(activation.a)) +
          " " + std::to_string(std::bit_cast<uint32_t>(activation.b));
  return text;
}

PlanPtr choose_plan(GpuDevice& device, const Convolution& c) {
  // The number changes when plans are added or their kernels change.
  const std::string key = "3 " + identity_of(device) + " " + c.key();
  const auto slot = std::make_pair(&device, key);
  {
    const std::lock_guard lock(decisions().mutex);
    if (PlanPtr plan = decisions().alive[slot].lock()) return plan;
  }
  PlanPtr plan = restore_plan(device, c, recall(key));
  if (!plan) {
    const Plans plans = candidate_plans(device, c);
    size_t workspace = 0;
    for (const PlanPtr& candidate : plans) workspace = std::max(workspace, candidate->workspace());
    const std::unique_ptr<TimingMemory> memory = timing_memory(device, c, workspace);
    plan = memory ? fastest(device, c, plans, *memory) : plans.front();
    if (!plan) plan = direct_plan(c);
    if (memory) remember(key, plan->saved());
  }
  const std::lock_guard lock(decisions().mutex);
  decisions().alive[slot] = plan;
  return plan;
}

}  // namespace fretsaw::cuda
