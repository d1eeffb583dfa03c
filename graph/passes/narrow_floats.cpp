// Rounding float32 to 16 bits, by integer arithmetic that compilers vectorise.
#include "graph/passes/narrow_floats.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

namespace fretsaw {
namespace {

constexpr size_t kLazyFrom = size_t{64} << 10;     // elements; smaller constants are looked at by passes
constexpr size_t kPartElements = size_t{1} << 20;  // what a thread converts at once
constexpr uint32_t kInfinity = 0x7f800000;

uint16_t half_bits(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  // Below 2^-14 the sum with 0.5 rounds to a multiple of 2^-24, the smallest float16, in its last bits.
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t rounded = (magnitude + 0xc8000fff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t normal = std::min<uint32_t>(rounded, 0x7bff);
  uint32_t result = magnitude < 0x38800000 ? small : normal;
  result = magnitude == kInfinity ? 0x7c00 : magnitude > kInfinity ? 0x7e00 : result;
  return static_cast<uint16_t>(sign | result);
}

uint16_t bfloat_bits(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  const uint32_t rounded = std::min<uint32_t>((magnitude + 0x7fff + ((magnitude >> 16) & 1)) >> 16, 0x7f7f);
  const uint32_t result = magnitude == kInfinity ? 0x7f80 : magnitude > kInfinity ? 0x7fc0 : rounded;
  return static_cast<uint16_t>(sign | result);
}

// Elements [first, first + count) of a float32 constant, narrowed.
void narrow_part(const Tensor& wide, DType type, size_t first, size_t count, uint16_t* to) {
  if (wide.data) {
    const std::byte* from = wide.data + first * sizeof(float);
    if (reinterpret_cast<uintptr_t>(from) % alignof(float) == 0) {
      narrow_floats(type, reinterpret_cast<const float*>(from), to, count);
      return;
    }
    std::vector<float> aligned(count);
    std::memcpy(aligned.data(), from, count * sizeof(float));
    narrow_floats(type, aligned.data(), to, count);
  } else {
    std::vector<float> made(count);
    wide.generate(first * sizeof(float), std::as_writable_bytes(std::span(made)));
    narrow_floats(type, made.data(), to, count);
  }
}

struct Part {
  const Tensor* wide;
  uint16_t* to;  // of the first element
  size_t first, count;
};

void narrow_side_by_side(const std::vector<Part>& parts, DType type) {
  std::atomic<size_t> next = 0;
  std::exception_ptr failure;
  std::mutex mutex;
  auto work = [&] {
    for (size_t i = next++; i < parts.size(); i = next++) {
      try {
        narrow_part(*parts[i].wide, type, parts[i].first, parts[i].count, parts[i].to + parts[i].first);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  };
  std::vector<std::thread> threads;
  const size_t count = std::min<size_t>(parts.size(), std::max(1U, std::thread::hardware_concurrency()));
  for (size_t t = 1; t < count; ++t) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

void add_parts(std::vector<Part>& parts, const Tensor& wide, uint16_t* to, size_t first, size_t count) {
  for (size_t done = 0; done < count; done += kPartElements)
    parts.push_back({&wide, to, first + done, std::min(kPartElements, count - done)});
}

// The bytes [first, first + bytes.size()) of the narrow form.
void narrow_bytes(const Tensor& wide, DType type, uint64_t first, std::span<std::byte> bytes) {
  const uint64_t begin = first / 2, end = (first + bytes.size() + 1) / 2;
  std::vector<uint16_t> own;
  auto* to = reinterpret_cast<uint16_t*>(bytes.data());
  const bool direct = first % 2 == 0 && bytes.size() % 2 == 0 && reinterpret_cast<uintptr_t>(to) % 2 == 0;
  if (!direct) {
    own.resize(end - begin);
    to = own.data();
  }
  std::vector<Part> parts;
  for (uint64_t at = begin; at < end; at += kPartElements)
    parts.push_back({&wide, to - begin, at, std::min<size_t>(kPartElements, end - at)});
  narrow_side_by_side(parts, type);
  if (!direct) std::memcpy(bytes.data(), reinterpret_cast<const std::byte*>(own.data()) + first % 2, bytes.size());
}

}  // namespace

void narrow_floats(DType type, const float* from, uint16_t* to, size_t count) {
  if (type == DType::float16)
    for (size_t i = 0; i < count; ++i) to[i] = half_bits(from[i]);
  else
    for (size_t i = 0; i < count; ++i) to[i] = bfloat_bits(from[i]);
}

double largest_of(DType type) {
  if (type == DType::float16) return 65504;
  if (type == DType::bfloat16) return 0x1.fep127;
  return type == DType::float32 ? 0x1.fffffep127 : 0x1.fffffffffffffp1023;
}

TensorPtr float_tensor(DType type, Dims dims, const std::vector<double>& numbers) {
  auto tensor = make_tensor(type, std::move(dims));
  std::byte* out = mutable_data(*tensor);
  if (type == DType::float64 && !numbers.empty()) std::memcpy(out, numbers.data(), tensor->bytes());
  if (type == DType::float64 || numbers.empty()) return tensor;
  std::vector<float> floats(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double most = largest_of(DType::float32), x = numbers[i];
    floats[i] = static_cast<float>(std::isfinite(x) ? std::clamp(x, -most, most) : x);
  }
  if (type == DType::float32)
    std::memcpy(out, floats.data(), tensor->bytes());
  else
    narrow_floats(type, floats.data(), reinterpret_cast<uint16_t*>(out), floats.size());
  return tensor;
}

TensorPtr FloatNarrower::narrowed(const TensorPtr& wide) {
  auto [it, added] = jobs_.try_emplace(wide.get());
  Job& job = it->second;
  if (!added) return job.narrow;
  job.wide = wide;
  const auto count = static_cast<size_t>(wide->count());
  const bool readable = wide->data || wide->generate;
  if (!readable || (lazy_ && count >= kLazyFrom)) {
    job.narrow = std::make_shared<Tensor>();
    job.narrow->dtype = type_;
    job.narrow->dims = wide->dims;
    if (readable)
      job.narrow->generate = [wide, type = type_](uint64_t first, std::span<std::byte> bytes) { narrow_bytes(*wide, type, first, bytes); };
  } else {
    job.narrow = make_tensor(type_, wide->dims);
    waiting_.push_back(wide.get());
  }
  job.narrow->name = wide->name;
  job.narrow->location = wide->location;
  job.narrow->missing = wide->missing;
  return job.narrow;
}

void FloatNarrower::finish() {
  std::vector<Part> parts;
  for (const Tensor* wide : waiting_) {
    Tensor& narrow = *jobs_.at(wide).narrow;
    add_parts(parts, *wide, reinterpret_cast<uint16_t*>(mutable_data(narrow)), 0, static_cast<size_t>(narrow.count()));
  }
  narrow_side_by_side(parts, type_);
  waiting_.clear();
}

}  // namespace fretsaw
