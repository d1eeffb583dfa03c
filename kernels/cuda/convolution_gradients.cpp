// ConvGradInput, which is a transposed convolution, and ConvGradWeight.
#include <algorithm>

#include "kernels/cpu/convolution.h"
#include "kernels/cuda/convolution_step.h"
#include "kernels/cuda/gradients.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {
namespace {

int64_t cells_of(const Dims& dims) {
  return count_of(Dims(dims.begin() + 2, dims.end()));
}

std::string refuse_operands(const CompileContext& c) {
  if (!c.has_input(0) || !c.has_input(1)) return "no operands";
  if (std::string reason = refuse_mixed_floats(c, {0, 1}); !reason.empty()) return reason;
  if (std::string reason = refuse_unknown_dims(c); !reason.empty()) return reason;
  const size_t rank = c.input_dims(0)->size();
  return rank < 3 || rank > 5 || c.input_dims(1)->size() != rank ? std::to_string(rank) + " dimensions" : "";
}

// The window of the convolution X [N, C, D...], W -> dY, whose shapes must fit.
Window window_of(const Node& node, const Dims& x, const Dims& w, const Dims& dy) {
  Window window;
  if (convolution_output(node, x, w, false, window) != dy) throw Error("a gradient that is not of the shape of the convolution's result");
  return window;
}

void set_window(Convolution& c, const Window& window) {
  c.strides = window.strides, c.dilations = window.dilations;
  c.pads_begin = window.pads_begin, c.pads_end = window.pads_end;
}

// --- by the input: dX = the transposed convolution of dY ---

std::string read_input_gradient(const CompileContext& c, ConvolutionStep& step) {
  if (std::string reason = refuse_operands(c); !reason.empty()) return reason;
  Convolution& convolution = step.convolution;
  const Dims dx = dims_of(*c.output_types.at(0).shape);
  try {
    convolution.x = *c.input_dims(0), convolution.w = *c.input_dims(1), convolution.y = step.y_dims = dx;
    set_window(convolution, window_of(c.node(), dx, convolution.w, convolution.x));
  } catch (const Error&) {
    return "shapes that do not fit";  // the CPU's kernel says what is wrong
  }
  if (count_of(dx) > 0 && (count_of(convolution.x) == 0 || count_of(convolution.w) == 0)) return "an empty input";
  convolution.dtype = c.input_dtype(0);
  convolution.transposed = true;
  convolution.groups = c.node().get_int("group", 1);
  convolution.x_channels = convolution.x[1];
  choose_layouts(c, step);
  if (dx.size() == 3) make_image(convolution);
  return "";
}

std::string refuse_input_gradient(const CompileContext& c) {
  if (c.outputs.empty() || !c.outputs[0]) return "no output";
  ConvolutionStep step;
  return read_input_gradient(c, step);
}

CompiledKernel make_input_gradient(const CompileContext& c) {
  ConvolutionStep step;
  if (const std::string reason = read_input_gradient(c, step); !reason.empty())
    throw Error("a convolution's gradient that has no kernel on the device: " + reason, "report this as a fault");
  step.settings = {2};  // the shape: it is that of the output's type
  return compile_convolution(c, std::move(step));
}

// --- by the weights ---

struct WeightStep {
  Convolution convolution;  // as it is computed: lines as images, channels padded
  Dims dw_dims;             // as the program has it
  bool images = false;      // X and dY are taken channels last; other ranks are copied to it
  bool pads_x = false;      // X gets more channels
  Layout x_layout = Layout::plain;
};

std::string read_weight_gradient(const CompileContext& c, WeightStep& step) {
  if (std::string reason = refuse_operands(c); !reason.empty()) return reason;
  Convolution& convolution = step.convolution;
  const Dims dy = *c.input_dims(0), x = *c.input_dims(1), kernel = c.node().get_ints("kernel_shape");
  if (kernel.size() + 2 != x.size()) return "no kernel_shape";
  convolution.groups = std::max<int64_t>(c.node().get_int("group", 1), 1);
  step.dw_dims = {dy[1], x[1] / convolution.groups};
  step.dw_dims.insert(step.dw_dims.end(), kernel.begin(), kernel.end());
  try {
    set_window(convolution, window_of(c.node(), x, step.dw_dims, dy));
  } catch (const Error&) {
    return "shapes that do not fit";  // the CPU's kernel says what is wrong
  }
  if (count_of(x) == 0 || count_of(dy) == 0 || count_of(step.dw_dims) == 0) return "an empty operand";
  convolution.dtype = c.input_dtype(0);
  convolution.of_weight = true;
  convolution.x = x, convolution.w = dy, convolution.y = step.dw_dims;
  convolution.x_channels = x[1];
  convolution.tf32 = c.tf32 && convolution.dtype == DType::float32;
  convolution.channels_last = convolution.tf32 || bits_of(convolution.dtype) == 16;
  step.images = convolution.channels_last && x.size() == 4;
  if (convolution.channels_last && convolution.groups == 1) {
    const int64_t pack = 16 / static_cast<int64_t>(bytes_of(convolution.dtype, 1));
    convolution.x[1] = convolution.y[1] = (x[1] + pack - 1) / pack * pack;
    step.pads_x = convolution.x[1] != x[1];
  }
  convolution.x_layout = step.images ? Layout::nhwc : Layout::plain;
  const bool offered_last = c.offered.size() > 1 && c.offered[1] == Layout::nhwc;
  step.x_layout = step.pads_x && !offered_last ? Layout::plain : convolution.x_layout;  // what adds channels takes either
  if (x.size() == 3) make_image(convolution);
  return "";
}

std::string refuse_weight_gradient(const CompileContext& c) {
  WeightStep step;
  return read_weight_gradient(c, step);
}

class WeightGradient {
 public:
  WeightGradient(const CompileContext& c, WeightStep step) : step_(std::move(step)), plan_(choose_plan(gpu(c), step_.convolution)) {}

