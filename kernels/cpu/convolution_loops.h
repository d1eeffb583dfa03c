// Convolutions by plain loops, for element types that oneDNN's float32 primitives do not serve.
#pragma once
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/window.h"

namespace fretsaw {

struct ConvolutionShape {
  int64_t batch, channels, outputs, groups;  // X [batch, channels, in...], Y [batch, outputs, out...]
  Dims in, out;                              // spatial
};

// Steps `index` through `dims` as an odometer does; false after the last.
inline bool next_index(Dims& index, const Dims& dims) {
  for (size_t i = dims.size(); i-- > 0;) {
    if (++index[i] < dims[i]) return true;
    index[i] = 0;
  }
  return false;
}

// Calls visit(out_cell, in_cell) for each pair of cells that the tap at `tap` joins: in = out * stride - begin + tap * dilation.
template <typename Visit>
void for_each_pair(const Window& w, const Dims& in, const Dims& out, const Dims& tap, const Visit& visit) {
  Dims cell(out.size(), 0);
  int64_t out_cell = 0;
  do {
    int64_t in_cell = 0;
    bool inside = true;
    for (size_t i = 0; i < out.size() && inside; ++i) {
      const int64_t at = cell[i] * w.strides[i] - w.pads_begin[i] + tap[i] * w.dilations[i];
      inside = at >= 0 && at < in[i];
      in_cell = in_cell * in[i] + at;
    }
    if (inside) visit(out_cell, in_cell);
    ++out_cell;
  } while (next_index(cell, out));
}

// The rows of sums of a convolution, one for each (n, o), by what a tap adds: `add_tap(sums, n, o, tap, t)`, tap t at `tap`.
// `put(n, o, sums)` takes the finished row, a sum for each output cell.
template <typename Acc, typename AddTap, typename Put>
void add_up_taps(const ConvolutionShape& s, const Window& window, int threads, const AddTap& add_tap, const Put& put) {
  const int64_t cells = count_of(s.out);
  if (cells == 0) return;
  parallel_for(s.batch * s.outputs, 1, threads, [&](int64_t begin, int64_t end) {
    std::vector<Acc> sums(static_cast<size_t>(cells));
    for (int64_t row = begin; row < end; ++row) {
      const int64_t n = row / s.outputs, o = row % s.outputs;
      std::fill(sums.begin(), sums.end(), Acc(0));
      Dims tap(window.rank(), 0);
      int64_t t = 0;
      do {
        add_tap(sums.data(), n, o, tap, t++);
      } while (next_index(tap, window.kernel));
      put(n, o, sums.data());
    }
  });
}

// y(n, o)[cell] = sum over c, tap of x(n, c)[...] * w(o, c)[tap]. `x(n * C + c, cell)`, `w(o, c, tap)` give elements as Acc.
template <typename Acc, typename X, typename W, typename Put>
void convolve_by_loops(const ConvolutionShape& s, const Window& window, int threads, const X& x, const W& w, const Put& put) {
  const int64_t group_in = s.channels / s.groups, group_out = s.outputs / s.groups;
  const auto add_tap = [&](Acc* sums, int64_t n, int64_t o, const Dims& tap, int64_t t) {
    const int64_t first = o / group_out * group_in;
    for_each_pair(window, s.in, s.out, tap, [&](int64_t out_cell, int64_t in_cell) {
      Acc sum = Acc(0);
      for (int64_t c = 0; c < group_in; ++c) sum += x(n * s.channels + first + c, in_cell) * w(o, c, t);
      sums[out_cell] += sum;
    });
  };
  add_up_taps<Acc>(s, window, threads, add_tap, put);
}

// The transposed form: what a convolution with this window gathers, it scatters. W is [C, outputs / groups, taps].
template <typename Acc, typename X, typename W, typename Put>
void convolve_transposed_by_loops(const ConvolutionShape& s, const Window& window, int threads, const X& x, const W& w, const Put& put) {
  const int64_t group_in = s.channels / s.groups, group_out = s.outputs / s.groups;
  const bool has_input = count_of(s.in) > 0;
  const auto add_tap = [&](Acc* sums, int64_t n, int64_t o, const Dims& tap, int64_t t) {
    if (!has_input) return;
    const int64_t first = o / group_out * group_in;
    for_each_pair(window, s.out, s.in, tap, [&](int64_t in_cell, int64_t out_cell) {  // input and output change places
      Acc sum = Acc(0);
      for (int64_t c = 0; c < group_in; ++c) sum += x(n * s.channels + first + c, in_cell) * w(first + c, o % group_out, t);
      sums[out_cell] += sum;
    });
  };
  add_up_taps<Acc>(s, window, threads, add_tap, put);
}

}  // namespace fretsaw
