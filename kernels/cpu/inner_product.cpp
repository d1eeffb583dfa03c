// Chooses, keeps and runs oneDNN inner products.
#include "kernels/cpu/inner_product.h"

#include <algorithm>
#include <functional>

namespace fretsaw {

using dnnl::memory;

namespace {

constexpr size_t kPlansKept = 8;

Dims padded(const Dims& dims, size_t rank) {
  Dims out(rank > dims.size() ? rank - dims.size() : 0, 1);
  out.insert(out.end(), dims.begin(), dims.end());
  return out;
}

}  // namespace

InnerProduct::InnerProduct(TensorPtr b, int64_t K, int64_t N, int64_t row, int64_t column, std::vector<FusedStep> steps)
    : b_(std::move(b)), K_(K), N_(N), row_(row), column_(column), steps_(std::move(steps)) {
  b_->check_readable(sizeof(float));
  for (const FusedStep& step : steps_) {
    if (step.is_binary()) binary_inputs_.push_back(step.operand);
  }
}

// An operand for Y [..., N] as one for [rows, N]: [1, N], [rows, 1], [rows, N] or [1, 1]; nullopt where it repeats otherwise.
std::optional<Dims> InnerProduct::flat_operand(const Plan& plan, const Dims& operand) const {
  if (plan.y.empty() || plan.y.back() != N_ || operand.size() > plan.y.size()) return std::nullopt;
  const Dims dims = padded(operand, plan.y.size());
  const bool same = std::equal(dims.begin(), dims.end() - 1, plan.y.begin());
  const bool ones = std::all_of(dims.begin(), dims.end() - 1, [](int64_t d) { return d == 1; });
  if (!same && !ones) return std::nullopt;
  return Dims{same ? plan.rows : 1, dims.back()};
}

struct InnerProduct::Choice {
  std::function<dnnl::primitive()> make;  // generates the code
  memory::desc src, weights, dst, scratchpad;
  std::vector<memory::desc> operands;  // of the fused binary steps
  std::string implementation;
  size_t fused = 0;
};

// A dense matrix [rows, columns]; as a convolution's image it has a pixel for each row and a channel for each column.
memory::desc InnerProduct::in_form(Form form, int64_t rows, int64_t columns) {
  if (form == Form::inner_product) return onednn::description(Dims{rows, columns});
  return onednn::description(Dims{1, columns, 1, rows}, Layout::nhwc);
}

std::optional<InnerProduct::Choice> InnerProduct::create(const Plan& plan, Form form, size_t steps) const {
  Choice choice;
  dnnl::post_ops ops;
  size_t next = 0;
  choice.fused = onednn::append_steps(ops, steps_, steps, [&](const FusedStep&) -> std::optional<memory::desc> {
    const std::optional<Dims> flat = flat_operand(plan, plan.operands[next++]);
    if (!flat) return std::nullopt;
    choice.operands.push_back(in_form(form, (*flat)[0], (*flat)[1]));
    return choice.operands.back();
  });
  if (choice.fused < steps) return std::nullopt;
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attributes.set_post_ops(ops);
  choice.src = in_form(form, plan.rows, K_), choice.dst = in_form(form, plan.rows, N_);
  const auto accept = [&](const auto& desc, auto make) {
    choice.weights = desc.weights_desc(), choice.scratchpad = desc.scratchpad_desc();
    choice.implementation = desc.impl_info_str(), choice.make = [desc, make]() { return make(desc); };
  };
  try {
    if (form == Form::convolution) {
      const onednn::ConvolutionSetting setting{choice.src, onednn::any_format({N_, K_, 1, 1}), {}, choice.dst, {1, 1}, {0, 0}, {0, 0},
                                               {0, 0}};
      accept(onednn::describe_convolution(setting, attributes),
             [](const auto& d) -> dnnl::primitive { return dnnl::convolution_forward(d); });
    } else {
      accept(dnnl::inner_product_forward::primitive_desc(onednn::engine(), dnnl::prop_kind::forward_inference, choice.src,
                                                         onednn::any_format({N_, K_}), memory::desc(), choice.dst, attributes),
             [](const auto& d) -> dnnl::primitive { return dnnl::inner_product_forward(d); });
    }
  } catch (const dnnl::error&) {
    return std::nullopt;
  }
  return choice;
}

// The code for the product alone, and then as many steps as it takes: they must not make it another, which may sum in another order.
std::optional<InnerProduct::Choice> InnerProduct::choose(const Plan& plan) const {
  Form form = Form::convolution;
  std::optional<Choice> bare = create(plan, form, 0);
  if (!bare || !onednn::is_fast_pointwise(bare->implementation)) bare = create(plan, form = Form::inner_product, 0);
  if (!bare || onednn::is_reference(bare->implementation)) return std::nullopt;
  for (size_t steps = steps_.size(); steps > 0; --steps) {
    std::optional<Choice> fused = create(plan, form, steps);
    if (fused && fused->implementation == bare->implementation) return fused;
  }
  return bare;
}

InnerProduct::Plan InnerProduct::make_plan(int64_t rows, const Dims& y, std::vector<Dims> operands) {
  Plan plan;
  plan.rows = rows, plan.y = y, plan.operands = std::move(operands);
  const std::optional<Choice> choice = choose(plan);
  if (!choice) return plan;
  onednn::report_choice("MatMul", {rows, K_, N_}, choice->implementation);
  plan.possible = true;
  plan.call = onednn::Call(choice->make());
  plan.weights = choice->weights;
  plan.scratchpad_bytes = choice->scratchpad.get_size();
  plan.fused = choice->fused;
  plan.call.add(DNNL_ARG_SRC, choice->src);
  plan.call.add(DNNL_ARG_WEIGHTS, plan.weights);
  plan.call.add(DNNL_ARG_DST, choice->dst);
  plan.call.add(DNNL_ARG_SCRATCHPAD, choice->scratchpad);
  size_t next = 0;
  for (size_t i = 0; i < plan.fused; ++i) {
    if (steps_[i].is_binary()) plan.call.add(onednn::operand_argument(i), choice->operands[next++]);
  }
  return plan;
}

// B as it stands in the model, with as many dimensions as `packed`.
memory::desc InnerProduct::plain_weights(const memory::desc& packed) const {
  return packed.get_ndims() == 4 ? onednn::strided({N_, K_, 1, 1}, {column_, row_, 1, 1}) : onednn::strided({N_, K_}, {column_, row_});
}

const void* InnerProduct::packed_weights(const Plan& plan) {
  for (const onednn::PackedWeights& packed : packed_) {
    if (packed.format() == plan.weights) return packed.data();
  }
  packed_.emplace_back(b_, plain_weights(plan.weights), plan.weights);
  return packed_.back().data();
}

void InnerProduct::prepare(int64_t rows, const Dims& y, const std::vector<Dims>& inputs) {
  std::vector<Dims> operands;
  for (size_t input : binary_inputs_) operands.push_back(inputs.at(input));
  plans_.push_front(make_plan(rows, y, std::move(operands)));
  if (plans_.front().possible) packed_weights(plans_.front());
}

bool InnerProduct::run(RunContext& r, const float* a, int64_t rows, TensorView& y) {
  const auto fits = [&](const Plan& plan) {
    if (plan.rows != rows || plan.y != y.dims) return false;
    for (size_t i = 0; i < binary_inputs_.size(); ++i) {
      if (plan.operands[i] != r.input(binary_inputs_[i]).dims) return false;
    }
    return true;
  };
  const auto found = std::find_if(plans_.begin(), plans_.end(), fits);
  if (found != plans_.end()) {
    if (found != plans_.begin()) plans_.splice(plans_.begin(), plans_, found);
  } else {
    std::vector<Dims> operands;
    for (size_t input : binary_inputs_) operands.push_back(r.input(input).dims);
    plans_.push_front(make_plan(rows, y.dims, std::move(operands)));
    if (plans_.size() > kPlansKept) plans_.pop_back();
  }
  Plan& plan = plans_.front();
  if (!plan.possible) return false;
  plan.call.set(DNNL_ARG_SRC, a);
  plan.call.set(DNNL_ARG_WEIGHTS, packed_weights(plan));
  plan.call.set(DNNL_ARG_DST, y.data);
  plan.call.set(DNNL_ARG_SCRATCHPAD, plan.scratchpad_bytes ? r.scratch(plan.scratchpad_bytes) : nullptr);
  for (size_t i = 0; i < plan.fused; ++i) {
    if (steps_[i].is_binary()) plan.call.set(onednn::operand_argument(i), r.input(steps_[i].operand).data);
  }
  plan.call.run();
  apply_steps(r, steps_, plan.fused, y);
  return true;
}

}  // namespace fretsaw
