// Attention by tiles in the manner of flash attention: a block takes a tile of queries through all keys that they see, a tile at a time,
// with the running maximum and sum of each query; products in float32.
#include <algorithm>

#include "kernels/cuda/attention_masks.cuh"

namespace fretsaw::cuda {
namespace {

constexpr int kSide = 16, kThreads = kSide * kSide;  // threads side by side along queries and along keys

// Heads are padded to Depth; each thread has Rows queries, Keys keys of a tile and Depth / 16 columns of Y.
template <int Depth_, int Rows_, int Keys_>
struct Shape {
  static constexpr int Depth = Depth_, Rows = Rows_, Keys = Keys_;
  static constexpr int queries = kSide * Rows, keys = kSide * Keys, columns = Depth / kSide;
  static constexpr int pitch = Depth + 4;         // of rows in shared memory: 16-byte accesses of neighbouring rows hit different banks
  static constexpr int weights_pitch = keys + 4;  // likewise
  static constexpr size_t bytes = sizeof(float) * ((queries + keys) * pitch + keys * Depth + queries * weights_pitch);
};

// Rows [first, first + Count) of a head [rows, width] into shared memory, with zeros around; 4 elements at a time where `packed`.
template <typename T, int Count, int Depth>
__device__ void stage(float* to, int pitch, const T* from, int64_t line, int first, int rows, int width, bool packed) {
  for (int i = static_cast<int>(threadIdx.x); i < Count * Depth / 4; i += kThreads) {
    const int row = i / (Depth / 4), d = i % (Depth / 4) * 4;
    float4 values = {0, 0, 0, 0};
    if (first + row < rows && d < width) {
      const T* source = from + (first + row) * line + d;
      if (packed) {
        const auto pack = *reinterpret_cast<const Lanes<T, 4>*>(source);
        values = {widen(pack.at[0]), widen(pack.at[1]), widen(pack.at[2]), widen(pack.at[3])};
      } else {
        values.x = widen(source[0]);
        if (d + 1 < width) values.y = widen(source[1]);
        if (d + 2 < width) values.z = widen(source[2]);
        if (d + 3 < width) values.w = widen(source[3]);
      }
    }
    *reinterpret_cast<float4*>(to + row * pitch + d) = values;
  }
}

__device__ inline float dot(float4 a, float4 b, float sum) {
  return sum + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
__device__ inline float4 at4(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

// The scores of this thread's queries and keys: rows y * Rows + r, keys x + 16 c.
template <typename S>
__device__ void multiply_keys(const float* q, const float* k, int x, int y, float (&scores)[S::Rows][S::Keys]) {
#pragma unroll
  for (int r = 0; r < S::Rows; ++r) {
#pragma unroll
    for (int c = 0; c < S::Keys; ++c) scores[r][c] = 0;
  }
#pragma unroll 4
  for (int d = 0; d < S::Depth; d += 4) {
    float4 keys[S::Keys];
#pragma unroll
    for (int c = 0; c < S::Keys; ++c) keys[c] = at4(k + (x + kSide * c) * S::pitch + d);
#pragma unroll
    for (int r = 0; r < S::Rows; ++r) {
      const float4 query = at4(q + (y * S::Rows + r) * S::pitch + d);
#pragma unroll
      for (int c = 0; c < S::Keys; ++c) scores[r][c] = dot(query, keys[c], scores[r][c]);
    }
  }
}

// sums += weights V: columns 4 x + 64 c .. + 3 of this thread, or x + 16 c where a head is narrower than 64.
template <typename S>
__device__ void multiply_values(const float* weights, const float* v, int x, int y, float (&sums)[S::Rows][S::columns]) {
#pragma unroll 2
  for (int t = 0; t < S::keys; t += 4) {
    float4 rows[S::Rows];
#pragma unroll
    for (int r = 0; r < S::Rows; ++r) rows[r] = at4(weights + (y * S::Rows + r) * S::weights_pitch + t);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float values[S::columns];
#pragma unroll
      for (int c = 0; c < S::columns; ++c) {
        if constexpr (S::columns >= 4) {
          if (c % 4 == 0) *reinterpret_cast<float4*>(values + c) = at4(v + (t + j) * S::Depth + c / 4 * 4 * kSide + 4 * x);
        } else {
          values[c] = v[(t + j) * S::Depth + c * kSide + x];
        }
      }
#pragma unroll
      for (int r = 0; r < S::Rows; ++r) {
        const float weight = j == 0 ? rows[r].x : j == 1 ? rows[r].y : j == 2 ? rows[r].z : rows[r].w;
#pragma unroll
        for (int c = 0; c < S::columns; ++c) sums[r][c] += weight * values[c];
      }
    }
  }
}
template <typename S>
__device__ int column_of(int x, int c) {
  return S::columns >= 4 ? c / 4 * 4 * kSide + 4 * x + c % 4 : c * kSide + x;
}

// The sum or maximum over the 16 threads that share a query.
__device__ inline float over_side(float value, bool largest) {
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, value, step);
    value = largest ? fmaxf(value, other) : value + other;
  }
  return value;
}

// One row's scores of a tile become weights; what was summed before is scaled to the new maximum.
template <typename S>
__device__ void weigh(float (&scores)[S::Keys], float& largest, float& total, float (&sums)[S::columns]) {
  float now = scores[0];
#pragma unroll
  for (int c = 1; c < S::Keys; ++c) now = fmaxf(now, scores[c]);
  now = fmaxf(largest, over_side(now, true));
  const float base = now == -INFINITY ? 0.0f : now, fade = expf(largest - base);
  float sum = 0;
#pragma unroll
  for (int c = 0; c < S::Keys; ++c) {
    scores[c] = expf(scores[c] - base);
    sum += scores[c];
  }
  total = total * fade + over_side(sum, false);
  largest = now;
#pragma unroll
  for (int c = 0; c < S::columns; ++c) sums[c] *= fade;
}

template <typename T, typename S>
__global__ void __launch_bounds__(kThreads) tiled_kernel(AttentionProblem p, bool packed) {
  extern __shared__ float4 memory[];
  float* q = reinterpret_cast<float*>(memory);  // [queries][pitch]
  float* k = q + S::queries * S::pitch;         // [keys][pitch]
  float* v = k + S::keys * S::pitch;            // [keys][Depth]
  float* weights = v + S::keys * S::Depth;      // [queries][weights_pitch]
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const int tiles = (p.S + S::queries - 1) / S::queries, tile = static_cast<int>(blockIdx.x % tiles);
  const int h = static_cast<int>(blockIdx.x / tiles % p.H), b = static_cast<int>(blockIdx.x / tiles / p.H), g = h / (p.H / p.G);
  const int first = (tiles - 1 - tile) * S::queries, last_row = min(first + S::queries, p.S) - 1;  // the longest rows of causal masks first
  stage<T, S::queries, S::Depth>(q, S::pitch, head_of<T>(p.q, p.q_at, b, h), p.q_at.row, first, p.S, p.D, packed);
  const T *key_head = head_of<T>(p.k, p.k_at, b, g), *value_head = head_of<T>(p.v, p.v_at, b, g);
  // Positions grow with rows: the first row has the first key, the last row the last one.
  const int begin = max(keys_of(p, b, first).first, 0) / S::keys * S::keys, end = min(keys_of(p, b, last_row).last, p.T);
  const bool restricted = p.restricts();
  float sums[S::Rows][S::columns] = {}, largest[S::Rows], total[S::Rows];
  KeyRange ranges[S::Rows];
#pragma unroll
  for (int r = 0; r < S::Rows; ++r) {
    largest[r] = -INFINITY, total[r] = 0;
    ranges[r] = keys_of(p, b, min(first + y * S::Rows + r, p.S - 1));
  }
  for (int t0 = begin; t0 < end; t0 += S::keys) {
    __syncthreads();
    stage<T, S::keys, S::Depth>(k, S::pitch, key_head, p.k_at.row, t0, p.T, p.D, packed);
    stage<T, S::keys, S::Depth>(v, S::Depth, value_head, p.v_at.row, t0, p.T, p.V, packed);
    __syncthreads();
    float scores[S::Rows][S::Keys];
    multiply_keys<S>(q, k, x, y, scores);
#pragma unroll
    for (int r = 0; r < S::Rows; ++r) {
      const int row = y * S::Rows + r;
      const int64_t mask = restricted ? mask_row(p, b, h, min(first + row, p.S - 1)) : 0;
#pragma unroll
      for (int c = 0; c < S::Keys; ++c) {
        const int t = t0 + x + kSide * c;
        const float added = t >= p.T ? -INFINITY : restricted ? added_at<T>(p, ranges[r], mask, t) : 0.0f;
        scores[r][c] = added == -INFINITY ? -INFINITY : capped(scores[r][c] * p.scale, p.softcap) + added;
      }
      weigh<S>(scores[r], largest[r], total[r], sums[r]);
#pragma unroll
      for (int c = 0; c < S::Keys; ++c) weights[row * S::weights_pitch + x + kSide * c] = scores[r][c];
    }
    __syncwarp();  // a query's weights are written and read by the same half of a warp
    multiply_values<S>(weights, v, x, y, sums);
  }
  T* out = const_cast<T*>(head_of<T>(p.y, p.y_at, b, h));
#pragma unroll
  for (int r = 0; r < S::Rows; ++r) {
    const int row = first + y * S::Rows + r;
    const float factor = total[r] == 0.0f ? 0.0f : 1.0f / total[r];
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
      const int column = column_of<S>(x, c);
      if (row < p.S && column < p.V) out[row * p.y_at.row + column] = narrow<T>(sums[r][c] * factor);
    }
  }
}

