// QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear. A thread takes eight neighbouring elements, so that no two threads share a
// byte of packed ones.
#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cuda/index_math.h"
#include "kernels/cuda/movement.h"
#include "kernels/cuda/quantized_elements.cuh"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kSmall = (int64_t{1} << 31) - 1;

constexpr TypeSet kFloats = types::half_floats | set_of(DType::float32);
constexpr TypeSet kQuantized = set_of(DType::int8, DType::uint8, DType::int16, DType::uint16, DType::float8e4m3fn, DType::float8e5m2,
                                      DType::int4, DType::uint4, DType::int2, DType::uint2);

// --- scales and zero points ---

// One scale for the tensor, for each index of an axis, or for each block of indexes of it: x [outer, axis, inner].
struct ScaleShape {
  int64_t axis = 1, inner = 1, block = 0;  // block 0: none
  bool single = true;

  // Checks the shapes of inputs 1 (scales) and 2 (zero points).
  ScaleShape(RunContext& r, int64_t axis_attribute, int64_t block_attribute) {
    const Dims &dims = r.input(0).dims, &scales = r.input(1).dims;
    single = r.input(1).count() == 1;
    if (r.has_input(2) && r.input(2).count() != r.input(1).count()) {
      throw Error("zero points of shape " + to_string(r.input(2).dims) + " for scales of shape " + to_string(scales),
                  "give them one shape");
    }
    if (single) return;
    // A vector has one axis, whatever the attribute's default says.
    const size_t at = dims.size() == 1 ? 0 : normalise_axis(axis_attribute, dims.size());
    axis = dims.empty() ? 1 : dims[at];
    inner = product(dims, at + 1, dims.size());
    Dims wanted{axis};
    if (scales.size() > 1) {
      block = block_attribute;
      wanted = dims;
      wanted[at] = block > 0 ? (axis + block - 1) / block : -1;
    }
    if (scales != wanted) {
      throw Error("scales of shape " + to_string(scales) + " for a tensor of shape " + to_string(dims),
                  "give one scale, one for each index of the axis, or set block_size");
    }
  }
};

template <typename Index>
struct ScaleIndex {
  Divider<Index> inner, axis, block;
  Index blocks;         // of the axis; 0: one scale for each index
  bool single, shared;  // one scale for all elements; for all of a thread

  explicit ScaleIndex(const ScaleShape& s)
      : inner(s.inner),
        axis(s.axis),
        block(std::max<int64_t>(s.block, 1)),
        blocks(static_cast<Index>(s.block > 0 ? (s.axis + s.block - 1) / s.block : 0)),
        single(s.single),
        shared(s.single || (s.block == 0 && s.inner % kEach == 0)) {}

  FRETSAW_HOST_DEVICE int64_t of(Index i) const {
    if (single) return 0;
    const Index row = inner.quotient(i), outer = axis.quotient(row), index = row - outer * axis.divisor;
    if (blocks == 0) return index;
    return static_cast<int64_t>(outer * blocks + block.quotient(index)) * inner.divisor + (i - row * inner.divisor);
  }
};

struct Scales {
  DType scale_type, zero_type;
  const void *scale, *zero;  // zero: null where there are none

  explicit Scales(RunContext& r)
      : scale_type(r.input(1).dtype),
        zero_type(r.has_input(2) ? r.input(2).dtype : DType::undefined),
        scale(r.input(1).data),
        zero(r.has_input(2) ? r.input(2).data : nullptr) {}

  __device__ float scale_at(int64_t i) const { return number_at(scale_type, scale, i); }
  __device__ float zero_at(int64_t i) const { return zero ? number_at(zero_type, zero, i) : 0; }
};

// --- QuantizeLinear and DequantizeLinear ---

// The number that stands for x.
struct Quantize {
  DType precision;  // that the division is rounded to
  bool to_float;
  float low, high;

  __device__ float operator()(float x, float scale, float zero) const {
    float q = x / scale;
    if (precision == DType::float16) q = __half2float(__float2half_rn(q));
    if (precision == DType::bfloat16) q = __bfloat162float(__float2bfloat16_rn(q));
    if (to_float) return q + zero;
    q = rintf(q) + zero;
    q = q > low ? q : low;  // NaN becomes the lowest number
    return q < high ? q : high;
  }
};

struct Dequantize {
  __device__ float operator()(float x, float scale, float zero) const { return (x - zero) * scale; }
};

