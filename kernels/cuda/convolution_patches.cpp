// Convolutions whose windows lie side by side, as those that cut an image into patches: one copy puts each window's elements in a row,
// and a product does the rest.
//
//   X [N, C, H, W] -> A [N * OH * OW, C * KH * KW]      Y [N * OH * OW, O] = activation(A W^T + bias)
#include <algorithm>

#include "kernels/cuda/convolution_plans.h"
#include "kernels/cuda/matmul_product.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

using Kind = FusedActivation::Kind;

int64_t window_size(const Convolution& c) {
  return c.x_channels * c.w[2] * c.w[3];
}

// The activations that products take in; the others follow in a pass of their own.
bool is_fused(const FusedActivation& f) {
  return f.kind == Kind::none || f.kind == Kind::relu || f.kind == Kind::gelu_tanh;
}

ProductSpec product_of(const Convolution& c) {
  ProductSpec s;
  s.type = c.dtype, s.tf32 = c.tf32;
  s.M = c.y[0] * c.y[2] * c.y[3], s.N = c.y[1], s.K = window_size(c);
  s.a_row = s.K, s.b_row = 1, s.b_column = s.K;
  if (!is_fused(c.activation)) return s;
  s.bias = c.bias;
  s.activation = c.activation.kind == Kind::relu        ? ProductActivation::relu
                 : c.activation.kind == Kind::gelu_tanh ? ProductActivation::gelu_tanh
                                                        : ProductActivation::none;
  return s;
}

class PatchesPlan : public ConvolutionPlan {
 public:
  PatchesPlan(GpuDevice& device, Convolution c)
      : convolution_(std::move(c)),
        product_(device, product_of(convolution_)),
        rows_bytes_(rounded(bytes_of(convolution_.dtype, product_of(convolution_).M * window_size(convolution_)))) {}
  size_t workspace() const override { return rows_bytes_ + product_.scratch_bytes(); }
  WeightForm weight_form() const override { return WeightForm::as_given; }
  bool takes_given_x() const override { return true; }
  std::string saved() const override { return {kPatches}; }

  void run(GpuDevice& device, const ConvolutionAddresses& at, void* workspace) override {
    const auto stream = static_cast<cudaStream_t>(device.stream());
    copy_windows(at.given_x, workspace, stream);
    ProductOperands operands;
    operands.a = workspace, operands.b = at.w, operands.d = at.y;
    if (is_fused(convolution_.activation)) operands.bias = at.bias;
    product_.run(operands, static_cast<char*>(workspace) + rows_bytes_, stream);
    if (!is_fused(convolution_.activation)) run_epilogue(convolution_, at, stream);
  }

 private:
  void copy_windows(const void* x, void* rows, cudaStream_t stream) const {
    const Convolution& c = convolution_;
    const int64_t cells = c.x[2] * c.x[3];
    const bool plain = c.x_layout == Layout::plain;
    const int64_t channel = plain ? cells : 1, column = plain ? 1 : c.x_channels, row = c.x[3] * column;
    StridedCopy copy;
    copy.element_bytes = bytes_of(c.dtype, 1);
    copy.dims = {c.y[0], c.y[2], c.y[3], c.x_channels, c.w[2], c.w[3]};
    copy.from_strides = {c.x_channels * cells, c.w[2] * row, c.w[3] * column, channel, row, column};
    copy.to = rows, copy.from = x;
    copy_strided(copy, stream);
  }

  Convolution convolution_;
  Product product_;
  size_t rows_bytes_;
};

}  // namespace

bool has_patches(const Convolution& c) {
  if (!c.channels_last || c.transposed || c.of_weight || c.groups != 1 || c.residual) return false;
  if (c.spatial_rank() != 2 || c.w[2] * c.w[3] == 1) return false;
  const auto none = [](const Dims& pads) { return std::all_of(pads.begin(), pads.end(), [](int64_t p) { return p == 0; }); };
  return c.strides == Dims{c.w[2], c.w[3]} && c.dilations == Dims{1, 1} && none(c.pads_begin) && none(c.pads_end);
}

std::shared_ptr<ConvolutionPlan> patches_plan(GpuDevice& device, const Convolution& c) {
  return std::make_shared<PatchesPlan>(device, c);
}

}  // namespace fretsaw::cuda
