// RoiAlignGrad: the elements around each sample point get back what it took of them; regions have no gradient.
#include <algorithm>

#include "kernels/cpu/regions.h"
#include "kernels/cuda/gradients.h"
#include "kernels/cuda/row_runs.cuh"
#include "kernels/scratch_pieces.h"

namespace fretsaw::cuda {
namespace {

// x [N, C, H, W], regions [R, 4], dy [R, C, bins of node.height rows and node.width columns].
struct Regions {
  RoiAlignNode node;
  int64_t images, channels, height, width, count;

  FRETSAW_HOST_DEVICE int64_t bins() const { return node.height * node.width; }
  FRETSAW_HOST_DEVICE int64_t lines() const { return node.height + node.width; }
  FRETSAW_HOST_DEVICE int64_t plane() const { return height * width; }
};

template <typename T>
__device__ RoiGrid grid_of(const Regions& s, const T* regions, int64_t region) {
  double corners[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) corners[k] = static_cast<double>(widen(regions[region * 4 + k]));
  return RoiGrid(s.node, corners);
}
// Not where it is too large or not a number. A region of an image that does not exist takes nothing, and the host gets word of it.
__device__ inline bool is_sampled(const Regions& s, const RoiGrid& grid, int64_t image, DeviceFault* fault) {
  if (image < 0 || image >= s.images) {
    *reinterpret_cast<longlong2*>(fault) = make_longlong2(image, s.images + 1);  // in one piece
    return false;
  }
  return fabs(grid.bin_height) < 1 << 14 && fabs(grid.bin_width) < 1 << 14 && grid.rows * grid.columns > 0;
}

// --- mean: the weight of an element in a bin is that of its row times that of its column ---

// What a row or column of bins takes of each row or column of the image, as means over its points: weights [R, node.height, H] and
// [R, node.width, W], zeros before; and the first and last that it takes something of, of rows, then of columns: spans [R, lines].
template <typename T>
__global__ void __launch_bounds__(kThreads) weigh_lines(Regions s, const T* regions, const int64_t* batch, WideOf<T>* row_weights,
                                                        WideOf<T>* column_weights, int2* spans, DeviceFault* fault) {
  using W = WideOf<T>;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= s.count * s.lines()) return;
  const int64_t region = i / s.lines(), line = i - region * s.lines();
  const RoiGrid grid = grid_of(s, regions, region);
  const bool is_row = line < s.node.height;
  const int64_t bin = is_row ? line : line - s.node.height, extent = is_row ? s.height : s.width;
  const int64_t points = is_sampled(s, grid, batch[region], fault) ? is_row ? grid.rows : grid.columns : 0;
  const double start = is_row ? grid.y0 : grid.x0, size = is_row ? grid.bin_height : grid.bin_width;
  W* weights = is_row ? row_weights + (region * s.node.height + bin) * extent : column_weights + (region * s.node.width + bin) * extent;
  int2 span = make_int2(static_cast<int>(extent), -1);
  for (int64_t p = 0; p < points; ++p) {
    const double along = static_cast<double>(bin) + (static_cast<double>(p) + 0.5) / static_cast<double>(points);
    const BilinearPoint point = bilinear_point(start + product_of(along, size), 0, extent, 1);
    if (!(point.weight[0] > 0)) continue;  // outside
    weights[point.offset[0]] += static_cast<W>(point.weight[0]) / static_cast<W>(points);
    weights[point.offset[2]] += static_cast<W>(point.weight[2]) / static_cast<W>(points);
    span.x = min(span.x, static_cast<int>(point.offset[0])), span.y = max(span.y, static_cast<int>(point.offset[2]));
  }
  spans[i] = span;
}

constexpr int kTileWidth = 32, kTileHeight = kThreads / kTileWidth;

// Whether some of these spans meets [first, last].
__device__ inline bool meets(const int2* spans, int64_t count, int64_t first, int64_t last) {
  for (int64_t i = 0; i < count; ++i)
    if (spans[i].x <= last && spans[i].y >= first) return true;
  return false;
}

// A block for each tile of an image and some channels; a thread adds up what an element gets, region after region.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    gather_means(Regions s, const T* dy, const int64_t* batch, const WideOf<T>* row_weights, const WideOf<T>* column_weights,
                 const int2* spans, T* dx, int64_t tiles_across, int64_t tiles_down) {
  using W = WideOf<T>;
  constexpr int kTogether = 8;
  __shared__ uint32_t hits[kThreads / 32];  // of the regions at hand, those that meet the tile
  const int64_t tile = blockIdx.x % (tiles_across * tiles_down), image = blockIdx.x / (tiles_across * tiles_down);
  const int64_t left = tile % tiles_across * kTileWidth, top = tile / tiles_across * kTileHeight;
  const int64_t column = left + threadIdx.x % kTileWidth, row = top + threadIdx.x / kTileWidth;
  const bool real = row < s.height && column < s.width;
  for (int64_t channel = int64_t{blockIdx.y} * kTogether; channel < s.channels; channel += int64_t{gridDim.y} * kTogether) {
    W sums[kTogether] = {};
    for (int64_t first = 0; first < s.count; first += kThreads) {
      const int64_t own = first + threadIdx.x;
      bool hit = own < s.count && batch[own] == image;
      if (hit) {
        const int2* span = spans + own * s.lines();
        hit = meets(span, s.node.height, top, top + kTileHeight - 1) &&
              meets(span + s.node.height, s.node.width, left, left + kTileWidth - 1);
      }
      const uint32_t mask = __ballot_sync(0xffffffffu, hit);
      __syncthreads();  // the last ones have been read
      if (threadIdx.x % 32 == 0) hits[threadIdx.x / 32] = mask;
      __syncthreads();
      for (int w = 0; real && w < kThreads / 32; ++w) {
        for (uint32_t rest = hits[w]; rest != 0; rest &= rest - 1) {
          const int64_t region = first + w * 32 + __ffs(static_cast<int>(rest)) - 1;
          const int2* span = spans + region * s.lines();
          const T* from = dy + (region * s.channels + channel) * s.bins();
          for (int64_t a = 0; a < s.node.height; ++a) {
            if (row < span[a].x || row > span[a].y) continue;
            const W of_row = row_weights[(region * s.node.height + a) * s.height + row];
            for (int64_t b = 0; b < s.node.width; ++b) {
              if (column < span[s.node.height + b].x || column > span[s.node.height + b].y) continue;
              const W weight = of_row * column_weights[(region * s.node.width + b) * s.width + column];
              const T* at = from + a * s.node.width + b;
#pragma unroll
              for (int u = 0; u < kTogether; ++u)
                if (channel + u < s.channels) sums[u] += weight * widen(at[u * s.bins()]);
            }
          }
        }
      }
    }
    if (!real) continue;
    T* to = dx + (image * s.channels + channel) * s.plane() + row * s.width + column;
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (channel + u < s.channels) to[u * s.plane()] = narrow<T>(sums[u]);
  }
}

