// fretsaw train: trains a model.
#include <CLI/App.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "graph/errors.h"
#include "graph/training/lr_schedule.h"
#include "graph/training/name_pattern.h"
#include "partitioner/training.h"
#include "runtime/tensor_values.h"
#include "runtime/training/checkpoint.h"
#include "runtime/training/trainer.h"
#include "tools/commands.h"
#include "tools/execution.h"
#include "tools/json_output.h"
#include "tools/options.h"
#include "tools/progress.h"
#include "tools/value_files.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

struct Settings {
  std::string path, data, loss = "softmax_cross_entropy", optimizer = "sgd", lr, mesh, schedule = "gpipe", train, freeze;
  std::string save_gradients, export_path, log, device = "cpu", devices, checkpoints, resume;
  int64_t every = 0;
  int keep = 3;
  int micro_batches = 1, threads = 0;
  int64_t batch = 0, steps = 0, epochs = 0, sequence = 0;
  double clip = 0;
  uint64_t seed = 0;
  bool json = false, sync_batch_norm = false;
};

struct Run {
  std::vector<double> losses;
  int64_t skipped = 0, samples = 0;
  std::vector<double> times_ms;
};

TrainingPlan make_plan(const Model& model, const Settings& settings) {
  PartitionOptions options;
  if (!settings.mesh.empty()) options.mesh = parse_mesh(settings.mesh);
  options.micro_batches = settings.micro_batches;
  options.schedule = settings.schedule;
  TrainingOptions training;
  training.loss = parse_loss(settings.loss);
  training.optimizer = parse_optimizer(settings.optimizer);
  training.sync_batch_norm = settings.sync_batch_norm;
  if (!settings.train.empty()) training.train = split_patterns(settings.train);
  if (!settings.freeze.empty()) training.freeze = split_patterns(settings.freeze);
  try {
    return partition_for_training(clone(model), options, training);
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

int64_t steps_of(const Settings& settings, const DataSource& data) {
  if (settings.steps > 0) return settings.steps;
  const int64_t epochs = std::max<int64_t>(settings.epochs, 1), of_epoch = data.epoch_size();
  return epochs * (settings.batch > 0 ? (of_epoch + settings.batch - 1) / settings.batch : of_epoch);
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

constexpr const char* kUpdates = "updates";

void write_checkpoint(const Trainer& trainer, const DataSource& data, const Settings& settings, int64_t step) {
  CheckpointState state;
  state.step = step, state.seed = settings.seed, state.data = data.position();
  state.more[kUpdates] = std::to_string(trainer.updates());
  const std::map<std::string, RuntimeValue> kept = trainer.kept();
  std::vector<CheckpointPiece> pieces;
  for (const auto& [name, value] : kept) pieces.push_back(whole_piece(name, value.tensor));
  CheckpointWriter writer(settings.checkpoints, state);
  writer.write("rank0", pieces);
  writer.commit(settings.keep);
}

// The step that comes next.
int64_t resume(Trainer& trainer, DataSource& data, const Settings& settings) {
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

// A new run's checkpoints would stand among those of another one, and the newest of both be taken for the run's own.
void check_checkpoints(const Settings& settings) {
  if (settings.every > 0 && settings.checkpoints.empty()) usage_error("--every says how often, and --checkpoint is missing");
  if (settings.checkpoints.empty() || !settings.resume.empty() || list_checkpoints(settings.checkpoints).empty()) return;
  usage_error("--checkpoint " + settings.checkpoints + " holds checkpoints of an earlier run",
              "go on from it with --resume, or name another folder");
}

void train(Trainer& trainer, DataSource& data, const Settings& settings, Run& run) {
  const int64_t steps = steps_of(settings, data);
  const LrSchedule rates = parse_lr_schedule(settings.lr, {parse_optimizer(settings.optimizer).lr, steps});
  Log log(settings.log);
  Progress progress("train", static_cast<int>(steps));
  for (int64_t i = settings.resume.empty() ? 0 : resume(trainer, data, settings); i < steps; ++i) {
    const Batch batch = data.next(settings.batch);
    const auto start = std::chrono::steady_clock::now();
    const StepResult result = trainer.step(batch, rates.at(i));
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    run.losses.push_back(result.loss);
    run.skipped += result.skipped;
    run.samples += samples_of(batch);
    run.times_ms.push_back(took.count());
    log.write({{"step", i},
               {"loss", result.loss},
               {"lr", rates.at(i)},
               {"gradient_norm", result.gradient_norm},
               {"skipped", result.skipped},
               {"samples", samples_of(batch)},
               {"ms", took.count()}});
    const bool due = settings.every > 0 && (i + 1) % settings.every == 0;
    if (!settings.checkpoints.empty() && (due || i + 1 == steps)) write_checkpoint(trainer, data, settings, i + 1);
    if (run.losses.size() == 1 && !settings.save_gradients.empty()) save_gradients(trainer, settings.save_gradients);
    progress.done(static_cast<int>(i) + 1);
  }
}

Json result_json(const Run& run, const Trainer& trainer) {
  double seconds = 0;
  for (double ms : run.times_ms) seconds += ms / 1e3;
  Json losses = Json::array();
  for (double loss : run.losses) losses.push_back(std::isfinite(loss) ? Json(loss) : Json(nullptr));
  return {{"losses", losses},
          {"steps", run.losses.size()},
          {"skipped", run.skipped},
          {"samples_per_s", seconds > 0 ? static_cast<double>(run.samples) / seconds : 0},
          {"time_ms", json_of(timing_of(run.times_ms))},
          {"ranks", json_of(trainer.session().ranks())}};
}

void run_command(const Settings& settings) {
  check_checkpoints(settings);
  if (settings.data.empty()) usage_error("--data is missing", "name a folder of batches, of .npy arrays, or a file of tokens");
  check_device(settings.device);
  if (settings.device != "cpu")
    not_supported("train --device " + settings.device, "the gradient operators have CPU kernels only", "train on CPU devices");
  const Model model = read_model(settings.path);
  TrainingPlan plan = make_plan(model, settings);
  DataOptions options;
  options.seed = settings.seed, options.sequence = settings.sequence;
  const std::unique_ptr<DataSource> data = open_data(settings.data, options);
  std::vector<std::string> inputs;
  for (const PlanInput& input : plan.plan->inputs) inputs.push_back(input.name);
  check_names(*data, inputs);
  for (const std::string& note : plan.plan->notes) std::fprintf(stderr, "note: %s\n", note.c_str());
  TrainerOptions training;
  ExecutionSettings execution;
  execution.device = settings.device, execution.devices = settings.devices, execution.threads = settings.threads;
  training.session = session_options(execution, *plan.plan);
  training.loss = parse_loss(settings.loss);
  training.clip = settings.clip;
  Trainer trainer(std::move(plan), training);
  Run run;
  train(trainer, *data, settings, run);
  if (!settings.export_path.empty()) write_model(trained_model(model, trainer), settings.export_path);
  if (settings.json) return print_json(result_json(run, trainer));
  if (run.losses.empty()) return void(std::printf("nothing is left to do\n"));
  std::printf("first loss %.6g   after %zu steps: loss %.6g   %.1f samples/s", run.losses.front(), run.losses.size(), run.losses.back(),
              result_json(run, trainer)["samples_per_s"].get<double>());
  if (run.skipped) std::printf("   %lld steps skipped", static_cast<long long>(run.skipped));
  std::printf("\n");
  if (!settings.export_path.empty()) std::printf("wrote %s\n", settings.export_path.c_str());
}

}  // namespace

void add_train(CLI::App& app, Outcome&) {
  auto settings = std::make_shared<Settings>();
  CLI::App* command = app.add_subcommand("train", "Train a model");
  command->add_option("model", settings->path, "An ONNX file")->required();
  command->add_option("--data", settings->data, "DIR of batches (x_S.pb, target_S.pb) or of .npy arrays, or a FILE of tokens");
  command->add_option("--loss", settings->loss,
                      "softmax_cross_entropy[:ignore_index=K,label_smoothing=E], mse, l1, bce_with_logits, output[:NAME]");
  command->add_option("--optimizer", settings->optimizer, "sgd, adam, adamw or lamb, with settings: adamw:lr=1e-3,weight_decay=0.01");
  command->add_option("--lr", settings->lr, "The learning rate: a number, or constant, linear, cosine, step with settings");
  command->add_option("--mesh", settings->mesh, "data=N,pipeline=N");
  command->add_option("--schedule", settings->schedule, "gpipe or 1f1b");
  command->add_option("--micro-batches", settings->micro_batches, "Parts a data rank's batch is run in")->check(CLI::Range(1, 1 << 20));
  command->add_option("--batch", settings->batch, "Samples of a step, of data that is no folder of batches");
  command->add_option("--steps", settings->steps, "Updates to make");
  command->add_option("--epochs", settings->epochs, "Times through the data, where --steps is not given");
  command->add_option("--sequence", settings->sequence, "Tokens of a sample, of token files");
  command->add_option("--clip", settings->clip, "The largest global norm of the gradient");
  command->add_option("--train", settings->train, "PATTERN|PATTERN: only parameters whose names match are trained");
  command->add_option("--freeze", settings->freeze, "PATTERN|PATTERN: parameters that stay as they are");
  command->add_option("--seed", settings->seed, "Of the order of samples");
  command->add_option("--device", settings->device, "cpu");
  command->add_option("--devices", settings->devices, "0,1,...: the GPU of each rank");
  command->add_option("--threads", settings->threads, "Cores for each CPU rank")->check(CLI::Range(1, 4096));
  command->add_option("--save-gradients", settings->save_gradients, "DIR: the first step's gradients, K.pb with the parameter's name");
  command->add_option("--export", settings->export_path, "FILE.onnx: the trained model, for inference");
  command->add_option("--log", settings->log, "FILE.jsonl: a line for each step");
  command->add_option("--checkpoint", settings->checkpoints, "DIR: checkpoints, at the end and every so many steps");
  command->add_option("--every", settings->every, "Steps between checkpoints");
  command->add_option("--keep", settings->keep, "The newest checkpoints that stay; 0: all");
  command->add_option("--resume", settings->resume, "DIR: go on from the newest checkpoint there, also under another mesh");
  command->add_flag("--sync-batch-norm", settings->sync_batch_norm, "BatchNormalization by the statistics of all data ranks");
  command->add_flag("--json", settings->json, "Print one JSON object");
  command->callback([settings] { run_command(*settings); });
}

}  // namespace fretsaw
