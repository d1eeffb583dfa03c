// Parts of states are runs of the whole's bytes.
#include "runtime/state_parts.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "graph/types.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/parallel.h"

namespace fretsaw {
namespace {

constexpr int64_t kRoundedAtOnce = 4096;  // elements

}  // namespace

StatePart::StatePart(const PlanState& state, const Coordinates& place)
    : whole_(dims_of(*state.type.shape)), element_bytes_(static_cast<size_t>(bits_of(state.type.dtype)) / 8) {
  for (const int64_t size : whole_) {
    std::vector<int64_t>& all = indexes_.emplace_back(static_cast<size_t>(size));
    std::iota(all.begin(), all.end(), int64_t{0});
  }
  for (const PlanState::Part& part : state.parts) {
    const auto at = place.find(part.axis);
    std::vector<int64_t>& own = indexes_[static_cast<size_t>(part.dim)];
    std::vector<int64_t> kept;
    for (const Interval& i : part.cut.parts[at == place.end() ? 0 : static_cast<size_t>(at->second)])
      kept.insert(kept.end(), own.begin() + i.begin, own.begin() + i.end);
    own = std::move(kept);
  }
}

Dims StatePart::dims() const {
  Dims dims;
  for (const auto& of_dim : indexes_) dims.push_back(static_cast<int64_t>(of_dim.size()));
  return dims;
}

size_t StatePart::bytes() const {
  size_t bytes = element_bytes_;
  for (const auto& of_dim : indexes_) bytes *= of_dim.size();
  return bytes;
}

// Calls copy(offset in the whole, offset in the part, bytes), offsets in bytes.
template <typename Copy>
void StatePart::each_run(Copy copy) const {
  if (bytes() == 0) return;
  size_t inner = whole_.size(), run_bytes = element_bytes_;  // dimensions from `inner` on are there in full
  while (inner > 0 && indexes_[inner - 1].size() == static_cast<size_t>(whole_[inner - 1]))
    run_bytes *= static_cast<size_t>(whole_[--inner]);
  if (inner == 0) return copy(size_t{0}, size_t{0}, run_bytes);
  const std::vector<int64_t>& last = indexes_[inner - 1];
  std::vector<size_t> at(inner - 1, 0);
  size_t in_part = 0;
  while (true) {
    size_t row = 0;
    for (size_t d = 0; d + 1 < inner; ++d) row = (row + static_cast<size_t>(indexes_[d][at[d]])) * static_cast<size_t>(whole_[d + 1]);
    for (size_t begin = 0, end; begin < last.size(); begin = end) {
      for (end = begin + 1; end < last.size() && last[end] == last[end - 1] + 1;) ++end;
      const size_t count = (end - begin) * run_bytes;
      copy((row + static_cast<size_t>(last[begin])) * run_bytes, in_part, count);
      in_part += count;
    }
    size_t d = at.size();
    while (d > 0 && ++at[d - 1] == indexes_[d - 1].size()) at[--d] = 0;
    if (d == 0) return;
  }
}

void StatePart::take(const std::byte* whole, std::byte* part) const {
  each_run([&](size_t in_whole, size_t in_part, size_t count) { std::memcpy(part + in_part, whole + in_whole, count); });
}

void StatePart::put(const std::byte* part, std::byte* whole) const {
  each_run([&](size_t in_whole, size_t in_part, size_t count) { std::memcpy(whole + in_whole, part + in_part, count); });
}

RuntimeValue rounded(const RuntimeValue& value, DType type) {
  RuntimeValue made = make_value(type, value.tensor.dims);
  const int64_t count = value.tensor.count();
  parallel_for((count + kRoundedAtOnce - 1) / kRoundedAtOnce, kGrainElements / kRoundedAtOnce, omp_get_max_threads(),
               [&](int64_t begin, int64_t end) {
                 std::vector<double> numbers(static_cast<size_t>(std::min<int64_t>(count, kRoundedAtOnce)));
                 for (int64_t at = begin * kRoundedAtOnce; at < std::min(count, end * kRoundedAtOnce); at += kRoundedAtOnce) {
                   const int64_t n = std::min(count - at, kRoundedAtOnce);
                   load_as(value.tensor.dtype, value.tensor.data, at, n, numbers.data());
                   store_from(type, made.tensor.data, at, n, numbers.data());
                 }
               });
  return made;
}

}  // namespace fretsaw
