// Chooses, keeps and runs oneDNN inner products.
#include "kernels/cpu/inner_product.h"

#include <algorithm>

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

bool InnerProduct::create(Plan& plan, size_t steps) {
  plan.fused = 0;
  std::vector<memory::desc> formats;
  dnnl::post_ops ops;
  const std::vector<FusedStep> wanted(steps_.begin() + static_cast<int64_t>(plan.first_step), steps_.end());
  size_t operand = plan.first_step;  // first_step is 1 only where step 0 is binary
  plan.fused = onednn::append_steps(ops, wanted, steps, [&](const FusedStep&) -> std::optional<memory::desc> {
    const std::optional<Dims> flat = flat_operand(plan, plan.operands[operand++]);
    if (!flat) return std::nullopt;
    formats.push_back(onednn::description(*flat));
    return formats.back();
  });
  if (plan.fused < steps) return false;
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attributes.set_post_ops(ops);
  const memory::desc src = onednn::description(Dims{plan.rows, K_}), dst = onednn::description(Dims{plan.rows, N_});
  const memory::desc bias = plan.bias_input >= 0 ? onednn::description(Dims{N_}) : memory::desc();
  try {
    const dnnl::inner_product_forward::primitive_desc desc(onednn::engine(), dnnl::prop_kind::forward_inference, src,
                                                           onednn::any_format({N_, K_}), bias, dst, attributes);
    if (onednn::is_reference(desc.impl_info_str())) return false;
    onednn::report_choice("MatMul", {plan.rows, K_, N_}, desc.impl_info_str());
    plan.call = onednn::Call(dnnl::inner_product_forward(desc));
    plan.weights = desc.weights_desc();
    plan.scratchpad_bytes = desc.scratchpad_desc().get_size();
    plan.call.add(DNNL_ARG_SRC, src);
    plan.call.add(DNNL_ARG_WEIGHTS, plan.weights);
    plan.call.add(DNNL_ARG_DST, dst);
    plan.call.add(DNNL_ARG_SCRATCHPAD, desc.scratchpad_desc());
    if (plan.bias_input >= 0) plan.call.add(DNNL_ARG_BIAS, bias);
  } catch (const dnnl::error&) {
    return false;
  }
  size_t next = 0;
  for (size_t i = 0; i < plan.fused; ++i) {
    if (wanted[i].is_binary()) plan.call.add(onednn::operand_argument(i), formats[next++]);
  }
  return true;
}

InnerProduct::Plan InnerProduct::make_plan(int64_t rows, const Dims& y, std::vector<Dims> operands) {
  Plan plan;
  plan.rows = rows, plan.y = y, plan.operands = std::move(operands);
  if (!steps_.empty() && steps_[0].kind == FusedStep::Kind::add) {
    if (flat_operand(plan, plan.operands[0]) == Dims{1, N_}) {
      plan.bias_input = static_cast<int>(steps_[0].operand), plan.first_step = 1;
    }
  }
  for (size_t steps = steps_.size() - plan.first_step + 1; steps-- > 0 && !plan.possible;) plan.possible = create(plan, steps);
  return plan;
}

const void* InnerProduct::packed_weights(const Plan& plan) {
  for (const onednn::PackedWeights& packed : packed_) {
    if (packed.format() == plan.weights) return packed.data();
  }
  packed_.emplace_back(b_, onednn::strided({N_, K_}, {column_, row_}), plan.weights);
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
  if (plan.bias_input >= 0) plan.call.set(DNNL_ARG_BIAS, r.input(static_cast<size_t>(plan.bias_input)).data);
  for (size_t i = 0; i < plan.fused; ++i) {
    const FusedStep& step = steps_[plan.first_step + i];
    if (step.is_binary()) plan.call.set(onednn::operand_argument(i), r.input(step.operand).data);
  }
  plan.call.run();
  apply_steps(r, steps_, plan.first_step + plan.fused, y);
  return true;
}

}  // namespace fretsaw
