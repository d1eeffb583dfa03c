// GridSampleGrad: an output is a sum of weights times elements around its point; the elements get the weights back, and the point what the
// weights change by as it moves.
#include <algorithm>

#include "kernels/cpu/sampling_slopes.h"
#include "kernels/cuda/gradients.h"
#include "kernels/cuda/image_sampling.cuh"
#include "kernels/cuda/row_runs.cuh"
#include "kernels/scratch_pieces.h"

namespace fretsaw::cuda {
namespace {

// --- to the image ---

// A thread for each point of some images: the element that each tap reads, and its weight, as SampleTerms has them.
template <typename T, int kTaps, bool kDeep, typename N>
__global__ void __launch_bounds__(kThreads)
    name_taps(Sampling s, const T* grid, N points, N rows, N* targets, N* order, WideOf<T>* weights) {
  using W = WideOf<T>;
  const int64_t point = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (point >= static_cast<int64_t>(points)) return;
  const int64_t image = point / s.places * (s.extents[0] * s.extents[1] * s.extents[2]);
  const Neighbours<W, kTaps, kDeep> around(s, grid + point * s.rank);
  const int lines = s.rank > 1 ? kTaps : 1;
  N item = static_cast<N>(point);
#pragma unroll
  for (int a = 0; a < (kDeep ? kTaps : 1); ++a) {
#pragma unroll
    for (int b = 0; b < kTaps; ++b) {
      if (b >= lines) continue;
#pragma unroll
      for (int c = 0; c < kTaps; ++c) {
        const int64_t i = around.axes[0].index[a], j = around.axes[1].index[b], k = around.axes[2].index[c];
        const bool inside = i >= 0 && j >= 0 && k >= 0;
        targets[item] = inside ? static_cast<N>(image + (i * s.extents[1] + j) * s.extents[2] + k) : rows;
        order[item] = item;
        weights[item] = around.weight(a, b, c);
        item += points;
      }
    }
  }
}

template <typename T, int kTaps, typename N>
void launch_name_taps(const Sampling& s, const T* grid, int64_t points, int64_t rows, N* targets, WideOf<T>* weights, int64_t items,
                      cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((points + kThreads - 1) / kThreads);
  const auto all = static_cast<N>(points), none = static_cast<N>(rows);
  if (s.rank == kMaxSpatial) {
    name_taps<T, kTaps, true, N><<<blocks, kThreads, 0, stream>>>(s, grid, all, none, targets, targets + items, weights);
  } else {
    name_taps<T, kTaps, false, N><<<blocks, kThreads, 0, stream>>>(s, grid, all, none, targets, targets + items, weights);
  }
  check_launch("name_taps");
}

constexpr int64_t kMostItems = int64_t{1} << 24;  // and rows, that are sorted at once, unless one image has more

struct Operands {
  const TensorView &dy, &x, &grid;  // [N, C, G...], [N, C, D...], [N, G..., r]
};

template <typename T, typename N>
void give_to_images(RunContext& r, const Sampling& s, const Operands& o, T* dx, int64_t at_once) {
  const int64_t images = o.x.dims[0], plane = s.extents[0] * s.extents[1] * s.extents[2];
  int64_t taps = 1;
  for (int d = 0; d < s.rank; ++d) taps *= s.rule.taps();
  const auto bytes = [&](int64_t count) { return bytes_to_find_runs<N>(count * s.places * taps, count * plane); };
  ScratchPieces pieces;
  const size_t weights_at = pieces.add(static_cast<size_t>(at_once * s.places * taps) * sizeof(WideOf<T>));
  const size_t items_at = pieces.add(std::max(bytes(at_once), images % at_once == 0 ? 0 : bytes(images % at_once)));
  char* scratch = static_cast<char*>(r.scratch(pieces.total()));
  auto* weights = reinterpret_cast<WideOf<T>*>(scratch + weights_at);
  auto* targets = reinterpret_cast<N*>(scratch + items_at);
  for (int64_t first = 0; first < images; first += at_once) {
    const int64_t count = std::min(at_once, images - first), points = count * s.places, items = points * taps, rows = count * plane;
    const T* grid = o.grid.as<const T>() + first * s.places * s.rank;
    if (s.rule.taps() == 1)
      launch_name_taps<T, 1, N>(s, grid, points, rows, targets, weights, items, stream_of(r));
    else if (s.rule.taps() == 2)
      launch_name_taps<T, 2, N>(s, grid, points, rows, targets, weights, items, stream_of(r));
    else
      launch_name_taps<T, 4, N>(s, grid, points, rows, targets, weights, items, stream_of(r));
    const RowRuns<N> runs = find_runs<N>(r, items, rows, targets);
    const T* from = o.dy.as<const T>() + first * s.channels * s.places;
    launch_sum_runs(
        r, runs,
        SampleTerms<T, T, N>{from, dx + first * s.channels * plane, weights, s.channels, s.places, Divider<N>(points), Divider<N>(plane)});
  }
}

template <typename T>
void give_to_images(RunContext& r, const Sampling& s, const Operands& o, const TensorView& dx) {
  int64_t each = s.places;
  for (int d = 0; d < s.rank; ++d) each *= s.rule.taps();
  const int64_t images = o.x.dims[0], plane = s.extents[0] * s.extents[1] * s.extents[2];
  const int64_t at_once = std::clamp<int64_t>(kMostItems / std::max(each, plane), 1, images);
  with_count_type(at_once * std::max(each, plane + 1), [&]<typename N>() { give_to_images<T, N>(r, s, o, dx.as<T>(), at_once); });
}

// --- to the points ---

// A thread of threadIdx.x a point; the threadIdx.y share the channels.
template <typename T, int kTaps, bool kDeep>
__global__ void __launch_bounds__(kThreads) move_points(Sampling s, const T* dy, const T* x, const T* grid, T* dgrid, int64_t points) {
  using W = WideOf<T>;
  __shared__ double shared[kThreads];
  const int64_t point = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, plane = s.extents[0] * s.extents[1] * s.extents[2];
  const bool real = point < points;
  double moved[kMaxSpatial] = {};
  if (real) {
    const T* at = grid + point * s.rank;
    const Neighbours<W, kTaps, kDeep> around(s, at);
    W slopes[kMaxSpatial][kTaps];
#pragma unroll
    for (int d = 0; d < kMaxSpatial; ++d) {
      SampleSlopes found{};
      if (d >= kMaxSpatial - s.rank) found = axis_slopes_at(s.rule, static_cast<double>(widen(at[kMaxSpatial - 1 - d])), s.extents[d]);
#pragma unroll
      for (int t = 0; t < kTaps; ++t) slopes[d][t] = static_cast<W>(found.slope[t]);
    }
    const int64_t n = point / s.places, place = point - n * s.places;
    for (int64_t c = threadIdx.y; c < s.channels; c += blockDim.y) {
      const W g = widen(dy[(n * s.channels + c) * s.places + place]);
      const T* image = x + (n * s.channels + c) * plane;
      W sums[kMaxSpatial] = {};
#pragma unroll
      for (int a = 0; a < (kDeep ? kTaps : 1); ++a) {
        W slab = 0, down = 0, right = 0;  // what the elements of the two last axes sum up to, and what that changes by along them
#pragma unroll
        for (int b = 0; b < kTaps; ++b) {
          W line = 0, along = 0;
#pragma unroll
          for (int k = 0; k < kTaps; ++k) {
            const int64_t i = around.axes[0].index[a], j = around.axes[1].index[b], l = around.axes[2].index[k];
            if (i < 0 || j < 0 || l < 0) continue;
            const W value = widen(image[(i * s.extents[1] + j) * s.extents[2] + l]);
            line += static_cast<W>(around.axes[2].weight[k]) * value, along += slopes[2][k] * value;
          }
          const W weight = static_cast<W>(around.axes[1].weight[b]);
          slab += weight * line, down += slopes[1][b] * line, right += weight * along;
        }
        const W weight = static_cast<W>(around.axes[0].weight[a]);
        sums[0] += slopes[0][a] * slab, sums[1] += weight * down, sums[2] += weight * right;
      }
#pragma unroll
      for (int d = 0; d < kMaxSpatial; ++d) moved[d] += static_cast<double>(g) * static_cast<double>(sums[d]);
    }
  }
#pragma unroll
  for (int d = 0; d < kMaxSpatial; ++d) {
    if (d < kMaxSpatial - s.rank) continue;
    const double sum = join_column(moved[d], shared, AddJoin{});
    if (real && threadIdx.y == 0) dgrid[point * s.rank + kMaxSpatial - 1 - d] = narrow<T>(static_cast<W>(sum));
  }
}

template <typename T, int kTaps>
void launch_move_points(RunContext& r, const Sampling& s, const Operands& o, const TensorView& dgrid) {
  const int64_t points = o.x.dims[0] * s.places;
  const dim3 threads = threads_sharing(s.channels);
  const auto blocks = static_cast<unsigned>((points + threads.x - 1) / threads.x);
  const T *dy = o.dy.as<const T>(), *x = o.x.as<const T>(), *grid = o.grid.as<const T>();
  if (s.rank == kMaxSpatial) {
    move_points<T, kTaps, true><<<blocks, threads, 0, stream_of(r)>>>(s, dy, x, grid, dgrid.as<T>(), points);
  } else {
    move_points<T, kTaps, false><<<blocks, threads, 0, stream_of(r)>>>(s, dy, x, grid, dgrid.as<T>(), points);
  }
  check_launch("move_points");
}

// --- the operator ---

CompiledKernel make_grid_sample_gradient(const CompileContext& c) {
  return {[rule = SampleRule(c.node())](RunContext& r) {
    const Operands o{r.input(0), r.input(1), r.input(2)};
    const Sampling s = read_sampling(rule, o.x, o.grid);
    if (o.dy.count() != o.x.dims[0] * s.channels * s.places)
      throw Error("a gradient that is not of the shape of GridSample's result", "give that of the forward node's output");
    const TensorView* dx = r.wants_output(0) ? &sized_output(r, 0, o.x.dims, o.x.dtype) : nullptr;
    const TensorView* dgrid = r.wants_output(1) ? &sized_output(r, 1, o.grid.dims, o.x.dtype) : nullptr;
    const bool is_empty = o.dy.count() == 0 || o.x.count() == 0;
    if (dx && is_empty) r.device().clear(dx->data, dx->bytes());
    if (dgrid && (is_empty || rule.mode == SampleMode::nearest)) r.device().clear(dgrid->data, dgrid->bytes());
    if (is_empty) return;
    with_float_type(o.x.dtype, [&]<typename T>(TypeIs<T>) {
      if (dx) give_to_images<T>(r, s, o, *dx);
      if (dgrid && rule.taps() == 2) launch_move_points<T, 2>(r, s, o, *dgrid);
      if (dgrid && rule.taps() == 4) launch_move_points<T, 4>(r, s, o, *dgrid);
    });
  }};
}

std::string unsupported(const CompileContext& c) {
  const std::string reason = refuse_mixed_floats(c, {0, 1, 2});
  if (!reason.empty()) return reason;
  const std::optional<Shape>& shape = c.input_types.at(1).shape;
  return shape && shape->size() > 2 + kMaxSpatial ? "more than three spatial axes" : "";
}

}  // namespace

void register_sampling_gradient(KernelRegistry& registry) {
  registry.add({.op = "GridSampleGrad", .domain = kCommunicationDomain, .make = make_grid_sample_gradient, .unsupported = unsupported});
}

}  // namespace fretsaw::cuda
