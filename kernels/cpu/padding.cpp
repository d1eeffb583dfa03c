// Pad and its kin: operators that copy a region and fill or mirror the rest. Pad, CenterCropPad, Trilu, ReverseSequence.
#include <algorithm>
#include <numeric>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/movement.h"
#include "kernels/cpu/parallel.h"

namespace fretsaw {

PadMode pad_mode_of(const std::string& name) {
  if (name == "constant") return PadMode::constant;
  if (name == "edge") return PadMode::edge;
  if (name == "reflect") return PadMode::reflect;
  if (name == "wrap") return PadMode::wrap;
  throw Error("there is no padding mode '" + name + "'", "use constant, edge, reflect or wrap");
}

namespace {

PadAxis pad_axis(int64_t extent, int64_t before, int64_t after) {
  constexpr int64_t kLimit = int64_t{1} << 40;
  if (before < -kLimit || after < -kLimit || before > kLimit || after > kLimit) {
    throw Error("padding of " + std::to_string(before) + " and " + std::to_string(after) + " is too large");
  }
  PadAxis axis;
  axis.crop_start = std::max<int64_t>(0, -before);
  axis.kept = extent - axis.crop_start - std::max<int64_t>(0, -after);
  axis.before = std::max<int64_t>(0, before);
  axis.after = std::max<int64_t>(0, after);
  if (axis.kept < 0) throw Error("negative padding cuts more than the dimension's " + std::to_string(extent) + " elements");
  return axis;
}

}  // namespace

std::vector<PadAxis> padded_axes(RunContext& r) {
  const Dims& dims = r.input(0).dims;
  const std::vector<int64_t> pads = r.input_ints(1);
  std::vector<int64_t> named(dims.size());
  std::iota(named.begin(), named.end(), 0);
  if (r.has_input(3)) named = r.input_ints(3);
  const std::vector<size_t> front = normalise_axes(named, dims.size());
  if (pads.size() != 2 * front.size()) {
    throw Error("pads has " + std::to_string(pads.size()) + " numbers for " + std::to_string(front.size()) + " axes", "give two for each");
  }
  std::vector<PadAxis> axes;
  for (int64_t d : dims) axes.push_back(pad_axis(d, 0, 0));
  for (size_t i = 0; i < front.size(); ++i) axes[front[i]] = pad_axis(dims[front[i]], pads[i], pads[front.size() + i]);
  return axes;
}

std::vector<PadAxis> centred_axes(RunContext& r, const std::vector<int64_t>* named) {
  const Dims& dims = r.input(0).dims;
  const std::vector<int64_t> shape = r.input_ints(1);
  std::vector<int64_t> all(dims.size());
  std::iota(all.begin(), all.end(), 0);
  const std::vector<size_t> front = normalise_axes(named ? *named : all, dims.size());
  require(shape.size() == front.size(), "the target shape must have one number for each axis");
  std::vector<PadAxis> axes;
  for (int64_t d : dims) axes.push_back(pad_axis(d, 0, 0));
  for (size_t i = 0; i < front.size(); ++i) {
    const int64_t extent = dims[front[i]];
    require(shape[i] >= 0 && shape[i] < (int64_t{1} << 40), "a target dimension is negative or too large");
    const int64_t added = shape[i] - extent, before = added / 2;  // both cropping and padding put the odd element behind
    axes[front[i]] = pad_axis(extent, before, added - before);
  }
  return axes;
}

Dims extents_of(const std::vector<PadAxis>& axes) {
  Dims dims;
  for (const PadAxis& axis : axes) dims.push_back(axis.extent());
  return dims;
}

Diagonal diagonal_of(RunContext& r) {
  const TensorView& x = r.input(0);
  require(x.rank() >= 2, "the input must be a matrix or a batch of them");
  const int64_t rows = x.dims[x.rank() - 2], columns = x.dims[x.rank() - 1];
  return {rows, columns, r.has_input(1) ? std::clamp(input_int(r, 1), -rows - 1, columns + 1) : 0};
}

namespace {

// Where element `i` of the padded dimension comes from in the input.
int64_t source_index(const PadAxis& axis, int64_t i, PadMode mode) {
  const int64_t n = axis.kept, at = i - axis.before;
  if (at >= 0 && at < n) return axis.crop_start + at;
  int64_t inside = 0;
  if (mode == PadMode::edge) {
    inside = at < 0 ? 0 : n - 1;
  } else if (mode == PadMode::wrap) {
    inside = ((at % n) + n) % n;
  } else if (n > 1) {
    const int64_t period = 2 * (n - 1);
    inside = ((at % period) + period) % period;
    if (inside >= n) inside = period - inside;
  }
  return axis.crop_start + inside;
}

void pad_constant(RunContext& r, const TensorView& x, TensorView& y, const std::vector<PadAxis>& axes, const void* fill) {
  const Dims from_strides = strides_of(x.dims), to_strides = strides_of(y.dims);
  Dims kept(axes.size());
  int64_t from_offset = 0, to_offset = 0;
  for (size_t i = 0; i < axes.size(); ++i) {
    kept[i] = axes[i].kept;
    from_offset += axes[i].crop_start * from_strides[i];
    to_offset += axes[i].before * to_strides[i];
  }
  ElementReader from(x);
  ElementWriter to(y);
  if (count_of(kept) != y.count()) {
    copy_strided(y.dtype, {y.count()}, to.data(), {1}, fill, {0}, r.threads());
  }
  if (count_of(kept) > 0) {
    copy_strided(x.dtype, kept, offset_by(to.data(), to_offset, x.dtype), to_strides, offset_by(from.data(), from_offset, x.dtype),
                 from_strides, r.threads());
  }
  to.finish();
}

template <typename T>
void pad_mapped_rows(T* to, const T* from, const Dims& dims, const std::vector<Dims>& sources, const Dims& from_strides, int64_t run_start,
                     int64_t run, int threads) {
  const size_t last = dims.size() - 1;
  const int64_t columns = dims[last];
  parallel_for(product(dims, 0, last), kGrainElements / columns + 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t rest = row, offset = 0;
      for (size_t i = last; i-- > 0; rest /= dims[i]) offset += sources[i][static_cast<size_t>(rest % dims[i])] * from_strides[i];
      const T* source = from + offset;
      T* target = to + row * columns;
      for (int64_t j = 0; j < run_start; ++j) target[j] = source[sources[last][static_cast<size_t>(j)]];
      if (run > 0) std::copy_n(source + sources[last][static_cast<size_t>(run_start)], run, target + run_start);
      for (int64_t j = run_start + run; j < columns; ++j) target[j] = source[sources[last][static_cast<size_t>(j)]];
    }
  });
}

