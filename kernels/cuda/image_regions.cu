// Operators on regions of an image: RoiAlign, MaxRoiPool, Col2Im.
#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/regions.h"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/movement.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;

std::string refuse_no_floats(const CompileContext& c) {
  return refuse_other_types(c, 0, {DType::float32, DType::float16, DType::bfloat16, DType::float64});
}

// x [N, C, H, W], regions [R, ...], y [R, C, bins...].
struct RegionImage {
  int64_t images = 0, channels = 0, height = 0, width = 0;

  explicit RegionImage(const TensorView& x) : images(x.dims[0]), channels(x.dims[1]), height(x.dims[2]), width(x.dims[3]) {}
};

// --- RoiAlign ---

// A region of an image that does not exist gives zeros, and word of it to the host.
template <typename T>
__global__ void __launch_bounds__(kThreads) align_regions(RoiAlignNode node, RegionImage image, const T* x, const T* regions,
                                                          const int64_t* batch, T* y, int64_t count, DeviceFault* fault) {
  using W = WideOf<T>;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t bins = node.height * node.width, bin = i % bins, region = i / bins / image.channels;
  const int64_t n = batch[region];
  if (n < 0 || n >= image.images) {
    *reinterpret_cast<longlong2*>(fault) = make_longlong2(n, image.images + 1);  // in one piece
    y[i] = narrow<T>(W(0));
    return;
  }
  double corners[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) corners[k] = static_cast<double>(widen(regions[region * 4 + k]));
  const RoiGrid grid(node, corners);
  const T* plane = x + (n * image.channels + i / bins % image.channels) * image.height * image.width;
  const int64_t points = grid.rows * grid.columns;
  W sum = 0, highest = 0;
  for (int64_t p = 0; p < points; ++p) {
    const BilinearPoint point = grid.point(bin / node.width, bin % node.width, p, image.height, image.width);
    W best = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const W part = static_cast<W>(point.weight[k]) * widen(plane[point.offset[k]]);
      sum += part;
      best = k == 0 || part > best ? part : best;  // ONNX: the largest of the weighted elements, not of their sums
    }
    highest = p == 0 || best > highest ? best : highest;
  }
  y[i] = narrow<T>(node.average ? sum / static_cast<W>(points > 0 ? points : 1) : highest);
}

CompiledKernel make_roi_align(const CompileContext& c) {
  const RoiAlignNode node(c.node());
  const std::shared_ptr<DeviceFault> fault = gpu(c).fault_word(c.node());
  return {[node, fault](RunContext& r) {
    const TensorView &x = r.input(0), &regions = r.input(1), &batch = r.input(2);  // [N, C, H, W], [R, 4], [R]
    require(x.rank() == 4 && regions.rank() == 2 && regions.dims[1] == 4, "the image must be [N, C, H, W] and the regions [R, 4]");
    require(batch.count() == regions.dims[0], "there must be one batch index for each region");
    const TensorView& y = device_output(r, 0, {regions.dims[0], x.dims[1], node.height, node.width}, x.dtype);
    const int64_t count = y.count();
    if (count == 0) return;
    require(x.dims[2] > 0 && x.dims[3] > 0, "an image without elements has no regions");
    with_float_type(x.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      align_regions<T><<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream_of(r)>>>(
          node, RegionImage(x), x.as<const T>(), regions.as<const T>(), batch.as<const int64_t>(), y.as<T>(), count, fault.get());
      check_launch("RoiAlign");
    });
  }};
}

std::string unsupported_roi_align(const CompileContext& c) {
  const std::string reason = refuse_no_floats(c);
  if (!reason.empty()) return reason;
  if (c.input_dtype(2) != DType::int64) return "batch indexes that are not int64";
  return c.input_dtype(1) != c.input_dtype(0) ? "regions of another type than the image" : "";
}

// --- MaxRoiPool ---

