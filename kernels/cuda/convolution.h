// What the files of the convolution family share: a convolution as numbers, ways to compute it, and the kernels they are made of.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

struct FusedActivation {
  enum class Kind : uint8_t { none, relu, clip, leaky_relu, sigmoid, swish, hard_swish, gelu, gelu_tanh, tanh };
  Kind kind = Kind::none;
  float a = 0, b = 0;  // the bounds of clip; the slope of leaky_relu; the factor of swish
};

// Y = activation(X * W + bias + residual), with 2 or 3 spatial dimensions (a line has the extent 1 first).
// Dimensions are logical: X [N, C, D...], W [O, C / groups, K...], or [C, O / groups, K...] when transposed, Y [N, O, E...].
// With channels_last X and Y lie as [N, D..., C] and W as [first, K..., second].
//
// of_weight: what is computed is the gradient of the weights of a convolution of X. `w` is then that of its result, [N, O, E...], and `y`
// that of its weights, [O, C / groups, K...]; they lie as such tensors do.
struct Convolution {
  DType dtype = DType::float32;
  bool transposed = false, of_weight = false, channels_last = false, tf32 = false;
  int64_t groups = 1;
  Dims x, w, y, strides, dilations, pads_begin, pads_end;
  // X as the program has it, whose channels may be fewer than x[1]: the rest is added before the convolution.
  int64_t x_channels = 0;
  Layout x_layout = Layout::plain;
  bool bias = false, residual = false;  // bias [O]; residual as Y
  FusedActivation activation;

  size_t spatial_rank() const { return strides.size(); }
  bool has_epilogue() const { return bias || residual || activation.kind != FusedActivation::Kind::none; }
  // One filter for each channel, and one channel for each filter.
  bool is_depthwise() const { return !transposed && !of_weight && groups > 1 && groups == x[1] && groups == y[1]; }
  double multiplications() const;
  std::string key() const;  // everything above, as text
};

struct ConvolutionAddresses {
  const void* given_x = nullptr;  // as the program has it
  const void *x = nullptr, *w = nullptr, *bias = nullptr, *residual = nullptr;
  void* y = nullptr;
};

// How a way to compute a convolution wants W in memory.
enum class WeightForm : uint8_t {
  as_described,  // by Convolution::channels_last
  taps_first,    // [K..., O]: of depthwise convolutions
  few_channels,  // as pack_few_channels_weights makes it
  as_given,      // the model's own [O, C, K...]
};

// One way to compute a convolution.
class ConvolutionPlan {
 public:
  virtual ~ConvolutionPlan() = default;
  virtual size_t workspace() const { return 0; }
  virtual WeightForm weight_form() const { return WeightForm::as_described; }
  virtual bool takes_given_x() const { return false; }  // and not x
  virtual void run(GpuDevice& device, const ConvolutionAddresses& at, void* workspace) = 0;
  virtual std::string saved() const = 0;  // from which restore_plan makes it again
};

// The fastest way found: by timing candidates on the device, once for equal convolutions, and remembered on disk.
std::shared_ptr<ConvolutionPlan> choose_plan(GpuDevice& device, const Convolution& convolution);

// Bytes in scratch memory, so that what follows is aligned.
inline size_t rounded(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// --- launches; all work goes on `stream` ---

// A convolution of any window, groups and layout, one thread for each output (convolution_direct.cu).
void run_direct(const Convolution& c, const ConvolutionAddresses& at, cudaStream_t stream);
// The same for the gradient of weights, one block for each of them (convolution_weight_gradient.cu).
void run_direct_weight_gradient(const Convolution& c, const ConvolutionAddresses& at, cudaStream_t stream);
// Depthwise, channels last, weights [K..., O] (convolution_depthwise.cu). Whether this one is among those it does, and the launch.
bool has_depthwise(const Convolution& c);
void run_depthwise(const Convolution& c, const ConvolutionAddresses& at, cudaStream_t stream);
// Half types, up to 4 channels, channels last: from the given X (convolution_few_channels.cu). Whether this one is among those it does,
// the bytes of the weights in its form and how they are made of [O, C, K...], and the launch.
bool has_few_channels(const Convolution& c);
size_t few_channels_weight_bytes(const Convolution& c);
void pack_few_channels_weights(const Convolution& c, const void* from, void* to, cudaStream_t stream);
void run_few_channels(const Convolution& c, const ConvolutionAddresses& at, int multiprocessors, cudaStream_t stream);
// Y = activation(Y + bias + residual), in place (convolution_epilogue.cu).
void run_epilogue(const Convolution& c, const ConvolutionAddresses& at, cudaStream_t stream);

// Copies between layouts (convolution_layouts.cu).
// to [N, S, P] = from [N, C, S], or [N, S, C] when from_channels_last; channels from C up to P are zeros. Element sizes 2, 4, 8.
void pack_channels(DType dtype, int64_t N, int64_t C, int64_t S, int64_t P, bool from_channels_last, const void* from, void* to,
                   cudaStream_t stream);
// to [N, C, S] = from [N, S, C].
void unpack_channels(DType dtype, int64_t N, int64_t C, int64_t S, const void* from, void* to, cudaStream_t stream);
// X with its padding written out as zeros: to has the spatial extents pads_begin + D + pads_end.
void write_padding(const Convolution& c, const void* from, void* to, cudaStream_t stream);
// to [y] = the middle of from [whole], which has the margins that c's padding says around it.
void cut_margins(const Convolution& c, const Dims& whole, const void* from, void* to, cudaStream_t stream);

void register_deformable_convolution(KernelRegistry& registry);  // DeformConv

}  // namespace fretsaw::cuda
