// DeformConv: each tap of each output cell reads its input where an offset moves it, between cells by bilinear interpolation. And its
// gradients.
#include <algorithm>
#include <optional>

#include "kernels/cpu/convolution.h"
#include "kernels/cpu/convolution_loops.h"
#include "kernels/cpu/deformation.h"
#include "kernels/cpu/gradients.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

namespace {

template <typename T>
T sum_corners(const Corners<T>& corners, const T (&of)[4], const T* image) {
  T total = 0;
  for (int k = 0; k < 4; ++k)
    if (corners.at[k] >= 0) total += of[k] * image[corners.at[k]];
  return total;
}

// What a tap of an offset group reads for a cell; `offset` of one image.
template <typename T>
Corners<T> corners_of(const Deformation& d, const T* offset, int64_t group, int64_t tap, int64_t cell) {
  const T* moved = offset + (group * d.taps() + tap) * 2 * d.cells() + cell;
  return {d.H, d.W, spot_of(d, first_spot<T>(d, cell), static_cast<int>(tap), moved[0], moved[d.cells()])};
}

Deformation deformation_of(const Node& node, const TensorView& x, const TensorView& w, const TensorView& offset, const TensorView* bias,
                           const TensorView* mask, Dims& y) {
  return read_deformation(node, x.dims, w.dims, offset.dims, bias ? std::optional(bias->count()) : std::nullopt,
                          mask ? std::optional(mask->dims) : std::nullopt, y);
}

// One image. columns [C, taps, OH*OW] = X sampled; then Y = W * columns for each group.
template <typename T>
void sample(const Deformation& d, const T* x, const T* offset, const T* mask, T* columns, int threads) {
  const int64_t taps = d.taps(), cells = d.cells();
  parallel_for(d.C * taps, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t c = row / taps, tap = row % taps, group = c / d.sharing;
      const T* weight = mask ? mask + (group * taps + tap) * cells : nullptr;
      for (int64_t cell = 0; cell < cells; ++cell) {
        const Corners<T> corners = corners_of(d, offset, group, tap, cell);
        const T value = sum_corners(corners, corners.weight, x + c * d.H * d.W);
        columns[row * cells + cell] = weight ? value * weight[cell] : value;
      }
    }
  });
}

template <typename T>
void multiply(const Deformation& d, const T* w, const T* bias, const T* columns, T* y, int threads) {
  const int64_t cells = d.cells(), group_in = d.group_in * d.taps(), group_out = d.group_out;
  parallel_for(d.O, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      T* out = y + o * cells;
      std::fill(out, out + cells, bias ? bias[o] : T(0));
      for (int64_t k = 0; k < group_in; ++k) {
        const T factor = w[o * group_in + k];
        const T* row = columns + (o / group_out * group_in + k) * cells;
        for (int64_t i = 0; i < cells; ++i) out[i] += factor * row[i];
      }
    }
  });
}

// Inputs: X [N, C, H, W], W [O, C/groups, kH, kW], offset [N, offset_groups * taps * 2, OH, OW], B [O], mask [N, offset_groups * taps, OH,
// OW].
template <typename T>
void deform(RunContext& r, const Node& node) {
  const TensorView &x = r.input(0), &w = r.input(1), &offset = r.input(2);
  const TensorView *bias = r.has_input(3) ? &r.input(3) : nullptr, *mask = r.has_input(4) ? &r.input(4) : nullptr;
  Dims y_dims;
  const Deformation d = deformation_of(node, x, w, offset, bias, mask, y_dims);
  TensorView& y = r.output(0, y_dims);
  if (y.count() == 0) return;
  T* columns = static_cast<T*>(r.scratch(static_cast<size_t>(d.C * d.taps() * d.cells() + 1) * sizeof(T)));
  for (int64_t n = 0; n < d.N; ++n) {
    const int64_t moved = n * d.offset_groups * d.taps() * d.cells();
    sample(d, x.as<T>() + n * d.C * d.H * d.W, offset.as<T>() + 2 * moved, mask ? mask->as<T>() + moved : nullptr, columns, r.threads());
    multiply(d, w.as<T>(), bias ? bias->as<T>() : nullptr, columns, y.as<T>() + n * d.O * d.cells(), r.threads());
  }
}

