// Operators whose output has as many elements as their input says: Compress, NonZero. The host waits for the number.
#include <thrust/iterator/counting_iterator.h>

#include <cub/device/device_select.cuh>

#include "kernels/cuda/indexing_rows.h"

namespace fretsaw::cuda {
namespace {

// Whether element i is not zero, by its bits without those that do not count (a float's sign).
template <typename T>
struct IsNonZero {
  const T* data;
  T counts;
  __device__ bool operator()(int64_t i) const { return (data[i] & counts) != 0; }
};

// The positions, ascending, of the elements that are not zero.
struct Selected {
  const int64_t* positions = nullptr;  // in scratch memory
  int64_t count = 0;
};

template <typename T>
Selected select_positions(RunContext& r, const TensorView& x, T counts) {
  const int64_t n = x.count();
  if (n == 0) return {};
  const IsNonZero<T> keeps{x.as<const T>(), counts};
  const thrust::counting_iterator<int64_t> all(0);
  size_t bytes = 0;
  int64_t* none = nullptr;
  FRETSAW_CUDA_CHECK(cub::DeviceSelect::If(nullptr, bytes, all, none, none, n, keeps, stream_of(r)));
  auto* positions = static_cast<int64_t*>(r.scratch((static_cast<size_t>(n) + 1) * sizeof(int64_t) + bytes));
  int64_t* found = positions + n;
  FRETSAW_CUDA_CHECK(cub::DeviceSelect::If(found + 1, bytes, all, positions, found, n, keeps, stream_of(r)));
  Selected selected{positions};
  r.device().download(&selected.count, found, sizeof(int64_t));
  return selected;
}

Selected select_non_zero(RunContext& r, const TensorView& x) {
  switch (x.dtype) {
    case DType::float16:
    case DType::bfloat16:
      return select_positions<uint16_t>(r, x, 0x7fff);
    case DType::float32:
      return select_positions<uint32_t>(r, x, 0x7fffffff);
    case DType::float64:
      return select_positions<uint64_t>(r, x, ~uint64_t{0} >> 1);
    default:
      break;
  }
  switch (element_bytes(x.dtype)) {
    case 1:
      return select_positions<uint8_t>(r, x, 0xff);
    case 2:
      return select_positions<uint16_t>(r, x, 0xffff);
    case 4:
      return select_positions<uint32_t>(r, x, 0xffffffff);
    default:
      return select_positions<uint64_t>(r, x, ~uint64_t{0});
  }
}

CompiledKernel make_compress(const CompileContext& c) {
  const bool flat = !c.node().has("axis");
  const int64_t axis_attribute = c.node().get_int("axis", 0);
  CompiledKernel kernel;
  kernel.capturable = false;
  kernel.run = [flat, axis_attribute, fault = gpu(c).fault_word(c.node())](RunContext& r) {
    TensorView x = r.input(0);
    if (flat) x.dims = {x.count()};
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    const TensorView& condition = r.input(1);
    require(condition.dtype == DType::boolean && condition.rank() == 1, "the condition must be a vector of booleans");
    const Selected kept = select_non_zero(r, condition);
    Dims dims = x.dims;
    dims[axis] = kept.count;
    const TensorView& y = sized_output(r, 0, dims, x.dtype);
    launch_gather(r, y, x, product(dims, 0, axis + 1), [&]<typename N>() {
      AxisPlaces<N> places{{}, Divider<N>(kept.count), x.dims[axis]};
      places.indexes.data = kept.positions;
      places.indexes.fault = fault.get();
      return places;
    });
  };
  return kernel;
}

struct Extents {
  int rank;
  int64_t of[kMaxRank];
};

// y [rank, count]: the coordinates of each position.
__global__ void __launch_bounds__(kThreads) write_coordinates(int64_t* y, const int64_t* positions, int64_t count, Extents extents) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    int64_t rest = positions[i];
    for (int k = extents.rank - 1; k >= 0; --k) {
      y[k * count + i] = rest % extents.of[k];
      rest /= extents.of[k];
    }
  }
}

CompiledKernel make_non_zero(const CompileContext&) {
  CompiledKernel kernel;
  kernel.capturable = false;
  kernel.run = [](RunContext& r) {
    const TensorView& x = r.input(0);
    const Dims dims = x.rank() == 0 ? Dims{1} : x.dims;  // a scalar counts as a vector of one
    require(dims.size() <= kMaxRank, "a tensor of more than 16 dimensions");
    const Selected found = select_non_zero(r, x);
    const TensorView& y = sized_output(r, 0, {static_cast<int64_t>(dims.size()), found.count}, DType::int64);
    if (found.count == 0) return;
    Extents extents{.rank = static_cast<int>(dims.size()), .of = {}};
    std::copy(dims.begin(), dims.end(), extents.of);
    write_coordinates<<<blocks_for(found.count, kThreads), kThreads, 0, stream_of(r)>>>(y.as<int64_t>(), found.positions, found.count,
                                                                                        extents);
    check_launch("write_coordinates");
  };
  return kernel;
}

std::string unsupported_compress(const CompileContext& c) {
  return refuse_to_move(c, 0);
}

std::string unsupported_non_zero(const CompileContext& c) {
  return refuse_other_types(c, 0,
                            {DType::boolean, DType::int8, DType::uint8, DType::int16, DType::uint16, DType::int32, DType::uint32,
                             DType::int64, DType::uint64, DType::float16, DType::bfloat16, DType::float32, DType::float64});
}

}  // namespace

void register_selections(KernelRegistry& registry) {
  registry.add({.op = "Compress", .make = make_compress, .unsupported = unsupported_compress});
  registry.add({.op = "NonZero", .make = make_non_zero, .unsupported = unsupported_non_zero});
}

}  // namespace fretsaw::cuda
