// Pad and its kin: Pad, CenterCropPad, Trilu, ReverseSequence.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/movement.h"
#include "kernels/cuda/index_math.h"
#include "kernels/cuda/movement.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr size_t kMaxRank = 12;
constexpr int64_t kSmall = (int64_t{1} << 31) - 1;

unsigned unrolled_blocks(int64_t count) {
  return static_cast<unsigned>((count + kThreads * kUnroll - 1) / (kThreads * kUnroll));
}

// --- Pad ---

struct PadPlan {
  PadMode mode = PadMode::constant;
  int rank = 0;
  PadAxis axes[kMaxRank];
  int64_t strides[kMaxRank] = {};  // of the input
};

// Where index `i` of the padded dimension comes from in the input; -1: from nowhere.
FRETSAW_HOST_DEVICE int64_t source_index(const PadAxis& axis, int64_t i, PadMode mode) {
  const int64_t n = axis.kept;
  int64_t at = i - axis.before;
  if (at >= 0 && at < n) return axis.crop_start + at;
  if (mode == PadMode::constant) return -1;
  if (mode == PadMode::edge) {
    at = at < 0 ? 0 : n - 1;
  } else if (mode == PadMode::wrap) {
    at = (at % n + n) % n;
  } else if (n > 1) {
    const int64_t period = 2 * (n - 1);
    at = (at % period + period) % period;
    at = at < n ? at : period - at;
  } else {
    at = 0;
  }
  return axis.crop_start + at;
}

// Output elements in the order of memory, by their coordinates.
template <typename Index>
struct PadExtents {
  Divider<Index> extents[kMaxRank];
};

template <typename Index>
FRETSAW_HOST_DEVICE int64_t pad_source(const PadPlan& plan, const PadExtents<Index>& out, Index i) {
  int64_t offset = 0;
  for (int k = plan.rank - 1; k >= 0; --k) {
    const Index outer = out.extents[k].quotient(i);
    const int64_t from = source_index(plan.axes[k], static_cast<int64_t>(i - outer * out.extents[k].divisor), plan.mode);
    if (from < 0) return -1;
    offset += from * plan.strides[k];
    i = outer;
  }
  return offset;
}

template <typename T, typename Index>
__global__ void __launch_bounds__(kThreads)
    pad_elements(PadPlan plan, PadExtents<Index> out, T* to, const T* from, T outside, Index count) {
  const Index first = static_cast<Index>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  T read[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Index i = first + u * kThreads;
    if (i >= count) continue;
    const int64_t source = pad_source(plan, out, i);
    read[u] = source < 0 ? outside : from[source];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Index i = first + u * kThreads;
    if (i < count) to[i] = read[u];
  }
}

bool is_whole(const PadAxis& axis, int64_t extent) {
  return axis.before == 0 && axis.after == 0 && axis.kept == extent;
}

// Fewer and wider elements: dimensions that stay whole join the one before, and pairs of elements become one.
struct PadShape {
  std::vector<PadAxis> axes;
  Dims extents;  // of the input
  size_t element_bytes;

  void merge(PadMode mode) {
    std::vector<PadAxis> merged;
    Dims merged_extents;
    for (size_t k = 0; k < axes.size(); ++k) {
      const bool joins =
          !merged.empty() && is_whole(axes[k], extents[k]) && (mode == PadMode::constant || is_whole(merged.back(), merged_extents.back()));
      if (!joins) {
        merged.push_back(axes[k]);
        merged_extents.push_back(extents[k]);
        continue;
      }
      PadAxis& last = merged.back();
      for (int64_t* v : {&last.crop_start, &last.kept, &last.before, &last.after, &merged_extents.back()}) *v *= extents[k];
    }
    axes = std::move(merged);
    extents = std::move(merged_extents);
  }

