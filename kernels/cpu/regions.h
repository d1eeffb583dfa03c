// Where RoiAlign, MaxRoiPool and Col2Im read an image; the same for every device.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/kernel.h"

namespace fretsaw {

struct RoiAlignNode {
  bool average, half_pixel;
  int64_t height, width, sampling;
  double scale;

  explicit RoiAlignNode(const Node& node);  // throws Error for values that are out of range
};

// The four elements around a point of a plane and their weights; all zero for a point outside.
struct BilinearPoint {
  int64_t offset[4] = {0, 0, 0, 0};
  double weight[4] = {0, 0, 0, 0};
};

FRETSAW_HOST_DEVICE BilinearPoint bilinear_point(double y, double x, int64_t height, int64_t width) {
  BilinearPoint point;
  if (!(y >= -1 && y <= static_cast<double>(height) && x >= -1 && x <= static_cast<double>(width))) return point;
  const auto split = [](double at, int64_t extent, int64_t& low, int64_t& high, double& part) {
    at = at > 0 ? at : 0;
    low = static_cast<int64_t>(at) < extent - 1 ? static_cast<int64_t>(at) : extent - 1;
    high = low + 1 < extent - 1 ? low + 1 : extent - 1;
    part = low == high ? 0 : at - static_cast<double>(low);
  };
  int64_t y0, y1, x0, x1;
  double py, px;
  split(y, height, y0, y1, py);
  split(x, width, x0, x1, px);
  return {{y0 * width + x0, y0 * width + x1, y1 * width + x0, y1 * width + x1},
          {(1 - py) * (1 - px), (1 - py) * px, py * (1 - px), py * px}};
}

// The grid of sample points in each bin of a region [x0, y0, x1, y1].
struct RoiGrid {
  double x0, y0, bin_height, bin_width;
  int64_t rows, columns;

  FRETSAW_HOST_DEVICE RoiGrid(const RoiAlignNode& node, const double* roi) {
    const double offset = node.half_pixel ? 0.5 : 0;
    x0 = product_of(roi[0], node.scale) - offset, y0 = product_of(roi[1], node.scale) - offset;
    double width = product_of(roi[2], node.scale) - offset - x0, height = product_of(roi[3], node.scale) - offset - y0;
    if (!node.half_pixel) width = width < 1 ? 1 : width, height = height < 1 ? 1 : height;
    bin_height = height / static_cast<double>(node.height), bin_width = width / static_cast<double>(node.width);
    rows = node.sampling > 0 ? node.sampling : points_in(bin_height);
    columns = node.sampling > 0 ? node.sampling : points_in(bin_width);
  }
  // Point `i` of bin (row, column), in rows of `columns` points.
  FRETSAW_HOST_DEVICE BilinearPoint point(int64_t row, int64_t column, int64_t i, int64_t height, int64_t width) const {
    const double down = static_cast<double>(row) + (static_cast<double>(i / columns) + 0.5) / static_cast<double>(rows);
    const double right = static_cast<double>(column) + (static_cast<double>(i % columns) + 0.5) / static_cast<double>(columns);
    return bilinear_point(y0 + product_of(down, bin_height), x0 + product_of(right, bin_width), height, width);
  }

 private:
  // One point for each element, rounded up; none for a region that is too large or not a number.
  FRETSAW_HOST_DEVICE static int64_t points_in(double extent) {
    return extent > 0 && extent < 1 << 14 ? static_cast<int64_t>(ceil(extent)) : 0;
  }
};

struct MaxRoiPoolNode {
  int64_t height, width;
  double scale;

  explicit MaxRoiPoolNode(const Node& node);  // throws Error for values that are out of range
};

// A region [image, x0, y0, x1, y1] in elements of the image's planes; throws Error where there is no such image.
struct PooledRegion {
  int64_t image;
  double x0, y0, width, height;

  PooledRegion(const MaxRoiPoolNode& node, const double* region, int64_t images);
};

// Rows or columns [first, last) of a bin of MaxRoiPool.
struct Extent {
  int64_t first, last;
};
FRETSAW_HOST_DEVICE Extent bin_extent(int64_t bin, int64_t bins, double start, double length, int64_t limit) {
  const double each = length / static_cast<double>(bins), extent = static_cast<double>(limit);
  const double first = floor(static_cast<double>(bin) * each) + start, last = ceil(static_cast<double>(bin + 1) * each) + start;
  const auto inside = [extent](double at) { return static_cast<int64_t>(!(at > 0) ? 0 : at > extent ? extent : at); };
  return {inside(first), inside(last)};
}

struct Col2ImNode {
  Dims image, block, dilations, pads, strides, columns;  // columns: how many blocks along each axis
};

Col2ImNode col2im_node(const Node& attributes, Dims image, Dims block);  // throws Error for values that do not fit

}  // namespace fretsaw
