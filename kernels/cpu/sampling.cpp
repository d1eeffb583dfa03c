// GridSample: reads an image of any rank at given points. AffineGrid: the points of an affine map.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/image.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/sampling_taps.h"

namespace fretsaw {

SampleRule::SampleRule(const Node& node) : align_corners(node.get_int("align_corners", 0) != 0) {
  const std::string mode_name = node.get_string("mode", "linear"), outside_name = node.get_string("padding_mode", "zeros");
  require(mode_name == "nearest" || mode_name == "linear" || mode_name == "cubic", "the mode must be nearest, linear or cubic");
  mode = mode_name == "nearest" ? SampleMode::nearest : mode_name == "linear" ? SampleMode::linear : SampleMode::cubic;
  require(outside_name == "zeros" || outside_name == "border" || outside_name == "reflection",
          "the padding mode must be zeros, border or reflection");
  outside = outside_name == "zeros" ? Outside::zeros : outside_name == "border" ? Outside::border : Outside::reflection;
}

Dims affine_points(const TensorView& theta, const std::vector<int64_t>& size) {
  require(size.size() == 4 || size.size() == 5, "the size must name 2 or 3 spatial axes");
  const auto rank = static_cast<int64_t>(size.size()) - 2;
  const Dims expected = {size[0], rank, rank + 1};
  if (theta.dims != expected) throw Error("theta has shape " + to_string(theta.dims) + " where " + to_string(expected) + " is expected");
  Dims dims = {size[0]};
  dims.insert(dims.end(), size.begin() + 2, size.end());
  return dims;
}

namespace {

// The offsets in a plane and weights of all elements around a point; those outside are left out.
template <typename T>
struct Neighbours {
  std::vector<int64_t> offset;
  std::vector<T> weight;

  void find(const SampleRule& rule, const T* point, const Dims& spatial) {
    offset.assign(1, 0);
    weight.assign(1, T(1));
    for (size_t d = 0; d < spatial.size(); ++d) {
      const SampleTaps taps =
          axis_taps_at(rule, static_cast<double>(point[spatial.size() - 1 - d]), spatial[d]);  // points name the last axis first
      std::vector<int64_t> offsets;
      std::vector<T> weights;
      for (size_t k = 0; k < offset.size(); ++k) {
        for (int t = 0; t < rule.taps(); ++t) {
          if (taps.index[t] < 0) continue;
          offsets.push_back(offset[k] * spatial[d] + taps.index[t]);
          weights.push_back(weight[k] * static_cast<T>(taps.weight[t]));
        }
      }
      offset.swap(offsets);
      weight.swap(weights);
    }
  }
};

template <typename T>
void sample(RunContext& r, const SampleRule& rule, const TensorView& x, const TensorView& grid, TensorView& y) {
  NumberReader<T> from(x), points(grid);
  NumberWriter<T> to(y);
  const Dims spatial(x.dims.begin() + 2, x.dims.end());
  const auto rank = static_cast<int64_t>(spatial.size());
  const int64_t channels = x.dims[1], plane = count_of(spatial), places = y.count() / (x.dims[0] * channels);
  parallel_for(x.dims[0] * places, kGrainElements / 16 / channels + 1, r.threads(), [&](int64_t begin, int64_t end) {
    Neighbours<T> around;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n = item / places, place = item % places;
      around.find(rule, points.data() + item * rank, spatial);
      for (int64_t c = 0; c < channels; ++c) {
        const T* source = from.data() + (n * channels + c) * plane;
        T sum = 0;
        for (size_t k = 0; k < around.offset.size(); ++k) sum += around.weight[k] * source[around.offset[k]];
        to[(n * channels + c) * places + place] = sum;
      }
    }
  });
  to.finish();
}

CompiledKernel make_grid_sample(const CompileContext& c) {
  const SampleRule rule(c.node());
  return {[rule](RunContext& r) {
    const TensorView &x = r.input(0), &grid = r.input(1);  // [N, C, D1, ..., Dr], [N, G1, ..., Gr, r]
    require(x.rank() >= 3 && x.rank() <= 8 && grid.rank() == x.rank() && grid.dims[0] == x.dims[0] &&
                grid.dims.back() == static_cast<int64_t>(x.rank()) - 2,
            "the grid must be [N, ..., r] for an image [N, C, ...] of r spatial axes");
    Dims dims = {x.dims[0], x.dims[1]};
    dims.insert(dims.end(), grid.dims.begin() + 1, grid.dims.end() - 1);
    TensorView& y = sized_output(r, 0, dims, x.dtype);
    if (y.count() == 0) return;
    require(x.count() > 0, "an image without elements can't be sampled");
    with_compute_type(x.dtype, [&]<typename T>() { sample<T>(r, rule, x, grid, y); });
  }};
}

CompiledKernel make_affine_grid(const CompileContext& c) {
  const bool align_corners = c.node().get_int("align_corners", 0) != 0;
  return {[align_corners](RunContext& r) {
    const TensorView& theta = r.input(0);               // [N, r, r + 1]
    const std::vector<int64_t> size = r.input_ints(1);  // N, C, spatial
    Dims dims = affine_points(theta, size);
    const size_t rank = size.size() - 2;
    const int64_t places = product(dims, 1, dims.size());
    dims.push_back(static_cast<int64_t>(rank));
    const std::vector<double> matrix = as_doubles(theta);
    TensorView& y = sized_output(r, 0, dims, theta.dtype);
    std::vector<double> grid(static_cast<size_t>(y.count()));
    for (int64_t item = 0; item < size[0] * places; ++item) {
      double point[4] = {1, 1, 1, 1};  // the last axis first, then one
      int64_t rest = item % places;
      for (size_t d = 0; d < rank; ++d) {
        const int64_t extent = size[size.size() - 1 - d];
        point[d] = grid_coordinate(rest % extent, extent, align_corners);
        rest /= extent;
      }
      point[rank] = 1;
      for (size_t row = 0; row < rank; ++row) {
        double sum = 0;
        for (size_t k = 0; k <= rank; ++k) sum += matrix[(static_cast<size_t>(item / places) * rank + row) * (rank + 1) + k] * point[k];
        grid[static_cast<size_t>(item) * rank + row] = sum;
      }
    }
    store_from<double>(y.dtype, y.data, 0, y.count(), grid.data());
  }};
}

}  // namespace

void register_sampling(KernelRegistry& registry) {
  registry.add({.op = "GridSample", .make = make_grid_sample});
  registry.add({.op = "AffineGrid", .make = make_affine_grid});
}

}  // namespace fretsaw
