// Operators that read where indexes say: Gather, GatherElements, GatherND, OneHot. An index out of range is a fault (device_faults.h).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cpu/numbers.h"
#include "kernels/cuda/indexing_rows.h"

namespace fretsaw::cuda {

std::string refuse_to_move(const CompileContext& c, size_t i) {
  const DType type = c.input_dtype(i);
  if (type == DType::string || (type != DType::undefined && bits_of(type) < 8)) return "elements of type " + std::string(name_of(type));
  const Type& known = c.input_types[i];
  if (known.is_tensor() && known.shape && known.shape->size() > kMaxRank) return "more than 16 dimensions";
  return "";
}

std::string refuse_indexes(const CompileContext& c, size_t i, size_t indexes) {
  const std::string reason = refuse_to_move(c, i);
  return reason.empty() ? refuse_other_types(c, indexes, {DType::int32, DType::int64}) : reason;
}

namespace {

std::string unsupported_gather(const CompileContext& c) {
  return refuse_indexes(c, 0, 1);
}

CompiledKernel make_gather(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", 0);
  return {[axis_attribute, fault = gpu(c).fault_word(c.node())](RunContext& r) {
    const TensorView &x = r.input(0), &indexes = r.input(1);
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    Dims dims(x.dims.begin(), x.dims.begin() + static_cast<ptrdiff_t>(axis));
    dims.insert(dims.end(), indexes.dims.begin(), indexes.dims.end());
    dims.insert(dims.end(), x.dims.begin() + static_cast<ptrdiff_t>(axis) + 1, x.dims.end());
    const TensorView& y = sized_output(r, 0, dims, x.dtype);
    const int64_t picked = indexes.count(), extent = x.dims[axis];
    launch_gather(r, y, x, product(x.dims, 0, axis) * picked, [&]<typename N>() {
      return AxisPlaces<N>{Indexes(indexes, fault.get()), Divider<N>(picked), extent};
    });
  }};
}

CompiledKernel make_gather_elements(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", 0);
  return {[axis_attribute, fault = gpu(c).fault_word(c.node())](RunContext& r) {
    const TensorView &x = r.input(0), &indexes = r.input(1);
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    const Dims& dims = indexes.dims;
    require(dims.size() == x.rank() && x.rank() <= kMaxRank, "data and indices must have the same rank, of at most 16");
    for (size_t i = 0; i < dims.size(); ++i) {
      if (i != axis && dims[i] > x.dims[i]) {
        throw Error("indices of shape " + to_string(dims) + " reach outside data of shape " + to_string(x.dims));
      }
    }
    const TensorView& y = sized_output(r, 0, dims, x.dtype);
    launch_gather(r, y, x, y.count(),
                  [&]<typename N>() { return ElementPlaces<N>(Indexes(indexes, fault.get()), indexes.dims, x.dims, axis); });
  }};
}

CompiledKernel make_gather_nd(const CompileContext& c) {
  const int64_t batch_dims = c.node().get_int("batch_dims", 0);
  return {[batch_dims, fault = gpu(c).fault_word(c.node())](RunContext& r) {
    const TensorView &x = r.input(0), &indexes = r.input(1);
    const Dims& index_dims = indexes.dims;  // [..., K]
    require(!index_dims.empty() && x.rank() > 0 && x.rank() <= kMaxRank, "data and indices must have 1 to 16 dimensions");
    require(batch_dims >= 0 && batch_dims < static_cast<int64_t>(std::min(index_dims.size(), x.rank())), "batch_dims is out of range");
    const auto batch = static_cast<size_t>(batch_dims);
    const int64_t width = index_dims.back();
    if (width < 1 || width + batch_dims > static_cast<int64_t>(x.rank())) {
      throw Error("indices of shape " + to_string(index_dims) + " do not fit data of shape " + to_string(x.dims));
    }
    for (size_t i = 0; i < batch; ++i) require(index_dims[i] == x.dims[i], "the batch dimensions of data and indices differ");
    Dims dims(index_dims.begin(), index_dims.end() - 1);
    const int64_t items = count_of(dims);
    dims.insert(dims.end(), x.dims.begin() + static_cast<ptrdiff_t>(batch) + width, x.dims.end());
    const TensorView& y = sized_output(r, 0, dims, x.dtype);
    launch_gather(r, y, x, items, [&]<typename N>() { return TuplePlaces<N>(Indexes(indexes, fault.get()), indexes.dims, x.dims, batch); });
  }};
}

// Element i as an integer; fractions are cut off.
__device__ int64_t integer_at(const void* data, DType type, int64_t i) {
  switch (type) {
    case DType::int64:
    case DType::uint64:
      return static_cast<const int64_t*>(data)[i];
    case DType::int32:
      return static_cast<const int32_t*>(data)[i];
    case DType::uint32:
      return static_cast<const uint32_t*>(data)[i];
    case DType::int16:
      return static_cast<const int16_t*>(data)[i];
    case DType::uint16:
      return static_cast<const uint16_t*>(data)[i];
    case DType::int8:
      return static_cast<const int8_t*>(data)[i];
    case DType::float32:
      return static_cast<int64_t>(static_cast<const float*>(data)[i]);
    case DType::float64:
      return static_cast<int64_t>(static_cast<const double*>(data)[i]);
    case DType::float16:
      return static_cast<int64_t>(__half2float(static_cast<const __half*>(data)[i]));
    case DType::bfloat16:
      return static_cast<int64_t>(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]));
    default:
      return static_cast<const uint8_t*>(data)[i];
  }
}

