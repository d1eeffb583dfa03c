// Operators on regions of an image: RoiAlign, MaxRoiPool, Col2Im.
#include "kernels/cpu/regions.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/image.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/parallel.h"

namespace fretsaw {

RoiAlignNode::RoiAlignNode(const Node& node)
    : average(node.get_string("mode", "avg") == "avg"),
      half_pixel(node.get_string("coordinate_transformation_mode", "half_pixel") == "half_pixel"),
      height(node.get_int("output_height", 1)),
      width(node.get_int("output_width", 1)),
      sampling(node.get_int("sampling_ratio", 0)),
      scale(node.get_float("spatial_scale", 1)) {
  const std::string mode = node.get_string("mode", "avg");
  require(mode == "avg" || mode == "max", "the mode must be avg or max");
  require(height > 0 && height <= 1 << 14 && width > 0 && width <= 1 << 14 && sampling >= 0 && sampling <= 1 << 16,
          "the output's size or the sampling ratio is out of range");
}

MaxRoiPoolNode::MaxRoiPoolNode(const Node& node) : height(0), width(0), scale(node.get_float("spatial_scale", 1)) {
  const std::vector<int64_t> pooled = node.get_ints("pooled_shape");
  require(pooled.size() == 2 && pooled[0] > 0 && pooled[1] > 0, "pooled_shape must be two positive numbers");
  height = pooled[0], width = pooled[1];
}

PooledRegion::PooledRegion(const MaxRoiPoolNode& node, const double* region, int64_t images) {
  require(std::all_of(region, region + 5, [](double v) { return std::isfinite(v) && std::fabs(v) < 0x1p40; }),
          "a region is too large or not a number");
  image = static_cast<int64_t>(region[0]);
  if (image < 0 || image >= images) throw_index_out_of_range(image, images);
  x0 = std::round(region[1] * node.scale), y0 = std::round(region[2] * node.scale);
  width = std::max(std::round(region[3] * node.scale) - x0 + 1, 1.0);
  height = std::max(std::round(region[4] * node.scale) - y0 + 1, 1.0);
}

Col2ImNode col2im_node(const Node& attributes, Dims image, Dims block) {
  const size_t rank = image.size();
  Col2ImNode node{.image = std::move(image),
                  .block = std::move(block),
                  .dilations = attributes.get_ints("dilations", Dims(rank, 1)),
                  .pads = attributes.get_ints("pads", Dims(2 * rank, 0)),
                  .strides = attributes.get_ints("strides", Dims(rank, 1))};
  require(
      rank > 0 && node.block.size() == rank && node.dilations.size() == rank && node.pads.size() == 2 * rank && node.strides.size() == rank,
      "the image, block, dilations, pads and strides must have one number for each axis");
  constexpr int64_t kLimit = int64_t{1} << 24;
  for (size_t d = 0; d < rank; ++d) {
    for (int64_t v : {node.image[d], node.block[d], node.dilations[d], node.strides[d]})
      require(v > 0 && v < kLimit, "a size is out of range");
    for (int64_t v : {node.pads[d], node.pads[rank + d]}) require(v >= 0 && v < kLimit, "a pad is out of range");
    const int64_t room = node.image[d] + node.pads[d] + node.pads[rank + d] - node.dilations[d] * (node.block[d] - 1) - 1;
    node.columns.push_back(room < 0 ? 0 : room / node.strides[d] + 1);
  }
  return node;
}

namespace {

// The sample points of one region: for each output element `each` of them.
struct RoiPoints {
  std::vector<BilinearPoint> points;
  int64_t each = 0;
};

RoiPoints roi_points(const RoiAlignNode& node, const double* roi, int64_t height, int64_t width) {
  const RoiGrid grid(node, roi);
  if (!(std::fabs(grid.bin_height) < 1 << 14 && std::fabs(grid.bin_width) < 1 << 14)) {
    throw Error("a region is too large or not a number");
  }
  RoiPoints result{.each = grid.rows * grid.columns};
  require(result.each * node.height * node.width < int64_t{1} << 28, "a region has too many sample points", "lower the sampling ratio");
  for (int64_t bin = 0; bin < node.height * node.width; ++bin) {
    for (int64_t i = 0; i < result.each; ++i) result.points.push_back(grid.point(bin / node.width, bin % node.width, i, height, width));
  }
  return result;
}

template <typename T>
T pooled_points(const BilinearPoint* points, int64_t count, const T* plane, bool average) {
  T sum = 0, highest = 0;
  for (int64_t i = 0; i < count; ++i) {
    T best = 0;
    for (int k = 0; k < 4; ++k) {
      const T part = static_cast<T>(points[i].weight[k]) * plane[points[i].offset[k]];
      sum += part;
      best = k == 0 ? part : std::max(best, part);  // ONNX: the largest of the weighted elements, not of their sums
    }
    highest = i == 0 ? best : std::max(highest, best);
  }
  return average ? sum / static_cast<T>(std::max<int64_t>(count, 1)) : highest;
}

CompiledKernel make_roi_align(const CompileContext& c) {
  const RoiAlignNode node(c.node());
  return {[node](RunContext& r) {
    const TensorView &x = r.input(0), &rois = r.input(1);  // [N, C, H, W], [R, 4]
    require(x.rank() == 4 && rois.rank() == 2 && rois.dims[1] == 4, "the image must be [N, C, H, W] and the regions [R, 4]");
    const std::vector<int64_t> batch = r.input_ints(2);
    for (int64_t b : batch) {
      if (b < 0 || b >= x.dims[0]) throw_index_out_of_range(b, x.dims[0]);
    }
    require(static_cast<int64_t>(batch.size()) == rois.dims[0], "there must be one batch index for each region");
    const std::vector<double> corners = as_doubles(rois);
    const int64_t channels = x.dims[1], height = x.dims[2], width = x.dims[3], bins = node.height * node.width;
    TensorView& y = sized_output(r, 0, {rois.dims[0], channels, node.height, node.width}, x.dtype);
    if (y.count() == 0) return;
    require(height > 0 && width > 0, "an image without elements has no regions");
    with_compute_type(x.dtype, [&]<typename T>() {
      NumberReader<T> from(x);
      NumberWriter<T> to(y);
      parallel_for(rois.dims[0], 1, r.threads(), [&](int64_t begin, int64_t end) {
        for (int64_t roi = begin; roi < end; ++roi) {
          const RoiPoints found = roi_points(node, corners.data() + roi * 4, height, width);
          for (int64_t i = 0; i < channels * bins; ++i) {
            const T* plane = from.data() + (batch[static_cast<size_t>(roi)] * channels + i / bins) * height * width;
            to[roi * channels * bins + i] = pooled_points(found.points.data() + i % bins * found.each, found.each, plane, node.average);
          }
        }
      });
      to.finish();
    });
  }};
}

CompiledKernel make_max_roi_pool(const CompileContext& c) {
  return {[node = MaxRoiPoolNode(c.node())](RunContext& r) {
    const TensorView &x = r.input(0), &rois = r.input(1);  // [N, C, H, W], [R, 5]
    require(x.rank() == 4 && rois.rank() == 2 && rois.dims[1] == 5, "the image must be [N, C, H, W] and the regions [R, 5]");
    const std::vector<double> regions = as_doubles(rois);
    const int64_t channels = x.dims[1], height = x.dims[2], width = x.dims[3], bins = node.height * node.width;
    TensorView& y = sized_output(r, 0, {rois.dims[0], channels, node.height, node.width}, x.dtype);
    with_compute_type(x.dtype, [&]<typename T>() {
      NumberReader<T> from(x);
      NumberWriter<T> to(y);
      int64_t out = 0;
      for (int64_t roi = 0; roi < rois.dims[0]; ++roi) {
        const PooledRegion region(node, regions.data() + roi * 5, x.dims[0]);
        for (int64_t i = 0; i < channels * bins; ++i) {
          const Extent rows = bin_extent(i / node.width % node.height, node.height, region.y0, region.height, height);
          const Extent columns = bin_extent(i % node.width, node.width, region.x0, region.width, width);
          const T* plane = from.data() + (region.image * channels + i / bins) * height * width;
          const bool empty = rows.first >= rows.last || columns.first >= columns.last;
          T highest = empty ? T(0) : plane[rows.first * width + columns.first];
          for (int64_t h = rows.first; h < rows.last; ++h) {
            for (int64_t w = columns.first; w < columns.last; ++w) highest = std::max(highest, plane[h * width + w]);
          }
          to[out++] = highest;
        }
      }
      to.finish();
    });
  }};
}

// Adds every block element of one channel to the image. x [block elements, blocks], y the image, zero before.
template <typename T>
void add_blocks(const Col2ImNode& node, const T* x, T* y) {
  const size_t rank = node.image.size();
  const int64_t elements = count_of(node.block), blocks = count_of(node.columns);
  for (int64_t element = 0; element < elements; ++element) {
    for (int64_t block = 0; block < blocks; ++block) {
      int64_t rest_element = element, rest_block = block, offset = 0, stride = 1;
      bool inside = true;
      for (size_t d = rank; d-- > 0;) {
        const int64_t at = rest_block % node.columns[d] * node.strides[d] + rest_element % node.block[d] * node.dilations[d] - node.pads[d];
        inside &= at >= 0 && at < node.image[d];
        offset += at * stride;
        stride *= node.image[d];
        rest_block /= node.columns[d];
        rest_element /= node.block[d];
      }
      if (inside) y[offset] += x[element * blocks + block];
    }
  }
}

CompiledKernel make_col2im(const CompileContext& c) {
  const auto attributes = std::make_shared<const Node>(c.node());  // the graph may be gone when the kernel runs
  return {[attributes](RunContext& r) {
    const TensorView& x = r.input(0);  // [N, C * block elements, blocks]
    const Col2ImNode node = col2im_node(*attributes, r.input_ints(1), r.input_ints(2));
    const int64_t elements = count_of(node.block), blocks = count_of(node.columns);
    require(x.rank() == 3 && x.dims[1] % elements == 0 && x.dims[2] == blocks, "the input does not have the blocks that the image needs");
    const int64_t channels = x.dims[1] / elements, each = count_of(node.image);
    Dims dims = {x.dims[0], channels};
    dims.insert(dims.end(), node.image.begin(), node.image.end());
    TensorView& y = sized_output(r, 0, dims, x.dtype);
    const bool wide = is_integer(x.dtype) || x.dtype == DType::float64;
    with_compute_type(wide ? DType::float64 : DType::float32, [&]<typename T>() {
      NumberReader<T> from(x);
      NumberWriter<T> to(y);
      std::fill_n(to.data(), y.count(), T(0));
      parallel_for(x.dims[0] * channels, 1, r.threads(), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) add_blocks(node, from.data() + i * elements * blocks, to.data() + i * each);
      });
      to.finish();
    });
  }};
}

}  // namespace

void register_regions(KernelRegistry& registry) {
  registry.add({.op = "RoiAlign", .make = make_roi_align});
  registry.add({.op = "MaxRoiPool", .make = make_max_roi_pool});
  registry.add({.op = "Col2Im", .make = make_col2im});
}

}  // namespace fretsaw
