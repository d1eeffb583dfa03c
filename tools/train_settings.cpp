// The options of the command train.
#include "tools/train_settings.h"

#include <CLI/App.hpp>
#include <algorithm>
#include <set>

#include "graph/training/name_pattern.h"
#include "kernels/cuda/devices.h"
#include "runtime/evaluate.h"
#include "runtime/training/checkpoint.h"
#include "tools/execution.h"
#include "tools/options.h"

namespace fretsaw {
namespace {

void check_word(const std::string& option, const std::string& word, const std::set<std::string>& known, const std::string& allowed) {
  if (!known.contains(word)) usage_error(option + " names the unknown " + option.substr(2) + " '" + word + "'", "write " + allowed);
}

// A new run's checkpoints would stand among those of another one, and the newest of both be taken for the run's own.
void check_checkpoints(const TrainSettings& s) {
  if (s.every < 0 || s.keep < 0) usage_error("--every or --keep is below 0", "leave it out, or give a number of steps or checkpoints");
  if (s.every > 0 && s.checkpoints.empty())
    usage_error("--every says how often, and --checkpoint is missing", "add --checkpoint DIR, or leave --every out");
  if (s.checkpoints.empty() || !s.resume.empty() || list_checkpoints(s.checkpoints).empty()) return;
  usage_error("--checkpoint " + s.checkpoints + " holds checkpoints of an earlier run",
              "go on from it with --resume, or name another folder");
}

// A plan is saved without data, unless there is more to do.
void check_data(const TrainSettings& s) {
  if (!s.data.empty()) return;
  for (const std::string* more : {&s.checkpoints, &s.resume, &s.eval, &s.export_path, &s.save_gradients, &s.log})
    if (s.save_plan.empty() || !more->empty())
      usage_error("--data is missing", "name a folder of batches, of .npy arrays, or a file of tokens");
}

// The figures of the first GPU's kind, or of the one that is nearest to it.
std::string target_of_gpu() {
  const std::vector<CudaDevice> devices = cuda_devices();
  return !devices.empty() && devices[0].name.find("H100") != std::string::npos ? "h100" : "h200";
}

DType token_type(const Type& type) {
  return type.is_tensor() && type.dtype == DType::int32 ? DType::int32 : DType::int64;
}

// A batch may have any size.
Type type_in_data(const PlanInput& input) {
  Type type = input.type;
  const auto axis = static_cast<size_t>(std::max(input.batch_axis, 0));
  if (input.batch_axis >= 0 && type.shape && axis < type.shape->size() && (*type.shape)[axis].known()) (*type.shape)[axis] = Dim();
  return type;
}

// Numbers that are told, but say nothing.
void check_numbers(const TrainSettings& s) {
  const auto check = [&](const std::string& option, int64_t value) {
    if (s.told.contains(option) && value < 1)
      usage_error(option + " " + std::to_string(value) + " is below 1", "leave it out, or give a number above 0");
  };
  check("--steps", s.steps), check("--epochs", s.epochs), check("--batch", s.batch), check("--sequence", s.sequence);
  if (s.steps > 0 && s.epochs > 0) usage_error("--steps and --epochs both say how long to train", "keep one of them");
  if (s.told.contains("--keep") && s.checkpoints.empty())
    usage_error("--keep says how many checkpoints stay, and --checkpoint is missing", "add --checkpoint DIR, or leave --keep out");
  if (s.overwrite && s.save_plan.empty())
    usage_error("--overwrite replaces what --save-plan finds, and --save-plan is missing", "add --save-plan DIR, or leave --overwrite out");
}

void add_model_options(CLI::App& c, TrainSettings& s) {
  c.add_option("model", s.path, "An ONNX file, or a plan that --save-plan wrote")->required();
  add_repeated(c, "--shape", s.shapes, "NAME=D,D,...: fix an input's dimensions");
  c.add_option("--loss", s.loss, "softmax_cross_entropy[:ignore_index=K,label_smoothing=E], mse, l1, bce_with_logits, output[:NAME]");
  c.add_option("--optimizer", s.optimizer, "sgd, adam, adamw or lamb, with settings: adamw:lr=1e-3,weight_decay=0.01");
  c.add_option("--lr", s.lr, "The learning rate: a number, or constant, linear, cosine, step with settings");
  from_zero(c.add_option("--clip", s.clip, "The largest global norm of the gradient"));
  c.add_option("--train", s.train, "PATTERN|PATTERN: only parameters whose names match are trained");
  c.add_option("--freeze", s.freeze, "PATTERN|PATTERN: parameters that stay as they are");
  c.add_flag("--sync-batch-norm", s.sync_batch_norm, "BatchNormalization by the statistics of all data ranks");
}

void add_data_options(CLI::App& c, TrainSettings& s) {
  c.add_option("--data", s.data, "DIR of batches (x_S.pb, target_S.pb) or of .npy arrays, or a FILE of tokens");
  c.add_option("--batch", s.batch, "Samples of a step, of data that is no folder of batches");
  c.add_option("--sequence", s.sequence, "Tokens of a sample, of token files");
  c.add_option("--steps", s.steps, "Updates to make");
  c.add_option("--epochs", s.epochs, "Times through the data, where --steps is not given");
  takes_seed(c.add_option("--seed", s.seed, "Of the order of samples and of random numbers; a run that is resumed keeps its own"));
  c.add_option("--eval", s.eval, "DIR or FILE: other data, on which the loss is measured; of nanoGPT's folder its val.bin");
  c.add_option("--eval-every", s.eval_every, "Steps between evaluations (without it: after the last step)");
}

void add_cut_options(CLI::App& c, TrainSettings& s) {
  c.add_option("--mesh", s.mesh, "data=N,pipeline=N,tensor=N");
  c.add_option("--schedule", s.schedule, "gpipe, 1f1b, interleaved, zero-bubble-h1 or zero-bubble-h2");
  c.add_option("--chunks", s.chunks, "Stages of each pipeline rank, of the schedule interleaved (2 without it)")->check(CLI::Range(1, 64));
  c.add_option("--micro-batches", s.micro_batches, "Parts a data rank's batch is run in")->check(CLI::Range(1, 1 << 20));
  c.add_option("--zero", s.zero, "Divided over data ranks: 1 what the optimizer keeps, 2 and gradients, 3 and parameters")
      ->check(CLI::Range(0, 3));
  above_zero(c.add_option("--bucket-mb", s.bucket_mb, "MiB of gradients that ranks add up in one exchange, beside the backward pass"));
  c.add_option("--recompute", s.recompute, "What the backward pass computes once more: none, all, or auto (as memory asks for)");
  c.add_option("--precision", s.precision, "fp32, tf32, fp16 or bf16: what forward and backward compute in; parameters stay float32");
  c.add_option("--memory", s.memory, "SIZE: the memory of one device, as 8GiB");
  c.add_option("--save-plan", s.save_plan,
               "DIR: the plan that trains, to be given in the model's place; without --data nothing is trained");
  c.add_flag("--overwrite", s.overwrite, "Replace the plan that --save-plan finds there");
}

void add_run_options(CLI::App& c, TrainSettings& s) {
  c.add_option("--device", s.device, "cpu or cuda");
  c.add_option("--devices", s.devices, "0,1,...: the GPU of each rank");
  c.add_option("--threads", s.threads, "Cores for each CPU rank")->check(CLI::Range(1, 4096));
  c.add_option("--trace", s.trace, "Write a Chrome trace of the last step to this file");
  c.add_flag("--detect-anomaly", s.detect_anomaly, "Stop at the first node whose output is not finite, and name it");
  c.add_option("--save-gradients", s.save_gradients,
               "DIR: the gradients of the first step that is not skipped, K.pb with the parameter's name");
  c.add_option("--export", s.export_path, "FILE.onnx: the trained model, for inference");
  c.add_option("--log", s.log, "FILE.jsonl: a line for each step; --resume adds to it");
  c.add_option("--checkpoint", s.checkpoints, "DIR: checkpoints, at the end and every so many steps");
  c.add_option("--every", s.every, "Steps between checkpoints");
  c.add_option("--keep", s.keep, "The newest checkpoints that stay; 0: all");
  c.add_option("--resume", s.resume, "DIR: go on from the newest checkpoint there, also under another mesh");
  c.add_flag("--json", s.json, "Print one JSON object");
}

}  // namespace

void add_train_options(CLI::App& command, TrainSettings& settings) {
  add_model_options(command, settings);
  add_data_options(command, settings);
  add_cut_options(command, settings);
  add_run_options(command, settings);
}

void check_train_settings(const TrainSettings& s) {
  check_numbers(s);
  check_checkpoints(s);
  check_data(s);
  check_word("--precision", s.precision, {"fp32", "tf32", "fp16", "bf16"}, "fp32, tf32, fp16 or bf16");
  check_word("--recompute", s.recompute, {"none", "auto", "all"}, "auto, none or all");
  if (s.chunks && *s.chunks > 1 && s.schedule != "interleaved")
    usage_error("--chunks has nothing to do in the schedule '" + s.schedule + "'", "add --schedule interleaved, or leave --chunks out");
  if (s.eval_every != 0 && s.eval.empty())
    usage_error("--eval-every says how often, and --eval is missing", "add --eval DIR, or leave --eval-every out");
  if (s.eval_every < 0) usage_error("--eval-every is below 0", "leave it out, or give a number above 0");
  check_device(s.device);
}

PartitionOptions partition_options(const TrainSettings& s) {
  PartitionOptions options;
  if (!s.mesh.empty()) options.mesh = parse_mesh(s.mesh);
  options.micro_batches = s.micro_batches;
  options.schedule = s.schedule;
  options.shapes = parse_shapes(s.shapes);
  if (!s.memory.empty()) options.memory_bytes = parse_size_bytes("--memory", s.memory);
  if (s.device == "cuda") options.target = target_of_gpu();
  return options;
}

TrainingOptions training_options(const TrainSettings& s) {
  constexpr int kInterleavedChunks = 2;
  TrainingOptions options;
  options.loss = parse_loss(s.loss);
  options.optimizer = parse_optimizer(s.optimizer);
  options.sync_batch_norm = s.sync_batch_norm;
  options.chunks = s.chunks.value_or(s.schedule == "interleaved" ? kInterleavedChunks : 1);
  options.zero = s.zero;
  options.recompute = s.recompute;
  options.bucket_mb = s.bucket_mb;
  options.precision = s.precision == "tf32" ? "fp32" : s.precision;  // tf32 is a way of multiplying: the session's
  options.evaluate = evaluate_on_constants;
  if (!s.train.empty()) options.train = split_patterns(s.train);
  if (!s.freeze.empty()) options.freeze = split_patterns(s.freeze);
  return options;
}

SessionOptions session_options(const TrainSettings& s, const Plan& plan) {
  ExecutionSettings execution;
  execution.device = s.device, execution.devices = s.devices, execution.threads = s.threads;
  execution.precision = s.precision == "tf32" ? "tf32" : "fp32";  // 16 bits are in the plan's graphs
  SessionOptions options = session_options(execution, plan);
  options.detect_anomaly = s.detect_anomaly;
  options.trace = !s.trace.empty();
  return options;
}

TrainerOptions trainer_options(const TrainSettings& s, const Plan& plan) {
  TrainerOptions options;
  options.session = session_options(s, plan);
  options.session.random_seed = s.seed;
  options.loss = parse_loss(s.loss);
  options.clip = s.clip;
  return options;
}

DataOptions data_options(const TrainSettings& s, const TrainingPlan& plan) {
  DataOptions options;
  options.seed = s.seed, options.sequence = s.sequence;
  std::vector<const PlanInput*> inputs;
  for (const PlanInput& input : plan.plan->inputs) {
    options.inputs.push_back(input.name);
    options.types[input.name] = type_in_data(input);
    options.sample_axes[input.name] = std::max(input.batch_axis, 0);
    if (input.name != plan.target) inputs.push_back(&input);
    if (input.name == plan.target) options.next_tokens = input.name, options.next_type = token_type(input.type);
  }
  if (inputs.size() == 1) options.tokens = inputs[0]->name, options.token_type = token_type(inputs[0]->type);
  return options;
}

void check_inputs(const DataSource& data, const std::vector<PlanInput>& inputs) {
  std::vector<std::string> names;
  std::map<std::string, DType> types;
  for (const PlanInput& input : inputs) {
    names.push_back(input.name);
    if (input.type.is_tensor()) types[input.name] = input.type.dtype;
  }
  check_names(data, names);
  check_types(data, types);
}

std::map<std::string, Dims> batch_dims(const TrainSettings& s, const Model& model) {
  std::map<std::string, Dims> dims;
  if (s.data.empty()) return dims;
  DataOptions options;
  options.sequence = s.sequence;
  for (const Value* v : model.graph->inputs)
    if (!v->is_constant()) options.inputs.push_back(v->name);
  if (options.inputs.size() == 1) options.tokens = options.inputs[0];
  if (options.tokens == options.next_tokens) options.next_tokens += "_next";
  const std::unique_ptr<DataSource> data = open_data(s.data, options);
  const std::vector<std::string> names = data->names();
  if (!data->in_batches() && s.batch == 0) return dims;
  for (const std::string& input : options.inputs)
    if (std::find(names.begin(), names.end(), input) != names.end()) dims[input] = data->look(input, s.batch).dims;
  return dims;
}

}  // namespace fretsaw
