// Intervals and cuts.
#include "graph/sharding.h"

#include <fmt/format.h>

#include <algorithm>

namespace fretsaw {
namespace {

void append(Intervals& intervals, Interval next) {
  if (next.size() == 0) return;
  if (!intervals.empty() && intervals.back().end == next.begin)
    intervals.back().end = next.end;
  else
    intervals.push_back(next);
}

}  // namespace

int64_t size_of(const Intervals& intervals) {
  int64_t size = 0;
  for (const Interval& i : intervals) size += i.size();
  return size;
}

bool contains(const Intervals& outer, const Intervals& inner) {
  return std::all_of(inner.begin(), inner.end(), [&](const Interval& i) {
    return std::any_of(outer.begin(), outer.end(), [&](const Interval& o) { return o.begin <= i.begin && i.end <= o.end; });
  });
}

std::vector<int64_t> places_within(const Intervals& outer, const Intervals& inner) {
  std::vector<int64_t> places;
  int64_t before = 0;  // indexes of `outer` passed so far
  for (const Interval& o : outer) {
    for (const Interval& i : inner)
      for (int64_t k = std::max(o.begin, i.begin); k < std::min(o.end, i.end); ++k) places.push_back(before + k - o.begin);
    before += o.size();
  }
  return places;
}

int64_t Cut::largest_part() const {
  int64_t largest = 0;
  for (const Intervals& part : parts) largest = std::max(largest, size_of(part));
  return largest;
}

bool Cut::even() const {
  return std::all_of(parts.begin(), parts.end(), [&](const Intervals& p) { return size_of(p) == size_of(parts.front()); });
}

bool Cut::overlaps() const {
  int64_t total = 0;
  for (const Intervals& part : parts) total += size_of(part);
  return total != size;
}

bool Cut::contiguous() const {
  return std::all_of(parts.begin(), parts.end(), [](const Intervals& p) { return p.size() <= 1; });
}

bool Cut::in_order() const {
  int64_t at = 0;
  for (const Intervals& part : parts)
    for (const Interval& i : part) {
      if (i.begin != at) return false;
      at = i.end;
    }
  return at == size;
}

Cut even_cut(int64_t size, int ranks) {
  Cut cut{size, {}};
  const int64_t n = ranks;
  for (int64_t r = 0; r < n; ++r) {
    // [ceil(r * size / n), ceil((r + 1) * size / n)), or what covers it
    const int64_t begin = size < n ? r * size / n : (r * size + n - 1) / n;
    const int64_t end = ((r + 1) * size + n - 1) / n;
    cut.parts.push_back(begin < end ? Intervals{{begin, end}} : Intervals{});
  }
  return cut;
}

Cut widen(const Cut& factor, int64_t outer, int64_t inner) {
  Cut cut{outer * factor.size * inner, {}};
  for (const Intervals& part : factor.parts) {
    Intervals wide;
    for (int64_t o = 0; o < outer; ++o)
      for (const Interval& i : part) append(wide, {(o * factor.size + i.begin) * inner, (o * factor.size + i.end) * inner});
    cut.parts.push_back(std::move(wide));
  }
  return cut;
}

std::optional<Cut> narrow(const Cut& dim, int64_t outer, int64_t size, int64_t inner) {
  if (outer * size * inner != dim.size) return std::nullopt;
  Cut factor{size, {}};
  for (const Intervals& part : dim.parts) {
    Intervals first;
    for (const Interval& i : part) {
      if (i.begin >= size * inner) break;
      if (i.begin % inner != 0 || i.end % inner != 0) return std::nullopt;
      append(first, {i.begin / inner, std::min(i.end / inner, size)});
    }
    factor.parts.push_back(std::move(first));
  }
  if (widen(factor, outer, inner) == dim) return factor;
  return std::nullopt;
}

Cut join(const std::vector<Cut>& segments) {
  Cut cut;
  for (const Cut& segment : segments) {
    cut.parts.resize(segment.parts.size());
    for (size_t r = 0; r < segment.parts.size(); ++r)
      for (const Interval& i : segment.parts[r]) append(cut.parts[r], {cut.size + i.begin, cut.size + i.end});
    cut.size += segment.size;
  }
  return cut;
}

std::string Sharding::text(size_t rank, const std::string& axis) const {
  std::string s = "[";
  for (size_t d = 0; d < rank; ++d) {
    if (d > 0) s += ", ";
    if (kind != Kind::cut || static_cast<int>(d) != dim) {
      s += "_";
      continue;
    }
    s += axis;
    if (cut == even_cut(cut.size, cut.ranks()) && cut.even() && !cut.overlaps()) continue;
    std::string parts;
    for (const Intervals& part : cut.parts) {
      std::string one;
      for (const Interval& i : part) one += fmt::format("{}{}:{}", one.empty() ? "" : "+", i.begin, i.end);
      parts += (parts.empty() ? "" : "|") + one;
    }
    s += "{" + parts + "}";
  }
  return s + (kind == Kind::pending ? "] sum(" + axis + ")" : "]");
}

}  // namespace fretsaw