void pad_mapped(RunContext& r, const TensorView& x, TensorView& y, const std::vector<PadAxis>& axes, PadMode mode) {
  if (y.count() == 0) return;
  std::vector<Dims> sources(axes.size());  // for each axis: the input's index of each output index
  for (size_t i = 0; i < axes.size(); ++i) {
    require(axes[i].kept > 0, "a dimension without elements can't be padded by its own elements", "use mode constant");
    for (int64_t j = 0; j < axes[i].extent(); ++j) sources[i].push_back(source_index(axes[i], j, mode));
  }
  ElementReader from(x);
  ElementWriter to(y);
  if (axes.empty()) {
    copy_elements(x.dtype, to.data(), from.data(), 1);
  } else {
    with_element_type(x.dtype, [&]<typename T>(std::type_identity<T>) {
      pad_mapped_rows(static_cast<T*>(to.data()), static_cast<const T*>(from.data()), y.dims, sources, strides_of(x.dims),
                      axes.back().before, axes.back().kept, r.threads());
    });
  }
  to.finish();
}

// An element of zeros (or an empty string), or that of a one-element tensor.
struct FillValue {
  FillValue(RunContext& r, size_t input, DType dtype) {
    if (!r.has_input(input)) return;
    const TensorView& value = r.input(input);
    require(value.dtype == dtype && value.count() == 1, "the constant to pad with must be one element of the input's type");
    reader.emplace_back(value);
  }
  const void* data(DType dtype) const {
    if (!reader.empty()) return reader[0].data();
    return dtype == DType::string ? static_cast<const void*>(&empty) : static_cast<const void*>(&zero);
  }
  std::vector<ElementReader> reader;
  std::string empty;
  Element16 zero{};
};

CompiledKernel make_pad(const CompileContext& c) {
  const PadMode mode = pad_mode_of(c.node().get_string("mode", "constant"));
  return {[mode](RunContext& r) {
    const TensorView& x = r.input(0);
    const std::vector<PadAxis> axes = padded_axes(r);
    TensorView& y = sized_output(r, 0, extents_of(axes), x.dtype);
    if (mode != PadMode::constant) return pad_mapped(r, x, y, axes, mode);
    const FillValue fill(r, 2, x.dtype);
    pad_constant(r, x, y, axes, fill.data(x.dtype));
  }};
}

