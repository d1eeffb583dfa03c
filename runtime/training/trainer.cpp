// Training steps of a plan.
#include "runtime/training/trainer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "graph/errors.h"
#include "graph/training/batch_norm.h"
#include "graph/training/optimizer.h"
#include "runtime/training/sample_order.h"

namespace fretsaw {
namespace {

template <typename T>
RuntimeValue scalar(DType dtype, T number) {
  RuntimeValue value = make_value(dtype, {});
  *value.tensor.as<T>() = number;
  return value;
}

double number_in(const RuntimeValue& value) {
  switch (value.tensor.dtype) {
    case DType::float32:
      return static_cast<double>(*value.tensor.as<float>());
    case DType::float64:
      return *value.tensor.as<double>();
    case DType::int64:
      return static_cast<double>(*value.tensor.as<int64_t>());
    default:
      throw Error("a scalar of type " + std::string(name_of(value.tensor.dtype)) + " came out of a training step",
                  "report this as a fault");
  }
}

const RuntimeValue& output_named(const Plan& plan, const std::vector<RuntimeValue>& outputs, const std::string& name) {
  for (size_t i = 0; i < plan.outputs.size(); ++i)
    if (plan.outputs[i].name == name) return outputs[i];
  throw Error("the training plan has no output '" + name + "'", "partition the model again");
}

TensorPtr tensor_of(const RuntimeValue& value) {
  auto tensor = make_tensor(value.tensor.dtype, value.tensor.dims);
  std::memcpy(mutable_data(*tensor), value.tensor.data, value.tensor.bytes());
  return tensor;
}

// Nodes that behave in another way while a model is trained.
void to_inference(Graph& graph) {
  batch_norms_for_inference(graph);
  for (Node* node : graph.nodes) {
    if (node->is("Dropout") && node->inputs.size() > 2) node->inputs.resize(2);  // without training_mode
    for (const GraphPtr& body : bodies(*node)) to_inference(*body);
  }
}

// Beside states: how long the loss scale has been what it is.
constexpr const char* kGoodSteps = "scalar:good_steps";

// Whether it is what an optimizer keeps ("exp_avg:NAME") of a tensor that is there.
bool is_kept_of(const std::string& name, const std::map<std::string, RuntimeValue>& given) {
  const size_t colon = name.find(':');
  return colon != std::string::npos && given.contains(name.substr(colon + 1));
}

}  // namespace

Trainer::Trainer(TrainingPlan plan, const TrainerOptions& options)
    : plan_(std::move(plan)), options_(options), session_(std::make_unique<Session>(plan_.plan, options.session)) {
  // Seed 0 counts from 0; others from anywhere in 62 bits.
  const uint64_t seed = options.session.random_seed;
  counter_ = seed == 0 ? 0 : static_cast<int64_t>(mixed_key(seed, 0) >> 2);
}

void Trainer::check_batch(const Batch& batch) const {
  for (const PlanInput& input : plan_.plan->inputs) {
    const auto given = batch.find(input.name);
    if (given == batch.end() || input.batch_axis < 0) continue;
    const Dims& dims = given->second.tensor.dims;
    const auto axis = static_cast<size_t>(input.batch_axis);
    if (axis >= dims.size() || dims[axis] >= plan_.least_batch) continue;
    throw Error(
        "a batch of " + std::to_string(dims[axis]) + " has no sample for some of the micro-batches of data ranks, of which there are " +
            std::to_string(plan_.least_batch),
        "use larger batches, fewer micro-batches, or neither --zero 2, --zero 3 nor --sync-batch-norm, for which all ranks meet in every "
        "micro-batch; a smaller last batch is best left out of the data");
  }
}

// How many losses a step's loss is the mean of, those of ignored targets too; 1 for a sum, and for a loss that the model computes.
int64_t Trainer::losses_in(const Batch& batch) const {
  const bool is_mean = options_.loss.reduction == LossSpec::Reduction::mean && options_.loss.kind != LossSpec::Kind::output;
  const auto target = batch.find(plan_.target);
  return is_mean && target != batch.end() ? target->second.tensor.count() : 1;
}

StepResult Trainer::step(const Batch& batch, double learning_rate) {
  check_batch(batch);
  const double seed = scale_.seed(losses_in(batch));
  if (plan_.scales_loss) session_->set_state(kLossScale, scalar(DType::float32, static_cast<float>(seed)));
  if (plan_.draws_masks) session_->set_state(kRandomCounter, scalar(DType::int64, counter_++));
  const std::optional<double> expected = expected_divisor(batch);
  const auto expected_scale = static_cast<float>(gradient_scale(0, expected.value_or(1) * (plan_.scales_loss ? seed : 1), options_.clip));
  if (expected) set_numbers(learning_rate, expected_scale);
  const std::vector<RuntimeValue> outputs = session_->run(batch, /*update_ahead=*/expected.has_value());
  StepResult result;
  result.count = static_cast<int64_t>(number_in(output_named(*plan_.plan, outputs, plan_.loss_count)));
  divisor_ = loss_divisor(options_.loss, result.count);
  result.loss = number_in(output_named(*plan_.plan, outputs, plan_.loss_sum)) / divisor_;
  if (plan_.scales_loss) divisor_ *= seed;
  const double squares = squared_sum();
  result.gradient_norm = std::sqrt(squares) / divisor_;
  result.skipped = !std::isfinite(result.loss) || !std::isfinite(squares);
  scale_.step(!result.skipped);
  const auto scale = static_cast<float>(gradient_scale(squares, divisor_, options_.clip));
  const bool is_as_expected = !result.skipped && expected && scale == expected_scale;
  if (!is_as_expected) session_->take_back_updates();
  last_ = {losses_in(batch), result.count, !result.skipped && scale == static_cast<float>(gradient_scale(0, divisor_, options_.clip))};
  if (result.skipped) return result;
  if (!is_as_expected) set_numbers(learning_rate, scale);
  ++updates_;
  session_->update();
  return result;
}

// What the gradients of the batch will be divided by, as far as that can be told before: null where ranks had better not update ahead.
std::optional<double> Trainer::expected_divisor(const Batch& batch) const {
  if (!session_->updates_ahead() || !last_.is_plain) return {};
  if (options_.session.detect_anomaly) return {};  // an update of gradients that are not finite would be named
  int64_t count = last_.count;
  const auto target = batch.find(plan_.target);
  if (options_.loss.ignore_index && target != batch.end() && target->second.tensor.dtype == DType::int64) {
    const auto* classes = target->second.tensor.as<int64_t>();
    const int64_t ignored = std::count(classes, classes + target->second.tensor.count(), *options_.loss.ignore_index);
    count = target->second.tensor.count() - ignored;
  } else if (losses_in(batch) != last_.losses) {
    return {};
  }
  return loss_divisor(options_.loss, count);
}

void Trainer::set_numbers(double learning_rate, float scale) {
  session_->set_state(kLearningRate, scalar(DType::float32, static_cast<float>(learning_rate)));
  session_->set_state(kStep, scalar(DType::int64, updates_ + 1));
  session_->set_state(kScale, scalar(DType::float32, scale));
}

// Every parameter lies on one pipeline rank; the data and tensor ranks have added theirs up.
double Trainer::squared_sum() const {
  double sum = 0;
  for (const RuntimeValue& value : session_->states(kSquaredSum)) sum += number_in(value);
  return sum;
}

RuntimeValue Trainer::parameter(const std::string& name) const {
  RuntimeValue found = session_->state(name);
  if (found.kind == RuntimeValue::Kind::absent) throw Error("no rank trains '" + name + "'", "see the names of the model's initializers");
  return found;
}

RuntimeValue Trainer::gradient(const std::string& parameter) const {
  const RuntimeValue found = session_->state(gradient_of(parameter));
  if (found.kind == RuntimeValue::Kind::absent)
    throw Error("no rank trains '" + parameter + "'", "see the names of the model's initializers");
  const TensorView& sum = found.tensor;
  RuntimeValue mean = make_value(sum.dtype == DType::float64 ? DType::float64 : DType::float32, sum.dims);
  const auto divide = [&]<typename Wide>(Wide*, const auto& element) {
    for (int64_t i = 0; i < sum.count(); ++i) mean.tensor.as<Wide>()[i] = static_cast<Wide>(static_cast<double>(element(i)) / divisor_);
  };
  float* wide = nullptr;
  if (sum.dtype == DType::float32)
    divide(wide, [&](int64_t i) { return sum.as<float>()[i]; });
  else if (sum.dtype == DType::float64)
    divide(static_cast<double*>(nullptr), [&](int64_t i) { return sum.as<double>()[i]; });
  else if (sum.dtype == DType::float16)
    divide(wide, [&](int64_t i) { return static_cast<float>(sum.as<_Float16>()[i]); });
  else if (sum.dtype == DType::bfloat16)
    divide(wide, [&](int64_t i) { return std::bit_cast<float>(static_cast<uint32_t>(sum.as<uint16_t>()[i]) << 16); });
  else
    throw Error("gradients of type " + std::string(name_of(sum.dtype)) + " can't be given out", "train in float32");
  return mean;
}

std::map<std::string, RuntimeValue> Trainer::kept() const {
  std::map<std::string, RuntimeValue> values;
  for (const PlanState& state : plan_.plan->states) {
    if (!outlives_step(state)) continue;
    RuntimeValue found = session_->state(state.name);
    if (found.kind != RuntimeValue::Kind::absent) values[state.name] = std::move(found);
  }
  // The state holds what the last batch's losses began with; of the next one's it is the factor that counts.
  if (plan_.scales_loss) {
    values[kLossScale] = scalar(DType::float32, static_cast<float>(scale_.factor()));
    values[kGoodSteps] = scalar(DType::int64, scale_.good_steps());
  }
  if (plan_.draws_masks) values[kRandomCounter] = scalar(DType::int64, counter_ - 1);  // the last step's, or that before the first
  return values;
}

void Trainer::restore(const std::map<std::string, RuntimeValue>& given, int64_t updates, const std::set<std::string>& frozen,
                      std::vector<std::string>* notes) {
  std::map<std::string, RuntimeValue> own = kept();
  std::erase_if(own, [](const auto& one) { return one.first.starts_with(kScalarState); });
  for (const auto& [name, value] : own) {
    const auto found = given.find(name);
    if (found == given.end())
      throw Error("there is no tensor '" + name + "'", "resume a run of the same model and optimizer that trained it too");
    const TensorView &wanted = value.tensor, &got = found->second.tensor;
    if (got.dtype != wanted.dtype || got.dims != wanted.dims) {
      throw Error("tensor '" + name + "' is " + std::string(name_of(got.dtype)) + " " + to_string(got.dims) + ", and the model has " +
                      std::string(name_of(wanted.dtype)) + " " + to_string(wanted.dims),
                  "resume a run of the same model and optimizer");
    }
  }
  std::vector<std::string> lost;
  for (const auto& [name, value] : given) {
    if (own.contains(name) || frozen.contains(name) || name.starts_with(kScalarState)) continue;
    if (!is_kept_of(name, given))
      throw Error("tensor '" + name + "' is there, and this run neither trains it nor has its value",
                  "train it, or resume with the model in place of a plan, and its initializer '" + name + "' takes that value");
    lost.push_back(name);
  }
  if (!lost.empty() && notes)
    notes->push_back("what the optimizer had is dropped where this run does not keep it: " + lost[0] +
                     (lost.size() > 1 ? " and " + std::to_string(lost.size() - 1) + " more" : ""));
  for (const auto& [name, value] : own) session_->set_state(name, given.at(name));
  scale_ = {};
  if (const auto scale = given.find(kLossScale); scale != given.end()) {
    const auto good = given.find(kGoodSteps);
    scale_.set(number_in(scale->second), good == given.end() ? 0 : static_cast<int64_t>(number_in(good->second)));
  }
  if (const auto counter = given.find(kRandomCounter); counter != given.end() && counter->second.tensor.dtype == DType::int64)
    counter_ = *counter->second.tensor.as<int64_t>() + 1;
  updates_ = updates;
}

Model trained_model(const Model& source, const Trainer& trainer) {
  Model model = clone(source);
  for (const auto* names : {&trainer.plan().parameters, &trainer.plan().statistics}) {
    for (const std::string& name : *names) {
      for (Value& value : model.graph->all_values())
        if (value.constant && value.name == name) value.constant = tensor_of(trainer.parameter(name));
    }
  }
  to_inference(*model.graph);
  return model;
}

}  // namespace fretsaw
