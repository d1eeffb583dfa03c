// Chooses, keeps and runs oneDNN primitives for convolutions.
#include "kernels/cpu/convolution_onednn.h"

#include <algorithm>
#include <functional>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/reorder.h"
#include "kernels/scratch_pieces.h"

namespace fretsaw {

using dnnl::memory;
using onednn::Call;

namespace {

constexpr size_t kPlansKept = 8;

// [N, D..., C] in memory for the logical shape [N, C, D...].
memory::desc channels_last(const Dims& dims) {
  Dims strides(dims.size());
  int64_t step = dims[1];
  strides[1] = 1;
  for (size_t i = dims.size(); i-- > 2;) strides[i] = step, step *= dims[i];
  strides[0] = step;
  return onednn::strided(dims, strides);
}

memory::desc description_of(const TensorView& view, const Dims& dims) {
  return view.layout == Layout::plain ? onednn::description(dims) : onednn::description(view);
}

// `dims` with ones in front up to `rank`.
Dims padded(const Dims& dims, size_t rank) {
  Dims out(rank > dims.size() ? rank - dims.size() : 0, 1);
  out.insert(out.end(), dims.begin(), dims.end());
  return out;
}

// By how much better: 2 for code generated for this convolution, 1 for a matrix product over gathered patches, 0 for the reference.
int quality(const std::string& implementation) {
  if (onednn::is_reference(implementation)) return 0;
  return implementation.find("gemm") != std::string::npos ? 1 : 2;
}

// Whether it adds what Y holds to the finished sum, as a separate Add would. Others start the sum from it, which rounds otherwise.
bool adds_last(const std::string& implementation) {
  return implementation.rfind("brgconv", 0) == 0 || onednn::is_fast_pointwise(implementation);
}

void copy_elements(RunContext& r, const TensorView& from, void* to) {
  const auto* source = from.as<float>();
  auto* target = static_cast<float*>(to);
  parallel_elements(from.count(), r.threads(),
                    [&](int64_t begin, int64_t end) { std::copy(source + begin, source + end, target + begin); });
}

}  // namespace

struct OneDnnConvolution::Choice {
  std::function<dnnl::primitive()> make;  // generates the code
  memory::desc src, weights, bias, dst, scratchpad;
  std::string implementation;
  size_t fused = 0;
  bool accumulates = false;
};

OneDnnConvolution::OneDnnConvolution(const CompileContext& c, bool transposed)
    : node_(c.node()),
      transposed_(transposed),
      groups_(node_.get_int("group", 1)),
      has_bias_(c.has_input(2) && node_.input(2) != nullptr),
      steps_(read_chain(c)) {
  if (c.constants.size() > 1) constant_weights_ = c.constants[1];
  // Attributes are checked now where the rank is known, and shapes too when they all are.
  std::vector<Dims> inputs;
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    const std::optional<Dims> dims = c.input_dims(i);
    if (c.has_input(i) && !dims) return;
    inputs.push_back(dims.value_or(Dims{}));
  }
  if (count_of(inputs.at(0)) == 0 || count_of(inputs.at(1)) == 0) return;
  plans_.push_front(make_plan(inputs));
  Plan& plan = plans_.front();
  if (constant_weights_) packed_weights(plan);
  if (plan.y_dims.size() == 4 && plan.dst == channels_last(plan.y_dims)) output_layout_ = Layout::nhwc;
}

void OneDnnConvolution::set_layouts(CompiledKernel& kernel, const CompileContext& c) {
  if (plans_.empty() || plans_.front().y_dims.size() != 4) return;
  const Plan& plan = plans_.front();
  kernel.input_layouts.assign(c.inputs.size(), Layout::plain);
  kernel.output_layouts.assign(std::max<size_t>(c.outputs.size(), 1), Layout::plain);
  kernel.output_layouts[0] = output_layout_;
  if (plan.src == channels_last(plan.key[0])) kernel.input_layouts[0] = Layout::nhwc;
  if (plan.accumulates) kernel.overwrites = static_cast<int>(steps_[0].operand);
  for (size_t s = 0; s < steps_.size(); ++s) {
    if (steps_[s].is_binary() && plan.key[steps_[s].operand] == plan.y_dims && steps_[s].operand != 1) {
      kernel.input_layouts[steps_[s].operand] = output_layout_;
    }
  }
}

