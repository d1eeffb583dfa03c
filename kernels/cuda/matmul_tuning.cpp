// Times the ways to compute a product, and remembers the best.
#include "kernels/cuda/matmul_tuning.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "kernels/cuda/disk_cache.h"
#include "kernels/cuda/matmul_simple.h"
#include "kernels/cuda/matmul_small.h"

namespace fretsaw::cuda {
namespace {

constexpr int kCandidates = 16, kRepeats = 5;
constexpr int64_t kFlushBytes = int64_t{96} << 20;         // more than the second-level caches of today's devices
constexpr int64_t kLargestTimed = int64_t{4} << 30;        // operands of more bytes: the heuristic's first guess
constexpr const char *kSmall = "small 1", *kLt = "lt 1 ";  // the numbers change when their kernels do

ProductSpec without_epilogue(ProductSpec spec) {
  spec.bias = false;
  spec.activation = ProductActivation::none;
  return spec;
}

std::string key_of(GpuDevice& device, const ProductSpec& spec, size_t alignment) {
  cudaDeviceProp properties;
  FRETSAW_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  return "cublasLt " + std::to_string(cublasLtGetVersion()) + "\n" + properties.name + " " + std::to_string(device.compute_capability()) +
         " " + std::to_string(device.multiprocessors()) + "\n" + describe(spec) + " alignment " + std::to_string(alignment);
}

// Memory for the operands, filled with numbers, and for what timing needs.
class Bench {
 public:
  Bench(GpuDevice& device, const ProductSpec& spec) : device_(device), stream_(static_cast<cudaStream_t>(device.stream())) {
    const ProductExtents e = extents_of(spec);
    operands_.a = filled(spec.type, e.a), operands_.b = filled(spec.type, e.b);
    operands_.d = filled(spec.type, e.d);
    if (spec.beta != 0) operands_.c = filled(spec.type, e.d);
    if (spec.bias) operands_.bias = filled(spec.type, spec.N);
    workspace_ = allocate(kProductWorkspace);
    flush_ = allocate(kFlushBytes);
  }
  static int64_t bytes_of(const ProductSpec& spec) {
    const ProductExtents e = extents_of(spec);
    return (e.a + e.b + 2 * e.d) * (bits_of(spec.type) / 8) + kFlushBytes + static_cast<int64_t>(kProductWorkspace);
  }

  // The median time of `work(operands, workspace, stream)` in us, with caches that hold other data; infinity where it fails.
  template <typename Work>
  double time(const Work& work) {
    if (!work(operands_, workspace_.get(), stream_)) return INFINITY;
    std::vector<std::pair<std::shared_ptr<DeviceEvent>, std::shared_ptr<DeviceEvent>>> events;
    for (int i = 0; i < kRepeats; ++i) {
      device_.clear(flush_.get(), kFlushBytes);
      auto begin = device_.record(true);
      work(operands_, workspace_.get(), stream_);
      events.emplace_back(begin, device_.record(true));
    }
    device_.synchronize();
    std::vector<double> times;
    for (const auto& [begin, end] : events) times.push_back(end->us_since(*begin));
    std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
    return times[kRepeats / 2];
  }

 private:
  std::shared_ptr<void> allocate(size_t bytes) {
    return {device_.allocate(bytes), [device = &device_](void* memory) { device->release(memory); }};
  }
  void* filled(DType type, int64_t count) {
    memory_.push_back(allocate(fretsaw::bytes_of(type, count)));
    fill_noise(type, memory_.back().get(), count, stream_);
    return memory_.back().get();
  }

  GpuDevice& device_;
  cudaStream_t stream_;
  std::vector<std::shared_ptr<void>> memory_;
  std::shared_ptr<void> workspace_, flush_;
  ProductOperands operands_;
};

// The choice as text: "small 1", "lt 1 <algorithm>", or "simple".
std::string fastest(GpuDevice& device, const ProductSpec& spec, const ProductSpec& lt_spec, LtProduct& lt) {
  std::vector<LtAlgorithm> candidates = lt.candidates(kCandidates);
  const bool small = takes_small_product(spec);
  if (candidates.empty()) return small ? kSmall : "simple";
  const int64_t bytes = Bench::bytes_of(spec);
  const bool timed = bytes <= kLargestTimed && bytes <= static_cast<int64_t>(device.free_bytes() / 2);
  if (!timed || (candidates.size() == 1 && !small)) return kLt + to_text(candidates.front());
  Bench bench(device, spec);
  std::string best = kLt + to_text(candidates.front());
  double best_time = INFINITY;
  const auto consider = [&](std::string name, double time) {
    if (time < best_time) best = std::move(name), best_time = time;
  };
  const bool follows = spec.bias != lt_spec.bias || spec.activation != lt_spec.activation;
  for (const LtAlgorithm& candidate : candidates) {
    consider(kLt + to_text(candidate), bench.time([&](const ProductOperands& o, void* workspace, cudaStream_t stream) {
      if (lt.run(o, candidate, workspace, stream) != CUBLAS_STATUS_SUCCESS) return false;
      if (follows) run_epilogue(spec, spec.bias ? o.bias : nullptr, o.d, extents_of(spec).d / spec.N, stream);
      return true;
    }));
  }
  if (small) {
    consider(kSmall, bench.time([&](const ProductOperands& o, void*, cudaStream_t stream) {
      run_small_product(spec, o, device.multiprocessors(), stream);
      return true;
    }));
  }
  device.synchronize();
  return best;
}

// nullopt where the text is of another version, or cuBLASLt does not take the algorithm.
std::optional<ProductChoice> read_choice(const std::string& text, const ProductSpec& spec, const LtProduct& lt) {
  if (text == "simple") return ProductChoice{};
  if (text == kSmall && takes_small_product(spec)) return ProductChoice{ProductChoice::Kind::small, {}, false};
  const std::string start = kLt;
  if (text.compare(0, start.size(), start) != 0) return std::nullopt;
  std::optional<LtAlgorithm> algorithm = algorithm_of(text.substr(start.size()));
  if (!algorithm || !lt.accepts(*algorithm)) return std::nullopt;
  return ProductChoice{ProductChoice::Kind::lt, *algorithm, false};
}

// One at a time in a process: ranks that ask for the same product get the same answer.
std::mutex choices_mutex;
std::map<std::string, std::string>& known_choices() {
  static std::map<std::string, std::string> choices;
  return choices;
}

}  // namespace

ProductChoice choose(GpuDevice& device, const ProductSpec& spec, size_t alignment, std::unique_ptr<LtProduct>& lt) {
  lt = std::make_unique<LtProduct>(device, spec, alignment);
  ProductSpec lt_spec = spec;
  const std::lock_guard<std::mutex> lock(choices_mutex);
  const std::string key = key_of(device, spec, alignment);
  const bool follows = spec.bias || spec.activation != ProductActivation::none;
  const bool separate = follows && lt->candidates(1).empty();
  if (separate) {
    lt_spec = without_epilogue(spec);
    lt = std::make_unique<LtProduct>(device, lt_spec, alignment);
  }
  std::string& known = known_choices()[key];
  if (known.empty()) known = read_cache("cublaslt", key).value_or("");
  std::optional<ProductChoice> choice = read_choice(known, spec, *lt);
  if (!choice) {
    known = fastest(device, spec, lt_spec, *lt);
    write_cache("cublaslt", key, known);
    choice = read_choice(known, spec, *lt);
  }
  if (!choice) choice = ProductChoice{};
  choice->separate_epilogue = separate && choice->kind == ProductChoice::Kind::lt;
  return *choice;
}

}  // namespace fretsaw::cuda
