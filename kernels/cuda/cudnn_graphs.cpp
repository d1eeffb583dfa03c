// Describes convolutions to cuDNN, and lists, runs, saves and restores its execution plans.
#include "kernels/cuda/cudnn_graphs.h"

#include <cudnn_frontend.h>

#include <unordered_map>

namespace fretsaw::cuda {

namespace {

namespace fe = cudnn_frontend;
using TensorAttributes = std::shared_ptr<fe::graph::Tensor_attributes>;

constexpr int64_t kMostWorkspace = int64_t{256} << 20;
enum Uid : int64_t { kX = 1, kW, kBias, kResidual, kY };

fe::DataType_t cudnn_type(DType type) {
  switch (type) {
    case DType::float16:
      return fe::DataType_t::HALF;
    case DType::bfloat16:
      return fe::DataType_t::BFLOAT16;
    case DType::float64:
      return fe::DataType_t::DOUBLE;
    default:
      return fe::DataType_t::FLOAT;
  }
}

// Of [N, C, D...] in elements.
Dims strides_of(const Dims& dims, bool channels_last) {
  Dims strides(dims.size(), 1);
  int64_t step = channels_last ? dims[1] : 1;
  for (size_t i = dims.size(); i-- > 2;) strides[i] = step, step *= dims[i];
  strides[1] = channels_last ? 1 : step;
  strides[0] = channels_last ? step : step * dims[1];
  return strides;
}

TensorAttributes input(fe::graph::Graph& graph, Uid uid, const Dims& dims, bool channels_last) {
  return graph.tensor(fe::graph::Tensor_attributes().set_uid(uid).set_dim(dims).set_stride(strides_of(dims, channels_last)));
}

template <typename Attributes>
Attributes window_of(const Convolution& c) {
  return Attributes().set_pre_padding(c.pads_begin).set_post_padding(c.pads_end).set_stride(c.strides).set_dilation(c.dilations);
}

fe::graph::Pointwise_attributes pointwise(fe::PointwiseMode_t mode) {
  return fe::graph::Pointwise_attributes().set_mode(mode);
}

// x * clip(x / 6 + 1/2, 0, 1): cuDNN has no mode for it.
TensorAttributes hard_swish(fe::graph::Graph& graph, const TensorAttributes& x) {
  const auto sixth = graph.tensor(1.0f / 6.0f), half = graph.tensor(0.5f);
  auto gate = graph.pointwise(x, sixth, pointwise(fe::PointwiseMode_t::MUL));
  gate = graph.pointwise(gate, half, pointwise(fe::PointwiseMode_t::ADD));
  gate = graph.pointwise(gate, pointwise(fe::PointwiseMode_t::RELU_FWD).set_relu_lower_clip(0.0f).set_relu_upper_clip(1.0f));
  return graph.pointwise(x, gate, pointwise(fe::PointwiseMode_t::MUL));
}

TensorAttributes activated(fe::graph::Graph& graph, const TensorAttributes& x, const FusedActivation& f) {
  using Mode = fe::PointwiseMode_t;
  switch (f.kind) {
    case FusedActivation::Kind::none:
      return x;
    case FusedActivation::Kind::relu:
      return graph.pointwise(x, pointwise(Mode::RELU_FWD));
    case FusedActivation::Kind::clip:
      return graph.pointwise(x, pointwise(Mode::RELU_FWD).set_relu_lower_clip(f.a).set_relu_upper_clip(f.b));
    case FusedActivation::Kind::leaky_relu:
      return graph.pointwise(x, pointwise(Mode::RELU_FWD).set_relu_lower_clip_slope(f.a));
    case FusedActivation::Kind::sigmoid:
      return graph.pointwise(x, pointwise(Mode::SIGMOID_FWD));
    case FusedActivation::Kind::swish:
      return graph.pointwise(x, pointwise(Mode::SWISH_FWD).set_swish_beta(f.a));
    case FusedActivation::Kind::hard_swish:
      return hard_swish(graph, x);
    case FusedActivation::Kind::gelu:
      return graph.pointwise(x, pointwise(Mode::GELU_FWD));
    case FusedActivation::Kind::gelu_tanh:
      return graph.pointwise(x, pointwise(Mode::GELU_APPROX_TANH_FWD));
    case FusedActivation::Kind::tanh:
      return graph.pointwise(x, pointwise(Mode::TANH_FWD));
  }
  return x;
}

std::shared_ptr<fe::graph::Graph> describe(const Convolution& c, bool fused) {
  auto graph = std::make_shared<fe::graph::Graph>();
  const fe::DataType_t wide = c.dtype == DType::float64 ? fe::DataType_t::DOUBLE : fe::DataType_t::FLOAT;
  graph->set_io_data_type(cudnn_type(c.dtype)).set_intermediate_data_type(wide).set_compute_data_type(wide);
  const auto x = input(*graph, kX, c.x, c.channels_last), w = input(*graph, kW, c.w, c.channels_last);
  const Dims y_strides = strides_of(c.y, c.channels_last);
  // A transposed convolution is the gradient of a convolution by its input.
  auto y = c.of_weight    ? graph->conv_wgrad(w, x, window_of<fe::graph::Conv_wgrad_attributes>(c))
           : c.transposed ? graph->conv_dgrad(x, w, window_of<fe::graph::Conv_dgrad_attributes>(c))
                          : graph->conv_fprop(x, w, window_of<fe::graph::Conv_fprop_attributes>(c));
  y->set_dim(c.y).set_stride(y_strides);
  if (fused && c.bias) {
    Dims dims(c.y.size(), 1);
    dims[1] = c.y[1];
    y = graph->pointwise(y, input(*graph, kBias, dims, c.channels_last), pointwise(fe::PointwiseMode_t::ADD));
  }
  if (fused && c.residual) y = graph->pointwise(y, input(*graph, kResidual, c.y, c.channels_last), pointwise(fe::PointwiseMode_t::ADD));
  if (fused) y = activated(*graph, y, c.activation);
  y->set_output(true).set_uid(kY).set_dim(c.y).set_stride(y_strides).set_data_type(cudnn_type(c.dtype));
  return graph;
}

std::vector<fe::NumericalNote_t> unwanted(const Convolution& c) {
  using Note = fe::NumericalNote_t;
  std::vector<Note> notes = {Note::NONDETERMINISTIC, Note::REDUCED_PRECISION_REDUCTION, Note::FFT};
  // Large Winograd tiles lose digits; for float32 small ones are as good as other orders of summation.
  if (c.dtype == DType::float32) {
    notes.insert(notes.end(), {Note::WINOGRAD_TILE_6x6, Note::WINOGRAD_TILE_13x13});
    if (!c.tf32) notes.insert(notes.end(), {Note::TENSOR_CORE, Note::DOWN_CONVERT_INPUTS});
  } else {
    notes.push_back(Note::WINOGRAD);
  }
  return notes;
}

class CudnnPlan : public ConvolutionPlan {
 public:
  CudnnPlan(std::shared_ptr<fe::graph::Graph> graph, int64_t index, size_t workspace)
      : graph_(std::move(graph)), index_(index), workspace_(workspace) {}
  // Null where cuDNN does not say how much memory the plan needs.
  static std::shared_ptr<CudnnPlan> make(std::shared_ptr<fe::graph::Graph> graph, int64_t index) {
    int64_t bytes = 0;
    if (graph->get_workspace_size_plan_at_index(index, bytes).is_bad()) return nullptr;
    return std::make_shared<CudnnPlan>(std::move(graph), index, static_cast<size_t>(bytes));
  }
  size_t workspace() const override { return workspace_; }