template <typename Map, typename Index>
__global__ void __launch_bounds__(kThreads) map_scaled(Map map, Scales scales, ScaleIndex<Index> index, DType from, const void* x, DType to,
                                                       void* y, bool saturate, int64_t count) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kEach;
  if (first >= count) return;
  const int present = count - first < kEach ? static_cast<int>(count - first) : kEach;
  float values[kEach];
  load_eight(from, x, first, present, values);
  int64_t at = index.of(static_cast<Index>(first));
  float scale = scales.scale_at(at), zero = scales.zero_at(at);
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (e >= present) break;
    if (e > 0 && !index.shared) {
      at = index.of(static_cast<Index>(first + e));
      scale = scales.scale_at(at), zero = scales.zero_at(at);
    }
    values[e] = map(values[e], scale, zero);
  }
  store_eight(to, y, first, present, values, saturate);
}

template <typename Map>
void launch_scaled(RunContext& r, const Map& map, const ScaleShape& shape, const TensorView& y, bool saturate) {
  const TensorView& x = r.input(0);
  const int64_t count = x.count();
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>((count + kThreads * kEach - 1) / (kThreads * kEach));
  if (count <= kSmall) {
    map_scaled<Map, uint32_t><<<blocks, kThreads, 0, stream_of(r)>>>(map, Scales(r), ScaleIndex<uint32_t>(shape), x.dtype, x.data, y.dtype,
                                                                     y.data, saturate, count);
  } else {
    map_scaled<Map, int64_t><<<blocks, kThreads, 0, stream_of(r)>>>(map, Scales(r), ScaleIndex<int64_t>(shape), x.dtype, x.data, y.dtype,
                                                                    y.data, saturate, count);
  }
  check_launch("quantisation");
}

Quantize quantize_to(DType to, DType precision) {
  const bool is_signed = to == DType::int8 || to == DType::int16 || to == DType::int4 || to == DType::int2;
  const int bits = bits_of(to);
  const auto steps = static_cast<float>(1 << bits);
  return {precision, is_float(to), is_signed ? -steps / 2 : 0, is_signed ? steps / 2 - 1 : steps - 1};
}

DType type_attribute(const Node& node, const char* name) {
  const int64_t type = node.get_int(name, 0);
  return type > 0 && type <= static_cast<int64_t>(DType::int2) ? static_cast<DType>(type) : DType::undefined;
}

CompiledKernel make_quantize(const CompileContext& c) {
  const Node& node = c.node();
  const int64_t axis = node.get_int("axis", 1), block = node.get_int("block_size", 0);
  const bool saturate = node.get_int("saturate", 1) != 0;
  const DType named = type_attribute(node, "output_dtype"), precision = type_attribute(node, "precision");
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);
    const DType to = r.has_input(2) ? r.input(2).dtype : named != DType::undefined ? named : DType::uint8;
    // Halves that meet halves are divided as such.
    const DType own = precision == DType::undefined && x.dtype == r.input(1).dtype ? x.dtype : precision;
    const ScaleShape shape(r, axis, block);
    launch_scaled(r, quantize_to(to, own), shape, device_output(r, 0, x.dims, to), saturate);
  }};
}

CompiledKernel make_dequantize(const CompileContext& c) {
  const Node& node = c.node();
  const int64_t axis = node.get_int("axis", 1), block = node.get_int("block_size", 0);
  const DType named = type_attribute(node, "output_dtype");
  return {[=](RunContext& r) {
    const ScaleShape shape(r, axis, block);
    const TensorView& y = device_output(r, 0, r.input(0).dims, named != DType::undefined ? named : r.input(1).dtype);
    launch_scaled(r, Dequantize{}, shape, y, true);
  }};
}

std::string unsupported_quantize(const CompileContext& c) {
  const DType from = c.input_dtype(0), scale = c.input_dtype(1);
  const DType to = c.has_input(2) ? c.input_dtype(2) : type_attribute(c.node(), "output_dtype");
  if (!contains(kFloats | set_of(DType::int32), from)) return not_supported(from);
  if (!contains(kFloats | set_of(DType::int32), scale)) return not_supported(scale);
  return to == DType::undefined || contains(kQuantized, to) ? "" : not_supported(to);
}