memory::desc OneDnnConvolution::plain_weights(const Dims& w) const {
  const int64_t taps = count_of(spatial_of(w));
  Dims dims = spatial_of(w), strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) strides[i - 1] = strides[i] * dims[i];
  // Logical order: [groups,] outputs, inputs of a group, taps.
  const int64_t of_group = w[0] / groups_;  // rows of the first dimension that belong to one group
  if (transposed_) {
    dims.insert(dims.begin(), {w[1], of_group});
    strides.insert(strides.begin(), {taps, w[1] * taps});
  } else {
    dims.insert(dims.begin(), {of_group, w[1]});
    strides.insert(strides.begin(), {w[1] * taps, taps});
  }
  if (groups_ > 1) {
    dims.insert(dims.begin(), groups_);
    strides.insert(strides.begin(), of_group * w[1] * taps);
  }
  return onednn::strided(dims, strides);
}

// Whether the first step adds a tensor of Y's shape that isn't read otherwise: a residual, which Y may be placed on.
bool OneDnnConvolution::adds_full_tensor(const std::vector<Dims>& inputs, const Dims& y) const {
  return !steps_.empty() && steps_[0].kind == FusedStep::Kind::add && steps_[0].operand > 1 && inputs[steps_[0].operand] == y;
}

std::optional<OneDnnConvolution::Choice> OneDnnConvolution::create(const Plan& plan, const Dims& x, const Window& window,
                                                                   const memory::desc& src, const memory::desc& dst,
                                                                   const std::vector<Dims>& inputs, size_t steps, bool accumulate) const {
  const Dims& y = plan.y_dims;
  const memory::desc weights = onednn::any_format(plain_weights(inputs[1]).get_dims());
  const memory::desc bias = plan.bias_input >= 0 ? onednn::description(Dims{y[1]}) : memory::desc();
  Dims dilations = window.dilations, right(window.rank());
  for (size_t i = 0; i < window.rank(); ++i) {
    --dilations[i];
    const int64_t out = y[i + 2], in = x[i + 2];
    // What is left over on the far side: oneDNN derives the output's size from it.
    right[i] =
        (transposed_ ? (in - 1) * window.strides[i] + window.extent(i) - out : (out - 1) * window.strides[i] + window.extent(i) - in) -
        window.pads_begin[i];
  }
  Choice choice;
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  dnnl::post_ops ops;
  choice.accumulates = accumulate && steps > 0;
  if (choice.accumulates) ops.append_sum(1.0f);
  const std::vector<FusedStep> others(steps_.begin() + (choice.accumulates ? 1 : 0), steps_.end());
  choice.fused = (choice.accumulates ? 1 : 0) + onednn::append_steps(ops, others, steps - (choice.accumulates ? 1 : 0),
                                                                     [&](const FusedStep& step) -> std::optional<memory::desc> {
                                                                       const Dims dims = padded(inputs[step.operand], y.size());
                                                                       if (dims.size() != y.size()) return std::nullopt;
                                                                       return dims == y ? dst : onednn::description(dims);
                                                                     });
  if (choice.fused < steps) return std::nullopt;
  attributes.set_post_ops(ops);
  const auto accept = [&](const auto& desc, auto make) {
    choice.src = desc.src_desc(), choice.weights = desc.weights_desc(), choice.dst = desc.dst_desc(),
    choice.scratchpad = desc.scratchpad_desc();
    choice.bias = bias, choice.implementation = desc.impl_info_str(), choice.make = [desc, make]() { return make(desc); };
  };
  try {
    if (transposed_) {
      const dnnl::deconvolution_forward::primitive_desc desc(onednn::engine(), dnnl::prop_kind::forward_inference,
                                                             dnnl::algorithm::deconvolution_direct, src, weights, bias, dst, window.strides,
                                                             dilations, window.pads_begin, right, attributes);
      accept(desc, [](const auto& d) -> dnnl::primitive { return dnnl::deconvolution_forward(d); });
    } else {
      const onednn::ConvolutionSetting setting{src, weights, bias, dst, window.strides, dilations, window.pads_begin, right};
      accept(onednn::describe_convolution(setting, attributes),
             [](const auto& d) -> dnnl::primitive { return dnnl::convolution_forward(d); });
    }
  } catch (const dnnl::error&) {
    return std::nullopt;
  }
  return choice;
}