// --- gradients ---

// What flows back to the samples [C, taps, cells] of an image: W' dY for each group.
template <typename T>
void multiply_back(const Deformation& d, const T* w, const T* dy, T* dcolumns, int threads) {
  const int64_t cells = d.cells(), group_in = d.group_in * d.taps(), group_out = d.group_out;
  parallel_for(d.C * d.taps(), 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* to = dcolumns + row * cells;
      std::fill_n(to, cells, T(0));
      const int64_t first = row / group_in * group_out;
      for (int64_t o = first; o < first + group_out; ++o)
        for (int64_t i = 0; i < cells; ++i) to[i] += w[o * group_in + row % group_in] * dy[o * cells + i];
    }
  });
}
template <typename T>
void add_to_weights(const Deformation& d, const T* columns, const T* dy, T* dw, int threads) {
  const int64_t cells = d.cells(), group_in = d.group_in * d.taps(), group_out = d.group_out;
  parallel_for(d.O, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      for (int64_t k = 0; k < group_in; ++k) {
        const T* row = columns + (o / group_out * group_in + k) * cells;
        T sum = 0;
        for (int64_t i = 0; i < cells; ++i) sum += dy[o * cells + i] * row[i];
        dw[o * group_in + k] += sum;
      }
    }
  });
}
// To the image, whose channels have elements of their own.
template <typename T>
void give_to_image(const Deformation& d, const T* offset, const T* mask, const T* dcolumns, T* dx, int threads) {
  const int64_t taps = d.taps(), cells = d.cells();
  parallel_for(d.C, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      T* image = dx + c * d.H * d.W;
      std::fill_n(image, d.H * d.W, T(0));
      const int64_t group = c / d.sharing;
      for (int64_t i = 0; i < taps * cells; ++i) {
        const Corners<T> corners = corners_of(d, offset, group, i / cells, i % cells);
        const T g = dcolumns[c * taps * cells + i] * (mask ? mask[group * taps * cells + i] : T(1));
        for (int k = 0; k < 4; ++k)
          if (corners.at[k] >= 0) image[corners.at[k]] += corners.weight[k] * g;
      }
    }
  });
}
// To offsets and mask, which all channels of a group share. Either may be null.
template <typename T>
void give_to_places(const Deformation& d, const T* x, const T* offset, const T* mask, const T* dcolumns, T* doffset, T* dmask,
                    int threads) {
  const int64_t taps = d.taps(), cells = d.cells(), each = d.sharing;
  parallel_for(d.offset_groups * taps, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; ++place) {
      const int64_t group = place / taps, tap = place % taps;
      for (int64_t cell = 0; cell < cells; ++cell) {
        const Corners<T> corners = corners_of(d, offset, group, tap, cell);
        T down = 0, right = 0, taken = 0;
        for (int64_t c = group * each; c < (group + 1) * each; ++c) {
          const T g = dcolumns[(c * taps + tap) * cells + cell];
          const T* image = x + c * d.H * d.W;
          taken += g * sum_corners(corners, corners.weight, image);
          down += g * sum_corners(corners, corners.down, image), right += g * sum_corners(corners, corners.right, image);
        }
        const T factor = mask ? mask[place * cells + cell] : T(1);
        if (dmask) dmask[place * cells + cell] = taken;
        if (doffset) doffset[2 * place * cells + cell] = factor * down, doffset[(2 * place + 1) * cells + cell] = factor * right;
      }
    }
  });
}

