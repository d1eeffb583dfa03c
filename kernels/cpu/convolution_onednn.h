// Convolution and transposed convolution in float32 by oneDNN, with the elementwise nodes fused into them.
#pragma once
#include <list>

#include "kernels/cpu/convolution.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/window.h"

namespace fretsaw {

// The spatial dimensions of a transposed convolution's output; sets the window's padding where output_shape or auto_pad decide it.
Dims transposed_output_spatial(const Node& node, Window& window, const Dims& spatial);

// One node (or fusion group) for any shapes: primitives are made for each set of shapes and kept.
//
// Tensors with two spatial dimensions are taken and left as nhwc: there oneDNN has its fastest code, and one layout everywhere
// means no copies between layers. What is chosen depends on shapes and attributes alone, never on the layouts that are offered.
class OneDnnConvolution {
 public:
  OneDnnConvolution(const CompileContext& c, bool transposed);
  void run(RunContext& r);
  void set_layouts(CompiledKernel& kernel, const CompileContext& c);

 private:
  struct Plan {
    std::vector<Dims> key;  // of all inputs
    Dims y_dims;
    onednn::Call call;
    dnnl::memory::desc src, weights, dst, scratchpad;
    std::vector<std::pair<size_t, dnnl::memory::desc>> operands;  // of the fused binary steps: step, format
    size_t fused = 0;                                             // steps [0, fused) are in the primitive
    bool accumulates = false;                                     // step 0 is: the result is added to what Y holds
    int bias_input = -1;
  };
  struct Choice;

  Plan& plan_for(RunContext& r);
  Plan make_plan(const std::vector<Dims>& inputs);
  std::optional<Choice> create(const Plan& plan, const Dims& x, const Window& window, const dnnl::memory::desc& src,
                               const dnnl::memory::desc& dst, const std::vector<Dims>& inputs, size_t steps, bool accumulate) const;
  Choice choose(const Plan& plan, const Dims& x, const Window& window, const std::vector<Dims>& inputs) const;
  dnnl::memory::desc plain_weights(const Dims& w) const;
  const void* packed_weights(const Plan& plan);
  bool adds_full_tensor(const std::vector<Dims>& inputs, const Dims& y) const;

  Node node_;  // a copy: only its attributes are read after the constructor
  bool transposed_;
  int64_t groups_;
  bool has_bias_;
  Window window_;
  std::vector<FusedStep> steps_;
  TensorPtr constant_weights_;
  std::vector<std::shared_ptr<onednn::PackedWeights>> packed_;
  std::list<Plan> plans_;
  Layout output_layout_ = Layout::plain;
};

// W [O, C, ...] and Y computed where there are no inputs to sum: Y = bias or 0, then the steps.
void fill_with_bias(RunContext& r, TensorView& y, const TensorView* bias);

}  // namespace fretsaw