  void run(RunContext& r) {
    const Convolution& c = step_.convolution;
    const cudaStream_t stream = stream_of(r);
    TensorView& dw = r.output(0, step_.dw_dims, c.dtype);
    const bool copies_all = c.channels_last && !step_.images, copies_x = copies_all || step_.pads_x;
    const bool copies_dw = c.channels_last && (cells_of(c.y) > 1 || step_.pads_x);
    const size_t x_bytes = copies_x ? bytes(c.x) : 0, dy_bytes = copies_all ? bytes(c.w) : 0, dw_bytes = copies_dw ? bytes(c.y) : 0;
    const size_t total = x_bytes + dy_bytes + dw_bytes + plan_->workspace();
    char* block = total ? static_cast<char*>(r.scratch(total)) : nullptr;
    ConvolutionAddresses at;
    at.w = r.input(0).data, at.x = at.given_x = r.input(1).data;
    const auto pack = [&](const Dims& dims, int64_t channels, const TensorView& from, char* to) {
      pack_channels(c.dtype, dims[0], channels, cells_of(dims), dims[1], from.layout == Layout::nhwc, from.data, to, stream);
      return to;
    };
    if (copies_x) at.x = pack(c.x, c.x_channels, r.input(1), block);
    if (copies_all) at.w = pack(c.w, c.w[1], r.input(0), block + x_bytes);
    at.y = copies_dw ? block + x_bytes + dy_bytes : dw.data;
    plan_->run(gpu(r), at, block + x_bytes + dy_bytes + dw_bytes);
    if (copies_dw) unpack(at.y, dw.data, stream);
  }

 private:
  size_t bytes(const Dims& dims) const { return rounded(bytes_of(step_.convolution.dtype, count_of(dims))); }
  // [O, C, taps] from [O, taps, padded C].
  void unpack(const void* from, void* to, cudaStream_t stream) const {
    const Convolution& c = step_.convolution;
    const int64_t taps = cells_of(c.y);
    StridedCopy copy;
    copy.element_bytes = bytes_of(c.dtype, 1);
    copy.dims = {c.y[0], step_.dw_dims[1], taps}, copy.from_strides = {taps * c.y[1], 1, c.y[1]};
    copy.to = to, copy.from = from;
    copy_strided(copy, stream);
  }

  WeightStep step_;
  std::shared_ptr<ConvolutionPlan> plan_;
};

CompiledKernel make_weight_gradient(const CompileContext& c) {
  WeightStep step;
  if (const std::string reason = read_weight_gradient(c, step); !reason.empty())
    throw Error("a convolution's gradient that has no kernel on the device: " + reason, "report this as a fault");
  CompiledKernel kernel;
  kernel.input_layouts = {step.images ? Layout::nhwc : Layout::plain, step.x_layout};
  kernel.output_layouts = {Layout::plain};
  kernel.run = [gradient = std::make_shared<WeightGradient>(c, std::move(step))](RunContext& r) { gradient->run(r); };
  return kernel;
}

}  // namespace

void register_convolution_gradients(KernelRegistry& registry) {
  const char* domain = kCommunicationDomain;
  registry.add(
      {.op = "ConvGradInput", .domain = domain, .make = make_input_gradient, .unsupported = refuse_input_gradient, .host_inputs = {2}});
  registry.add({.op = "ConvGradWeight", .domain = domain, .make = make_weight_gradient, .unsupported = refuse_weight_gradient});
}

}  // namespace fretsaw::cuda
