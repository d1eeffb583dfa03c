// Conversions around a float32 kernel for 16-bit floats.
#include "kernels/cpu/through_float.h"

#include <algorithm>
#include <deque>
#include <memory>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/reorder.h"

namespace fretsaw {

bool is_half_float(DType type) {
  return type == DType::float16 || type == DType::bfloat16;
}

namespace {

TensorPtr widened(const TensorPtr& tensor) {
  if (!tensor || !is_half_float(tensor->dtype)) return tensor;
  tensor->check_readable(2);
  std::shared_ptr<Tensor> wide = make_tensor(DType::float32, tensor->dims);
  load_as<float>(tensor->dtype, tensor->data, 0, tensor->count(), reinterpret_cast<float*>(mutable_data(*wide)));
  return wide;
}

// Gives the inner kernel float32 memory for outputs that are to be rounded; other requests go through.
class WideMemory : public KernelMemory {
 public:
  WideMemory(RunContext& outer, const std::vector<DType>& types, std::vector<std::vector<float>>& buffers)
      : outer_(outer), types_(types), buffers_(buffers) {}
  void* output(size_t index, DType dtype, const Dims& dims, Layout) override {
    if (!is_half_float(types_[index]) || dtype != DType::float32) return outer_.output(index, dims, dtype).data;
    buffers_[index].resize(static_cast<size_t>(std::max<int64_t>(count_of(dims), 1)));
    return buffers_[index].data();
  }
  void* scratch(size_t bytes) override { return outer_.scratch(bytes); }

 private:
  RunContext& outer_;
  const std::vector<DType>& types_;
  std::vector<std::vector<float>>& buffers_;
};

// What lives between runs: buffers, so that a second run allocates nothing.
struct State {
  CompiledKernel inner;
  std::vector<DType> output_types;
  std::vector<std::vector<float>> input_buffers, output_buffers;
  std::vector<float> plain;  // an output that the kernel left in another layout
  std::vector<RuntimeValue> inputs, outputs;
};

void run_widened(RunContext& r, State& s) {
  std::vector<RuntimeValue*> inputs(r.input_count(), nullptr), outputs(s.output_types.size(), nullptr);
  s.inputs.resize(r.input_count());
  s.input_buffers.resize(r.input_count());
  for (size_t i = 0; i < r.input_count(); ++i) {
    if (!r.has_input(i)) continue;
    s.inputs[i] = r.value(i);
    inputs[i] = &s.inputs[i];
    TensorView& view = s.inputs[i].tensor;
    if (!is_half_float(view.dtype)) continue;
    s.input_buffers[i].resize(static_cast<size_t>(std::max<int64_t>(view.count(), 1)));
    load_as<float>(view.dtype, view.data, 0, view.count(), s.input_buffers[i].data());
    view.dtype = DType::float32, view.data = s.input_buffers[i].data();
  }
  s.outputs.assign(outputs.size(), {});
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (r.wants_output(i)) outputs[i] = &s.outputs[i];
  }
  WideMemory memory(r, s.output_types, s.output_buffers);
  RunContext inner(inputs, outputs, memory, r.threads());
  s.inner.run(inner);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i] || !is_half_float(s.output_types[i]) || s.outputs[i].tensor.dtype != DType::float32) continue;
    TensorView wide = s.outputs[i].tensor;
    if (wide.layout != Layout::plain) {
      s.plain.resize(static_cast<size_t>(wide.count()));
      TensorView plain{wide.dtype, wide.dims, s.plain.data()};
      reorder(wide, plain);
      wide = plain;
    }
    TensorView& y = r.output(i, wide.dims, s.output_types[i]);
    store_from<float>(y.dtype, y.data, 0, wide.count(), wide.as<float>());
  }
}

}  // namespace

CompiledKernel through_float(const CompileContext& c, KernelMaker make) {
  CompileContext wide = c;
  auto state = std::make_shared<State>();
  for (Type& type : wide.input_types) {
    if (is_half_float(type.dtype)) type.dtype = DType::float32;
  }
  for (Type& type : wide.output_types) {
    state->output_types.push_back(type.dtype);
    if (is_half_float(type.dtype)) type.dtype = DType::float32;
  }
  for (TensorPtr& constant : wide.constants) constant = widened(constant);
  std::fill(wide.offered.begin(), wide.offered.end(), Layout::plain);
  // Outputs whose type is not known are taken to be of the first input's.
  state->output_types.resize(std::max(state->output_types.size(), c.outputs.size()), c.input_dtype(0));
  for (DType& type : state->output_types) {
    if (type == DType::undefined) type = c.input_dtype(0);
  }
  state->output_buffers.resize(state->output_types.size());
  state->inner = make(wide);
  // The buffers are plain; a kernel that wants other layouts reorders inside.
  state->inner.input_layouts.clear();
  state->inner.output_layouts.clear();
  return {[state](RunContext& r) { run_widened(r, *state); }};
}

CompiledKernel make_any_float(const CompileContext& c, KernelMaker make) {
  const auto is_half = [](const Type& type) { return is_half_float(type.dtype); };
  const bool halves = std::any_of(c.input_types.begin(), c.input_types.end(), is_half);
  return halves ? through_float(c, make) : make(c);
}

}  // namespace fretsaw