CompiledKernel make_center_crop_pad(const CompileContext& c) {
  const std::vector<int64_t> named = c.node().get_ints("axes");
  const bool has_axes = c.node().has("axes");
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);
    const std::vector<PadAxis> axes = centred_axes(r, has_axes ? &named : nullptr);
    const FillValue fill(r, 2, x.dtype);
    pad_constant(r, x, sized_output(r, 0, extents_of(axes), x.dtype), axes, fill.data(x.dtype));
  }};
}

CompiledKernel make_trilu(const CompileContext& c) {
  const bool upper = c.node().get_int("upper", 1) != 0;
  return {[upper](RunContext& r) {
    const TensorView& x = r.input(0);
    const Diagonal d = diagonal_of(r);
    const int64_t rows = d.rows, columns = d.columns;
    TensorView& y = sized_output(r, 0, x.dims, x.dtype);
    if (y.count() == 0) return;
    ElementReader from(x);
    ElementWriter to(y);
    with_element_type(x.dtype, [&]<typename T>(std::type_identity<T>) {
      const auto* source = static_cast<const T*>(from.data());
      auto* target = static_cast<T*>(to.data());
      parallel_for(x.count() / columns, kGrainElements / columns + 1, r.threads(), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t diagonal = row % rows + d.k;  // its column in this row
          const int64_t first = upper ? std::clamp<int64_t>(diagonal, 0, columns) : 0;
          const int64_t last = upper ? columns : std::clamp<int64_t>(diagonal + 1, 0, columns);
          const int64_t at = row * columns;
          std::fill(target + at, target + at + first, T{});
          std::copy(source + at + first, source + at + last, target + at + first);
          std::fill(target + at + last, target + at + columns, T{});
        }
      });
    });
    to.finish();
  }};
}

CompiledKernel make_reverse_sequence(const CompileContext& c) {
  const int64_t batch_attribute = c.node().get_int("batch_axis", 1), time_attribute = c.node().get_int("time_axis", 0);
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t batch_axis = normalise_axis(batch_attribute, x.rank()), time_axis = normalise_axis(time_attribute, x.rank());
    require(batch_axis != time_axis, "batch_axis and time_axis are the same");
    const std::vector<int64_t> lengths = r.input_ints(1);
    if (static_cast<int64_t>(lengths.size()) != x.dims[batch_axis]) {
      throw Error("there are " + std::to_string(lengths.size()) + " sequence lengths for a batch of " + std::to_string(x.dims[batch_axis]));
    }
    TensorView& y = sized_output(r, 0, x.dims, x.dtype);
    ElementReader from(x);
    ElementWriter to(y);
    const Dims strides = strides_of(x.dims);
    const int64_t extent = x.dims[time_axis];
    Dims part = x.dims, backwards = strides;
    part[batch_axis] = 1;
    backwards[time_axis] = -strides[time_axis];
    for (size_t b = 0; b < lengths.size(); ++b) {
      const int64_t length = lengths[b], base = static_cast<int64_t>(b) * strides[batch_axis];
      if (length < 0 || length > extent) {
        throw Error("a sequence length of " + std::to_string(length) + " is outside a time axis of " + std::to_string(extent));
      }
      const int64_t tail = base + length * strides[time_axis];
      part[time_axis] = length;
      if (length > 0)
        copy_strided(x.dtype, part, offset_by(to.data(), base, x.dtype), strides,
                     offset_by(from.data(), tail - strides[time_axis], x.dtype), backwards, r.threads());
      part[time_axis] = extent - length;
      copy_strided(x.dtype, part, offset_by(to.data(), tail, x.dtype), strides, offset_by(from.data(), tail, x.dtype), strides,
                   r.threads());
    }
    to.finish();
  }};
}

}  // namespace

void register_padding(KernelRegistry& registry) {
  registry.add({.op = "Pad", .make = make_pad});
  registry.add({.op = "CenterCropPad", .make = make_center_crop_pad});
  registry.add({.op = "Trilu", .make = make_trilu});
  registry.add({.op = "ReverseSequence", .make = make_reverse_sequence});
}

}  // namespace fretsaw
