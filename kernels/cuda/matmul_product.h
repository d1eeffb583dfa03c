// A batched matrix product on the GPU, with what follows it. How it is computed is chosen when it is made.
//
//   D [.., M, N] = activation(alpha * A [.., M, K] B [.., K, N] + beta * C [.., M, N] + bias [N])
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

enum class ProductActivation : uint8_t { none, relu, gelu_tanh };

// One batch dimension: elements from one matrix to the next, of A, B, and of D (and C).
struct ProductBatch {
  int64_t count = 1, a = 0, b = 0, d = 0;
};

struct ProductSpec {
  DType type = DType::float32;
  DType out = DType::undefined;  // of C and D where it isn't `type`: float32, of products of halves without bias
  bool tf32 = false;
  int64_t M = 0, N = 0, K = 0;
  // Element (i, k) of A stands at i * a_row + k * a_column, one of which is 1; B likewise. D and C are dense.
  int64_t a_row = 0, a_column = 1, b_row = 0, b_column = 1;
  int64_t b_columns = 0;              // more columns than N that B has in memory, the rest zeros; 0: it has none
  std::vector<ProductBatch> batches;  // outermost first
  double alpha = 1, beta = 0;
  bool bias = false;
  bool constant_b = false;  // B has been there since before the step: it may be read while earlier kernels still run
  ProductActivation activation = ProductActivation::none;
};

inline DType output_type(const ProductSpec& spec) {
  return spec.out == DType::undefined ? spec.type : spec.out;
}

struct ProductOperands {
  const void *a = nullptr, *b = nullptr, *c = nullptr, *bias = nullptr;
  void* d = nullptr;  // may be C
};

// Merges batch dimensions, and makes rows of those that share B, so that few large products remain.
void simplify(ProductSpec& spec);
// The batch dimensions of two operands that broadcast as numpy's do; `a` and `b` without the two last dimensions.
std::vector<ProductBatch> broadcast_batches(const Dims& a, const Dims& b, int64_t a_matrix, int64_t b_matrix, int64_t d_matrix);
// Elements from the first to the last one of an operand.
struct ProductExtents {
  int64_t a = 0, b = 0, d = 0;
};
ProductExtents extents_of(const ProductSpec& spec);
// Everything that a choice of algorithm depends on.
std::string describe(const ProductSpec& spec);

class Product {
 public:
  Product(GpuDevice& device, ProductSpec spec);
  ~Product();
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;
  size_t scratch_bytes() const;  // that `run` needs
  void run(const ProductOperands& operands, void* scratch, cudaStream_t stream);

 private:
  struct Implementation;
  std::unique_ptr<Implementation> self_;
};

// The least count of elements, `count` or more, that fills whole packs of 16 bytes.
inline int64_t in_whole_packs(int64_t count, DType type) {
  const int64_t pack = 128 / bits_of(type);
  return (count + pack - 1) / pack * pack;
}
// The smallest power of two, up to 16, that divides all these byte counts.
size_t common_alignment(std::initializer_list<int64_t> bytes);

}  // namespace fretsaw::cuda