  void widen(PadMode mode) {
    if (axes.empty() || (mode != PadMode::constant && !is_whole(axes.back(), extents.back()))) return;
    PadAxis& last = axes.back();
    const auto numbers = {&last.crop_start, &last.kept, &last.before, &last.after, &extents.back()};
    while (element_bytes < 16 && std::all_of(numbers.begin(), numbers.end(), [](int64_t* v) { return *v % 2 == 0; })) {
      element_bytes *= 2;
      for (int64_t* v : numbers) *v /= 2;
    }
  }
};

template <typename T, typename Index>
void launch_pad(const PadPlan& plan, const PadShape& shape, const TensorView& x, TensorView& y, int64_t count, const Pattern& outside,
                cudaStream_t stream) {
  PadExtents<Index> out;
  for (size_t k = 0; k < shape.axes.size(); ++k) out.extents[k] = Divider<Index>(shape.axes[k].extent());
  T element;
  std::memcpy(&element, outside.bytes, sizeof(T));
  pad_elements<T, Index>
      <<<unrolled_blocks(count), kThreads, 0, stream>>>(plan, out, y.as<T>(), x.as<const T>(), element, static_cast<Index>(count));
  check_launch("pad");
}

void pad(RunContext& r, PadMode mode, const std::vector<PadAxis>& axes, Layout layout) {
  const TensorView& x = r.input(0);
  TensorView& y = device_output(r, 0, extents_of(axes), x.dtype, layout);
  PadShape shape{{}, physical_dims(x.dims, layout), element_bytes(x.dtype)};
  shape.axes.resize(axes.size());
  for (size_t k = 0; k < axes.size(); ++k) shape.axes[physical_axis(k, layout)] = axes[k];
  Pattern outside;
  if (mode == PadMode::constant && r.has_input(2)) {
    const TensorView& value = r.input(2);
    require(value.dtype == x.dtype && value.count() == 1, "the constant to pad with must be one element of the input's type");
    outside = Pattern(value.data, shape.element_bytes);
  }
  if (y.count() == 0) return;
  if (x.count() == 0) {
    require(mode == PadMode::constant, "a dimension without elements can't be padded by its own elements", "use mode constant");
    return fill(y.data, y.count(), outside, shape.element_bytes, stream_of(r));
  }
  shape.merge(mode);
  shape.widen(mode);
  require(shape.axes.size() <= kMaxRank, "the tensor has too many dimensions to be padded on this device", "use --device cpu");
  PadPlan plan;
  plan.mode = mode;
  plan.rank = static_cast<int>(shape.axes.size());
  const Dims strides = strides_of(shape.extents);
  for (size_t k = 0; k < shape.axes.size(); ++k) {
    require(mode == PadMode::constant || shape.axes[k].kept > 0, "a dimension without elements can't be padded by its own elements",
            "use mode constant");
    plan.axes[k] = shape.axes[k];
    plan.strides[k] = strides[k];
  }
  const auto count = static_cast<int64_t>(y.bytes() / shape.element_bytes);
  with_unit(shape.element_bytes, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    if (count <= kSmall) {
      launch_pad<T, uint32_t>(plan, shape, x, y, count, outside, stream_of(r));
    } else {
      launch_pad<T, int64_t>(plan, shape, x, y, count, outside, stream_of(r));
    }
  });
}

CompiledKernel make_pad(const CompileContext& c) {
  const PadMode mode = pad_mode_of(c.node().get_string("mode", "constant"));
  const Layout layout = offered_layout(c, 0);
  return {.run = [=](RunContext& r) { pad(r, mode, padded_axes(r), layout); }, .input_layouts = {layout}, .output_layouts = {layout}};
}

CompiledKernel make_center_crop_pad(const CompileContext& c) {
  const std::vector<int64_t> named = c.node().get_ints("axes");
  const bool has_axes = c.node().has("axes");
  return {[=](RunContext& r) { pad(r, PadMode::constant, centred_axes(r, has_axes ? &named : nullptr), Layout::plain); }};
}

// --- Trilu ---

struct Triangle {
  Divider<int64_t> rows, columns;
  int64_t shift = 0;  // the column of the diagonal in row 0
  bool upper = true;

