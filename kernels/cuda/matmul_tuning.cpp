// Times the ways to compute a product, and remembers the best.
#include "kernels/cuda/matmul_tuning.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "kernels/cuda/disk_cache.h"
#include "kernels/cuda/matmul_padding.h"
#include "kernels/cuda/matmul_simple.h"
#include "kernels/cuda/matmul_small.h"

namespace fretsaw::cuda {
namespace {

constexpr int kCandidates = 16, kFewCandidates = 6, kRepeats = 5;  // few: of large products, which there are more ways for
constexpr double kBegunEarlier = 2;  // us that a product of few rows gains where it begins beside the kernel before it, as no timing shows
constexpr int64_t kFlushBytes = int64_t{96} << 20;    // more than the second-level caches of today's devices
constexpr int64_t kLargestTimed = int64_t{16} << 30;  // operands of more bytes: the heuristic's first guess
// The numbers change when their kernels do.
constexpr const char *kSmall = "small 2", *kLt = "lt 1 ", *kStaged = "staged 3 ", *kPadded = "padded 1 ";
constexpr int64_t kStagedParts[] = {256, 512};  // rows that are staged at a time: few enough to be copied from the second-level cache

ProductSpec without_epilogue(ProductSpec spec) {
  spec.bias = false;
  spec.activation = ProductActivation::none;
  return spec;
}

// Where the rows of D are no whole packs, cuBLASLt knows slow algorithms only, or none.
bool takes_staging(const ProductSpec& spec) {
  return spec.batches.empty() && spec.beta == 0 && spec.M > kSmallRows && spec.N != in_whole_packs(spec.N, spec.type);
}

// Whether a large product may be one of whole lines, where its own are none.
bool takes_whole_lines(const ProductSpec& spec) {
  return is_large_product(spec) && (takes_padding(spec) || takes_staging(spec));
}

std::string key_of(GpuDevice& device, const ProductSpec& spec, size_t alignment) {
  cudaDeviceProp properties;
  FRETSAW_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  return "cublasLt " + std::to_string(cublasLtGetVersion()) + "\n" + properties.name + " " + std::to_string(device.compute_capability()) +
         " " + std::to_string(device.multiprocessors()) + "\n" + describe(spec) + " alignment " + std::to_string(alignment) +
         (takes_whole_lines(spec) ? " in whole lines" : "");
}

// Memory for the operands, filled with numbers, and for what timing needs.
class Bench {
 public:
  Bench(GpuDevice& device, const ProductSpec& spec) : device_(device), stream_(static_cast<cudaStream_t>(device.stream())) {
    const ProductExtents e = extents_of(spec);
    operands_.a = filled(spec.type, e.a), operands_.b = filled(spec.type, e.b + std::max<int64_t>(0, spec.b_columns - spec.N));
    operands_.d = filled(output_type(spec), e.d);
    if (spec.beta != 0) operands_.c = filled(output_type(spec), e.d);
    if (spec.bias) operands_.bias = filled(spec.type, spec.N);
    if (takes_staging(spec)) staged_ = allocate(staged_bytes(spec, spec.M));
    if (takes_padding(spec)) padded_ = allocate(padded_bytes(spec));
    workspace_ = allocate(kProductWorkspace);
    flush_ = allocate(kFlushBytes);
  }
  static int64_t bytes_of(const ProductSpec& spec) {
    const ProductExtents e = extents_of(spec);
    const auto of = [](DType type, int64_t count) { return static_cast<int64_t>(fretsaw::bytes_of(type, count)); };
    int64_t bytes = of(spec.type, e.a + e.b) + of(output_type(spec), e.d) + kFlushBytes + static_cast<int64_t>(kProductWorkspace);
    if (spec.beta != 0) bytes += of(output_type(spec), e.d);
    if (takes_staging(spec)) bytes += static_cast<int64_t>(staged_bytes(spec, spec.M));
    if (takes_padding(spec)) bytes += static_cast<int64_t>(padded_bytes(spec));
    return bytes;
  }
  void* staged() const { return staged_.get(); }
  void* padded() const { return padded_.get(); }

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
  std::shared_ptr<void> workspace_, flush_, staged_, padded_;
  ProductOperands operands_;
};

// One way to use cuBLASLt, with a name by which its choices are remembered.
struct LtWay {
  std::string name = kLt;
  ProductSpec form;  // the product, of padded operands where they are
  bool separate_epilogue = false;
  int64_t staged_rows = 0;
  bool padded = false;
  std::unique_ptr<LtProduct> lt;
};

// Adds the ways with operands of this form: with the bias and activation, or where cuBLASLt can't, with those in a kernel of their own;
// and with a staged D.
void add_ways(std::vector<LtWay>& ways, GpuDevice& device, const ProductSpec& form, size_t alignment, bool padded) {
  const std::string prefix = padded ? kPadded : "";
  const auto add = [&](const std::string& name, const ProductSpec& own, int64_t d_row) -> LtWay& {
    ways.push_back({prefix + name, form, false, 0, padded, std::make_unique<LtProduct>(device, own, alignment, d_row)});
    return ways.back();
  };
  const bool follows = form.bias || form.activation != ProductActivation::none;
  const bool fused = add(kLt, form, form.N).lt->candidates(1).size() > 0 || !follows;
  if (!fused) {
    ways.pop_back();
    add(kLt, without_epilogue(form), form.N).separate_epilogue = true;
  }
  if (!takes_staging(form)) return;
  ProductSpec staged = form;
  staged.out = DType::undefined;
  if (form.b_columns >= staged_row(form) && !form.bias) staged.N = staged_row(form);
  std::vector<int64_t> parts = {form.M};
  for (int64_t rows : kStagedParts) {
    if (rows < form.M && form.M % rows == 0) parts.push_back(rows);
  }
  for (int64_t rows : parts) {
    staged.M = rows;
    add(kStaged + std::to_string(rows) + " ", staged, staged_row(form)).staged_rows = rows;
  }
}

std::vector<LtWay> ways_of(GpuDevice& device, const ProductSpec& spec, size_t alignment) {
  std::vector<LtWay> ways;
  add_ways(ways, device, spec, alignment, false);
  if (takes_padding(spec)) add_ways(ways, device, padded_form(spec), alignment, true);
  return ways;
}

// Times all that can compute a product.
class Race {
 public:
  Race(GpuDevice& device, const ProductSpec& spec) : device_(device), spec_(spec), bench_(device, spec) {}