  void run(GpuDevice& device, const ConvolutionAddresses& at, void* workspace) override {
    std::unordered_map<int64_t, void*> addresses = {
        {kX, const_cast<void*>(at.x)},
        {kW, const_cast<void*>(at.w)},
        {kBias, const_cast<void*>(at.bias)},
        {kResidual, const_cast<void*>(at.residual)},
        {kY, at.y},
    };
    fe::error_t status = graph_->execute_plan_at_index(device.cudnn(), addresses, workspace, index_);
    if (status.is_bad())
      throw Error("cuDNN can't run a convolution: " + status.get_message(), "report this as a fault, with the node", ErrorCode::device);
  }

  std::string saved() const override {
    std::vector<uint8_t> bytes;
    // Building it again, which does nothing, makes it the one that is saved.
    if (graph_->build_plan_at_index(index_).is_bad() || graph_->serialize(bytes, false).is_bad()) return "";
    return {bytes.begin(), bytes.end()};
  }

 private:
  std::shared_ptr<fe::graph::Graph> graph_;
  int64_t index_;
  size_t workspace_;
};

}  // namespace

std::vector<std::shared_ptr<ConvolutionPlan>> cudnn_plans(GpuDevice& device, const Convolution& c, bool fused, size_t limit) {
  std::vector<std::shared_ptr<ConvolutionPlan>> plans;
  try {
    const auto graph = describe(c, fused);
    if (graph->validate().is_bad() || graph->build_operation_graph(device.cudnn()).is_bad() ||
        graph->create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}).is_bad()) {
      return plans;
    }
    graph->deselect_numeric_notes(unwanted(c)).deselect_workspace_greater_than(kMostWorkspace);
    const int64_t count = graph->get_execution_plan_count();
    for (int64_t i = 0; i < count && plans.size() < limit; ++i) {
      if (graph->build_plan_at_index(i).is_bad()) continue;
      if (auto plan = CudnnPlan::make(graph, i)) plans.push_back(std::move(plan));
    }
  } catch (const fe::cudnnException&) {  // as good as a status: these engines can't
  }
  return plans;
}

std::shared_ptr<ConvolutionPlan> restored_cudnn_plan(GpuDevice& device, const std::string& saved) {
  try {
    auto graph = std::make_shared<fe::graph::Graph>();
    const std::vector<uint8_t> bytes(saved.begin(), saved.end());
    if (graph->deserialize(device.cudnn(), bytes, false, false).is_bad()) return nullptr;
    return CudnnPlan::make(std::move(graph), 0);
  } catch (const std::exception&) {  // a damaged file
    return nullptr;
  }
}

std::string cudnn_identity() {
  return "cudnn " + std::to_string(cudnnGetVersion());
}

}  // namespace fretsaw::cuda
