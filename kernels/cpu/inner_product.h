// Products with one constant matrix: oneDNN packs it once into the format that its kernel reads.
#pragma once
#include <list>
#include <memory>

#include "kernels/cpu/onednn.h"

namespace fretsaw {

// Y [rows, N] = A [rows, K] * B [K, N], then the steps of a fusion group. Plans for several numbers of rows are kept.
class InnerProduct {
 public:
  // Element (k, n) of B stands at k * row + n * column of the constant.
  InnerProduct(TensorPtr b, int64_t K, int64_t N, int64_t row, int64_t column, std::vector<FusedStep> steps);

  // `y` has its memory; A is dense. False where oneDNN has no fast code for these shapes: nothing is done then.
  bool run(RunContext& r, const float* a, int64_t rows, TensorView& y);
  // Packs the weights for this number of rows now.
  void prepare(int64_t rows, const Dims& y, const std::vector<Dims>& inputs);

 private:
  struct Plan {
    int64_t rows = 0;
    Dims y;
    std::vector<Dims> operands;  // shapes of the second operands of the binary steps
    bool possible = false;
    onednn::Call call;
    dnnl::memory::desc weights;
    size_t scratchpad_bytes = 0, fused = 0;
  };
  // The same product in oneDNN's terms: an inner product, or a convolution with a window of one element over an image of 1 x rows.
  enum class Form : uint8_t { inner_product, convolution };
  struct Choice;
  static dnnl::memory::desc in_form(Form form, int64_t rows, int64_t columns);
  dnnl::memory::desc plain_weights(const dnnl::memory::desc& packed) const;
  Plan make_plan(int64_t rows, const Dims& y, std::vector<Dims> operands);
  std::optional<Choice> create(const Plan& plan, Form form, size_t steps) const;
  std::optional<Choice> choose(const Plan& plan) const;
  std::optional<Dims> flat_operand(const Plan& plan, const Dims& operand) const;
  const void* packed_weights(const Plan& plan);

  TensorPtr b_;
  int64_t K_, N_, row_, column_;
  std::vector<FusedStep> steps_;
  std::vector<size_t> binary_inputs_;  // kernel inputs of the binary steps, in order
  std::vector<onednn::PackedWeights> packed_;
  std::list<Plan> plans_;
};

}  // namespace fretsaw
