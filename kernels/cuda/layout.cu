// Between the layouts plain [N, C, H, W] and nhwc [N, H, W, C]: for each image a transposition of [C, H * W] through shared memory.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/layout.h"

namespace fretsaw::cuda {
namespace {

constexpr int tile = 32, rows_a_pass = 8;

// x: [images, rows, columns] -> y: [images, columns, rows]
template <typename T>
__global__ void transpose_images(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int64_t columns, int64_t row_tiles) {
  __shared__ T held[tile][tile + 1];
  const int64_t image = static_cast<int64_t>(blockIdx.y) * rows * columns;
  const int64_t row0 = (blockIdx.x % row_tiles) * tile, column0 = (blockIdx.x / row_tiles) * tile;
  for (int i = threadIdx.y; i < tile; i += rows_a_pass) {
    const int64_t row = row0 + i, column = column0 + threadIdx.x;
    if (row < rows && column < columns) held[i][threadIdx.x] = x[image + row * columns + column];
  }
  __syncthreads();
  for (int i = threadIdx.y; i < tile; i += rows_a_pass) {
    const int64_t row = row0 + threadIdx.x, column = column0 + i;
    if (row < rows && column < columns) y[image + column * rows + row] = held[threadIdx.x][i];
  }
}

template <typename T>
void launch(const void* x, void* y, int64_t images, int64_t rows, int64_t columns, cudaStream_t stream) {
  const int64_t row_tiles = (rows + tile - 1) / tile, column_tiles = (columns + tile - 1) / tile;
  for (int64_t first = 0; first < images; first += 65535) {  // as many as a grid's second dimension takes
    const auto count = static_cast<unsigned>(images - first < 65535 ? images - first : 65535);
    const int64_t at = first * rows * columns;
    transpose_images<<<dim3(static_cast<unsigned>(row_tiles * column_tiles), count), dim3(tile, rows_a_pass), 0, stream>>>(
        static_cast<const T*>(x) + at, static_cast<T*>(y) + at, rows, columns, row_tiles);
    check_launch("transpose_images");
  }
}

}  // namespace

void reorder(const TensorView& from, const TensorView& to, cudaStream_t stream) {
  if (from.count() == 0) return;
  const bool to_nhwc = to.layout == Layout::nhwc;
  const int64_t images = from.dims[0], channels = from.dims[1], pixels = from.dims[2] * from.dims[3];
  const int64_t rows = to_nhwc ? channels : pixels, columns = to_nhwc ? pixels : channels;
  switch (bits_of(from.dtype)) {
    case 8:
      return launch<uint8_t>(from.data, to.data, images, rows, columns, stream);
    case 16:
      return launch<uint16_t>(from.data, to.data, images, rows, columns, stream);
    case 32:
      return launch<uint32_t>(from.data, to.data, images, rows, columns, stream);
    case 64:
      return launch<uint64_t>(from.data, to.data, images, rows, columns, stream);
    default:
      throw Error("elements of type " + std::string(name_of(from.dtype)) + " have one layout only on the device", "report this as a fault");
  }
}

}  // namespace fretsaw::cuda
