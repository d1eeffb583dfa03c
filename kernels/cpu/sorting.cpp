// Operators that order or compare elements: TopK, Unique, NonMaxSuppression.
#include <algorithm>
#include <numeric>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/indexing.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scalar_types.h"

namespace fretsaw {
namespace {

// What elements are compared as.
template <typename T>
using KeyOf = std::conditional_t<std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>, float, T>;

// A total order: NaN is the greatest number and equal to itself.
template <typename K>
bool before(const K& a, const K& b) {
  if constexpr (std::is_floating_point_v<K>) {
    if (a != a || b != b) return a == a;
  }
  return a < b;
}
template <typename K>
bool same(const K& a, const K& b) {
  return !before(a, b) && !before(b, a);
}

struct TopKParameters {
  int64_t k = 0, extent = 0, inner = 0;
  bool largest = true;
};

// The k first of one slice, whose elements lie `inner` apart. Ties go to the lowest index.
template <typename T>
void top_k_slice(const TopKParameters& p, const T* x, T* values, int64_t* places, std::vector<KeyOf<T>>& keys,
                 std::vector<int64_t>& order) {
  for (int64_t i = 0; i < p.extent; ++i) keys[static_cast<size_t>(i)] = static_cast<KeyOf<T>>(x[i * p.inner]);
  std::iota(order.begin(), order.end(), 0);
  const auto first = [&](int64_t a, int64_t b) {
    const KeyOf<T>&ka = keys[static_cast<size_t>(a)], &kb = keys[static_cast<size_t>(b)];
    if (before(ka, kb)) return !p.largest;
    if (before(kb, ka)) return p.largest;
    return a < b;
  };
  if (p.k < p.extent / 16) {
    std::partial_sort(order.begin(), order.begin() + p.k, order.end(), first);
  } else {
    if (p.k < p.extent) std::nth_element(order.begin(), order.begin() + p.k, order.end(), first);
    std::sort(order.begin(), order.begin() + p.k, first);
  }
  for (int64_t i = 0; i < p.k; ++i) {
    const int64_t place = order[static_cast<size_t>(i)];
    if (values) values[i * p.inner] = x[place * p.inner];
    if (places) places[i * p.inner] = place;
  }
}

CompiledKernel make_top_k(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", -1);
  const bool largest = c.node().get_int("largest", 1) != 0;  // unsorted results may come in any order: they come sorted
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    TopKParameters p{.k = input_int(r, 1), .extent = x.dims[axis], .inner = product(x.dims, axis + 1, x.rank()), .largest = largest};
    if (p.k < 0 || p.k > p.extent) {
      throw Error("K is " + std::to_string(p.k) + ", the dimension has " + std::to_string(p.extent) + " elements");
    }
    Dims dims = x.dims;
    dims[axis] = p.k;
    TensorView* values = r.wants_output(0) ? &sized_output(r, 0, dims, x.dtype) : nullptr;
    TensorView* places = r.wants_output(1) ? &sized_output(r, 1, dims, DType::int64) : nullptr;
    if (count_of(dims) == 0) return;
    const int64_t slices = product(x.dims, 0, axis) * p.inner;
    dispatch<types::numbers>(x.dtype, [&]<typename T>() {
      parallel_for(slices, kGrainElements / 4 / p.extent + 1, r.threads(), [&](int64_t begin, int64_t end) {
        std::vector<KeyOf<T>> keys(static_cast<size_t>(p.extent));
        std::vector<int64_t> order(static_cast<size_t>(p.extent));
        for (int64_t slice = begin; slice < end; ++slice) {
          const int64_t from = slice / p.inner * p.extent * p.inner + slice % p.inner,
                        to = slice / p.inner * p.k * p.inner + slice % p.inner;
          top_k_slice<T>(p, x.as<T>() + from, values ? values->as<T>() + to : nullptr, places ? places->as<int64_t>() + to : nullptr, keys,
                         order);
        }
      });
    });
  }};
}

