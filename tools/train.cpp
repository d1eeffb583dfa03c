// fretsaw train: trains a model.
#include <CLI/App.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "graph/errors.h"
#include "graph/training/lr_schedule.h"
#include "runtime/tensor_values.h"
#include "runtime/training/background_checkpoints.h"
#include "tools/commands.h"
#include "tools/execution.h"
#include "tools/json_output.h"
#include "tools/options.h"
#include "tools/plan_summary.h"
#include "tools/run_files.h"
#include "tools/text.h"
#include "tools/train_evaluation.h"
#include "tools/train_plan.h"
#include "tools/train_progress.h"
#include "tools/train_settings.h"
#include "tools/value_files.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

constexpr const char* kUpdates = "updates";  // in checkpoints: steps that were not skipped

struct Run {
  std::vector<double> losses;
  int64_t skipped = 0, samples = 0;
  std::vector<double> times_ms;
  std::vector<std::pair<int64_t, double>> evaluations;  // after so many steps
};

TrainingPlan make_plan(const Model& model, const TrainSettings& settings) {
  try {
    return partition_for_training(clone(model), partition_options(settings), training_options(settings));
  } catch (const Error& e) {
    throw e.file().empty() ? e.in_file(settings.path) : e;
  }
}

int64_t samples_of(const Batch& batch) {
  int64_t samples = 0;
  for (const auto& [name, value] : batch)
    if (!value.tensor.dims.empty()) samples = std::max(samples, value.tensor.dims[0]);
  return samples;
}

// A batch that reaches the end of an epoch goes on with the next one; the last one does so too.
int64_t steps_of(const TrainSettings& settings, const DataSource& data) {
  if (settings.steps > 0) return settings.steps;
  const int64_t samples = std::max<int64_t>(settings.epochs, 1) * data.epoch_size();
  return data.in_batches() || settings.batch == 0 ? samples : (samples + settings.batch - 1) / settings.batch;
}

// K.pb with the parameter's name in it, K from 0 on in the order of the model's initializers.
void save_gradients(const Trainer& trainer, const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw Error("cannot be made: " + error.message(), "check the path and its permissions").in_file(folder);
  size_t number = 0;
  for (const std::string& name : trainer.plan().parameters) {
    const RuntimeValue value = trainer.gradient(name);
    write_value_file(value, Type::tensor(value.tensor.dtype, shape_of(value.tensor.dims)), name,
                     (fs::path(folder) / (std::to_string(number++) + ".pb")).string());
  }
}

class Log {
 public:
  explicit Log(const std::string& path) {
    if (path.empty()) return;
    file_.reset(std::fopen(path.c_str(), "w"));
    if (!file_) throw Error("cannot be written", "check the path and its permissions").in_file(path);
  }
  void write(const Json& line) {
    if (!file_) return;
    const std::string text = line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    std::fwrite(text.data(), 1, text.size(), file_.get());
    std::fflush(file_.get());
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::unique_ptr<std::FILE, Close> file_;
};

// The step that comes next.
int64_t resume(Trainer& trainer, DataSource& data, const TrainSettings& settings) {
  std::vector<std::string> notes;
  const Checkpoint checkpoint = open_newest_checkpoint(settings.resume, notes);
  for (const std::string& note : notes) std::fprintf(stderr, "note: %s\n", note.c_str());
  std::map<std::string, RuntimeValue> kept;
  for (const std::string& name : checkpoint.names()) kept[name] = value_from_tensor(*checkpoint.read(name));
  const CheckpointState& state = checkpoint.state();
  const auto updates = state.more.find(kUpdates);
  try {
    trainer.restore(kept, updates == state.more.end() ? state.step : std::stoll(updates->second));
    data.seek(state.data);
  } catch (const Error& e) {
    throw e.file().empty() ? e.in_file(checkpoint.folder()) : e;
  }
  return state.step;
}

class TrainingRun {
 public:
  TrainingRun(Trainer& trainer, DataSource& data, Evaluation* evaluation, const TrainSettings& settings)
      : trainer_(trainer),
        data_(data),
        evaluation_(evaluation),
        settings_(settings),
        steps_(steps_of(settings, data)),
        rates_(parse_lr_schedule(settings.lr, {parse_optimizer(settings.optimizer).lr, steps_})),
        log_(settings.log),
        progress_(steps_, settings.sequence > 0 ? "tokens" : "samples"),
        checkpoints_(settings.checkpoints, trainer.plan().plan->mesh.size(), settings.keep) {
    for (const PlanInput& input : trainer.plan().plan->inputs) inputs_.push_back(input.name);
  }

