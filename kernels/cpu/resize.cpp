// Resize: nearest by index tables, linear and cubic one axis after the other (two at once for images).
#include <algorithm>
#include <cmath>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/image.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/resize_axes.h"

namespace fretsaw {
namespace {

// --- nearest ---

template <typename T>
void resize_nearest(const std::vector<AxisTaps>& axes, const Dims& from_strides, const T* from, T* to, const T& outside, int threads) {
  const size_t last = axes.size() - 1;
  const AxisTaps& columns = axes[last];
  int64_t rows = 1;
  for (size_t i = 0; i < last; ++i) rows *= axes[i].out;
  parallel_for(rows, kGrainElements / columns.out + 1, threads, [&](int64_t begin, int64_t end) {
    int64_t previous = -1;
    for (int64_t row = begin; row < end; ++row) {
      int64_t rest = row, base = 0;
      bool extrapolated = false;
      for (size_t i = last; i-- > 0; rest /= axes[i].out) {
        const auto j = static_cast<size_t>(rest % axes[i].out);
        base += axes[i].index[j] * from_strides[i];
        extrapolated |= !axes[i].extrapolated.empty() && axes[i].extrapolated[j];
      }
      T* target = to + row * columns.out;
      if (extrapolated) {
        std::fill_n(target, columns.out, outside);
        previous = -1;
        continue;
      }
      if (base == previous) {  // the same as the row above
        std::copy_n(target - columns.out, columns.out, target);
        continue;
      }
      previous = base;
      if (columns.identity) {
        std::copy_n(from + base, columns.out, target);
        continue;
      }
      for (int64_t j = 0; j < columns.out; ++j) target[j] = from[base + columns.index[static_cast<size_t>(j)]];
      for (size_t j = 0; j < columns.extrapolated.size(); ++j) {
        if (columns.extrapolated[j]) target[j] = outside;
      }
    }
  });
}

// --- linear and cubic ---

// y[j] = the sum of the taps over a row of neighbouring elements.
template <typename T>
void interpolate_row(const AxisTaps& axis, const T* weights, const T* x, T* y) {
  const int32_t* index = axis.index.data();
  const int64_t out = axis.out;
  if (axis.taps == 2) {
    for (int64_t j = 0; j < out; ++j) y[j] = weights[j] * x[index[j]] + weights[out + j] * x[index[out + j]];
    return;
  }
  for (int64_t j = 0; j < out; ++j) {
    T sum = 0;
    for (int64_t t = 0; t < axis.taps; ++t) sum += weights[t * out + j] * x[index[t * out + j]];
    y[j] = sum;
  }
}

// Output row j of an axis whose elements are rows of `inner` elements.
template <typename T>
void interpolate_rows(const AxisTaps& axis, const T* weights, int64_t j, const T* x, T* y, int64_t inner) {
  const T* first = x + axis.index[static_cast<size_t>(j)] * inner;
  const T w0 = weights[j];
  if (axis.taps == 1) {
    std::copy_n(first, inner, y);
    return;
  }
  const T* second = x + axis.index[static_cast<size_t>(axis.out + j)] * inner;
  const T w1 = weights[axis.out + j];
  run_vectorised([=]() FRETSAW_ALWAYS_INLINE {
    for (int64_t i = 0; i < inner; ++i) y[i] = w0 * first[i] + w1 * second[i];
  });
  for (int64_t t = 2; t < axis.taps; ++t) {
    const T* next = x + axis.index[static_cast<size_t>(t * axis.out + j)] * inner;
    const T w = weights[t * axis.out + j];
    run_vectorised([=]() FRETSAW_ALWAYS_INLINE {
      for (int64_t i = 0; i < inner; ++i) y[i] += w * next[i];
    });
  }
}

template <typename T>
struct WeightedAxis {
  const AxisTaps* taps;
  std::vector<T> weights;
  explicit WeightedAxis(const AxisTaps& axis) : taps(&axis), weights(axis.weight.begin(), axis.weight.end()) {}
  bool extrapolated(int64_t j) const { return !taps->extrapolated.empty() && taps->extrapolated[static_cast<size_t>(j)]; }
};

// One axis of x [outer, in, inner] to y [outer, out, inner].
template <typename T>
void resize_axis(const WeightedAxis<T>& axis, int64_t outer, int64_t inner, const T* x, T* y, T outside, int threads) {
  const AxisTaps& taps = *axis.taps;
  parallel_for(outer, kGrainElements / (taps.out * inner) + 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      const T* source = x + o * taps.in * inner;
      T* target = y + o * taps.out * inner;
      if (inner == 1) interpolate_row(taps, axis.weights.data(), source, target);
      for (int64_t j = 0; j < taps.out; ++j) {
        if (axis.extrapolated(j)) {
          std::fill_n(target + j * inner, inner, outside);
        } else if (inner > 1) {
          interpolate_rows(taps, axis.weights.data(), j, source, target + j * inner, inner);
        }
      }
    }
  });
}