// Slices of a tensor along an axis that are compared as wholes.
template <typename T>
struct Slices {
  const T* data;
  int64_t outer, extent, inner;

  // -1, 0 or 1 as slice a stands before, at or after slice b.
  int compare(int64_t a, int64_t b) const {
    for (int64_t o = 0; o < outer; ++o) {
      for (int64_t i = 0; i < inner; ++i) {
        const auto ka = static_cast<KeyOf<T>>(data[(o * extent + a) * inner + i]);
        const auto kb = static_cast<KeyOf<T>>(data[(o * extent + b) * inner + i]);
        if (before(ka, kb)) return -1;
        if (before(kb, ka)) return 1;
      }
    }
    return 0;
  }
};

struct UniqueResult {
  std::vector<int64_t> first, inverse, counts;  // for each unique slice: its first index and how often; for each slice: its unique one
};

template <typename T>
UniqueResult unique_slices(const Slices<T>& slices, bool sorted) {
  std::vector<int64_t> order(static_cast<size_t>(slices.extent));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const int c = slices.compare(a, b);
    return c != 0 ? c < 0 : a < b;
  });
  UniqueResult result;
  result.inverse.resize(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    if (i == 0 || slices.compare(order[i - 1], order[i]) != 0) {
      result.first.push_back(order[i]);
      result.counts.push_back(0);
    }
    result.inverse[static_cast<size_t>(order[i])] = static_cast<int64_t>(result.first.size()) - 1;
    ++result.counts.back();
  }
  if (sorted) return result;
  std::vector<size_t> by_occurrence(result.first.size());
  std::iota(by_occurrence.begin(), by_occurrence.end(), size_t{0});
  std::sort(by_occurrence.begin(), by_occurrence.end(), [&](size_t a, size_t b) { return result.first[a] < result.first[b]; });
  UniqueResult renumbered;
  std::vector<int64_t> number(by_occurrence.size());
  for (size_t i = 0; i < by_occurrence.size(); ++i) {
    number[by_occurrence[i]] = static_cast<int64_t>(i);
    renumbered.first.push_back(result.first[by_occurrence[i]]);
    renumbered.counts.push_back(result.counts[by_occurrence[i]]);
  }
  for (int64_t u : result.inverse) renumbered.inverse.push_back(number[static_cast<size_t>(u)]);
  return renumbered;
}

void write_ints(RunContext& r, size_t output, const std::vector<int64_t>& values) {
  if (!r.wants_output(output)) return;
  std::copy(values.begin(), values.end(), sized_output(r, output, {static_cast<int64_t>(values.size())}, DType::int64).as<int64_t>());
}

CompiledKernel make_unique(const CompileContext& c) {
  const bool flat = !c.node().has("axis"), sorted = c.node().get_int("sorted", 1) != 0;
  const int64_t axis_attribute = c.node().get_int("axis", 0);
  return {[=](RunContext& r) {
    TensorView x = r.input(0);
    if (flat) x.dims = {x.count()};
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    const UniqueResult found = dispatch<types::everything>(x.dtype, [&]<typename T>() {
      return unique_slices(Slices<T>{x.as<const T>(), product(x.dims, 0, axis), x.dims[axis], product(x.dims, axis + 1, x.rank())}, sorted);
    });
    if (r.wants_output(0)) {
      Dims dims = x.dims;
      dims[axis] = static_cast<int64_t>(found.first.size());
      gather_into(sized_output(r, 0, dims, x.dtype), x, axis, found.first, r.threads());
    }
    write_ints(r, 1, found.first);
    write_ints(r, 2, found.inverse);
    write_ints(r, 3, found.counts);
  }};
}

struct Box {
  float y0, x0, y1, x1;
  float area() const { return (y1 - y0) * (x1 - x0); }
};

Box box_at(const float* b, bool center_point) {
  if (center_point) return {b[1] - b[3] / 2, b[0] - b[2] / 2, b[1] + b[3] / 2, b[0] + b[2] / 2};  // x, y, width, height
  return {std::min(b[0], b[2]), std::min(b[1], b[3]), std::max(b[0], b[2]), std::max(b[1], b[3])};
}