  Run run() {
    for (int64_t i = settings_.resume.empty() ? 0 : resume(trainer_, data_, settings_); i < steps_; ++i) {
      step(i);
      if (evaluates_after(i)) evaluate(i);
      if (saves_after(i)) checkpoints_.begin(state_after(i), trainer_.kept());
      checkpoints_.check();
    }
    checkpoints_.finish();
    return std::move(run_);
  }

 private:
  bool is_due(int64_t i, int64_t every) const { return i + 1 == steps_ || (every > 0 && (i + 1) % every == 0); }
  bool evaluates_after(int64_t i) const { return evaluation_ && is_due(i, settings_.eval_every); }
  bool saves_after(int64_t i) const { return !settings_.checkpoints.empty() && is_due(i, settings_.every); }

  void step(int64_t i) {
    Batch batch = data_.next(settings_.batch);
    keep_inputs(batch, inputs_);
    const auto start = std::chrono::steady_clock::now();
    const StepResult result = trained(i, batch);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    const int64_t samples = samples_of(batch);
    const std::vector<RankReport> ranks = trainer_.session().ranks();
    run_.losses.push_back(result.loss);
    run_.skipped += result.skipped;
    run_.samples += samples;
    run_.times_ms.push_back(took.count());
    log_.write({{"step", i},
                {"loss", result.loss},
                {"lr", rates_.at(i)},
                {"gradient_norm", result.gradient_norm},
                {"skipped", result.skipped},
                {"samples", samples},
                {"ms", took.count()},
                {"peak_bytes", peak_bytes(ranks)},
                {"idle_share", idle_share(ranks)}});
    if (run_.losses.size() == 1 && !settings_.save_gradients.empty()) save_gradients(trainer_, settings_.save_gradients);
    progress_.step(i + 1, result.loss, rates_.at(i), samples * std::max<int64_t>(settings_.sequence, 1), ranks);
  }

  StepResult trained(int64_t i, const Batch& batch) {
    if (!settings_.detect_anomaly) return trainer_.step(batch, rates_.at(i));
    StepResult result;
    try {
      result = trainer_.step(batch, rates_.at(i));
    } catch (const Error& e) {
      const std::string rank = e.problem().starts_with("rank ") ? "" : "rank 0: ";
      throw Error("step " + std::to_string(i) + ", " + rank + e.problem(), e.remedy(), e.code()).at_node(e.node(), e.op());
    }
    if (!result.skipped) return result;
    throw Error("step " + std::to_string(i) + ": the loss or a gradient is not finite, though no node made NaN",
                "look for infinities in the data and the model's constants");
  }

  void evaluate(int64_t i) {
    const double loss = evaluation_->loss(trainer_);
    run_.evaluations.emplace_back(i + 1, loss);
    log_.write({{"step", i}, {"eval_loss", loss}});
    progress_.evaluated(loss);
  }

  CheckpointState state_after(int64_t i) const {
    CheckpointState state;
    state.step = i + 1, state.seed = settings_.seed, state.data = data_.position();
    state.more[kUpdates] = std::to_string(trainer_.updates());
    return state;
  }