// Inputs: dY, X, W, offset, mask. Outputs: dX, dW, doffset, dmask.
template <typename T>
void deform_back(RunContext& r, const Node& node) {
  const TensorView &dy = r.input(0), &x = r.input(1), &w = r.input(2), &offset = r.input(3);
  const TensorView* mask = r.has_input(4) ? &r.input(4) : nullptr;
  Dims y_dims;
  const Deformation d = deformation_of(node, x, w, offset, nullptr, mask, y_dims);
  if (dy.dims != y_dims)
    throw Error("a gradient that is not of the shape of DeformConv's result", "give that of the forward node's output");
  const auto wanted = [&](size_t o, const TensorView* like) {
    return like && r.wants_output(o) ? r.output(o, like->dims).as<T>() : nullptr;
  };
  T *dx = wanted(0, &x), *dw = wanted(1, &w), *doffset = wanted(2, &offset), *dmask = wanted(3, mask);
  if (dw) std::fill_n(dw, w.count(), T(0));
  const int64_t samples = d.C * d.taps() * d.cells();
  T* columns = static_cast<T*>(r.scratch(static_cast<size_t>(2 * samples + 1) * sizeof(T)));
  T* dcolumns = columns + samples;
  for (int64_t n = 0; n < d.N; ++n) {
    const int64_t moved = n * d.offset_groups * d.taps() * d.cells();
    const T *image = x.as<T>() + n * d.C * d.H * d.W, *places = offset.as<T>() + 2 * moved,
            *factors = mask ? mask->as<T>() + moved : nullptr;
    const T* g = dy.as<T>() + n * d.O * d.cells();
    if (dw) {
      sample(d, image, places, factors, columns, r.threads());
      add_to_weights(d, columns, g, dw, r.threads());
    }
    multiply_back(d, w.as<T>(), g, dcolumns, r.threads());
    if (dx) give_to_image(d, places, factors, dcolumns, dx + n * d.C * d.H * d.W, r.threads());
    if (doffset || dmask)
      give_to_places(d, image, places, factors, dcolumns, doffset ? doffset + 2 * moved : nullptr, dmask ? dmask + moved : nullptr,
                     r.threads());
  }
}

CompiledKernel make_deform_float(const CompileContext& c) {
  return {[node = Node(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(0).dtype, [&]<typename T>() { deform<T>(r, node); });
  }};
}

CompiledKernel make_gradient_float(const CompileContext& c) {
  return {[node = Node(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(1).dtype, [&]<typename T>() { deform_back<T>(r, node); });
  }};
}

}  // namespace

Deformation read_deformation(const Node& node, const Dims& x, const Dims& w, const Dims& offset, std::optional<int64_t> bias,
                             const std::optional<Dims>& mask, Dims& y) {
  if (x.size() != 4) throw Error("DeformConv of shape " + to_string(x), "give it [N,C,H,W]");
  Window window;
  y = convolution_output(node, x, w, false, window);
  const int64_t groups = node.get_int("group", 1), offset_groups = node.get_int("offset_group", 1), taps = window.taps();
  if (offset_groups < 1 || x[1] % offset_groups != 0 || offset != Dims{y[0], offset_groups * taps * 2, y[2], y[3]} ||
      (bias && *bias != y[1]) || (mask && *mask != Dims{y[0], offset_groups * taps, y[2], y[3]})) {
    throw Error("the offsets, bias or mask do not fit the convolution", "check their shapes and offset_group");
  }
  const auto small = [](int64_t n) { return static_cast<int>(n); };
  return {x[0],
          x[1],
          x[2],
          x[3],
          y[1],
          y[2],
          y[3],
          x[1] / groups,
          y[1] / groups,
          offset_groups,
          x[1] / offset_groups,
          small(window.kernel[0]),
          small(window.kernel[1]),
          small(window.strides[0]),
          small(window.strides[1]),
          small(window.dilations[0]),
          small(window.dilations[1]),
          small(window.pads_begin[0]),
          small(window.pads_begin[1])};
}

void register_deformable_convolution(KernelRegistry& registry) {
  registry.add({.op = "DeformConv", .make = any_float<make_deform_float>});
}
void register_deformable_gradient(KernelRegistry& registry) {
  add_gradient(registry, "DeformConvGrad", any_float<make_gradient_float>);
}

}  // namespace fretsaw