  void add(const LtWay& way, const LtAlgorithm& algorithm) {
    consider(way.name + to_text(algorithm), [&](const ProductOperands& given, void* workspace, cudaStream_t stream) {
      const ProductOperands o = way.padded ? pad_operands(spec_, given, bench_.padded(), stream) : given;
      if (way.staged_rows > 0)
        return run_staged(way.form, way.staged_rows, *way.lt, algorithm, o, bench_.staged(), workspace, stream) == CUBLAS_STATUS_SUCCESS;
      if (way.lt->run(o, algorithm, workspace, stream) != CUBLAS_STATUS_SUCCESS) return false;
      if (way.separate_epilogue) run_epilogue(spec_, spec_.bias ? o.bias : nullptr, o.d, extents_of(spec_).d / spec_.N, stream);
      return true;
    });
  }
  void add_small() {
    consider(
        kSmall,
        [&](const ProductOperands& o, void*, cudaStream_t stream) {
          run_small_product(spec_, o, device_.multiprocessors(), stream);
          return true;
        },
        kBegunEarlier);
  }
  const std::string& best() const { return best_; }

 private:
  template <typename Work>
  void consider(std::string name, const Work& work, double gain = 0) {
    const double time = bench_.time(work) - gain;
    if (time < best_time_) best_ = std::move(name), best_time_ = time;
  }

