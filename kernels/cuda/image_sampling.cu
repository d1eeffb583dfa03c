// GridSample: reads an image of one to three axes at given points. AffineGrid: the points of an affine map.
#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/image_sampling.cuh"
#include "kernels/cuda/movement.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;

// --- GridSample ---

// A thread reads every `gridDim.y`-th channel at one point.
template <typename T, int kTaps, bool kDeep>
__global__ void __launch_bounds__(kThreads) sample(Sampling s, const T* x, const T* grid, T* y, int64_t points) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= points) return;
  const int64_t n = item / s.places, place = item % s.places, plane = s.extents[0] * s.extents[1] * s.extents[2];
  const Neighbours<WideOf<T>, kTaps, kDeep> around(s, grid + item * s.rank);
  for (int64_t c = blockIdx.y; c < s.channels; c += gridDim.y) {
    y[(n * s.channels + c) * s.places + place] = narrow<T>(around.sum(s, x + (n * s.channels + c) * plane));
  }
}

template <typename T, int kTaps>
void launch_sample(const Sampling& s, const TensorView& x, const TensorView& grid, const TensorView& y, RunContext& r) {
  const int64_t points = x.dims[0] * s.places, blocks = (points + kThreads - 1) / kThreads;
  // Channels share a point's weights unless too few threads would be left.
  const int64_t shares = std::clamp<int64_t>(8 * gpu(r).multiprocessors() / blocks, 1, std::min<int64_t>(s.channels, 65535));
  const dim3 size(static_cast<unsigned>(blocks), static_cast<unsigned>(shares));
  if (s.rank == kMaxSpatial) {
    sample<T, kTaps, true><<<size, kThreads, 0, stream_of(r)>>>(s, x.as<const T>(), grid.as<const T>(), y.as<T>(), points);
  } else {
    sample<T, kTaps, false><<<size, kThreads, 0, stream_of(r)>>>(s, x.as<const T>(), grid.as<const T>(), y.as<T>(), points);
  }
  check_launch("GridSample");
}

CompiledKernel make_grid_sample(const CompileContext& c) {
  const SampleRule rule(c.node());
  return {[rule](RunContext& r) {
    const TensorView &x = r.input(0), &grid = r.input(1);  // [N, C, D1, ..., Dr], [N, G1, ..., Gr, r]
    const Sampling s = read_sampling(rule, x, grid);
    Dims dims = {x.dims[0], x.dims[1]};
    dims.insert(dims.end(), grid.dims.begin() + 1, grid.dims.end() - 1);
    const TensorView& y = device_output(r, 0, dims, x.dtype);
    if (y.count() == 0) return;
    require(x.count() > 0, "an image without elements can't be sampled");
    with_float_type(x.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      if (s.rule.taps() == 1) return launch_sample<T, 1>(s, x, grid, y, r);
      if (s.rule.taps() == 2) return launch_sample<T, 2>(s, x, grid, y, r);
      launch_sample<T, 4>(s, x, grid, y, r);
    });
  }};
}

std::string unsupported_grid_sample(const CompileContext& c) {
  const std::string reason = refuse_other_types(c, 0, {DType::float32, DType::float16, DType::bfloat16, DType::float64});
  if (!reason.empty()) return reason;
  if (c.input_dtype(1) != c.input_dtype(0)) return "a grid of another type than the image";
  const auto& shape = c.input_types[0].shape;
  return shape && shape->size() > 2 + kMaxSpatial ? "more than three spatial axes" : "";
}

// --- AffineGrid ---

struct AffineMap {
  int64_t extents[3] = {1, 1, 1};  // the last axis first
  int rank = 2;
  bool align_corners = false;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) write_grid(AffineMap map, const T* theta, T* y, int64_t points) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= points) return;
  double point[4] = {1, 1, 1, 1};  // the last axis first, then one
  int64_t rest = item;
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    if (d < map.rank) point[d] = grid_coordinate(rest % map.extents[d], map.extents[d], map.align_corners);
    rest /= map.extents[d];
  }
  const T* matrix = theta + rest * map.rank * (map.rank + 1);  // [r, r + 1]
  for (int row = 0; row < map.rank; ++row) {
    double sum = 0;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      if (k < map.rank) sum += static_cast<double>(widen(matrix[row * (map.rank + 1) + k])) * point[k];
    }
    sum += static_cast<double>(widen(matrix[row * (map.rank + 1) + map.rank]));
    y[item * map.rank + row] = narrow<T>(static_cast<WideOf<T>>(sum));
  }
}

CompiledKernel make_affine_grid(const CompileContext& c) {
  const bool align_corners = c.node().get_int("align_corners", 0) != 0;
  return {[align_corners](RunContext& r) {
    const TensorView& theta = r.input(0);               // [N, r, r + 1]
    const std::vector<int64_t> size = r.input_ints(1);  // N, C, spatial
    Dims dims = affine_points(theta, size);
    const int64_t rank = static_cast<int64_t>(size.size()) - 2, points = product(dims, 0, dims.size());
    dims.push_back(rank);
    const TensorView& y = device_output(r, 0, dims, theta.dtype);
    if (y.count() == 0) return;
    AffineMap map;
    map.rank = static_cast<int>(rank);
    map.align_corners = align_corners;
    std::copy(size.rbegin(), size.rbegin() + rank, map.extents);
    with_float_type(theta.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      const auto blocks = static_cast<unsigned>((points + kThreads - 1) / kThreads);
      write_grid<T><<<blocks, kThreads, 0, stream_of(r)>>>(map, theta.as<const T>(), y.as<T>(), points);
      check_launch("AffineGrid");
    });
  }};
}

std::string unsupported_affine_grid(const CompileContext& c) {
  return refuse_other_types(c, 0, {DType::float32, DType::float16, DType::bfloat16, DType::float64});
}

}  // namespace

void register_sampling(KernelRegistry& registry) {
  registry.add({.op = "GridSample", .make = make_grid_sample, .unsupported = unsupported_grid_sample});
  registry.add({.op = "AffineGrid", .make = make_affine_grid, .unsupported = unsupported_affine_grid, .host_inputs = {1}});
}

}  // namespace fretsaw::cuda
