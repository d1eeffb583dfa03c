// fretsaw train: trains a model.
#include <signal.h>

#include <CLI/App.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "graph/errors.h"
#include "graph/io/temporary_file.h"
#include "graph/training/lr_schedule.h"
#include "runtime/training/background_checkpoints.h"
#include "runtime/training/read_ahead.h"
#include "tools/commands.h"
#include "tools/execution.h"
#include "tools/json_output.h"
#include "tools/options.h"
#include "tools/plan_summary.h"
#include "tools/run_files.h"
#include "tools/stop_signals.h"
#include "tools/text.h"
#include "tools/train_evaluation.h"
#include "tools/train_log.h"
#include "tools/train_plan.h"
#include "tools/train_progress.h"
#include "tools/train_resume.h"
#include "tools/train_settings.h"
#include "tools/train_targets.h"
#include "tools/value_files.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

struct Run {
  std::vector<double> losses;
  int64_t skipped = 0, samples = 0;
  std::vector<double> times_ms;                          // of steps, without waiting for data
  double waited_ms = 0;                                  // for data, in all
  std::vector<std::vector<double>> busy_ms, busy_share;  // of each rank in each step
  std::vector<std::pair<int64_t, double>> evaluations;   // after so many steps
  int stopped_by = 0;                                    // a signal
  int64_t done = 0;                                      // steps, those before a checkpoint that was resumed too
};

bool has_loops(const Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const Node* node) {
    const std::vector<GraphPtr> inner = bodies(*node);
    return node->is("Loop") || node->is("Scan") || std::any_of(inner.begin(), inner.end(), [](const GraphPtr& g) { return has_loops(*g); });
  });
}

// How often loops run may follow from the data's sizes. What does not fit is refused where the data is opened.
void take_sizes(const Graph& graph, const std::map<std::string, Dims>& dims, std::map<std::string, Dims>& shapes) {
  for (const Value* v : graph.inputs) {
    const auto found = dims.find(v->name);
    if (found == dims.end() || !v->type.shape || found->second.size() != v->type.shape->size()) continue;
    if (!std::equal(v->type.shape->begin(), v->type.shape->end(), found->second.begin(),
                    [](const Dim& d, int64_t size) { return !d.known() || d.value == size; }))
      continue;
    shapes.try_emplace(v->name, found->second);
  }
}

TrainingPlan make_plan(const Model& model, const TrainSettings& settings) {
  try {
    TrainingOptions training = training_options(settings);
    PartitionOptions cut = partition_options(settings);
    const bool loops = has_loops(*model.graph);
    std::map<std::string, Dims> dims;
    if (loops || training.recompute == "auto" || !settings.memory.empty()) dims = batch_dims(settings, model);
    if (loops) take_sizes(*model.graph, dims, cut.shapes);
    if (training.recompute == "auto" || !settings.memory.empty()) training.dims = std::move(dims);
    return partition_for_training(clone(model), cut, training);
  } catch (const Error& e) {
    throw e.file().empty() ? e.in_file(settings.path) : e;
  }
}

int64_t samples_of(const Batch& batch, const std::vector<PlanInput>& inputs) {
  int64_t samples = 0;
  for (const PlanInput& input : inputs) {
    const Dims& dims = batch.at(input.name).tensor.dims;
    if (input.batch_axis >= 0 && static_cast<size_t>(input.batch_axis) < dims.size())
      samples = std::max(samples, dims[static_cast<size_t>(input.batch_axis)]);
  }
  return samples;
}

// A batch that reaches the end of an epoch goes on with the next one; the last one does so too.
int64_t steps_of(const TrainSettings& settings, const DataSource& data) {
  if (settings.steps > 0) return settings.steps;
  int64_t samples = 0;
  if (__builtin_mul_overflow(std::max<int64_t>(settings.epochs, 1), data.epoch_size(), &samples))
    usage_error("--epochs " + std::to_string(settings.epochs) + " is too large: an epoch has " + std::to_string(data.epoch_size()) +
                    (data.in_batches() ? " batches" : " samples"),
                "give fewer, or --steps");
  return data.in_batches() || settings.batch == 0 ? samples : (samples - 1) / settings.batch + 1;
}

// K.pb with the parameter's name in it, K from 0 on in the order of the model's initializers, and no others.
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
  remove_earlier_files(folder, "", number);
}