bool overlaps(const Box& a, const Box& b, float threshold) {
  const float height = std::min(a.y1, b.y1) - std::max(a.y0, b.y0), width = std::min(a.x1, b.x1) - std::max(a.x0, b.x0);
  if (height <= 0 || width <= 0) return false;
  const float shared = height * width, all = a.area() + b.area() - shared;
  return all > 0 && shared / all > threshold;
}

struct NmsParameters {
  int64_t boxes, most;
  float iou_threshold;
  const float* score_threshold;  // null: none
  bool center_point;
};

// Indexes of the boxes that stay for one class, best first.
std::vector<int64_t> kept_boxes(const NmsParameters& p, const float* boxes, const float* scores) {
  std::vector<int64_t> candidates;
  for (int64_t i = 0; i < p.boxes; ++i) {
    if (!p.score_threshold || scores[i] > *p.score_threshold) candidates.push_back(i);
  }
  std::stable_sort(candidates.begin(), candidates.end(), [&](int64_t a, int64_t b) { return before(scores[b], scores[a]); });
  std::vector<int64_t> kept;
  std::vector<Box> kept_corners;
  for (int64_t i : candidates) {
    if (static_cast<int64_t>(kept.size()) >= p.most) break;
    const Box box = box_at(boxes + 4 * i, p.center_point);
    if (std::any_of(kept_corners.begin(), kept_corners.end(), [&](const Box& k) { return overlaps(k, box, p.iou_threshold); })) continue;
    kept.push_back(i);
    kept_corners.push_back(box);
  }
  return kept;
}

CompiledKernel make_non_max_suppression(const CompileContext& c) {
  const bool center_point = c.node().get_int("center_point_box", 0) != 0;
  return {[center_point](RunContext& r) {
    const TensorView &boxes = r.input(0), &scores = r.input(1);  // [B, N, 4], [B, C, N]
    require(boxes.dtype == DType::float32 && scores.dtype == DType::float32, "boxes and scores must be float32");
    require(
        boxes.rank() == 3 && scores.rank() == 3 && boxes.dims[2] == 4 && boxes.dims[0] == scores.dims[0] && boxes.dims[1] == scores.dims[2],
        "boxes must be [batch, N, 4] and scores [batch, classes, N]");
    const float threshold = r.has_input(4) ? static_cast<float>(input_number(r, 4)) : 0;
    const NmsParameters p{.boxes = boxes.dims[1],
                          .most = r.has_input(2) ? input_int(r, 2) : 0,
                          .iou_threshold = r.has_input(3) ? static_cast<float>(input_number(r, 3)) : 0,
                          .score_threshold = r.has_input(4) ? &threshold : nullptr,
                          .center_point = center_point};
    const int64_t classes = scores.dims[1], pairs = boxes.dims[0] * classes;
    std::vector<std::vector<int64_t>> kept(static_cast<size_t>(pairs));
    parallel_for(pairs, kGrainElements / 16 / (p.boxes + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        kept[static_cast<size_t>(i)] = kept_boxes(p, boxes.as<float>() + i / classes * p.boxes * 4, scores.as<float>() + i * p.boxes);
      }
    });
    int64_t total = 0;
    for (const auto& each : kept) total += static_cast<int64_t>(each.size());
    auto* out = sized_output(r, 0, {total, 3}, DType::int64).as<int64_t>();
    for (int64_t i = 0; i < pairs; ++i) {
      for (int64_t box : kept[static_cast<size_t>(i)]) {
        *out++ = i / classes;
        *out++ = i % classes;
        *out++ = box;
      }
    }
  }};
}

}  // namespace

void register_sorting(KernelRegistry& registry) {
  registry.add({.op = "TopK", .make = make_top_k});
  registry.add({.op = "Unique", .make = make_unique});
  registry.add({.op = "NonMaxSuppression", .make = make_non_max_suppression});
}

}  // namespace fretsaw
