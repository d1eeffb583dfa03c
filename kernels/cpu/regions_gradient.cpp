// RoiAlignGrad: the elements around each sample point get back what it took of them; MaxRoiPoolGrad: the first of a bin's largest elements
// gets it all. Regions have no gradient, as in PyTorch.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/gradients.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/regions.h"
#include "kernels/cpu/scalar_types.h"

namespace fretsaw {
namespace {

// g of one output element to the plane that its points read.
template <typename T>
void give_average(const std::vector<BilinearPoint>& points, T g, T* to) {
  const T share = g / static_cast<T>(points.size());
  for (const BilinearPoint& point : points)
    for (int k = 0; k < 4; ++k) to[point.offset[k]] += static_cast<T>(point.weight[k]) * share;
}
// The first of the largest weighted elements takes it all.
template <typename T>
void give_largest(const std::vector<BilinearPoint>& points, T g, const T* plane, T* to) {
  const BilinearPoint* best = points.data();
  int at = 0;
  const auto weighted = [&](const BilinearPoint& point, int k) { return static_cast<T>(point.weight[k]) * plane[point.offset[k]]; };
  for (const BilinearPoint& point : points)
    for (int k = 0; k < 4; ++k)
      if (weighted(point, k) > weighted(*best, at)) best = &point, at = k;
  to[best->offset[at]] += static_cast<T>(best->weight[at]) * g;
}

template <typename T>
void run_gradient(RunContext& r, const RoiAlignNode& node) {
  const TensorView &dy = r.input(0), &x = r.input(1), &rois = r.input(2);  // [R, C, h, w], [N, C, H, W], [R, 4]
  const std::vector<int64_t> batch = r.input_ints(3);
  const std::vector<double> corners = as_doubles(rois);
  if (x.rank() != 4 || corners.size() != 4 * batch.size() || dy.count() != rois.dims[0] * x.dims[1] * node.height * node.width)
    throw Error("a gradient that is not of the shape of RoiAlign's result", "give that of the forward node's output");
  for (const int64_t image : batch)
    if (image < 0 || image >= x.dims[0]) throw_index_out_of_range(image, x.dims[0]);
  const int64_t channels = x.dims[1], height = x.dims[2], width = x.dims[3], bins = node.height * node.width;
  TensorView& dx = r.output(0, x.dims);
  std::fill_n(dx.as<T>(), dx.count(), T(0));
  // Regions may lie over one another, channels do not.
  parallel_for(channels, 1, r.threads(), [&](int64_t begin, int64_t end) {
    std::vector<BilinearPoint> points;
    for (size_t roi = 0; roi < batch.size(); ++roi) {
      const RoiGrid grid(node, corners.data() + 4 * roi);
      const bool is_sampled = std::fabs(grid.bin_height) < 1 << 14 && std::fabs(grid.bin_width) < 1 << 14 && grid.rows * grid.columns > 0;
      for (int64_t bin = 0; bin < bins && is_sampled; ++bin) {
        points.clear();
        for (int64_t i = 0; i < grid.rows * grid.columns; ++i)
          points.push_back(grid.point(bin / node.width, bin % node.width, i, height, width));
        for (int64_t c = begin; c < end; ++c) {
          const int64_t plane = (batch[roi] * channels + c) * height * width;
          const T g = dy.as<T>()[(static_cast<int64_t>(roi) * channels + c) * bins + bin];
          if (node.average)
            give_average(points, g, dx.as<T>() + plane);
          else
            give_largest(points, g, x.as<T>() + plane, dx.as<T>() + plane);
        }
      }
    }
  });
}

template <typename T>
void run_pool_gradient(RunContext& r, const MaxRoiPoolNode& node) {
  const TensorView &dy = r.input(0), &x = r.input(1), &rois = r.input(2);  // [R, C, h, w], [N, C, H, W], [R, 5]
  if (x.rank() != 4 || rois.rank() != 2 || rois.dims[1] != 5 || dy.dims != Dims({rois.dims[0], x.dims[1], node.height, node.width}))
    throw Error("a gradient that is not of the shape of MaxRoiPool's result", "give that of the forward node's output");
  const std::vector<double> corners = as_doubles(rois);
  std::vector<PooledRegion> regions;
  for (int64_t i = 0; i < rois.dims[0]; ++i) regions.emplace_back(node, corners.data() + 5 * i, x.dims[0]);
  const int64_t channels = x.dims[1], height = x.dims[2], width = x.dims[3], bins = node.height * node.width;
  TensorView& dx = r.output(0, x.dims);
  std::fill_n(dx.as<T>(), dx.count(), T(0));
  // Regions may lie over one another, channels do not.
  parallel_for(channels, 1, r.threads(), [&](int64_t begin, int64_t end) {
    for (size_t roi = 0; roi < regions.size(); ++roi) {
      const PooledRegion& region = regions[roi];
      for (int64_t bin = 0; bin < bins; ++bin) {
        const Extent rows = bin_extent(bin / node.width, node.height, region.y0, region.height, height);
        const Extent columns = bin_extent(bin % node.width, node.width, region.x0, region.width, width);
        if (rows.first >= rows.last || columns.first >= columns.last) continue;  // gives 0
        for (int64_t c = begin; c < end; ++c) {
          const int64_t plane = (region.image * channels + c) * height * width;
          const T* from = x.as<T>() + plane;
          int64_t best = rows.first * width + columns.first;
          for (int64_t h = rows.first; h < rows.last; ++h)
            for (int64_t w = columns.first; w < columns.last; ++w)
              if (from[best] < from[h * width + w]) best = h * width + w;
          dx.as<T>()[plane + best] += dy.as<T>()[(static_cast<int64_t>(roi) * channels + c) * bins + bin];
        }
      }
    }
  });
}

CompiledKernel make_pool_plain(const CompileContext& c) {
  return {[node = MaxRoiPoolNode(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(1).dtype, [&]<typename T>() { run_pool_gradient<T>(r, node); });
  }};
}

CompiledKernel make_plain(const CompileContext& c) {
  return {[node = RoiAlignNode(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(1).dtype, [&]<typename T>() { run_gradient<T>(r, node); });
  }};
}

}  // namespace

void register_regions_gradient(KernelRegistry& registry) {
  add_gradient(registry, "RoiAlignGrad", any_float<make_plain>);
  add_gradient(registry, "MaxRoiPoolGrad", any_float<make_pool_plain>);
}

}  // namespace fretsaw