// y [outer, depth, inner] = values [off, on] at the indexes [outer, inner]; one outside the depth leaves its row off.
template <typename V, typename N>
__global__ void __launch_bounds__(kThreads)
    one_hot(V* y, const V* values, const void* indexes, DType type, N count, Divider<N> depth, Divider<N> inner) {
  const N step = static_cast<N>(gridDim.x) * blockDim.x;
  const V off = values[0], on = values[1];
  const auto classes = static_cast<int64_t>(depth.divisor);
  for (N at = static_cast<N>(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) {
    const N line = inner.quotient(at), column = at - line * static_cast<N>(inner.divisor);
    const N outer = depth.quotient(line), k = line - outer * static_cast<N>(depth.divisor);
    int64_t index = integer_at(indexes, type, outer * static_cast<N>(inner.divisor) + column);
    if (index < 0) index += classes;
    y[at] = index == static_cast<int64_t>(k) ? on : off;
  }
}

CompiledKernel make_one_hot(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", -1);
  return {[axis_attribute](RunContext& r) {
    const TensorView &indexes = r.input(0), &values = r.input(2);  // [off, on]
    const std::vector<int64_t> depths = as_ints(r.input(1));
    require(depths.size() == 1 && depths[0] >= 0, "the depth must be one number, not negative");
    require(values.count() == 2, "the values must be two: off and on");
    const size_t axis = normalise_axis(axis_attribute, indexes.rank() + 1);
    Dims dims = indexes.dims;
    dims.insert(dims.begin() + static_cast<ptrdiff_t>(axis), depths[0]);
    const TensorView& y = sized_output(r, 0, dims, values.dtype);
    const int64_t count = y.count(), inner = product(indexes.dims, axis, indexes.rank());
    if (count == 0) return;
    with_widest(element_bytes(y.dtype), {y.data, values.data}, [&]<typename V>() {
      with_count_type(count, [&]<typename N>() {
        one_hot<V, N><<<blocks_for(count, kThreads, 4), kThreads, 0, stream_of(r)>>>(
            y.as<V>(), values.as<const V>(), indexes.data, indexes.dtype, static_cast<N>(count), Divider<N>(depths[0]), Divider<N>(inner));
      });
    });
    check_launch("one_hot");
  }};
}

std::string unsupported_one_hot(const CompileContext& c) {
  const std::string reason = refuse_to_move(c, 2);
  if (!reason.empty()) return reason;
  return refuse_other_types(c, 0,
                            {DType::int64, DType::int32, DType::int16, DType::int8, DType::uint64, DType::uint32, DType::uint16,
                             DType::uint8, DType::float32, DType::float64, DType::float16, DType::bfloat16});
}

}  // namespace

void register_gathers(KernelRegistry& registry) {
  registry.add({.op = "Gather", .make = make_gather, .unsupported = unsupported_gather});
  registry.add({.op = "GatherElements", .make = make_gather_elements, .unsupported = unsupported_gather});
  registry.add({.op = "GatherND", .make = make_gather_nd, .unsupported = unsupported_gather});
  registry.add({.op = "OneHot", .make = make_one_hot, .unsupported = unsupported_one_hot, .host_inputs = {1}});
}

void register_indexing(KernelRegistry& registry) {
  for (auto add : {register_gathers, register_selections, register_scatters, register_sorting, register_generators, register_random,
                   register_rotary, register_integer_products}) {
    add(registry);
  }
}

}  // namespace fretsaw::cuda
