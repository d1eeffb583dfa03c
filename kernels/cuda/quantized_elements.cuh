// Elements of any type that is quantised or the result of it, eight neighbours at a time, as float32.
#pragma once
#include <cuda_fp8.h>

#include "kernels/cuda/element_packs.cuh"
#include "kernels/host_device.h"

namespace fretsaw::cuda {

constexpr int kEach = 8;  // whole bytes of packed elements, whatever their bits

__device__ inline float float8_value(uint8_t bits, __nv_fp8_interpretation_t kind) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, kind)));
}

// Element i of a packed array, `bits` wide.
FRETSAW_HOST_DEVICE int packed_value(const uint8_t* data, int64_t i, int bits, bool is_signed) {
  const int each = 8 / bits, code = data[i / each] >> static_cast<int>(i % each) * bits & ((1 << bits) - 1);
  return is_signed && code >> (bits - 1) ? code - (1 << bits) : code;
}

__device__ inline float number_at(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::float32:
      return static_cast<const float*>(data)[i];
    case DType::float16:
      return __half2float(static_cast<const __half*>(data)[i]);
    case DType::bfloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    case DType::int8:
      return static_cast<const int8_t*>(data)[i];
    case DType::uint8:
      return static_cast<const uint8_t*>(data)[i];
    case DType::int16:
      return static_cast<const int16_t*>(data)[i];
    case DType::uint16:
      return static_cast<const uint16_t*>(data)[i];
    case DType::int32:
      return static_cast<float>(static_cast<const int32_t*>(data)[i]);
    case DType::float8e4m3fn:
      return float8_value(static_cast<const uint8_t*>(data)[i], __NV_E4M3);
    case DType::float8e5m2:
      return float8_value(static_cast<const uint8_t*>(data)[i], __NV_E5M2);
    case DType::int4:
    case DType::uint4:
      return static_cast<float>(packed_value(static_cast<const uint8_t*>(data), i, 4, dtype == DType::int4));
    default:
      return static_cast<float>(packed_value(static_cast<const uint8_t*>(data), i, 2, dtype == DType::int2));
  }
}

// Eight elements from a multiple of eight on, of which `count` exist.
template <typename T>
__device__ inline void load_run(const T* data, int count, float (&values)[kEach]) {
  if (count == kEach) {
    const auto run = *reinterpret_cast<const Lanes<T, kEach>*>(data);
#pragma unroll
    for (int e = 0; e < kEach; ++e) values[e] = static_cast<float>(run.at[e]);
    return;
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) values[e] = e < count ? static_cast<float>(data[e]) : 0;
}
template <>
__device__ inline void load_run(const float* data, int count, float (&values)[kEach]) {
#pragma unroll
  for (int half = 0; half < kEach; half += 4) {
    if (count >= half + 4) {
      const float4 run = *reinterpret_cast<const float4*>(data + half);
      values[half] = run.x, values[half + 1] = run.y, values[half + 2] = run.z, values[half + 3] = run.w;
    } else {
#pragma unroll
      for (int e = half; e < half + 4; ++e) values[e] = e < count ? data[e] : 0;
    }
  }
}

__device__ inline void load_eight(DType dtype, const void* data, int64_t i, int count, float (&values)[kEach]) {
  switch (dtype) {
    case DType::float32:
      return load_run(static_cast<const float*>(data) + i, count, values);
    case DType::float16:
      return load_run(static_cast<const __half*>(data) + i, count, values);
    case DType::bfloat16:
      return load_run(static_cast<const __nv_bfloat16*>(data) + i, count, values);
    case DType::int8:
      return load_run(static_cast<const int8_t*>(data) + i, count, values);
    case DType::uint8:
      return load_run(static_cast<const uint8_t*>(data) + i, count, values);
    default:
#pragma unroll
      for (int e = 0; e < kEach; ++e) values[e] = e < count ? number_at(dtype, data, i + e) : 0;
  }
}

template <typename T>
__device__ inline void store_run(T* data, int count, const float (&values)[kEach]) {
  using Number = std::conditional_t<std::is_integral_v<T>, int, float>;
  Lanes<T, kEach> run;
#pragma unroll
  for (int e = 0; e < kEach; ++e) run.at[e] = static_cast<T>(static_cast<Number>(values[e]));
  if (count == kEach) {
    *reinterpret_cast<Lanes<T, kEach>*>(data) = run;
    return;
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (e < count) data[e] = run.at[e];
  }
}

template <int kBits>
__device__ inline void store_packed(uint8_t* data, int64_t i, int count, const float (&values)[kEach]) {
  uint32_t codes = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (e < count) codes |= (static_cast<uint32_t>(static_cast<int>(values[e])) & ((1u << kBits) - 1)) << (e * kBits);
  }
  for (int byte = 0; byte * 8 < count * kBits; ++byte) data[i * kBits / 8 + byte] = static_cast<uint8_t>(codes >> (8 * byte));
}

__device__ inline void store_float8(uint8_t* data, int count, const float (&values)[kEach], __nv_fp8_interpretation_t kind, bool saturate) {
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (e < count) data[e] = __nv_cvt_float_to_fp8(values[e], saturate ? __NV_SATFINITE : __NV_NOSAT, kind);
  }
}

__device__ inline void store_eight(DType dtype, void* data, int64_t i, int count, const float (&values)[kEach], bool saturate) {
  switch (dtype) {
    case DType::float32:
      return store_run(static_cast<float*>(data) + i, count, values);
    case DType::float16:
      return store_run(static_cast<__half*>(data) + i, count, values);
    case DType::bfloat16:
      return store_run(static_cast<__nv_bfloat16*>(data) + i, count, values);
    case DType::int8:
      return store_run(static_cast<int8_t*>(data) + i, count, values);
    case DType::uint8:
      return store_run(static_cast<uint8_t*>(data) + i, count, values);
    case DType::int16:
      return store_run(static_cast<int16_t*>(data) + i, count, values);
    case DType::uint16:
      return store_run(static_cast<uint16_t*>(data) + i, count, values);
    case DType::float8e4m3fn:
      return store_float8(static_cast<uint8_t*>(data) + i, count, values, __NV_E4M3, saturate);
    case DType::float8e5m2:
      return store_float8(static_cast<uint8_t*>(data) + i, count, values, __NV_E5M2, saturate);
    case DType::int4:
    case DType::uint4:
      return store_packed<4>(static_cast<uint8_t*>(data), i, count, values);
    default:
      return store_packed<2>(static_cast<uint8_t*>(data), i, count, values);
  }
}

}  // namespace fretsaw::cuda
