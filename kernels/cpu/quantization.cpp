// QuantizeLinear and DequantizeLinear.
#include "kernels/cpu/quantization.h"

#include <algorithm>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector_math.h"

namespace fretsaw {

Quantization::Quantization(RunContext& r, const Dims& dims, int64_t axis, int64_t block) {
  const TensorView& scale = r.input(1);
  scales_.resize(static_cast<size_t>(scale.count()));
  zeros_.assign(scales_.size(), 0.0f);
  load_as<float>(scale.dtype, scale.data, 0, scale.count(), scales_.data());
  if (r.has_input(2)) {
    const TensorView& zero = r.input(2);
    if (zero.count() != scale.count()) {
      throw Error("zero points of shape " + to_string(zero.dims) + " for scales of shape " + to_string(scale.dims), "give them one shape");
    }
    load_as<float>(zero.dtype, zero.data, 0, zero.count(), zeros_.data());
  }
  if (single()) return;
  // A vector has one axis, whatever the attribute's default says.
  const size_t at = dims.size() == 1 ? 0 : normalise_axis(axis, dims.size());
  axis_size_ = dims.empty() ? 1 : dims[at];
  inner_ = product(dims, at + 1, dims.size());
  if (scale.rank() > 1) block_ = block;
  Dims wanted{axis_size_};
  if (scale.rank() > 1) {
    wanted = dims;
    wanted[at] = block > 0 ? (axis_size_ + block - 1) / block : -1;
  }
  if (scale.dims != wanted) {
    throw Error("scales of shape " + to_string(scale.dims) + " for a tensor of shape " + to_string(dims),
                "give one scale, one for each index of the axis, or set block_size");
  }
}

void Quantization::spread(int64_t begin, int64_t n, float* scales, float* zeros) const {
  if (single()) {
    std::fill_n(scales, n, scales_[0]);
    std::fill_n(zeros, n, zeros_[0]);
    return;
  }
  int64_t within = begin % inner_, index = begin / inner_ % axis_size_, outer = begin / inner_ / axis_size_;
  const int64_t blocks = block_ ? (axis_size_ + block_ - 1) / block_ : 0;
  for (int64_t i = 0; i < n;) {
    int64_t run = std::min(inner_ - within, n - i);
    if (block_ && inner_ == 1) {
      // Blocks along the last axis: as many elements as are left of this one.
      run = std::min({block_ - index % block_, axis_size_ - index, n - i});
      const auto from = static_cast<size_t>(outer * blocks + index / block_);
      std::fill_n(scales + i, run, scales_[from]);
      std::fill_n(zeros + i, run, zeros_[from]);
      index += run - 1;
    } else if (block_) {
      const int64_t from = (outer * blocks + index / block_) * inner_ + within;
      std::copy_n(scales_.data() + from, run, scales + i);
      std::copy_n(zeros_.data() + from, run, zeros + i);
    } else {
      std::fill_n(scales + i, run, scales_[static_cast<size_t>(index)]);
      std::fill_n(zeros + i, run, zeros_[static_cast<size_t>(index)]);
    }
    i += run;
    within = 0;
    if (++index == axis_size_) {
      index = 0;
      ++outer;
    }
  }
}

namespace {

constexpr int64_t kChunkElements = 512;
constexpr TypeSet kFloat8 = set_of(DType::float8e4m3fn, DType::float8e4m3fnuz, DType::float8e5m2, DType::float8e5m2fnuz);
constexpr TypeSet kQuantized = set_of(DType::int8, DType::uint8, DType::int16, DType::uint16) | kFloat8 | types::packed;
constexpr TypeSet kScales = types::half_floats | set_of(DType::float32, DType::int32, DType::float8e8m0);

struct Range {
  float low, high;
};
Range range_of(DType type) {
  switch (type) {
    case DType::int8:
      return {-128, 127};
    case DType::uint8:
      return {0, 255};
    case DType::int16:
      return {-32768, 32767};
    case DType::uint16:
      return {0, 65535};
    case DType::int4:
      return {-8, 7};
    case DType::uint4:
      return {0, 15};
    case DType::int2:
      return {-2, 1};
    default:
      return {0, 3};
  }
}

// y[i] = x[i], which is a whole number in T's range
template <typename T>
void narrow(const float* x, T* y, int64_t n) {
  run_vectorised([=]() FRETSAW_ALWAYS_INLINE {
    for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(static_cast<int32_t>(x[i]));
  });
}

struct QuantizeOptions {
  int64_t axis = 1, block = 0;
  DType precision = DType::undefined;  // that the division is rounded to
  CastRules rules;
};

// values[i] becomes the number that stands for it, of type `to`.
void quantize_chunk(float* values, const float* scales, const float* zeros, int64_t n, DType to, DType precision) {
  const bool half = precision == DType::float16 || precision == DType::bfloat16;
  run_vectorised([=]() FRETSAW_ALWAYS_INLINE {
    for (int64_t i = 0; i < n; ++i) values[i] = values[i] / scales[i];
  });
  if (half) {
    uint16_t rounded[kChunkElements];
    store_from<float>(precision, rounded, 0, n, values);
    load_as<float>(precision, rounded, 0, n, values);
  }
  if (is_float(to)) {
    for (int64_t i = 0; i < n; ++i) values[i] += zeros[i];
    return;
  }
  const Range range = range_of(to);
  run_vectorised([=]() FRETSAW_ALWAYS_INLINE {
    const float low = range.low, high = range.high;  // locals: see isa.h
    for (int64_t i = 0; i < n; ++i) {
      float q = math::rint(values[i]) + zeros[i];
      q = q > low ? q : low;  // NaN becomes the lowest number
      values[i] = q < high ? q : high;
    }
  });
}

void store_chunk(const float* values, TensorView& y, int64_t begin, int64_t n, const CastRules& rules) {
  switch (y.dtype) {
    case DType::int8:
      return narrow(values, y.as<int8_t>() + begin, n);
    case DType::uint8:
      return narrow(values, y.as<uint8_t>() + begin, n);
    case DType::int16:
      return narrow(values, y.as<int16_t>() + begin, n);
    case DType::uint16:
      return narrow(values, y.as<uint16_t>() + begin, n);
    default:
      return store_from<float>(y.dtype, y.data, begin, n, values, rules);
  }
}

void quantize(const TensorView& x, TensorView& y, const Quantization& quantization, const QuantizeOptions& options, int threads) {
  const int64_t count = x.count();
  // In groups of eight elements, so that threads never share a byte of packed ones.
  parallel_for((count + 7) / 8, kGrainElements / 8, threads, [&](int64_t first, int64_t last) {
    alignas(64) float values[kChunkElements], scales[kChunkElements], zeros[kChunkElements];
    const int64_t end = std::min(last * 8, count);
    if (quantization.single()) quantization.spread(0, kChunkElements, scales, zeros);
    for (int64_t begin = first * 8; begin < end; begin += kChunkElements) {
      const int64_t n = std::min(kChunkElements, end - begin);
      load_as<float>(x.dtype, x.data, begin, n, values);
      if (!quantization.single()) quantization.spread(begin, n, scales, zeros);
      quantize_chunk(values, scales, zeros, n, y.dtype, options.precision);
      store_chunk(values, y, begin, n, options.rules);
    }
  });
}

DType type_attribute(const Node& node, const char* name) {
  const int64_t type = node.get_int(name, 0);
  return type > 0 && type <= static_cast<int64_t>(DType::int2) ? static_cast<DType>(type) : DType::undefined;
}

CompiledKernel compile_quantize(const CompileContext& c) {
  const Node& node = c.node();
  QuantizeOptions options{node.get_int("axis", 1), node.get_int("block_size", 0), type_attribute(node, "precision"), {}};
  options.rules.saturate = node.get_int("saturate", 1) != 0;
  const DType named = type_attribute(node, "output_dtype");
  return {[options, named](RunContext& r) {
    const TensorView& x = r.input(0);
    const DType to = r.has_input(2) ? r.input(2).dtype : named != DType::undefined ? named : DType::uint8;
    QuantizeOptions own = options;
    // Halves that meet halves are divided as such.
    if (own.precision == DType::undefined && x.dtype == r.input(1).dtype) own.precision = x.dtype;
    const Quantization quantization(r, x.dims, own.axis, own.block);
    quantize(x, r.output(0, x.dims, to), quantization, own, r.threads());
  }};
}

std::string unsupported_quantize(const CompileContext& c) {
  const DType to = c.has_input(2) ? c.input_dtype(2) : type_attribute(c.node(), "output_dtype");
  if (to != DType::undefined && !contains(kQuantized, to)) return not_supported(to);
  for (size_t i = 0; i < 2; ++i) {
    const DType type = c.input_dtype(i);
    if (type != DType::undefined && !contains(kScales, type)) return not_supported(type);
  }
  return "";
}

CompiledKernel compile_dequantize(const CompileContext& c) {
  const Node& node = c.node();
  const int64_t axis = node.get_int("axis", 1), block = node.get_int("block_size", 0);
  const DType named = type_attribute(node, "output_dtype");
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);
    const DType scale_type = r.input(1).dtype;
    const DType to = named != DType::undefined ? named : scale_type == DType::float8e8m0 ? DType::float32 : scale_type;
    const Quantization quantization(r, x.dims, axis, block);
    TensorView& y = r.output(0, x.dims, to);
    parallel_elements(x.count(), r.threads(), [&](int64_t first, int64_t end) {
      alignas(64) float values[kChunkElements], scales[kChunkElements], zeros[kChunkElements];
      for (int64_t begin = first; begin < end; begin += kChunkElements) {
        const int64_t n = std::min(kChunkElements, end - begin);
        load_as<float>(x.dtype, x.data, begin, n, values);
        quantization.spread(begin, n, scales, zeros);
        run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
          for (int64_t i = 0; i < n; ++i) values[i] = (values[i] - zeros[i]) * scales[i];
        });
        store_from<float>(y.dtype, y.data, begin, n, values);
      }
    });
  }};
}

std::string unsupported_dequantize(const CompileContext& c) {
  const DType from = c.input_dtype(0), scale = c.input_dtype(1), to = type_attribute(c.node(), "output_dtype");
  if (from != DType::undefined && !contains(kQuantized | set_of(DType::int32), from)) return not_supported(from);
  if (scale != DType::undefined && !contains(kScales, scale)) return not_supported(scale);
  return to != DType::undefined && !contains(types::floats, to) ? not_supported(to) : "";
}

}  // namespace

void register_quantization(KernelRegistry& registry) {
  registry.add({.op = "QuantizeLinear", .make = compile_quantize, .unsupported = unsupported_quantize});
  registry.add({.op = "DequantizeLinear", .make = compile_dequantize, .unsupported = unsupported_dequantize});
  register_dynamic_quantization(registry);
}

}  // namespace fretsaw
