// Conv, ConvTranspose: brings X, W and Y into the layouts that the chosen plan wants, and runs it.
#include "kernels/cpu/convolution.h"

#include <algorithm>

#include "kernels/cuda/convolution_step.h"

namespace fretsaw::cuda {

namespace {

int64_t cells_of(const Dims& dims) {
  return count_of(Dims(dims.begin() + 2, dims.end()));
}

// W as a plan wants it, from the model's [first, second, taps].
void pack_weights(const Convolution& c, const Dims& given, WeightForm form, const void* from, void* to, cudaStream_t stream) {
  const int64_t taps = cells_of(given);
  if (form == WeightForm::few_channels) return pack_few_channels_weights(c, from, to, stream);
  if (form == WeightForm::taps_first) return pack_channels(c.dtype, 1, given[0], taps, given[0], false, from, to, stream);
  pack_channels(c.dtype, given[0], given[1], taps, c.w[1], false, from, to, stream);
}

// Runs one convolution step again and again.
class ConvolutionKernel {
 public:
  ConvolutionKernel(const CompileContext& c, ConvolutionStep step)
      : step_(std::move(step)), given_weights_(*c.input_dims(1)), plan_(choose_plan(gpu(c), step_.convolution)) {
    const Convolution& convolution = step_.convolution;
    const bool same =
        !convolution.channels_last || ((cells_of(given_weights_) == 1 || given_weights_[1] == 1) && given_weights_[1] == convolution.w[1]);
    const WeightForm form = plan_->weight_form();
    repacks_ = form != WeightForm::as_given && (form != WeightForm::as_described || !same);
    packs_x_ = step_.prepares_x && !plan_->takes_given_x();
    if (repacks_ && c.constants[1] && c.constants[1]->count() > 0) weights_ = packed_constant(gpu(c), c.constants[1]);
  }
  bool holds_weights() const { return weights_ != nullptr; }
  void run(RunContext& r);

 private:
  size_t bytes(const Dims& dims) const { return rounded(bytes_of(step_.convolution.dtype, count_of(dims))); }
  size_t weight_bytes() const {
    const Convolution& c = step_.convolution;
    return plan_->weight_form() == WeightForm::few_channels ? rounded(few_channels_weight_bytes(c)) : bytes(c.w);
  }
  std::shared_ptr<void> packed_constant(GpuDevice& device, const TensorPtr& tensor) const;

