// What the files of the matrix product family share.
#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/kernel.h"

namespace fretsaw {

// The shapes of a product as numpy's matmul has it. Vectors count as a row (A) or a column (B), whose dimension is left out of the result.
//
//   A [batch_a..., M, K]   B [batch_b..., K, N]   Y [batch..., M, N], the batch dimensions broadcast
struct MatMulShape {
  int64_t M = 0, K = 0, N = 0;
  Dims y;  // as the model sees it
  // For each matrix of Y in order, which matrix of A and of B it is the product of.
  std::vector<std::pair<int64_t, int64_t>> batches;
  bool single_b = false;  // all of them take the same B
};
MatMulShape matmul_shape(const Dims& a, const Dims& b);

// Element (i, k) of a matrix stands at data[i * row + k * column]; one of the two strides is 1.
struct MatrixView {
  const float* data;
  int64_t row, column;
};
// C [M, N] = alpha * A [M, K] * B [K, N] + beta * C, on this thread's share of the cores. Rows of C are `c_row` elements apart.
void multiply(int64_t M, int64_t N, int64_t K, MatrixView a, MatrixView b, float* c, int64_t c_row, float alpha = 1.0f, float beta = 0.0f);

// The same for other types, by loops: Y [M, N] = A [M, K] * B [K, N], all dense.
template <typename T>
void multiply_by_loops(const T* a, const T* b, T* y, int64_t M, int64_t K, int64_t N) {
  for (int64_t i = 0; i < M; ++i) {
    T* row = y + i * N;
    for (int64_t j = 0; j < N; ++j) row[j] = T(0);
    for (int64_t k = 0; k < K; ++k) {
      const T factor = a[i * K + k];
      const T* from = b + k * N;
      for (int64_t j = 0; j < N; ++j) row[j] += factor * from[j];
    }
  }
}

// A [M, K] and B [K, N] by strides, as `multiply` has it; for float32 it is that.
template <typename T>
struct StridedMatrix {
  const T* data;
  int64_t row, column;
};
template <typename T>
void multiply_strided(int64_t M, int64_t N, int64_t K, StridedMatrix<T> a, StridedMatrix<T> b, T* c, int64_t c_row, T alpha = T(1),
                      T beta = T(0)) {
  if constexpr (std::is_same_v<T, float>) {
    multiply(M, N, K, {a.data, a.row, a.column}, {b.data, b.row, b.column}, c, c_row, alpha, beta);
  } else {
    for (int64_t i = 0; i < M; ++i) {
      for (int64_t j = 0; j < N; ++j) {
        T sum = T(0);
        for (int64_t k = 0; k < K; ++k) sum += a.data[i * a.row + k * a.column] * b.data[k * b.row + j * b.column];
        c[i * c_row + j] = alpha * sum + (beta == T(0) ? T(0) : beta * c[i * c_row + j]);
      }
    }
  }
}

// Calls body(batch) for each of `batches` products of matrices: batches side by side on the threads where there are enough of them, else
// one after another, each on all threads.
template <typename Body>
void for_each_batch(int64_t batches, int threads, const Body& body) {
  if (batches < threads) {
    for (int64_t i = 0; i < batches; ++i) body(i);
    return;
  }
  parallel_for(batches, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

void register_quantized_matmul(KernelRegistry& registry);  // MatMulInteger, QLinearMatMul
void register_einsum(KernelRegistry& registry);
void register_determinant(KernelRegistry& registry);  // Det

}  // namespace fretsaw