OneDnnConvolution::Choice OneDnnConvolution::choose(const Plan& plan, const Dims& x, const Window& window,
                                                    const std::vector<Dims>& inputs) const {
  // The code for the convolution alone, in channels-last, oneDNN's own or a plain layout. Then as many steps as it takes: they must not
  // make it another, which may sum in another order.
  std::optional<Choice> best;
  const auto consider = [&](const memory::desc& src, const memory::desc& dst) {
    std::optional<Choice> candidate = create(plan, x, window, src, dst, inputs, 0, false);
    if (candidate && (!best || quality(candidate->implementation) > quality(best->implementation))) best = std::move(candidate);
    return best && quality(best->implementation) == 2;
  };
  if (!consider(channels_last(x), channels_last(plan.y_dims)) && !consider(onednn::any_format(x), onednn::any_format(plan.y_dims)))
    consider(onednn::description(x), onednn::description(plan.y_dims));
  if (!best)
    throw Error("oneDNN has no convolution for X " + to_string(x) + " and W " + to_string(inputs[1]),
                "check the shapes and attributes of the node");
  onednn::report_choice(transposed_ ? "ConvTranspose" : "Conv", x, best->implementation);
  for (size_t steps = steps_.size(); steps > 0; --steps) {
    for (bool accumulate : {true, false}) {
      if (accumulate && !(adds_full_tensor(inputs, plan.y_dims) && adds_last(best->implementation))) continue;
      std::optional<Choice> fused = create(plan, x, window, best->src, best->dst, inputs, steps, accumulate);
      if (fused && fused->implementation == best->implementation) return std::move(*fused);
    }
  }
  return std::move(*best);
}

OneDnnConvolution::Plan OneDnnConvolution::make_plan(const std::vector<Dims>& inputs) {
  Plan plan;
  plan.key = inputs;
  Window window;
  plan.y_dims = convolution_output(node_, inputs[0], inputs[1], transposed_, window);
  if (has_bias_) {
    if (inputs[2] != Dims{plan.y_dims[1]})
      throw Error("a bias of shape " + to_string(inputs[2]) + " for " + std::to_string(plan.y_dims[1]) + " channels",
                  "give it one entry a channel");
    plan.bias_input = 2;
  }
  if (count_of(inputs[0]) == 0 || count_of(inputs[1]) == 0 || count_of(plan.y_dims) == 0) return plan;
  Choice choice = choose(plan, inputs[0], window, inputs);
  plan.src = choice.src, plan.weights = choice.weights, plan.dst = choice.dst, plan.scratchpad = choice.scratchpad,
  plan.fused = choice.fused, plan.accumulates = choice.accumulates;
  plan.call = Call(choice.make());
  plan.call.add(DNNL_ARG_SRC, plan.src);
  plan.call.add(DNNL_ARG_WEIGHTS, plan.weights);
  plan.call.add(DNNL_ARG_DST, plan.dst);
  plan.call.add(DNNL_ARG_SCRATCHPAD, plan.scratchpad);
  if (plan.bias_input >= 0) plan.call.add(DNNL_ARG_BIAS, choice.bias);
  for (size_t i = 0; i < plan.fused; ++i) {
    const FusedStep& step = steps_[i];
    if (!step.is_binary() || (i == 0 && plan.accumulates)) continue;
    const Dims dims = padded(inputs[step.operand], plan.y_dims.size());
    plan.operands.emplace_back(i, dims == plan.y_dims ? plan.dst : onednn::description(dims));
    plan.call.add(onednn::operand_argument(i), plan.operands.back().second);
  }
  return plan;
}

const void* OneDnnConvolution::packed_weights(const Plan& plan) {
  for (const auto& packed : packed_) {
    if (packed->format() == plan.weights) return packed->data();
  }
  packed_.push_back(std::make_shared<onednn::PackedWeights>(constant_weights_, plain_weights(plan.key[1]), plan.weights));
  return packed_.back()->data();
}

