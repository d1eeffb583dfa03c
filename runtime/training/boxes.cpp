// Boxes of tensors.
#include "runtime/training/boxes.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace fretsaw {
namespace {

// Where an element is in a packed box that holds it.
int64_t offset_in(const Box& box, const Dims& at) {
  int64_t offset = 0;
  for (size_t d = 0; d < at.size(); ++d) offset = offset * box.shape[d] + (at[d] - box.start[d]);
  return offset;
}

}  // namespace

bool lies_in(const Box& box, const Dims& whole) {
  if (box.start.size() != whole.size() || box.shape.size() != whole.size()) return false;
  for (size_t d = 0; d < whole.size(); ++d)
    if (box.start[d] < 0 || box.shape[d] < 0 || box.start[d] > whole[d] || box.shape[d] > whole[d] - box.start[d]) return false;
  return true;
}

Box intersection(const Box& a, const Box& b) {
  Box both{a.start, a.shape};
  for (size_t d = 0; d < a.start.size(); ++d) {
    both.start[d] = std::max(a.start[d], b.start[d]);
    both.shape[d] = std::max<int64_t>(std::min(a.start[d] + a.shape[d], b.start[d] + b.shape[d]) - both.start[d], 0);
  }
  return both;
}

bool covers_once(const Dims& whole, std::span<const Box> boxes) {
  int64_t rest = count_of(whole);
  std::vector<const Box*> sorted;
  for (const Box& box : boxes) {
    if (box.count() > rest) return false;
    rest -= box.count();
    if (box.count() > 0) sorted.push_back(&box);
  }
  if (rest != 0) return false;
  // Enough elements: they are each one's exactly when no two boxes meet. Only those that meet in the first dimension are compared.
  if (whole.empty()) return true;  // one element, one box
  std::sort(sorted.begin(), sorted.end(), [](const Box* a, const Box* b) { return a->start < b->start; });
  for (size_t i = 0; i < sorted.size(); ++i)
    for (size_t k = i + 1; k < sorted.size() && sorted[k]->start[0] < sorted[i]->start[0] + sorted[i]->shape[0]; ++k)
      if (intersection(*sorted[i], *sorted[k]).count() > 0) return false;
  return true;
}

void copy_common(const Box& from, const std::byte* source, const Box& to, std::byte* target, size_t size) {
  const Box both = intersection(from, to);
  if (both.count() == 0) return;
  const size_t rank = both.shape.size();
  const auto row = static_cast<size_t>(rank == 0 ? 1 : both.shape[rank - 1]) * size;
  Dims at = both.start;  // the first element of the row
  for (;;) {
    std::memcpy(target + static_cast<size_t>(offset_in(to, at)) * size, source + static_cast<size_t>(offset_in(from, at)) * size, row);
    size_t d = rank < 2 ? 0 : rank - 1;  // the row's dimension itself stays
    while (d > 0 && ++at[d - 1] == both.start[d - 1] + both.shape[d - 1]) {
      at[d - 1] = both.start[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

}  // namespace fretsaw