class TrainingRun {
 public:
  TrainingRun(Trainer& trainer, DataSource& data, Evaluation* evaluation, const TrainSettings& settings, int64_t first)
      : trainer_(trainer),
        data_(data),
        evaluation_(evaluation),
        settings_(settings),
        first_(first),
        steps_(steps_of(settings, data)),
        rates_(parse_lr_schedule(settings.lr, {parse_optimizer(settings.optimizer).lr, steps_})),
        log_(settings.log, !settings.resume.empty()),
        progress_(steps_, settings.sequence > 0 ? "tokens" : "samples"),
        checkpoints_(settings.checkpoints, trainer.plan().plan->mesh.size(), settings.keep),
        saves_gradients_(!settings.save_gradients.empty()) {
    for (const PlanInput& input : trainer.plan().plan->inputs) inputs_.push_back(input.name);
  }
  int64_t rate_total() const { return rates_.total; }

  Run run() {
    std::optional<StopSignals> signals;
    if (!settings_.checkpoints.empty()) signals.emplace();
    run_.done = first_;
    ReadAhead batches(data_, settings_.batch, steps_ - first_, [&](Batch& batch) {
      keep_inputs(batch, inputs_);
      trainer_.stage(batch);
    });
    for (int64_t i = first_; i < steps_; ++i) {
      step(i, batches);
      if (evaluates_after(i) && !StopSignals::caught()) evaluate(i);
      if (signals && i + 1 < steps_) run_.stopped_by = StopSignals::caught();
      if (saves_after(i) || run_.stopped_by) save(i);
      if (run_.stopped_by) break;
      checkpoints_.check();
    }
    finish_updates();
    checkpoints_.finish();
    if (run_.skipped > 0 && run_.skipped == static_cast<int64_t>(run_.losses.size()))
      std::fprintf(stderr,
                   "warning: every step was skipped: the loss or a gradient was never finite; look at the data, or use --detect-anomaly\n");
    if (saves_gradients_ && !run_.losses.empty()) std::fprintf(stderr, "note: --save-gradients wrote nothing: every step was skipped\n");
    return std::move(run_);
  }

 private:
  bool is_due(int64_t i, int64_t every) const { return i + 1 == steps_ || (every > 0 && (i + 1) % every == 0); }
  bool evaluates_after(int64_t i) const { return evaluation_ && is_due(i, settings_.eval_every); }
  bool saves_after(int64_t i) const { return !settings_.checkpoints.empty() && is_due(i, settings_.every); }

  void step(int64_t i, ReadAhead& batches) {
    const auto asked = std::chrono::steady_clock::now();
    const ReadAhead::Read read = batches.next();
    const Batch& batch = read.batch;
    const auto start = std::chrono::steady_clock::now();
    const std::chrono::duration<double, std::milli> waited = start - asked;
    next_batch_ = read.after;
    const StepResult result = trained(i, batch);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    const int64_t samples = samples_of(batch, trainer_.plan().plan->inputs);
    const std::vector<RankReport> ranks = trainer_.session().ranks();
    run_.losses.push_back(result.loss);
    run_.skipped += result.skipped;
    run_.done = i + 1;
    run_.samples += samples;
    run_.times_ms.push_back(took.count());
    run_.waited_ms += waited.count();
    run_.busy_ms.resize(ranks.size()), run_.busy_share.resize(ranks.size());
    for (size_t r = 0; r < ranks.size(); ++r)
      run_.busy_ms[r].push_back(ranks[r].busy_ms), run_.busy_share[r].push_back(ranks[r].busy_share);
    log_.write({{"step", i},
                {"loss", result.loss},
                {"lr", rates_.at(i)},
                {"gradient_norm", result.gradient_norm},
                {"skipped", result.skipped},
                {"samples", samples},
                {"ms", took.count()},
                {"waited_ms", waited.count()},
                {"peak_bytes", peak_bytes(ranks)},
                {"idle_share", idle_share(ranks)}});
    if (saves_gradients_ && !result.skipped) save_gradients(trainer_, settings_.save_gradients), saves_gradients_ = false;
    progress_.step(i + 1, result.loss, rates_.at(i), samples * std::max<int64_t>(settings_.sequence, 1), ranks);
  }

  // Devices make an update while the next step begins; the last step's is waited for here.
  void finish_updates() {
    const auto start = std::chrono::steady_clock::now();
    trainer_.finish_updates();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    if (!run_.times_ms.empty()) run_.times_ms.back() += took.count();
  }