OneDnnConvolution::Plan& OneDnnConvolution::plan_for(RunContext& r) {
  for (auto it = plans_.begin(); it != plans_.end(); ++it) {
    bool same = it->key.size() == r.input_count();
    for (size_t i = 0; same && i < it->key.size(); ++i) same = r.has_input(i) ? r.input(i).dims == it->key[i] : it->key[i].empty();
    if (!same) continue;
    if (it != plans_.begin()) plans_.splice(plans_.begin(), plans_, it);
    return plans_.front();
  }
  std::vector<Dims> inputs(r.input_count());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (r.has_input(i)) inputs[i] = r.input(i).dims;
  }
  if (inputs.size() < 2) throw Error("a convolution needs an input and weights", "give both");
  plans_.push_front(make_plan(inputs));
  if (plans_.size() > kPlansKept) plans_.pop_back();
  return plans_.front();
}

void OneDnnConvolution::run(RunContext& r) {
  Plan& plan = plan_for(r);
  TensorView& y = r.output(0, plan.y_dims, DType::float32, output_layout_);
  if (y.count() == 0) return;
  if (r.input(0).count() == 0 || r.input(1).count() == 0) {
    const TensorView* bias = plan.bias_input >= 0 ? &r.input(static_cast<size_t>(plan.bias_input)) : nullptr;
    fill_with_bias(r, y, bias);
    return apply_steps(r, steps_, 0, y);
  }
  // First what has to be copied into another format, with its place in the scratch memory.
  struct Copy {
    int argument;
    memory::desc from, to;
    const void* data;
    size_t offset;
  };
  ScratchPieces scratch;
  std::vector<Copy> copies;
  const auto bind = [&](int argument, const memory::desc& from, const memory::desc& to, const void* data) {
    if (from == to) return plan.call.set(argument, data);
    copies.push_back({argument, from, to, data, scratch.add(to.get_size())});
  };
  bind(DNNL_ARG_SRC, description_of(r.input(0), plan.key[0]), plan.src, r.input(0).data);
  if (constant_weights_)
    plan.call.set(DNNL_ARG_WEIGHTS, packed_weights(plan));
  else
    bind(DNNL_ARG_WEIGHTS, plain_weights(plan.key[1]), plan.weights, r.input(1).data);
  if (plan.bias_input >= 0) plan.call.set(DNNL_ARG_BIAS, r.input(static_cast<size_t>(plan.bias_input)).data);
  for (const auto& [step, format] : plan.operands) {
    const TensorView& operand = r.input(steps_[step].operand);
    bind(onednn::operand_argument(step), description_of(operand, padded(operand.dims, plan.y_dims.size())), format, operand.data);
  }
  const memory::desc left = onednn::description(y);
  const bool direct = left == plan.dst;
  const size_t result = direct ? 0 : scratch.add(plan.dst.get_size());
  const size_t pad = scratch.add(plan.scratchpad.get_size());
  char* block = scratch.total() ? static_cast<char*>(r.scratch(scratch.total())) : nullptr;
  for (const Copy& copy : copies) {
    onednn::Reordering(copy.from, copy.to).run(copy.data, block + copy.offset);
    plan.call.set(copy.argument, block + copy.offset);
  }
  plan.call.set(DNNL_ARG_SCRATCHPAD, block ? block + pad : nullptr);
  void* dst = direct ? y.data : block + result;
  plan.call.set(DNNL_ARG_DST, dst);
  if (plan.accumulates) {
    const TensorView& addend = r.input(steps_[0].operand);
    const memory::desc from = onednn::description(addend);
    if (from != plan.dst)
      onednn::Reordering(from, plan.dst).run(addend.data, dst);
    else if (addend.data != dst)
      copy_elements(r, addend, dst);
  }
  plan.call.run();
  if (!direct) onednn::Reordering(plan.dst, left).run(dst, y.data);
  apply_steps(r, steps_, plan.fused, y);
}

void fill_with_bias(RunContext& r, TensorView& y, const TensorView* bias) {
  (void)r;
  const int64_t channels = y.dims[1], cells = count_of(spatial_of(y.dims));
  float* out = y.as<float>();
  for (int64_t i = 0; i < y.count(); ++i) {
    const int64_t channel = y.layout == Layout::nhwc ? i % channels : i / cells % channels;
    out[i] = bias ? bias->as<float>()[channel] : 0.0f;
  }
}

}  // namespace fretsaw
