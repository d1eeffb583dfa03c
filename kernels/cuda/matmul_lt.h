// One product as cuBLASLt sees it: its descriptors, the algorithms that can do it, and running one of them.
#pragma once
#include <optional>

#include "kernels/cuda/matmul_product.h"

namespace fretsaw::cuda {

inline constexpr size_t kProductWorkspace = size_t{32} << 20;

struct LtAlgorithm {
  cublasLtMatmulAlgo_t algorithm = {};
  size_t workspace = 0;
};
// As text for the cache, and back; nullopt where the text is not one.
std::string to_text(const LtAlgorithm& algorithm);
std::optional<LtAlgorithm> algorithm_of(const std::string& text);

class LtProduct {
 public:
  // `spec.batches` has at most one dimension. All addresses will be multiples of `alignment`. The rows of D are `d_row` elements apart.
  LtProduct(GpuDevice& device, const ProductSpec& spec, size_t alignment, int64_t d_row);
  ~LtProduct();
  LtProduct(const LtProduct&) = delete;
  LtProduct& operator=(const LtProduct&) = delete;

  std::vector<LtAlgorithm> candidates(int at_most) const;  // best guesses first; empty where cuBLASLt can't
  bool accepts(LtAlgorithm& algorithm) const;              // and fills in its workspace
  cublasStatus_t run(const ProductOperands& operands, const LtAlgorithm& algorithm, void* workspace, cudaStream_t stream);

 private:
  cublasLtHandle_t handle_;
  bool bias_, double_scale_;
  double alpha_, beta_;
  float alpha32_, beta32_;
  size_t alignment_;
  bool half_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t first_ = nullptr, second_ = nullptr, result_ = nullptr;
};

}  // namespace fretsaw::cuda