struct Operands {
  const TensorView &dy, &x, &regions, &batch;
  DeviceFault* fault;
};

template <typename T>
void give_means(RunContext& r, const Regions& s, const Operands& o, T* dx) {
  using W = WideOf<T>;
  const cudaStream_t stream = stream_of(r);
  const int64_t rows = s.count * s.node.height * s.height, columns = s.count * s.node.width * s.width;
  ScratchPieces pieces;
  const size_t weights_at = pieces.add(static_cast<size_t>(rows + columns) * sizeof(W));
  const size_t spans_at = pieces.add(static_cast<size_t>(s.count * s.lines()) * sizeof(int2));
  char* scratch = static_cast<char*>(r.scratch(pieces.total()));
  auto* weights = reinterpret_cast<W*>(scratch + weights_at);
  auto* spans = reinterpret_cast<int2*>(scratch + spans_at);
  r.device().clear(weights, static_cast<size_t>(rows + columns) * sizeof(W));
  const auto* batch = o.batch.as<const int64_t>();
  weigh_lines<T><<<static_cast<unsigned>((s.count * s.lines() + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      s, o.regions.as<const T>(), batch, weights, weights + rows, spans, o.fault);
  check_launch("weigh_lines");
  const int64_t across = (s.width + kTileWidth - 1) / kTileWidth, down = (s.height + kTileHeight - 1) / kTileHeight;
  const dim3 blocks(static_cast<unsigned>(s.images * across * down), static_cast<unsigned>(std::min<int64_t>((s.channels + 7) / 8, 65535)));
  gather_means<T><<<blocks, kThreads, 0, stream>>>(s, o.dy.as<const T>(), batch, weights, weights + rows, spans, dx, across, down);
  check_launch("gather_means");
}

// --- maximum: the first of the largest weighted elements takes all that a bin gives back ---

// A thread for each element of dy: which element of dx it goes to, and how much it gives.
template <typename T, typename N>
__global__ void __launch_bounds__(kThreads) choose_elements(Regions s, const T* dy, const T* x, const T* regions, const int64_t* batch,
                                                            N items, N none, N* targets, N* order, WideOf<T>* given, DeviceFault* fault) {
  using W = WideOf<T>;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= static_cast<int64_t>(items)) return;
  const int64_t bin = i % s.bins(), channel = i / s.bins() % s.channels, region = i / s.bins() / s.channels, image = batch[region];
  const RoiGrid grid = grid_of(s, regions, region);
  const int64_t points = is_sampled(s, grid, image, fault) ? grid.rows * grid.columns : 0,
                plane = (image * s.channels + channel) * s.plane();
  int64_t chosen = 0;
  W largest = 0, weight = 0;
  for (int64_t p = 0; p < points; ++p) {
    const BilinearPoint point = grid.point(bin / s.node.width, bin % s.node.width, p, s.height, s.width);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const W part = static_cast<W>(point.weight[k]) * widen(x[plane + point.offset[k]]);
      if ((p > 0 || k > 0) && !(part > largest)) continue;
      largest = part, weight = static_cast<W>(point.weight[k]), chosen = point.offset[k];
    }
  }
  given[i] = weight * widen(dy[i]);
  targets[i] = points > 0 && given[i] != 0 ? static_cast<N>(plane + chosen) : none;
  order[i] = static_cast<N>(i);
}

