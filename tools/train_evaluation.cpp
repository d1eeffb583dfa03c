// The loss of a model in training on data that it is not trained on.
#include "tools/train_evaluation.h"

#include <algorithm>
#include <filesystem>

#include "graph/errors.h"
#include "graph/passes.h"
#include "partitioner/batch.h"
#include "tools/options.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

std::string evaluation_data(const std::string& path) {
  const fs::path tokens = fs::path(path) / "val.bin";
  std::error_code error;
  return fs::exists(tokens, error) ? tokens.string() : path;
}

// A batch that is baked into the file would not take the last, smaller one. Where its samples are mixed it stays, and batches are run
// whole.
void make_batches_symbolic(Model& model, const std::map<std::string, int>& axes) {
  const bool baked = std::any_of(model.graph->inputs.begin(), model.graph->inputs.end(), [&](const Value* v) {
    const auto axis = axes.find(v->name);
    return axis != axes.end() && axis->second >= 0 && v->type.shape && static_cast<size_t>(axis->second) < v->type.shape->size() &&
           (*v->type.shape)[static_cast<size_t>(axis->second)].known();
  });
  if (!baked) return;
  BatchFacts facts;
  try {
    facts = analyse_batch(model, axes, {});
  } catch (const Error&) {
    return;
  }
  make_batch_symbolic(model, facts);
}

bool has_axis(const PlanInput& input) {
  return input.batch_axis >= 0 && (!input.type.shape || static_cast<size_t>(input.batch_axis) < input.type.shape->size());
}

double number_in(const TensorView& scalar) {
  if (scalar.dtype == DType::float32) return static_cast<double>(*scalar.as<float>());
  if (scalar.dtype == DType::float64) return *scalar.as<double>();
  if (scalar.dtype == DType::int64) return static_cast<double>(*scalar.as<int64_t>());
  throw Error("a scalar of type " + std::string(name_of(scalar.dtype)) + " came out of an evaluation", "report this as a fault");
}

double output_named(const Plan& plan, const std::vector<RuntimeValue>& outputs, const std::string& name) {
  for (size_t i = 0; i < plan.outputs.size(); ++i)
    if (plan.outputs[i].name == name) return number_in(outputs[i].tensor);
  throw Error("the evaluation has no output '" + name + "'", "report this as a fault");
}

}  // namespace

Evaluation::Evaluation(const Model& source, const TrainSettings& settings, const TrainingPlan& plan)
    : source_(source), settings_(settings), inputs_(plan.plan->inputs), target_(plan.target) {
  DataOptions options = data_options(settings, plan);
  options.shuffle = false, options.wrap = false;
  for (auto& [name, type] : options.types) type.shape.reset();  // those of the training's batches
  data_ = open_data(evaluation_data(settings.eval), options);
  check_inputs(*data_, inputs_);
  if (!data_->in_batches() && settings.batch == 0)
    usage_error("--eval needs --batch for data that is no folder of batches", "say how many samples are run at once");
}

// No more samples at once than a micro-batch of the training has.
int64_t Evaluation::batch() const {
  return data_->in_batches() ? 0 : std::max<int64_t>(1, settings_.batch / settings_.micro_batches);
}

Plan Evaluation::make_plan(const Trainer& trainer) {
  PartitionOptions options = partition_options(settings_);
  options.micro_batches = 1, options.schedule = "gpipe", options.note_sizes = false;
  options.shapes.clear();  // of the training's batches
  Model model = trained_model(source_, trainer);
  std::map<std::string, int> axes;
  for (const PlanInput& input : inputs_)
    if (input.name != target_) axes[input.name] = has_axis(input) ? input.batch_axis : -1;
  run_passes(model, normalise_passes());
  infer_shapes(model);
  make_batches_symbolic(model, axes);
  const LossValues loss = append_loss(model, parse_loss(settings_.loss));
  sum_ = loss.sum->name, count_ = loss.count->name;
  options.batch_axes = axes;
  for (const PlanInput& input : inputs_)
    if (input.name == target_) options.batch_axes[input.name] = input.batch_axis;
  options.merges = {{sum_, {"sum", 0}}, {count_, {"sum", 0}}};
  model.graph->outputs = {loss.sum, loss.count};
  remove_dead_nodes(*model.graph);
  return partition(std::move(model), options);
}

double Evaluation::loss(const Trainer& trainer) {
  const auto plan = std::make_shared<const Plan>(make_plan(trainer));
  Session session(plan, session_options(settings_, *plan));
  std::vector<std::string> names;
  for (const PlanInput& input : plan->inputs) names.push_back(input.name);
  double sum = 0, count = 0;
  data_->seek({});
  while (data_->position().epoch == 0) {
    Batch samples = data_->next(batch());
    keep_inputs(samples, names);
    const std::vector<RuntimeValue> outputs = session.run(samples);
    sum += output_named(*plan, outputs, sum_), count += output_named(*plan, outputs, count_);
  }
  return sum / loss_divisor(parse_loss(settings_.loss), static_cast<int64_t>(count));
}

}  // namespace fretsaw