  StepResult trained(int64_t i, const Batch& batch) {
    StepResult result;
    try {
      result = trainer_.step(batch, rates_.at(i));
    } catch (const Error& e) {
      if (e.code() != ErrorCode::model) throw;
      const std::string rank = e.problem().starts_with("rank ") ? "" : "rank 0: ";
      const std::string remedy = e.remedy().empty() ? "look at the data (" + settings_.data + ") and the model" : e.remedy();
      throw Error("step " + std::to_string(i) + ", " + rank + e.problem(), remedy, e.code())
          .at_node(e.node(), e.op())
          .in_file(e.file().empty() ? settings_.path : e.file());
    }
    if (!settings_.detect_anomaly || !result.skipped) return result;
    throw Error("step " + std::to_string(i) + ": the loss or a gradient is not finite, though no node made NaN",
                "look for infinities in the data and the model's constants")
        .in_file(settings_.data);
  }

  void evaluate(int64_t i) {
    double loss = 0;
    try {
      loss = evaluation_->loss(trainer_);
    } catch (const Error& e) {
      throw e.code() == ErrorCode::model ? e.in_file(settings_.eval) : e;
    }
    run_.evaluations.emplace_back(i + 1, loss);
    log_.write({{"step", i + 1}, {"eval_loss", loss}});
    progress_.evaluated(loss);
  }

  // The one before is written first: two copies of all that is kept would be too many.
  void save(int64_t i) {
    checkpoints_.finish();
    checkpoints_.begin(state_after(i), trainer_.kept());
  }

  CheckpointState state_after(int64_t i) const {
    CheckpointState state;
    state.step = i + 1, state.seed = settings_.seed, state.data = next_batch_;
    state.more[kUpdates] = std::to_string(trainer_.updates());
    if (rates_.total > 0) state.more[kRateTotal] = std::to_string(rates_.total);
    return state;
  }

  Trainer& trainer_;
  DataSource& data_;
  Evaluation* evaluation_;
  const TrainSettings& settings_;
  int64_t first_, steps_;
  LrSchedule rates_;
  TrainLog log_;
  TrainProgress progress_;
  BackgroundCheckpoints checkpoints_;
  std::vector<std::string> inputs_;
  DataPosition next_batch_;  // where it begins: batches are read ahead
  bool saves_gradients_;     // still to do: those of the first step that is not skipped
  Run run_;
};

Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json result_json(const Run& run, const Trainer& trainer) {
  double seconds = run.waited_ms / 1e3;
  for (double ms : run.times_ms) seconds += ms / 1e3;
  Json losses = Json::array(), evaluations = Json::array();
  std::vector<RankReport> ranks = trainer.session().ranks();
  for (size_t r = 0; r < run.busy_ms.size(); ++r)
    ranks[r].busy_ms = timing_of(run.busy_ms[r]).median_ms, ranks[r].busy_share = timing_of(run.busy_share[r]).median_ms;
  for (double loss : run.losses) losses.push_back(number(loss));
  for (const auto& [step, loss] : run.evaluations) evaluations.push_back({{"step", step}, {"loss", number(loss)}});
  Json result = {{"losses", losses},
                 {"steps", run.losses.size()},
                 {"skipped", run.skipped},
                 {"samples_per_s", seconds > 0 ? static_cast<double>(run.samples) / seconds : 0},
                 {"time_ms", json_of(timing_of(run.times_ms))},
                 {"waited_ms", run.waited_ms},
                 {"ranks", json_of(ranks)}};
  if (!run.evaluations.empty()) result["evals"] = evaluations;
  if (run.stopped_by) result["stopped_after"] = run.done;
  return result;
}

void print_result(const Run& run, const Trainer& trainer, const TrainSettings& settings) {
  if (settings.json) return print_json(result_json(run, trainer));
  const bool exported = !settings.export_path.empty() && !run.stopped_by;
  const auto print_export = [&] {
    if (exported) std::printf("wrote %s\n", one_line(settings.export_path).c_str());
  };
  if (run.losses.empty()) return std::printf("nothing is left to do\n"), print_export();
  std::printf("first loss %.6g   after %zu steps: loss %.6g", run.losses.front(), run.losses.size(), run.losses.back());
  if (!run.evaluations.empty()) std::printf("   eval loss %.6g", run.evaluations.back().second);
  std::printf("   %.1f samples/s", result_json(run, trainer)["samples_per_s"].get<double>());
  if (run.skipped) std::printf("   %lld steps skipped", static_cast<long long>(run.skipped));
  std::printf("\n");
  print_export();
}

