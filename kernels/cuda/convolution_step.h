// A convolution node, or a fused step that one leads, read from its context.
#pragma once
#include <string>

#include "kernels/cuda/convolution.h"

namespace fretsaw::cuda {

struct ConvolutionStep {
  Convolution convolution;  // as it is computed: lines as images of height 1, channels padded
  Dims y_dims;              // as the program has it
  int bias_input = -1, residual_input = -1;
  std::vector<size_t> settings;  // constant inputs that were read (the bounds of Clip)
  // Tensors of other ranks than 4 are never nhwc in a program: X and Y are then copied to and from channels last inside the step.
  bool copies_y = false;
  bool prepares_x = false;                                    // X is copied to channels last, or to more channels
  Layout x_layout = Layout::plain, y_layout = Layout::plain;  // that the step takes and leaves
};

// Fills `step`; returns a reason where it can't be computed here, or "". All dimensions must be known.
std::string read_convolution_step(const CompileContext& c, bool transposed, ConvolutionStep& step);
// Adds the nodes after the first: bias, residual and activation, each at most once and the activation last.
std::string read_followers(const CompileContext& c, ConvolutionStep& step);

// Chooses how it is computed by layouts that tensor cores like, and by those that are offered.
void choose_layouts(const CompileContext& c, ConvolutionStep& step);
// A line [N, C, L] becomes an image [N, C, 1, L].
void make_image(Convolution& c);
// The kernel of what was read.
CompiledKernel compile_convolution(const CompileContext& c, ConvolutionStep step);

}  // namespace fretsaw::cuda