  Trainer& trainer_;
  DataSource& data_;
  Evaluation* evaluation_;
  const TrainSettings& settings_;
  int64_t steps_;
  LrSchedule rates_;
  Log log_;
  TrainProgress progress_;
  BackgroundCheckpoints checkpoints_;
  std::vector<std::string> inputs_;
  Run run_;
};

Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json result_json(const Run& run, const Trainer& trainer) {
  double seconds = 0;
  for (double ms : run.times_ms) seconds += ms / 1e3;
  Json losses = Json::array(), evaluations = Json::array();
  for (double loss : run.losses) losses.push_back(number(loss));
  for (const auto& [step, loss] : run.evaluations) evaluations.push_back({{"step", step}, {"loss", number(loss)}});
  Json result = {{"losses", losses},
                 {"steps", run.losses.size()},
                 {"skipped", run.skipped},
                 {"samples_per_s", seconds > 0 ? static_cast<double>(run.samples) / seconds : 0},
                 {"time_ms", json_of(timing_of(run.times_ms))},
                 {"ranks", json_of(trainer.session().ranks())}};
  if (!run.evaluations.empty()) result["evals"] = evaluations;
  return result;
}

void print_result(const Run& run, const Trainer& trainer, const TrainSettings& settings) {
  if (settings.json) return print_json(result_json(run, trainer));
  if (run.losses.empty()) return void(std::printf("nothing is left to do\n"));
  std::printf("first loss %.6g   after %zu steps: loss %.6g", run.losses.front(), run.losses.size(), run.losses.back());
  if (!run.evaluations.empty()) std::printf("   eval loss %.6g", run.evaluations.back().second);
  std::printf("   %.1f samples/s", result_json(run, trainer)["samples_per_s"].get<double>());
  if (run.skipped) std::printf("   %lld steps skipped", static_cast<long long>(run.skipped));
  std::printf("\n");
  if (!settings.export_path.empty()) std::printf("wrote %s\n", settings.export_path.c_str());
}

// Whether there is something to train with it.
bool save_plan(const TrainingPlan& plan, const TrainSettings& settings) {
  if (settings.save_plan.empty()) return true;
  save_training_plan(plan, settings);
  const bool ends = settings.data.empty();
  if (settings.json && ends) print_json(plan_json(*plan.plan));
  if (settings.json) return !ends;
  if (ends) print_plan(*plan.plan), std::printf("\n");
  std::printf("wrote %s\n", one_line(settings.save_plan).c_str());
  return !ends;
}

void run_command(TrainSettings settings) {
  std::optional<Model> model;  // of a plan: what is asked for needs it
  TrainingPlan plan;
  if (fs::is_directory(settings.path)) {
    plan = open_training_plan(settings);
    check_train_settings(settings);
    if (!settings.export_path.empty() || !settings.eval.empty()) model = source_of(*plan.plan);
  } else {
    check_train_settings(settings);
    model = read_model(settings.path);
    plan = make_plan(*model, settings);
    if (!save_plan(plan, settings)) return;
  }
  const std::unique_ptr<DataSource> data = open_data(settings.data, data_options(settings, plan));
  std::vector<std::string> inputs;
  for (const PlanInput& input : plan.plan->inputs) inputs.push_back(input.name);
  check_names(*data, inputs);
  std::unique_ptr<Evaluation> evaluation;
  if (!settings.eval.empty()) evaluation = std::make_unique<Evaluation>(*model, settings, plan);
  for (const std::string& note : plan.plan->notes) std::fprintf(stderr, "note: %s\n", note.c_str());
  const TrainerOptions options = trainer_options(settings, *plan.plan);
  Trainer trainer(std::move(plan), options);
  const Run run = TrainingRun(trainer, *data, evaluation.get(), settings).run();
  if (!settings.export_path.empty()) write_model(trained_model(*model, trainer), settings.export_path);
  if (!settings.trace.empty()) write_trace(trainer.session().trace(), settings.trace);
  print_result(run, trainer, settings);
}

}  // namespace

void add_train(CLI::App& app, Outcome&) {
  auto settings = std::make_shared<TrainSettings>();
  CLI::App* command = app.add_subcommand("train", "Train a model");
  add_train_options(*command, *settings);
  command->callback([settings, command] {
    for (const CLI::Option* option : command->get_options())
      if (option->count() > 0) settings->told.insert(option->get_name());
    run_command(*settings);
  });
}

}  // namespace fretsaw