  ConvolutionStep step_;
  Dims given_weights_;
  std::shared_ptr<ConvolutionPlan> plan_;
  bool repacks_ = false, packs_x_ = false;
  std::shared_ptr<void> weights_;
};

std::shared_ptr<void> ConvolutionKernel::packed_constant(GpuDevice& device, const TensorPtr& tensor) const {
  const Convolution& c = step_.convolution;
  const WeightForm form = plan_->weight_form();
  const std::string name = form == WeightForm::taps_first     ? "convolution taps first"
                           : form == WeightForm::few_channels ? "convolution of few channels"
                                                              : "convolution channels last " + std::to_string(c.w[1]);
  return device.constant(tensor, name, weight_bytes(), [&](void* to) {
    const std::shared_ptr<void> plain(device.allocate(tensor->bytes()), [&](void* memory) { device.release(memory); });
    device.put(plain.get(), *tensor);
    pack_weights(c, given_weights_, form, plain.get(), to, static_cast<cudaStream_t>(device.stream()));
    device.synchronize();  // before `plain` goes
  });
}

void ConvolutionKernel::run(RunContext& r) {
  const Convolution& c = step_.convolution;
  TensorView& y = r.output(0, step_.y_dims, c.dtype, step_.y_layout);
  if (y.count() == 0) return;
  const bool packs_now = repacks_ && !weights_;
  const size_t x_bytes = packs_x_ ? bytes(c.x) : 0, w_bytes = packs_now ? weight_bytes() : 0, y_bytes = step_.copies_y ? bytes(c.y) : 0;
  const size_t total = x_bytes + w_bytes + y_bytes + plan_->workspace();
  char* block = total ? static_cast<char*>(r.scratch(total)) : nullptr;
  const cudaStream_t stream = stream_of(r);
  const TensorView& x = r.input(0);
  ConvolutionAddresses at;
  at.given_x = at.x = x.data;
  if (packs_x_) {
    pack_channels(c.dtype, c.x[0], c.x_channels, cells_of(c.x), c.x[1], x.layout == Layout::nhwc, x.data, block, stream);
    at.x = block;
  }
  at.w = weights_ ? weights_.get() : r.input(1).data;
  if (packs_now) {
    pack_weights(c, given_weights_, plan_->weight_form(), at.w, block + x_bytes, stream);
    at.w = block + x_bytes;
  }
  if (step_.bias_input >= 0) at.bias = r.input(static_cast<size_t>(step_.bias_input)).data;
  if (step_.residual_input >= 0) at.residual = r.input(static_cast<size_t>(step_.residual_input)).data;
  at.y = step_.copies_y ? block + x_bytes + w_bytes : y.data;
  plan_->run(gpu(r), at, block + x_bytes + w_bytes + y_bytes);
  if (step_.copies_y) unpack_channels(c.dtype, c.y[0], c.y[1], cells_of(c.y), at.y, y.data, stream);
}

template <bool kTransposed>
std::string why_not(const CompileContext& c) {
  ConvolutionStep step;
  return read_convolution_step(c, kTransposed, step);
}

template <bool kTransposed>
CompiledKernel make_convolution(const CompileContext& c) {
  ConvolutionStep step;
  if (const std::string reason = read_convolution_step(c, kTransposed, step); !reason.empty())
    throw Error("a convolution that has no kernel on the device: " + reason, "report this as a fault");
  return compile_convolution(c, std::move(step));
}

// Fills in shapes and window; the attributes are checked as the CPU's kernel does it.
void read_shapes(const CompileContext& c, bool transposed, ConvolutionStep& step) {
  Convolution& convolution = step.convolution;
  Window window;
  convolution.dtype = c.input_dtype(0);
  convolution.transposed = transposed;
  convolution.groups = c.node().get_int("group", 1);
  convolution.x = *c.input_dims(0), convolution.w = *c.input_dims(1);
  convolution.y = step.y_dims = convolution_output(c.node(), convolution.x, convolution.w, transposed, window);
  convolution.strides = window.strides, convolution.dilations = window.dilations;
  convolution.pads_begin = window.pads_begin, convolution.pads_end = window.pads_end;
  // An output_shape beyond what the window reaches: the cells past it are only bias.
  for (int64_t& pad : convolution.pads_end) pad = std::max<int64_t>(pad, 0);
  convolution.x_channels = convolution.x[1];
}

}  // namespace

CompiledKernel compile_convolution(const CompileContext& c, ConvolutionStep step) {
  CompiledKernel kernel;
  kernel.input_layouts.assign(c.inputs.size(), Layout::plain);
  kernel.output_layouts.assign(std::max<size_t>(c.outputs.size(), 1), Layout::plain);
  kernel.input_layouts[0] = step.x_layout;
  kernel.output_layouts[0] = step.y_layout;
  if (step.residual_input >= 0) kernel.input_layouts[static_cast<size_t>(step.residual_input)] = step.y_layout;
  kernel.packed_inputs = step.settings;
  if (count_of(step.y_dims) == 0) {
    kernel.run = [step](RunContext& r) { r.output(0, step.y_dims, step.convolution.dtype, step.y_layout); };
    return kernel;
  }
  const auto convolution = std::make_shared<ConvolutionKernel>(c, std::move(step));
  if (convolution->holds_weights()) kernel.packed_inputs.push_back(1);
  kernel.run = [convolution](RunContext& r) { convolution->run(r); };
  return kernel;
}

void make_image(Convolution& c) {
  for (Dims* dims : {&c.x, &c.w, &c.y}) dims->insert(dims->begin() + 2, 1);
  for (Dims* dims : {&c.strides, &c.dilations}) dims->insert(dims->begin(), 1);
  for (Dims* dims : {&c.pads_begin, &c.pads_end}) dims->insert(dims->begin(), 0);
}

// Tensor cores want channels last, in whole packs of 16 bytes; float32 without them is fastest in the plain layout.
void choose_layouts(const CompileContext& c, ConvolutionStep& step) {
  Convolution& convolution = step.convolution;
  const bool half = convolution.dtype == DType::float16 || convolution.dtype == DType::bfloat16;
  convolution.tf32 = c.tf32 && convolution.dtype == DType::float32;
  convolution.channels_last = half || convolution.tf32;
  if (!convolution.channels_last) return;
  const bool image = step.y_dims.size() == 4;
  const int64_t pack = 16 / static_cast<int64_t>(bytes_of(convolution.dtype, 1));
  if (convolution.groups == 1 && !convolution.transposed) {
    convolution.x[1] = convolution.w[1] = (convolution.x_channels + pack - 1) / pack * pack;
  }
  step.copies_y = !image;
  step.prepares_x = !image || convolution.x[1] != convolution.x_channels;
  step.y_layout = image ? Layout::nhwc : Layout::plain;
  const bool offered_last = !c.offered.empty() && c.offered[0] == Layout::nhwc;
  step.x_layout = image && (!step.prepares_x || offered_last) ? Layout::nhwc : Layout::plain;
  convolution.x_layout = step.x_layout;
}

std::string read_convolution_step(const CompileContext& c, bool transposed, ConvolutionStep& step) {
  if (!c.has_input(0) || !c.has_input(1)) return "no weights";
  if (std::string reason = refuse_unknown_dims(c); !reason.empty()) return reason;
  const auto types = {DType::float32, DType::float16, DType::bfloat16, DType::float64};
  if (std::string reason = refuse_other_types(c, 0, types); !reason.empty()) return reason;
  if (c.input_dtype(1) != c.input_dtype(0)) return "weights of another type";
  const size_t rank = c.input_dims(0)->size();
  if (rank < 3 || rank > 5) return std::to_string(rank) + " dimensions";
  try {
    read_shapes(c, transposed, step);
  } catch (const Error&) {
    return "shapes that do not fit";  // the CPU's kernel says what is wrong
  }
  if (count_of(step.y_dims) > 0 && (count_of(step.convolution.x) == 0 || count_of(step.convolution.w) == 0)) return "an empty input";
  choose_layouts(c, step);
  if (c.node().input(2)) {
    if (*c.input_dims(2) != Dims{step.y_dims[1]} || c.input_dtype(2) != step.convolution.dtype) return "a bias of another shape or type";
    step.convolution.bias = true, step.bias_input = 2;
  }
  if (std::string reason = read_followers(c, step); !reason.empty()) return reason;
  if (rank == 3) make_image(step.convolution);
  return "";
}

void register_convolution(KernelRegistry& registry) {
  registry.add({.op = "Conv", .make = make_convolution<false>, .unsupported = why_not<false>, .leads = true});
  registry.add({.op = "ConvTranspose", .make = make_convolution<true>, .unsupported = why_not<true>, .leads = true});
  cuda::register_deformable_convolution(registry);
}

}  // namespace fretsaw::cuda