std::string unsupported_dequantize(const CompileContext& c) {
  const DType from = c.input_dtype(0), scale = c.input_dtype(1), to = type_attribute(c.node(), "output_dtype");
  if (!contains(kQuantized | set_of(DType::int32), from)) return not_supported(from);
  if (!contains(kFloats, scale)) return not_supported(scale);
  return to == DType::undefined || contains(kFloats, to) ? "" : not_supported(to);
}

// --- DynamicQuantizeLinear ---

struct Extremes {
  float low = 0, high = 0;  // the range always holds zero
};

__device__ Extremes both(const Extremes& a, const Extremes& b) {
  return {a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}

// The extremes of a block's threads, for all of them.
__device__ Extremes of_block(const Extremes& mine) {
  __shared__ Extremes threads[kThreads];
  threads[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) threads[threadIdx.x] = both(threads[threadIdx.x], threads[threadIdx.x + half]);
    __syncthreads();
  }
  return threads[0];
}

__global__ void __launch_bounds__(kThreads) find_extremes(const float* x, int64_t count, Extremes* blocks) {
  Extremes found;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    found.low = x[i] < found.low ? x[i] : found.low;
    found.high = x[i] > found.high ? x[i] : found.high;
  }
  found = of_block(found);
  if (threadIdx.x == 0) blocks[blockIdx.x] = found;
}

// `found` are the extremes of at most kThreads parts. `scale_to` and `zero_to` may be null.
__global__ void __launch_bounds__(kThreads)
    quantize_dynamically(const float* x, int64_t count, const Extremes* found, int parts, uint8_t* y, float* scale_to, uint8_t* zero_to) {
  const Extremes range = of_block(static_cast<int>(threadIdx.x) < parts ? found[threadIdx.x] : Extremes{});
  // A tensor of zeros has no range; any scale serves.
  const float scale = range.high > range.low ? (range.high - range.low) / 255.0f : 1.0f;
  const float offset = 0.0f - range.low / scale, zero = rintf(offset > 0 ? offset < 255 ? offset : 255 : 0);
  const Quantize quantize{DType::float32, false, 0, 255};
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kEach;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kEach; i < count; i += step) {
    const int present = count - i < kEach ? static_cast<int>(count - i) : kEach;
    float values[kEach];
    load_run(x + i, present, values);
#pragma unroll
    for (int e = 0; e < kEach; ++e) values[e] = quantize(values[e], scale, zero);
    store_run(y + i, present, values);
  }
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  if (scale_to) *scale_to = scale;
  if (zero_to) *zero_to = static_cast<uint8_t>(zero);
}

CompiledKernel make_dynamic_quantize(const CompileContext&) {
  return {[](RunContext& r) {
    const TensorView& x = r.input(0);
    const auto* from = x.as<const float>();
    const int64_t count = x.count();
    auto* y = device_output(r, 0, x.dims, DType::uint8).as<uint8_t>();
    auto* scale = r.wants_output(1) ? device_output(r, 1, {}, DType::float32).as<float>() : nullptr;
    auto* zero = r.wants_output(2) ? device_output(r, 2, {}, DType::uint8).as<uint8_t>() : nullptr;
    const int parts = static_cast<int>(std::min<unsigned>(blocks_for(count, kThreads, 4), kThreads));
    auto* found = static_cast<Extremes*>(r.scratch(kThreads * sizeof(Extremes)));
    find_extremes<<<parts, kThreads, 0, stream_of(r)>>>(from, count, found);
    const unsigned blocks = std::min<unsigned>(blocks_for(count, kThreads, kEach), static_cast<unsigned>(8 * gpu(r).multiprocessors()));
    quantize_dynamically<<<blocks, kThreads, 0, stream_of(r)>>>(from, count, found, parts, y, scale, zero);
    check_launch("DynamicQuantizeLinear");
  }};
}

std::string unsupported_dynamic_quantize(const CompileContext& c) {
  return refuse_other_types(c, 0, {DType::float32});
}

}  // namespace

void register_quantization(KernelRegistry& registry) {
  registry.add({.op = "QuantizeLinear", .make = make_quantize, .unsupported = unsupported_quantize});
  registry.add({.op = "DequantizeLinear", .make = make_dequantize, .unsupported = unsupported_dequantize});
  registry.add({.op = "DynamicQuantizeLinear", .make = make_dynamic_quantize, .unsupported = unsupported_dynamic_quantize});
}

}  // namespace fretsaw::cuda