// The name of what is written to, where a file's temporary name was at fault.
void write_export(const Model& model, const std::string& path) {
  try {
    write_model(model, path);
  } catch (const Error& e) {
    if (!e.file().starts_with(end_of_links(path))) throw;
    throw Error(e.problem(), e.remedy(), e.code()).in_file(path);
  }
}

int stopped(const Run& run, const TrainSettings& settings) {
  std::fprintf(stderr, "fretsaw: stopped by %s after step %lld; go on with --resume %s\n", run.stopped_by == SIGINT ? "SIGINT" : "SIGTERM",
               static_cast<long long>(run.done), one_line(settings.checkpoints).c_str());
  constexpr int kOfSignals = 128;
  return kOfSignals + run.stopped_by;
}

void note_idle_options(const TrainSettings& s, const DataSource& data, const TrainingPlan& plan, bool narrows) {
  if (!narrows && (s.precision == "fp16" || s.precision == "bf16")) std::fprintf(stderr, "note: %s\n", idle_precision(s.precision).c_str());
  if (s.told.contains("--seed") && data.in_batches() && !plan.draws_masks)
    std::fprintf(stderr, "note: --seed has nothing to do: batches come in their order, and the model draws no random numbers\n");
  if (s.device == "cpu" && !s.devices.empty())
    std::fprintf(stderr, "note: --devices has nothing to do on the CPU: every rank is a group of threads\n");
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

// The exit code.
int run_command(TrainSettings settings) {
  std::optional<Model> model;  // of a plan: what is asked for needs it
  TrainingPlan plan;
  std::optional<Checkpoint> checkpoint;
  std::set<std::string> taken;  // initializers, from the checkpoint
  std::error_code error;
  if (fs::is_directory(settings.path, error)) {
    plan = open_training_plan(settings);
    check_train_settings(settings);
    if (!settings.export_path.empty() || !settings.eval.empty()) model = source_of(*plan.plan);
    check_train_targets(settings, model ? files_of(*model) : std::vector<std::string>{plan.plan->source_file});
    checkpoint = open_resumed(settings);
  } else {
    check_train_settings(settings);
    model = read_model(settings.path);
    check_train_targets(settings, files_of(*model));
    checkpoint = open_resumed(settings);
    if (checkpoint) taken = take_initializers(*model, *checkpoint);
    plan = make_plan(*model, settings);
    if (!save_plan(plan, settings)) return 0;
  }
  const std::unique_ptr<DataSource> data = open_data(settings.data, data_options(settings, plan));
  check_inputs(*data, plan.plan->inputs);
  std::unique_ptr<Evaluation> evaluation;
  if (!settings.eval.empty()) evaluation = std::make_unique<Evaluation>(*model, settings, plan);
  for (const std::string& note : plan.plan->notes) std::fprintf(stderr, "note: %s\n", note.c_str());
  note_idle_options(settings, *data, plan, !model || has_float32(*model));
  const TrainerOptions options = trainer_options(settings, *plan.plan);
  Trainer trainer(std::move(plan), options);
  const int64_t first = checkpoint ? resume(trainer, *data, *checkpoint, taken) : 0;
  TrainingRun training(trainer, *data, evaluation.get(), settings, first);
  if (checkpoint) note_other_rates(*checkpoint, training.rate_total());
  checkpoint.reset();
  const Run run = training.run();
  if (!settings.export_path.empty() && !run.stopped_by) write_export(trained_model(*model, trainer), settings.export_path);
  if (!settings.trace.empty()) write_trace(trainer.session().trace(), settings.trace);
  print_result(run, trainer, settings);
  return run.stopped_by ? stopped(run, settings) : 0;
}

}  // namespace

void add_train(CLI::App& app, Outcome& outcome) {
  auto settings = std::make_shared<TrainSettings>();
  CLI::App* command = app.add_subcommand("train", "Train a model");
  add_train_options(*command, *settings);
  command->callback([settings, command, &outcome] {
    for (const CLI::Option* option : command->get_options())
      if (option->count() > 0) settings->told.insert(option->get_name());
    outcome.exit_code = run_command(*settings);
  });
}

}  // namespace fretsaw
