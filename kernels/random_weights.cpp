// Made-up weights on the host.
#include "kernels/random_weights.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/random.h"

namespace fretsaw {
namespace {

// Uniform numbers in [low, high).
struct Range {
  float low, high;
};
Range range_of(const Dims& dims) {
  if (dims.size() < 2) return {0.5f, 1.0f};
  double fan_in = static_cast<double>(std::max<int64_t>(dims[0], 1));
  if (dims.size() == 2) {
    fan_in = static_cast<double>(std::max({dims[0], dims[1], int64_t{1}}));  // [K, N] or [N, K]: either way not too large
  } else {
    fan_in = 1;
    for (size_t i = 1; i < dims.size(); ++i) fan_in *= static_cast<double>(std::max<int64_t>(dims[i], 1));
  }
  auto bound = static_cast<float>(std::sqrt(3.0 / fan_in));
  return {-bound, bound};
}

uint16_t bfloat_bits(float v) {
  auto u = std::bit_cast<uint32_t>(v);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

}  // namespace

RandomWeights::RandomWeights(uint64_t key, DType dtype, const Dims& dims, const ValuePart* part) : key_(key), dtype_(dtype) {
  Dims source = dims;
  if (!part || part->dim < 0) {
    block_ = source_block_ = count_of(dims);
    runs_ = {{0, 0, block_}};
  } else {
    const auto dim = static_cast<size_t>(part->dim);
    source.at(dim) = part->size;
    int64_t inner = 1;
    for (size_t d = 0; d < dims.size(); ++d) (d < dim ? blocks_ : inner) *= d == dim ? 1 : dims[d];
    for (const Interval& i : part->intervals) {
      runs_.push_back({block_, inner * i.begin, inner * i.size()});
      block_ += inner * i.size();
    }
    source_block_ = inner * part->size;
  }
  const Range range = range_of(source);
  low_ = range.low;
  span_ = range.high - range.low;
}

// Calls visit(first here, first in the source, count) for the elements [begin, end).
template <typename Visit>
void RandomWeights::for_each_run(int64_t begin, int64_t end, const Visit& visit) const {
  while (begin < end) {
    const int64_t block = begin / block_;
    for (const Run& run : runs_) {
      const int64_t rest = begin - block * block_ - run.here;  // how far into the run
      const int64_t count = std::min(run.count - rest, end - begin);
      if (rest < 0 || count <= 0) continue;
      visit(begin, block * source_block_ + run.in_source + rest, count);
      begin += count;
    }
  }
}

template <typename T, typename Make>
void RandomWeights::fill(int64_t begin, int64_t end, T* to, const Make& make) const {
  const Philox random(key_);
  parallel_for(end - begin, 4 * kGrainElements, omp_get_max_threads(), [&](int64_t from, int64_t until) {
    for_each_run(begin + from, begin + until, [&](int64_t first, int64_t source, int64_t count) {
      T* out = to + (first - begin);
      for (int64_t b = source / 4; 4 * b < source + count; ++b) {
        const auto words = random.block(static_cast<uint64_t>(b));
        for (int64_t i = std::max(4 * b, source); i < std::min(4 * b + 4, source + count); ++i)
          out[i - source] = make(words[static_cast<size_t>(i - 4 * b)]);
      }
    });
  });
}

void RandomWeights::make(int64_t begin, int64_t end, std::byte* to) const {
  auto real = [this](uint32_t word) { return low_ + span_ * (static_cast<float>(word >> 8) * 0x1p-24f); };
  switch (dtype_) {
    case DType::float32:
      return fill(begin, end, reinterpret_cast<float*>(to), real);
    case DType::float64:
      return fill(begin, end, reinterpret_cast<double*>(to), [&](uint32_t w) { return static_cast<double>(real(w)); });
    case DType::float16:
      return fill(begin, end, reinterpret_cast<_Float16*>(to), [&](uint32_t w) { return static_cast<_Float16>(real(w)); });
    case DType::bfloat16:
      return fill(begin, end, reinterpret_cast<uint16_t*>(to), [&](uint32_t w) { return bfloat_bits(real(w)); });
    default:
      return fill(begin, end, reinterpret_cast<uint8_t*>(to), [](uint32_t w) { return static_cast<uint8_t>(w >> 24); });
  }
}

bool RandomWeights::random() const {
  switch (dtype_) {
    case DType::float32:
    case DType::float64:
    case DType::float16:
    case DType::bfloat16:
    case DType::int8:
    case DType::uint8:
      return true;
    default:
      return false;  // indexes and flags: zeros are always legal
  }
}

void RandomWeights::operator()(uint64_t first, std::span<std::byte> bytes) const {
  if (!random()) {
    std::fill(bytes.begin(), bytes.end(), std::byte{0});
    return;
  }
  const uint64_t size = bytes_of(dtype_, 1), begin = first / size, end = (first + bytes.size() + size - 1) / size;
  const auto address = reinterpret_cast<uintptr_t>(bytes.data());
  if (first % size == 0 && bytes.size() % size == 0 && address % size == 0)
    return make(static_cast<int64_t>(begin), static_cast<int64_t>(end), bytes.data());
  std::vector<std::byte> elements((end - begin) * size);
  make(static_cast<int64_t>(begin), static_cast<int64_t>(end), elements.data());
  std::copy_n(elements.begin() + static_cast<std::ptrdiff_t>(first % size), bytes.size(), bytes.begin());
}

}  // namespace fretsaw