// Both axes of planes x [planes, H, W] to y [planes, H', W'], the columns of each needed row first.
template <typename T>
void resize_planes(const WeightedAxis<T>& rows, const WeightedAxis<T>& columns, int64_t planes, const T* x, T* y, T outside, int threads) {
  const AxisTaps &h = *rows.taps, &w = *columns.taps;
  std::vector<uint8_t> needed(static_cast<size_t>(h.in), 0);
  for (int32_t i : h.index) needed[static_cast<size_t>(i)] = 1;
  parallel_for(planes, kGrainElements / (h.out * w.out) + 1, threads, [&](int64_t begin, int64_t end) {
    std::vector<T> narrow(static_cast<size_t>(h.in * w.out));  // [H, W']
    for (int64_t p = begin; p < end; ++p) {
      for (int64_t i = 0; i < h.in; ++i) {
        if (!needed[static_cast<size_t>(i)]) continue;
        T* row = narrow.data() + i * w.out;
        interpolate_row(w, columns.weights.data(), x + (p * h.in + i) * w.in, row);
        for (int64_t j = 0; j < w.out && !w.extrapolated.empty(); ++j) {
          if (columns.extrapolated(j)) row[j] = outside;
        }
      }
      for (int64_t j = 0; j < h.out; ++j) {
        T* row = y + (p * h.out + j) * w.out;
        if (rows.extrapolated(j)) {
          std::fill_n(row, w.out, outside);
        } else {
          interpolate_rows(h, rows.weights.data(), j, narrow.data(), row, w.out);
        }
      }
    }
  });
}

template <typename T>
void resize_smooth(const std::vector<AxisTaps>& axes, const T* x, T* y, int64_t count, T outside, int threads) {
  std::vector<size_t> changed;
  for (size_t i = 0; i < axes.size(); ++i) {
    if (!axes[i].identity) changed.push_back(i);
  }
  const size_t rank = axes.size();
  if (changed.empty()) {
    std::copy_n(x, count, y);
    return;
  }
  if (changed.size() == 2 && changed[0] == rank - 2 && changed[1] == rank - 1) {
    const int64_t planes = count / (axes[rank - 2].out * axes[rank - 1].out);
    resize_planes<T>(WeightedAxis<T>(axes[rank - 2]), WeightedAxis<T>(axes[rank - 1]), planes, x, y, outside, threads);
    return;
  }
  std::vector<T> current, next;
  for (size_t k = 0; k < changed.size(); ++k) {
    int64_t outer = 1, inner = 1;
    for (size_t i = 0; i < changed[k]; ++i) outer *= axes[i].out;
    for (size_t i = changed[k] + 1; i < rank; ++i) inner *= axes[i].in;
    const bool last = k + 1 == changed.size();
    if (!last) next.resize(static_cast<size_t>(outer * axes[changed[k]].out * inner));
    resize_axis<T>(WeightedAxis<T>(axes[changed[k]]), outer, inner, k == 0 ? x : current.data(), last ? y : next.data(), outside, threads);
    std::swap(current, next);
  }
}

// Integers are rounded and kept in range.
template <typename T>
void round_to_type(DType dtype, T* values, int64_t count) {
  if (!is_integer(dtype)) return;
  const int bits = bits_of(dtype);
  const bool is_unsigned = dtype == DType::uint8 || dtype == DType::uint16 || dtype == DType::uint32 || dtype == DType::uint64 ||
                           dtype == DType::uint4 || dtype == DType::uint2;
  const T low = is_unsigned ? T(0) : -std::ldexp(T(1), bits - 1);
  T high = std::ldexp(T(1), is_unsigned ? bits : bits - 1);
  high = bits > 32 ? std::nextafter(high, T(0)) : high - 1;
  for (int64_t i = 0; i < count; ++i) values[i] = std::clamp(std::nearbyint(values[i]), low, high);
}

void run_smooth(const TensorView& x, TensorView& y, const std::vector<AxisTaps>& axes, float outside, int threads) {
  const bool wide = x.dtype == DType::float64 || (is_integer(x.dtype) && bits_of(x.dtype) >= 32);
  with_compute_type(wide ? DType::float64 : DType::float32, [&]<typename T>() {
    NumberReader<T> from(x);
    NumberWriter<T> to(y);
    resize_smooth<T>(axes, from.data(), to.data(), y.count(), static_cast<T>(outside), threads);
    round_to_type(y.dtype, to.data(), y.count());
    to.finish();
  });
}

void run_nearest(const TensorView& x, TensorView& y, const std::vector<AxisTaps>& axes, float outside, int threads) {
  ElementReader from(x);
  ElementWriter to(y);
  Element16 fill{};
  store_from<float>(x.dtype, &fill, 0, 1, &outside);
  with_element_type(x.dtype, [&]<typename T>(std::type_identity<T>) {
    if constexpr (!std::is_same_v<T, std::string>) {
      resize_nearest<T>(axes, strides_of(x.dims), static_cast<const T*>(from.data()), static_cast<T*>(to.data()),
                        *reinterpret_cast<const T*>(&fill), threads);
    }
  });
  to.finish();
}

CompiledKernel make_resize(const CompileContext& c) {
  const ResizeNode node(c.node());
  return {[node](RunContext& r) {
    const TensorView& x = r.input(0);
    const std::vector<AxisSize> sizes = axis_sizes(node, r);
    Dims dims;
    for (const AxisSize& size : sizes) dims.push_back(size.out);
    TensorView& y = sized_output(r, 0, dims, x.dtype);
    if (y.count() == 0) return;
    require(x.dtype != DType::string, "strings can't be resized");
    if (x.rank() == 0) return copy_view(y, x, 1);
    require(x.count() > 0, "a tensor without elements can't be resized to one with elements");
    std::vector<AxisTaps> axes;
    for (const AxisSize& size : sizes) axes.push_back(axis_taps(node.rule, size));
    if (node.rule.mode == ResizeMode::nearest) {
      run_nearest(x, y, axes, node.extrapolation, r.threads());
    } else {
      run_smooth(x, y, axes, node.extrapolation, r.threads());
    }
  }};
}

}  // namespace

void register_resize(KernelRegistry& registry) {
  registry.add({.op = "Resize", .make = make_resize});
}

void register_image(KernelRegistry& registry) {
  register_resize(registry);
  register_sampling(registry);
  register_regions(registry);
}

}  // namespace fretsaw
