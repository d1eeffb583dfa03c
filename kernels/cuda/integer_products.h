// Products of 8-bit matrices with zero points, summed in int32.
//
// All operands are read as int8: a uint8 number u as u - 128, and its zero point likewise, which leaves their difference. With A' and B'
// the numbers read, zero points a_m and b_n,
//   sum over k of (A' - a_m)(B' - b_n) = sum A'B' - a_m * sum B' - b_n * sum A' + K * a_m * b_n,
// modulo 2^32, so that four products of bytes are one instruction.
#pragma once
#include <algorithm>

#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/indexing.h"

namespace fretsaw::cuda {

// The number read for element `i`.
__device__ inline int8_t byte_at(const void* data, bool is_signed, int64_t i) {
  return static_cast<int8_t>(static_cast<const uint8_t*>(data)[i] ^ (is_signed ? 0u : 0x80u));
}

constexpr int kTileM = 64, kTileN = 64, kTileK = 32;
constexpr int kTileThreads = 256;  // each has 4 x 4 sums

// The numbers of the matrices of one product.
struct ProductAt {
  int64_t a, b, y;
};

// Puts the sums of one tile of one product. Operands is copied to the device and has
//   int64_t M, N, K
//   ProductAt matrices_of(index)
//   int8_t a(at, m, k), b(at, k, n)   the numbers read
//   int a_zero(at, m), b_zero(at, n)
//   void put(at, m, n, int32_t sum)
// Grid: x over tiles of N, y over tiles of M, z over products.
template <typename Operands>
__global__ void __launch_bounds__(kTileThreads) multiply_bytes(Operands o, int64_t matrices) {
  // [row or column][k], a word apart from a multiple of 32 words, so that a warp's rows lie in different banks.
  constexpr int kStride = kTileK + 4;
  __shared__ alignas(16) int8_t a_tile[kTileM][kStride], b_tile[kTileN][kStride];
  const int thread = static_cast<int>(threadIdx.x), row = thread / 16 * 4, column = thread % 16;  // columns column, column + 16, ...
  const int64_t n_begin = static_cast<int64_t>(blockIdx.x) * kTileN;
  for (int64_t matrix = blockIdx.z; matrix < matrices; matrix += gridDim.z) {
    const ProductAt at = o.matrices_of(matrix);
    for (int64_t m_begin = static_cast<int64_t>(blockIdx.y) * kTileM; m_begin < o.M; m_begin += static_cast<int64_t>(gridDim.y) * kTileM) {
      int32_t sums[4][4] = {}, a_sums[4] = {}, b_sums[4] = {};
      for (int64_t k_begin = 0; k_begin < o.K; k_begin += kTileK) {
        for (int i = thread; i < kTileM * kTileK; i += kTileThreads) {
          const int64_t m = m_begin + i / kTileK, k = k_begin + i % kTileK;
          a_tile[i / kTileK][i % kTileK] = m < o.M && k < o.K ? o.a(at, m, k) : int8_t{0};
        }
        for (int i = thread; i < kTileN * kTileK; i += kTileThreads) {
          const int64_t n = n_begin + i % kTileN, k = k_begin + i / kTileN;
          b_tile[i % kTileN][i / kTileN] = n < o.N && k < o.K ? o.b(at, k, n) : int8_t{0};
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kTileK; k += 4) {
          int a[4], b[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a[i] = *reinterpret_cast<const int*>(&a_tile[row + i][k]);
            b[i] = *reinterpret_cast<const int*>(&b_tile[column + 16 * i][k]);
            a_sums[i] = __dp4a(a[i], 0x01010101, a_sums[i]);
            b_sums[i] = __dp4a(b[i], 0x01010101, b_sums[i]);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] = __dp4a(a[i], b[j], sums[i][j]);
          }
        }
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int64_t m = m_begin + row + i, n = n_begin + column + 16 * j;
          if (m >= o.M || n >= o.N) continue;
          // Unsigned, because sums may wrap around.
          const auto za = static_cast<uint32_t>(o.a_zero(at, m)), zb = static_cast<uint32_t>(o.b_zero(at, n));
          const uint32_t sum = static_cast<uint32_t>(sums[i][j]) - za * static_cast<uint32_t>(b_sums[j]) -
                               zb * static_cast<uint32_t>(a_sums[i]) + static_cast<uint32_t>(o.K) * za * zb;
          o.put(at, m, n, static_cast<int32_t>(sum));
        }
      }
    }
  }
}

template <typename Operands>
void launch_products(RunContext& r, const Operands& operands, int64_t matrices) {
  if (matrices == 0 || operands.M == 0 || operands.N == 0) return;
  const auto tiles = [](int64_t extent, int tile, int64_t most) {
    return static_cast<unsigned>(std::min((extent + tile - 1) / tile, most));
  };
  const dim3 grid(tiles(operands.N, kTileN, int64_t{1} << 30), tiles(operands.M, kTileM, 65535), tiles(matrices, 1, 65535));
  multiply_bytes<<<grid, kTileThreads, 0, stream_of(r)>>>(operands, matrices);
  check_launch("multiply_bytes");
}

// A scale or zero point of any granularity: one, or one for each line (row or column), or these for each matrix.
struct LineParameter {
  const void* data = nullptr;  // null: 0
  DType type = DType::undefined;
  int64_t count = 1, lines = 1;

  LineParameter() = default;
  LineParameter(RunContext& r, size_t input, int64_t lines);
  __device__ int64_t index(int64_t matrix, int64_t line) const { return count == 1 ? 0 : matrix % (count / lines) * lines + line; }
  // Of a zero point, as the numbers are read.
  __device__ int zero(int64_t matrix, int64_t line) const { return byte_at(data, type == DType::int8, index(matrix, line)); }
  // Of a scale (a float), or of a zero point that is added.
  __device__ float number(int64_t matrix, int64_t line) const {
    const int64_t i = index(matrix, line);
    switch (type) {
      case DType::float16:
        return widen(static_cast<const __half*>(data)[i]);
      case DType::bfloat16:
        return widen(static_cast<const __nv_bfloat16*>(data)[i]);
      case DType::int8:
        return static_cast<const int8_t*>(data)[i];
      case DType::uint8:
        return static_cast<const uint8_t*>(data)[i];
      default:
        return static_cast<const float*>(data)[i];
    }
  }
};

// sum * scale + zero, rounded to the nearest whole number (halves to even) and into the range of int8 or uint8.
__device__ inline uint8_t quantized(int32_t sum, float scale, float zero, bool is_signed) {
  const float low = is_signed ? -128.0f : 0.0f, high = is_signed ? 127.0f : 255.0f;
  const float value = fminf(fmaxf(rintf(__fmul_rn(static_cast<float>(sum), scale)) + zero, low), high);
  return is_signed ? static_cast<uint8_t>(static_cast<int8_t>(value)) : static_cast<uint8_t>(value);
}

void register_integer_convolutions(KernelRegistry& registry);  // integer_convolutions.cu: ConvInteger, QLinearConv

}  // namespace fretsaw::cuda
