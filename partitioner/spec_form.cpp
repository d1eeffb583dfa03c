// Parts of a spec by device, and what of them lies along the tensor axis.
#include "partitioner/spec_form.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "graph/errors.h"

namespace fretsaw {

std::vector<int> parts_by_number(const TensorAnnotation& spec, const DeviceNumbers& numbers, int devices) {
  std::vector<int> parts(static_cast<size_t>(devices), -1);
  if (spec.devices.empty()) {  // neighbours share a part where there are more devices
    const int64_t count = shards_of(spec);
    for (int64_t n = 0; n < devices && count <= devices; ++n) parts[static_cast<size_t>(n)] = static_cast<int>(n * count / devices);
    return parts;
  }
  const auto holders = holders_of(spec);
  for (size_t part = 0; part < holders.size(); ++part)
    for (const int64_t device : holders[part])
      if (const auto at = numbers.find(device); at != numbers.end() && at->second < devices)
        parts[static_cast<size_t>(at->second)] = static_cast<int>(part);
  return parts;
}

std::vector<int64_t> pieces_of_part(const TensorAnnotation& spec, int64_t part) {
  std::vector<int64_t> pieces(spec.axes.size());
  for (size_t a = spec.axes.size(); a-- > 0;) {
    const int64_t shards = shards_of(spec.axes[a]);
    pieces[a] = part % shards;
    part /= shards;
  }
  return pieces;
}

namespace {

// The sizes of an axis's simple shardings, slowest first; one that isn't named is what remains.
std::optional<std::vector<int64_t>> sizes_of(const ShardedAxis& axis, int64_t dim) {
  std::vector<int64_t> sizes;
  int64_t named = 1;
  int unnamed = 0;
  for (const SimpleSharding& part : axis.parts) {
    unnamed += !part.size;
    named *= part.size.value_or(1);
  }
  if (unnamed > 1 || named < 1 || dim % named != 0 || (unnamed == 0 && named != dim)) return std::nullopt;
  for (const SimpleSharding& part : axis.parts) sizes.push_back(part.size.value_or(dim / named));
  return sizes;
}

void append(Intervals& intervals, Interval next) {
  if (!intervals.empty() && intervals.back().end == next.begin)
    intervals.back().end = next.end;
  else if (next.size() > 0)
    intervals.push_back(next);
}

// The rows of one piece of an axis whose dimension a reshape may have fused from several: (a b) with b cut lies in intervals.
Intervals rows_of_piece(const ShardedAxis& axis, const std::vector<int64_t>& sizes, int64_t piece) {
  std::vector<int64_t> digits(axis.parts.size());
  for (size_t k = axis.parts.size(); k-- > 0;) {
    digits[k] = piece % axis.parts[k].num_shards;
    piece /= axis.parts[k].num_shards;
  }
  Intervals rows{{0, 1}};
  for (size_t k = 0; k < axis.parts.size(); ++k) {
    const Intervals own = even_cut(sizes[k], static_cast<int>(axis.parts[k].num_shards)).parts[static_cast<size_t>(digits[k])];
    const bool all = own == Intervals{{0, sizes[k]}};
    Intervals finer;
    for (const Interval& outer : rows) {
      if (all) append(finer, {outer.begin * sizes[k], outer.end * sizes[k]});
      for (int64_t r = outer.begin; r < outer.end && !all; ++r)
        for (const Interval& i : own) append(finer, {r * sizes[k] + i.begin, r * sizes[k] + i.end});
    }
    rows = std::move(finer);
  }
  return rows;
}

// The part of each tensor rank, as its first data rank holds it. A rank that the spec gives nothing holds what its neighbour does.
std::vector<int> parts_by_tensor_rank(const TensorAnnotation& spec, const DeviceNumbers& numbers, const StageLayout& layout) {
  const std::vector<int> by_number = parts_by_number(spec, numbers, layout.size());
  std::vector<int> parts(static_cast<size_t>(layout.tensor), -1);
  for (int t = 0; t < layout.tensor; ++t)
    for (int d = 0; d < layout.data && parts[static_cast<size_t>(t)] < 0; ++d)
      parts[static_cast<size_t>(t)] = by_number[static_cast<size_t>(layout.number(d, t))];
  for (size_t t = 1; t < parts.size(); ++t)
    if (parts[t] < 0) parts[t] = parts[t - 1];
  for (size_t t = parts.size(); t-- > 1;)
    if (parts[t - 1] < 0) parts[t - 1] = parts[t];
  return parts;
}

}  // namespace

SpecForm form_of_spec(const TensorAnnotation& spec, const Shape& shape, const DeviceNumbers& numbers, const StageLayout& layout) {
  const std::vector<int> parts = parts_by_tensor_rank(spec, numbers, layout);
  SpecForm form{Sharding{}, ""};
  if (shards_of(spec) == 1 || parts.front() < 0) return form;
  for (size_t a = 0; a < spec.axes.size(); ++a) {
    std::vector<int64_t> pieces;  // of each tensor rank
    for (const int part : parts) pieces.push_back(pieces_of_part(spec, part)[a]);
    if (std::equal(pieces.begin() + 1, pieces.end(), pieces.begin())) continue;  // the same on all: not along this axis
    if (form.sharding->kind == Sharding::Kind::cut) return {std::nullopt, "it is cut along two dimensions over one mesh axis"};
    const int64_t axis = spec.axes[a].axis < 0 ? spec.axes[a].axis + static_cast<int64_t>(shape.size()) : spec.axes[a].axis;
    if (axis < 0 || axis >= static_cast<int64_t>(shape.size())) return {std::nullopt, "it has another rank by now"};
    const Dim& dim = shape[static_cast<size_t>(axis)];
    if (!dim.known()) return {std::nullopt, fmt::format("the size of dimension {} is not known", axis)};
    const auto sizes = sizes_of(spec.axes[a], dim.value);
    if (!sizes) return {std::nullopt, fmt::format("the sizes along axis {} are not known", axis)};
    form.sharding = Sharding{Sharding::Kind::cut, static_cast<int>(axis), Cut{dim.value, {}}};
    for (const int64_t piece : pieces) form.sharding->cut.parts.push_back(rows_of_piece(spec.axes[a], *sizes, piece));
  }
  return form;
}

bool fits_spec(const Sharding& s) {
  return s.kind == Sharding::Kind::whole || (s.kind == Sharding::Kind::cut && s.cut == even_cut(s.cut.size, s.cut.ranks()));
}

TensorAnnotation spec_of(const std::string& tensor, const Sharding& sharding, int batch_axis,
                         const std::vector<std::vector<int64_t>>& devices) {
  TensorAnnotation spec{tensor, {}, {}, {}};
  const bool cut = sharding.kind == Sharding::Kind::cut;
  const bool batch = batch_axis >= 0 && devices.size() > 1 && !(cut && sharding.dim == batch_axis);
  const auto axis = [](int dim, size_t shards) {
    return ShardedAxis{dim, {SimpleSharding{static_cast<int64_t>(shards), std::nullopt, ""}}};
  };
  if (batch) spec.axes.push_back(axis(batch_axis, devices.size()));
  if (cut) spec.axes.push_back(axis(sharding.dim, devices.front().size()));
  std::vector<std::vector<int64_t>> holders;  // of each part
  if (!batch && !cut) {                       // whole on each
    for (const auto& row : devices) spec.devices.insert(spec.devices.end(), row.begin(), row.end());
    return spec;
  }
  for (size_t d = 0; d < (batch ? devices.size() : 1); ++d)
    for (size_t t = 0; t < (cut ? devices[0].size() : 1); ++t) {
      std::vector<int64_t>& part = holders.emplace_back();
      for (size_t d2 = batch ? d : 0; d2 < (batch ? d + 1 : devices.size()); ++d2)
        for (size_t t2 = cut ? t : 0; t2 < (cut ? t + 1 : devices[0].size()); ++t2) part.push_back(devices[d2][t2]);
    }
  for (const auto& part : holders) {
    if (part.size() == 1) {
      spec.devices.push_back(part[0]);
      continue;
    }
    const auto key = -static_cast<int64_t>(spec.groups.size()) - 1;
    spec.groups.push_back({key, part});
    spec.devices.push_back(key);
  }
  return spec;
}

namespace {

[[noreturn]] void no_sharding(const std::string& text, const std::string& why) {
  throw Error(fmt::format("'{}' is no sharding: {}", text, why), "the metadata of annotated.onnx is damaged");
}

Cut cut_from_text(const std::string& text, const std::string& list, int64_t size) {
  Cut cut{size, {}};
  cut.parts.resize(1);
  size_t at = 0;
  const auto number = [&] {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(list.data() + at, list.data() + list.size(), value);
    if (error != std::errc()) no_sharding(text, "a number is missing");
    at = static_cast<size_t>(end - list.data());
    return value;
  };
  while (at < list.size()) {
    if (list[at] == '|') {
      cut.parts.emplace_back(), ++at;
      continue;
    }
    if (list[at] == '+') ++at;
    const int64_t begin = number();
    if (at >= list.size() || list[at++] != ':') no_sharding(text, "a colon is missing");
    const int64_t end = number();
    Intervals& part = cut.parts.back();
    if (begin < 0 || end <= begin || end > size || (!part.empty() && part.back().end >= begin)) no_sharding(text, "its parts do not fit");
    part.push_back({begin, end});
  }
  return cut;
}

}  // namespace

Sharding sharding_from_text(const std::string& text, const Shape& shape, int ranks) {
  if (text.ends_with("] sum(tensor)")) return {Sharding::Kind::pending, -1, {}};
  if (text.size() < 2 || text.front() != '[' || text.back() != ']') no_sharding(text, "brackets are missing");
  Sharding sharding;
  size_t dim = 0;
  for (size_t begin = 1; begin + 1 < text.size(); ++dim) {
    const size_t end = std::min(text.find(", ", begin), text.size() - 1);
    const std::string entry = text.substr(begin, end - begin);
    begin = end + 2;
    if (entry == "_") continue;
    if (!entry.starts_with("tensor") || dim >= shape.size() || !shape[dim].known() || sharding.kind == Sharding::Kind::cut)
      no_sharding(text, "it does not fit the tensor's shape");
    sharding.kind = Sharding::Kind::cut;
    sharding.dim = static_cast<int>(dim);
    const std::string list = entry.substr(6);
    if (!list.empty() && (list.size() < 2 || list.front() != '{' || list.back() != '}')) no_sharding(text, "braces are missing");
    sharding.cut =
        list.empty() ? even_cut(shape[dim].value, ranks) : cut_from_text(text, list.substr(1, list.size() - 2), shape[dim].value);
    if (sharding.cut.ranks() != ranks) no_sharding(text, fmt::format("it is for {} ranks", sharding.cut.ranks()));
  }
  return sharding;
}

}  // namespace fretsaw