// As row_runs.cuh says; an item gives its number to the element of dx that is its row.
template <typename T, typename N>
struct GivenTerms {
  using Wide = WideOf<T>;
  static constexpr int kTogether = 1;
  const Wide* given;
  T* to;
  int64_t channels = 1;

  __device__ void add(N, N item, int64_t, Wide (&sums)[1]) const { sums[0] += given[item]; }
  __device__ void store(N row, int64_t, const Wide (&sums)[1]) const { to[row] = narrow<T>(sums[0]); }
};

template <typename T>
void give_to_largest(RunContext& r, const Regions& s, const Operands& o, T* dx) {
  const int64_t items = o.dy.count(), rows = o.x.count();
  with_count_type(std::max(items, rows + 1), [&]<typename N>() {
    ScratchPieces pieces;
    const size_t given_at = pieces.add(static_cast<size_t>(items) * sizeof(WideOf<T>));
    const size_t items_at = pieces.add(bytes_to_find_runs<N>(items, rows));
    char* scratch = static_cast<char*>(r.scratch(pieces.total()));
    auto* given = reinterpret_cast<WideOf<T>*>(scratch + given_at);
    auto* targets = reinterpret_cast<N*>(scratch + items_at);
    choose_elements<T, N><<<static_cast<unsigned>((items + kThreads - 1) / kThreads), kThreads, 0, stream_of(r)>>>(
        s, o.dy.as<const T>(), o.x.as<const T>(), o.regions.as<const T>(), o.batch.as<const int64_t>(), static_cast<N>(items),
        static_cast<N>(rows), targets, targets + items, given, o.fault);
    check_launch("choose_elements");
    launch_sum_runs(r, find_runs<N>(r, items, rows, targets), GivenTerms<T, N>{given, dx});
  });
}

// --- the operator ---

CompiledKernel make_roi_align_gradient(const CompileContext& c) {
  return {[node = RoiAlignNode(c.node()), fault = gpu(c).fault_word(c.node())](RunContext& r) {
    const Operands o{r.input(0), r.input(1), r.input(2), r.input(3), fault.get()};
    const TensorView& x = o.x;
    require(x.rank() == 4 && o.regions.rank() == 2 && o.regions.dims[1] == 4, "the image must be [N, C, H, W] and the regions [R, 4]");
    require(o.batch.count() == o.regions.dims[0], "there must be one batch index for each region");
    const Regions s{node, x.dims[0], x.dims[1], x.dims[2], x.dims[3], o.regions.dims[0]};
    if (o.dy.count() != s.count * s.channels * s.bins())
      throw Error("a gradient that is not of the shape of RoiAlign's result", "give that of the forward node's output");
    const TensorView& dx = sized_output(r, 0, x.dims, x.dtype);
    if (x.count() == 0 || o.dy.count() == 0) return r.device().clear(dx.data, dx.bytes());
    with_float_type(x.dtype, [&]<typename T>(TypeIs<T>) {
      if (node.average)
        give_means<T>(r, s, o, dx.as<T>());
      else
        give_to_largest<T>(r, s, o, dx.as<T>());
    });
  }};
}

std::string unsupported(const CompileContext& c) {
  const std::string reason = refuse_mixed_floats(c, {0, 1, 2});
  if (!reason.empty()) return reason;
  return c.input_dtype(3) != DType::int64 ? "batch indexes that are not int64" : "";
}

}  // namespace

void register_regions_gradient(KernelRegistry& registry) {
  registry.add({.op = "RoiAlignGrad", .domain = kCommunicationDomain, .make = make_roi_align_gradient, .unsupported = unsupported});
}

}  // namespace fretsaw::cuda
