// Dropout while a model is trained. It drops the elements that the CPU drops.
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/random.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dropout.h"
#include "kernels/cuda/number_types.cuh"
#include "kernels/cuda/random_place.cuh"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256, kPack = 4;  // a counter of Philox makes the numbers of 4 elements

// What says how much is dropped, in device memory; null where it is left out.
struct Settings {
  const void* ratio;
  DType ratio_type;
  const bool* training;

  __device__ double dropped() const {
    if (!training || !*training) return 0;
    if (!ratio) return 0.5;
    switch (ratio_type) {
      case DType::float64:
        return *static_cast<const double*>(ratio);
      case DType::float16:
        return widen(*static_cast<const __half*>(ratio));
      case DType::bfloat16:
        return widen(*static_cast<const __nv_bfloat16*>(ratio));
      default:
        return *static_cast<const float*>(ratio);
    }
  }
};

// y may be x.
template <typename T>
__global__ void __launch_bounds__(kThreads) drop(const T* x, T* y, bool* mask, int64_t count, Settings settings, cuda::Philox random) {
  using Wide = WideOf<T>;
  const double ratio = settings.dropped();
  const auto scale = static_cast<Wide>(1.0 / (1.0 - ratio));
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPack; i < count; i += int64_t{gridDim.x} * kThreads * kPack) {
    const uint4 words = random.block(static_cast<uint64_t>(i) / kPack);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (i + k >= count) break;
      const float drawn = static_cast<float>(cuda::Philox::word(words, static_cast<uint64_t>(k)) >> 8) * 0x1p-24f;
      const bool kept = ratio == 0 || static_cast<double>(drawn) >= ratio;
      y[i + k] = kept ? narrow<T>(widen(x[i + k]) * scale) : narrow<T>(Wide(0));
      if (mask) mask[i + k] = kept;
    }
  }
}

CompiledKernel make_dropout(const CompileContext& c) {
  const bool has_seed = c.node().has("seed");
  const cuda::Philox random(has_seed ? static_cast<uint64_t>(c.node().get_int("seed", 0)) : random_key(c.node()));
  return {[random](RunContext& r) {
    const TensorView& x = r.input(0);
    Settings settings{nullptr, DType::float32, r.has_input(2) ? r.input(2).as<const bool>() : nullptr};
    if (r.has_input(1)) {
      require(r.input(1).count() == 1, "the ratio of a dropout must be one number");
      settings.ratio = r.input(1).data, settings.ratio_type = r.input(1).dtype;
    }
    bool* mask = r.wants_output(1) ? r.output(1, x.dims, DType::boolean).as<bool>() : nullptr;
    TensorView& y = r.output(0, x.dims, x.dtype);
    if (x.count() == 0) return;
    with_float_type(x.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      drop<T><<<blocks_for(x.count(), kThreads, kPack), kThreads, 0, stream_of(r)>>>(x.as<const T>(), y.as<T>(), mask, x.count(), settings,
                                                                                     random);
    });
    check_launch("drop");
  }};
}

std::string unsupported_dropout(const CompileContext& c) {
  for (size_t i : {0, 1}) {
    const std::string reason = refuse_other_types(c, i, {DType::float32, DType::float16, DType::bfloat16, DType::float64});
    if (!reason.empty()) return reason;
  }
  return refuse_other_types(c, 2, {DType::boolean});
}

__global__ void __launch_bounds__(kThreads) draw_mask(bool* mask, int64_t count, float ratio, uint64_t key, RandomPlace place) {
  const cuda::Philox random = place.random(key);
  const uint64_t first = place.first(count);
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPack; i < count; i += int64_t{gridDim.x} * kThreads * kPack) {
    uint4 words{};
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (i + k >= count) break;
      const uint64_t index = first + static_cast<uint64_t>(i + k);
      if (k == 0 || index % kPack == 0) words = random.block(index / kPack);
      mask[i + k] = static_cast<float>(cuda::Philox::word(words, index) >> 8) * 0x1p-24f >= ratio;
    }
  }
}

CompiledKernel make_dropout_mask(const CompileContext& c) {
  const float ratio = c.node().get_float("ratio", 0.5f);
  const auto key = static_cast<uint64_t>(c.node().get_int("key", 0));
  return {[ratio, key](RunContext& r) {
    require(r.input(1).count() == 2, "the samples at hand are not given by two numbers");
    const RandomPlace place{r.input(1).as<const int64_t>(), r.input(2).as<const int64_t>()};
    TensorView& mask = sized_output(r, 0, Dims(r.input_ints(0)), DType::boolean);
    if (mask.count() == 0) return;
    draw_mask<<<blocks_for(mask.count(), kThreads, kPack), kThreads, 0, stream_of(r)>>>(mask.as<bool>(), mask.count(), ratio, key, place);
    check_launch("draw_mask");
  }};
}

std::string unsupported_dropout_mask(const CompileContext& c) {
  const std::string reason = refuse_other_types(c, 1, {DType::int64});
  return reason.empty() ? refuse_other_types(c, 2, {DType::int64}) : reason;
}

}  // namespace

KernelRecord dropout_mask() {
  return {
      .op = "DropoutMask", .domain = "ai.fretsaw", .make = make_dropout_mask, .unsupported = unsupported_dropout_mask, .host_inputs = {0}};
}

KernelRecord training_dropout() {
  return {.op = "Dropout", .make = make_dropout, .unsupported = unsupported_dropout, .in_place = true, .host_random = true};
}

}  // namespace fretsaw::cuda