bool is_packed(const AttentionProblem& p, int64_t element) {
  if (p.D % 4 || p.V % 4) return false;
  for (const void* base : {p.q, p.k, p.v})
    if (reinterpret_cast<uintptr_t>(base) % static_cast<size_t>(4 * element)) return false;
  for (const HeadStrides& at : {p.q_at, p.k_at, p.v_at})
    if (at.batch % 4 || at.head % 4 || at.row % 4) return false;
  return true;
}

template <typename T, typename S>
void launch(const AttentionProblem& p, cudaStream_t stream) {
  const int64_t blocks = int64_t{p.B} * p.H * ((p.S + S::queries - 1) / S::queries);
  FRETSAW_CUDA_CHECK(cudaFuncSetAttribute(tiled_kernel<T, S>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(S::bytes)));
  tiled_kernel<T, S><<<static_cast<unsigned>(blocks), kThreads, S::bytes, stream>>>(p, is_packed(p, sizeof(T)));
  check_launch("tiled_kernel");
}

template <typename T>
void launch_for_depth(const AttentionProblem& p, cudaStream_t stream) {
  const int depth = std::max(p.D, p.V);
  if (depth <= 32) return launch<T, Shape<32, 8, 4>>(p, stream);
  if (depth <= 64) return launch<T, Shape<64, 8, 4>>(p, stream);
  if (depth <= 128) return launch<T, Shape<128, 8, 4>>(p, stream);
  launch<T, Shape<256, 4, 2>>(p, stream);
}

}  // namespace

bool takes_tiled_attention(const AttentionProblem& p) {
  return std::max(p.D, p.V) <= 256 && !p.scores && p.T > 0 && int64_t{p.B} * p.H * ((p.S + 63) / 64) <= INT32_MAX;
}

void run_tiled_attention(const AttentionProblem& p, cudaStream_t stream) {
  if (int64_t{p.B} * p.H * p.S == 0) return;
  if (p.type == DType::float32) return launch_for_depth<float>(p, stream);
  if (p.type == DType::float16) return launch_for_depth<__half>(p, stream);
  launch_for_depth<__nv_bfloat16>(p, stream);
}

}  // namespace fretsaw::cuda