  FRETSAW_HOST_DEVICE bool keeps(int64_t i) const {
    const int64_t row = columns.quotient(i), column = i - row * columns.divisor;
    const int64_t diagonal = row - rows.quotient(row) * rows.divisor + shift;
    return upper ? column >= diagonal : column <= diagonal;
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) keep_triangle(Triangle triangle, T* to, const T* from, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    to[i] = triangle.keeps(i) ? from[i] : T{};
  }
}

CompiledKernel make_trilu(const CompileContext& c) {
  const bool upper = c.node().get_int("upper", 1) != 0;
  return {[upper](RunContext& r) {
    const TensorView& x = r.input(0);
    const Diagonal diagonal = diagonal_of(r);
    TensorView& y = device_output(r, 0, x.dims, x.dtype);
    const int64_t count = y.count();
    if (count == 0) return;
    const Triangle triangle{Divider<int64_t>(diagonal.rows), Divider<int64_t>(diagonal.columns), diagonal.k, upper};
    with_unit(element_bytes(x.dtype), [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      keep_triangle<T><<<blocks_for(count, kThreads, 2), kThreads, 0, stream_of(r)>>>(triangle, y.as<T>(), x.as<const T>(), count);
      check_launch("Trilu");
    });
  }};
}

// --- ReverseSequence ---

struct Reversal {
  Divider<int64_t> time_stride, time, batch_stride, batch;

  FRETSAW_HOST_DEVICE int64_t source(int64_t i, const int64_t* lengths) const {
    const int64_t t = time_stride.quotient(i) % time.divisor, b = batch_stride.quotient(i) % batch.divisor;
    const int64_t length = lengths[b] < time.divisor ? lengths[b] : time.divisor;
    return t < length ? i + (length - 1 - 2 * t) * time_stride.divisor : i;
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) reverse(Reversal reversal, T* to, const T* from, const int64_t* lengths, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    to[i] = from[reversal.source(i, lengths)];
  }
}

CompiledKernel make_reverse_sequence(const CompileContext& c) {
  const int64_t batch_attribute = c.node().get_int("batch_axis", 1), time_attribute = c.node().get_int("time_axis", 0);
  return {[=](RunContext& r) {
    const TensorView &x = r.input(0), &lengths = r.input(1);
    const size_t batch_axis = normalise_axis(batch_attribute, x.rank()), time_axis = normalise_axis(time_attribute, x.rank());
    require(batch_axis != time_axis, "batch_axis and time_axis are the same");
    if (lengths.count() != x.dims[batch_axis]) {
      throw Error("there are " + std::to_string(lengths.count()) + " sequence lengths for a batch of " +
                  std::to_string(x.dims[batch_axis]));
    }
    TensorView& y = device_output(r, 0, x.dims, x.dtype);
    const int64_t count = y.count();
    if (count == 0) return;
    const Dims strides = strides_of(x.dims);
    const Reversal reversal{Divider<int64_t>(strides[time_axis]), Divider<int64_t>(x.dims[time_axis]),
                            Divider<int64_t>(strides[batch_axis]), Divider<int64_t>(x.dims[batch_axis])};
    with_unit(element_bytes(x.dtype), [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      reverse<T><<<blocks_for(count, kThreads, 2), kThreads, 0, stream_of(r)>>>(reversal, y.as<T>(), x.as<const T>(),
                                                                                lengths.as<const int64_t>(), count);
      check_launch("ReverseSequence");
    });
  }};
}

}  // namespace

void register_padding(KernelRegistry& registry) {
  const auto movable = refuse_unmovable_input;
  registry.add({.op = "Pad", .make = make_pad, .unsupported = movable, .host_inputs = {1, 2, 3}});
  registry.add({.op = "CenterCropPad", .make = make_center_crop_pad, .unsupported = movable, .host_inputs = {1}});
  registry.add({.op = "Trilu", .make = make_trilu, .unsupported = movable, .host_inputs = {1}});
  registry.add({.op = "ReverseSequence", .make = make_reverse_sequence, .unsupported = movable});
}

}  // namespace fretsaw::cuda