  GpuDevice& device_;
  const ProductSpec& spec_;
  Bench bench_;
  std::string best_;
  double best_time_ = INFINITY;
};

// What is taken where nothing is timed: large products in whole lines, others the heuristic's first.
std::string guess(const ProductSpec& spec, const std::vector<std::pair<const LtWay*, LtAlgorithm>>& candidates) {
  auto found = candidates.begin();
  if (takes_whole_lines(spec)) {
    const auto in_whole_lines = [&](const auto& c) {
      return c.first->padded == takes_padding(spec) && (c.first->staged_rows > 0) == takes_staging(spec);
    };
    const auto better = std::find_if(candidates.begin(), candidates.end(), in_whole_lines);
    if (better != candidates.end()) found = better;
  }
  return found->first->name + to_text(found->second);
}

// The choice as text: "small 2", "lt 1 <algorithm>", "staged 3 <rows> <algorithm>", "padded 1 " and one of these two, or "simple".
std::string fastest(GpuDevice& device, const ProductSpec& spec, const std::vector<LtWay>& ways) {
  std::vector<std::pair<const LtWay*, LtAlgorithm>> candidates;
  for (const LtWay& way : ways) {
    for (const LtAlgorithm& algorithm : way.lt->candidates(takes_whole_lines(spec) ? kFewCandidates : kCandidates))
      candidates.emplace_back(&way, algorithm);
  }
  const bool small = takes_small_product(spec);
  if (candidates.empty()) return small ? kSmall : "simple";
  const std::string first_guess = guess(spec, candidates);
  const int64_t bytes = Bench::bytes_of(spec);
  const bool timed = bytes <= kLargestTimed && bytes <= static_cast<int64_t>(device.free_bytes() / 2);
  if (!timed || (candidates.size() == 1 && !small)) return first_guess;
  Race race(device, spec);
  for (const auto& [way, algorithm] : candidates) race.add(*way, algorithm);
  if (small) race.add_small();
  device.synchronize();
  return race.best().empty() ? first_guess : race.best();
}

// nullopt where the text is of another version, or cuBLASLt does not take the algorithm; otherwise `lt` is what runs it.
std::optional<ProductChoice> read_choice(const std::string& text, const ProductSpec& spec, std::vector<LtWay>& ways,
                                         std::unique_ptr<LtProduct>& lt) {
  if (text == "simple") return ProductChoice{};
  if (text == kSmall && takes_small_product(spec)) return ProductChoice{ProductChoice::Kind::small};
  for (LtWay& way : ways) {
    if (!text.starts_with(way.name)) continue;
    std::optional<LtAlgorithm> algorithm = algorithm_of(text.substr(way.name.size()));
    if (!algorithm || !way.lt->accepts(*algorithm)) return std::nullopt;
    lt = std::move(way.lt);
    return ProductChoice{ProductChoice::Kind::lt, *algorithm, way.separate_epilogue, way.staged_rows, way.padded};
  }
  return std::nullopt;
}

// One at a time in a process: ranks that ask for the same product get the same answer.
std::mutex choices_mutex;
std::map<std::string, std::string>& known_choices() {
  static std::map<std::string, std::string> choices;
  return choices;
}

}  // namespace

int64_t staged_row(const ProductSpec& spec) {
  return in_whole_packs(spec.N, spec.type);
}
size_t staged_bytes(const ProductSpec& spec, int64_t rows) {
  return bytes_of(spec.type, rows * staged_row(spec));
}

cublasStatus_t run_staged(const ProductSpec& spec, int64_t rows, LtProduct& lt, const LtAlgorithm& algorithm,
                          const ProductOperands& operands, void* staged, void* workspace, cudaStream_t stream) {
  const auto a_part = static_cast<int64_t>(bytes_of(spec.type, rows * spec.a_row));
  const auto d_part = static_cast<int64_t>(bytes_of(output_type(spec), rows * spec.N));
  for (int64_t part = 0; part < spec.M / rows; ++part) {
    ProductOperands o = operands;
    o.a = static_cast<const char*>(operands.a) + part * a_part;
    o.d = staged;
    if (const cublasStatus_t status = lt.run(o, algorithm, workspace, stream); status != CUBLAS_STATUS_SUCCESS) return status;
    copy_staged(spec, rows, staged, staged_row(spec), static_cast<char*>(operands.d) + part * d_part, stream);
  }
  return CUBLAS_STATUS_SUCCESS;
}

ProductChoice choose(GpuDevice& device, const ProductSpec& spec, size_t alignment, std::unique_ptr<LtProduct>& lt) {
  const std::lock_guard<std::mutex> lock(choices_mutex);
  std::vector<LtWay> ways = ways_of(device, spec, alignment);
  const std::string key = key_of(device, spec, alignment);
  std::string& known = known_choices()[key];
  if (known.empty()) known = read_cache("cublaslt", key).value_or("");
  if (std::optional<ProductChoice> choice = read_choice(known, spec, ways, lt)) return *choice;
  known = fastest(device, spec, ways);
  write_cache("cublaslt", key, known);
  return read_choice(known, spec, ways, lt).value_or(ProductChoice{});
}

}  // namespace fretsaw::cuda