struct RegionBins {
  int64_t rows = 1, columns = 1;
  double scale = 1;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    pool_regions(RegionBins bins, RegionImage image, const T* x, const T* regions, T* y, int64_t count, DeviceFault* fault) {
  using W = WideOf<T>;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t each = bins.rows * bins.columns;
  const T* region = regions + i / each / image.channels * 5;  // image, x0, y0, x1, y1
  const auto n = static_cast<int64_t>(widen(region[0]));
  if (n < 0 || n >= image.images) {
    *reinterpret_cast<longlong2*>(fault) = make_longlong2(n, image.images + 1);  // in one piece
    y[i] = narrow<T>(W(0));
    return;
  }
  double corners[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) corners[k] = round(static_cast<double>(widen(region[k + 1])) * bins.scale);
  const double width = fmax(corners[2] - corners[0] + 1, 1.0), height = fmax(corners[3] - corners[1] + 1, 1.0);
  const Extent rows = bin_extent(i / bins.columns % bins.rows, bins.rows, corners[1], height, image.height);
  const Extent columns = bin_extent(i % bins.columns, bins.columns, corners[0], width, image.width);
  const T* plane = x + (n * image.channels + i / each % image.channels) * image.height * image.width;
  const bool empty = rows.first >= rows.last || columns.first >= columns.last;
  W highest = empty ? W(0) : widen(plane[rows.first * image.width + columns.first]);
  for (int64_t h = rows.first; h < rows.last; ++h) {
    for (int64_t w = columns.first; w < columns.last; ++w) {
      const W value = widen(plane[h * image.width + w]);
      highest = highest < value ? value : highest;
    }
  }
  y[i] = narrow<T>(highest);
}

CompiledKernel make_max_roi_pool(const CompileContext& c) {
  const std::vector<int64_t> pooled = c.node().get_ints("pooled_shape");
  require(pooled.size() == 2 && pooled[0] > 0 && pooled[1] > 0, "pooled_shape must be two positive numbers");
  const RegionBins bins{pooled[0], pooled[1], c.node().get_float("spatial_scale", 1)};
  const std::shared_ptr<DeviceFault> fault = gpu(c).fault_word(c.node());
  return {[bins, fault](RunContext& r) {
    const TensorView &x = r.input(0), &regions = r.input(1);  // [N, C, H, W], [R, 5]
    require(x.rank() == 4 && regions.rank() == 2 && regions.dims[1] == 5, "the image must be [N, C, H, W] and the regions [R, 5]");
    const TensorView& y = device_output(r, 0, {regions.dims[0], x.dims[1], bins.rows, bins.columns}, x.dtype);
    const int64_t count = y.count();
    if (count == 0) return;
    with_float_type(x.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      pool_regions<T><<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream_of(r)>>>(
          bins, RegionImage(x), x.as<const T>(), regions.as<const T>(), y.as<T>(), count, fault.get());
      check_launch("MaxRoiPool");
    });
  }};
}

// --- Col2Im ---

constexpr int kMaxImageRank = 6;

struct BlockSums {
  int rank = 0;
  int64_t image[kMaxImageRank], block[kMaxImageRank], dilations[kMaxImageRank], pads[kMaxImageRank], strides[kMaxImageRank],
      columns[kMaxImageRank];
  int64_t image_count = 1, elements = 1, blocks = 1;

  // The block whose element `element` lies on place `i` of the image; -1 when there is none.
  FRETSAW_HOST_DEVICE int64_t block_at(int64_t i, int64_t element) const {
    int64_t block_index = 0, stride = 1;
    for (int d = rank - 1; d >= 0; --d) {
      const int64_t distance = i % image[d] + pads[d] - element % block[d] * dilations[d];
      if (distance < 0 || distance % strides[d] != 0 || distance / strides[d] >= columns[d]) return -1;
      block_index += distance / strides[d] * stride;
      stride *= columns[d];
      i /= image[d];
      element /= block[d];
    }
    return block_index;
  }
};

// Every place of the image sums what lies on it, in the order of block elements.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_blocks(BlockSums sums, const T* x, T* y, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const T* channel = x + i / sums.image_count * sums.elements * sums.blocks;  // [block elements, blocks]
  WideOf<T> sum = 0;
  for (int64_t element = 0; element < sums.elements; ++element) {
    const int64_t block = sums.block_at(i % sums.image_count, element);
    if (block >= 0) sum += widen(channel[element * sums.blocks + block]);
  }
  y[i] = narrow<T>(sum);
}

CompiledKernel make_col2im(const CompileContext& c) {
  const auto attributes = std::make_shared<const Node>(c.node());  // the graph may be gone when the kernel runs
  return {[attributes](RunContext& r) {
    const TensorView& x = r.input(0);  // [N, C * block elements, blocks]
    const Col2ImNode node = col2im_node(*attributes, r.input_ints(1), r.input_ints(2));
    require(node.image.size() <= kMaxImageRank, "the image has too many dimensions for this device", "use --device cpu");
    BlockSums sums;
    sums.rank = static_cast<int>(node.image.size());
    sums.elements = count_of(node.block), sums.blocks = count_of(node.columns), sums.image_count = count_of(node.image);
    for (size_t d = 0; d < node.image.size(); ++d) {
      sums.image[d] = node.image[d], sums.block[d] = node.block[d], sums.columns[d] = node.columns[d];
      sums.dilations[d] = node.dilations[d], sums.pads[d] = node.pads[d], sums.strides[d] = node.strides[d];
    }
    require(x.rank() == 3 && x.dims[1] % sums.elements == 0 && x.dims[2] == sums.blocks,
            "the input does not have the blocks that the image needs");
    Dims dims = {x.dims[0], x.dims[1] / sums.elements};
    dims.insert(dims.end(), node.image.begin(), node.image.end());
    const TensorView& y = device_output(r, 0, dims, x.dtype);
    const int64_t count = y.count();
    if (count == 0) return;
    with_float_type(x.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      sum_blocks<T><<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream_of(r)>>>(sums, x.as<const T>(),
                                                                                                             y.as<T>(), count);
      check_launch("Col2Im");
    });
  }};
}

}  // namespace

void register_regions(KernelRegistry& registry) {
  registry.add({.op = "RoiAlign", .make = make_roi_align, .unsupported = unsupported_roi_align});
  registry.add({.op = "MaxRoiPool", .make = make_max_roi_pool, .unsupported = refuse_no_floats});
  registry.add({.op = "Col2Im", .make = make_col2im, .unsupported = refuse_no_floats, .host_inputs = {1, 2}});
}

}  // namespace fretsaw::cuda
