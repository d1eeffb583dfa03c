// DynamicQuantizeLinear: one scale and zero point from the range of the values themselves.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/quantization.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/vector_math.h"

namespace fretsaw {

namespace {

struct Extremes {
  float low = 0, high = 0;  // the range always holds zero
};

Extremes extremes_of(const float* x, int64_t n) {
  constexpr int64_t kLanes = 64;
  float low[kLanes] = {}, high[kLanes] = {};
  run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
    for (int64_t i = 0; i < n; i += kLanes) {
      const int64_t lanes = std::min(kLanes, n - i);
      for (int64_t j = 0; j < lanes; ++j) {
        low[j] = x[i + j] < low[j] ? x[i + j] : low[j];
        high[j] = x[i + j] > high[j] ? x[i + j] : high[j];
      }
    }
  });
  return {*std::min_element(low, low + kLanes), *std::max_element(high, high + kLanes)};
}

void dynamic_quantize(RunContext& r) {
  const TensorView& x = r.input(0);
  const Extremes range = extremes_of(x.as<float>(), x.count());
  // A tensor of zeros has no range; any scale serves.
  const float scale = range.high > range.low ? (range.high - range.low) / 255.0f : 1.0f;
  const float zero = std::nearbyint(std::clamp(0.0f - range.low / scale, 0.0f, 255.0f));
  const float* from = x.as<float>();
  auto* y = r.output(0, x.dims, DType::uint8).as<uint8_t>();
  parallel_elements(x.count(), r.threads(), [&](int64_t begin, int64_t end) {
    run_vectorised([=]() FRETSAW_ALWAYS_INLINE {
      const float step = scale, offset = zero;  // locals: see isa.h
      for (int64_t i = begin; i < end; ++i) {
        float q = math::rint(from[i] / step) + offset;
        q = q > 0.0f ? q : 0.0f;
        y[i] = static_cast<uint8_t>(static_cast<int32_t>(q < 255.0f ? q : 255.0f));
      }
    });
  });
  if (r.wants_output(1)) *r.output(1, {}, DType::float32).as<float>() = scale;
  if (r.wants_output(2)) *r.output(2, {}, DType::uint8).as<uint8_t>() = static_cast<uint8_t>(zero);
}

}  // namespace

void register_dynamic_quantization(KernelRegistry& registry) {
  registry.add({.op = "DynamicQuantizeLinear",
                .make = [](const CompileContext&) { return CompiledKernel{dynamic_quantize}; },
                .unsupported =
                    [](const CompileContext& c) {
                      const DType type = c.input_dtype(0);
                      return type == DType::undefined || type == DType::float32 ? std::string() : not_supported(type);
                    }});
}

}  // namespace fretsaw
