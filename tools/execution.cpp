// Running a model or plan and timing it: what `run` and `bench` share.
#include "tools/execution.h"

#include <sched.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "graph/errors.h"
#include "graph/io.h"
#include "graph/training/training_plan_file.h"
#include "kernels/cuda/devices.h"
#include "partitioner/partition.h"
#include "tools/options.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

// "0,1,1" as numbers.
std::vector<int> parse_device_list(const std::string& text) {
  std::vector<int> devices;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    int index = -1;
    const auto [rest, status] = std::from_chars(text.data() + begin, text.data() + end, index);
    if (status != std::errc() || rest != text.data() + end || index < 0)
      usage_error("--devices " + text + " is no list of numbers", "write the GPUs' numbers, as 0,1");
    devices.push_back(index);
    begin = end + 1;
  }
  return devices;
}

Plan plan_of_model(const std::string& path, const ExecutionSettings& settings, int micro_batches, const Plan* like) {
  Model model = read_model(path, {.allow_missing_weights = settings.random_weights.has_value()});
  PartitionOptions options;
  options.micro_batches = micro_batches;
  options.shapes = parse_shapes(settings.shapes);
  options.note_sizes = false;  // the inputs decide them
  if (like) {                  // the batch is divided as there
    for (const PlanInput& input : like->inputs) options.batch_axes[input.name] = input.batch_axis;
    for (const PlanOutput& output : like->outputs)
      if (output.merge == "mean" || output.merge == "sum") options.merges[output.name] = {output.merge, output.axis};
  }
  try {
    return partition(std::move(model), options);
  } catch (const Error& error) {
    throw error.in_file(path);
  }
}

Plan plan_of_folder(const std::string& path, const ExecutionSettings& settings, std::vector<std::string>& notes) {
  refuse_training_plan(path);
  Plan plan = read_plan(path, settings.random_weights.has_value());
  if (plan.structure_only && !settings.random_weights)
    throw Error("was made with --structure-only and holds no weights", "add --random-weights SEED").in_file(path);
  if (settings.micro_batches && *settings.micro_batches != plan.micro_batches)
    usage_error(
        "--micro-batches " + std::to_string(*settings.micro_batches) + ": the plan was made for " + std::to_string(plan.micro_batches),
        "partition the model again with --micro-batches " + std::to_string(*settings.micro_batches));
  if (!settings.shapes.empty() && !settings.random) notes.push_back("--shape has nothing to do in a plan whose inputs are given");
  return plan;
}

}  // namespace

void refuse_training_plan(const std::string& path) {
  if (is_training_plan(path))
    throw Error("holds a plan that trains, which takes batches with targets", "use `fretsaw train`, whose --export writes a model to run",
                ErrorCode::usage)
        .in_file(path);
}

void add_execution_options(CLI::App& command, ExecutionSettings& s) {
  command.add_option("model", s.path, "An ONNX file or a plan folder")->required();
  command.add_option("--device", s.device, "cpu or cuda");
  command.add_option("--devices", s.devices, "0,1,...: the GPU of each rank; one that is named twice runs two");
  add_repeated(command, "--shape", s.shapes, "NAME=D,D,...: fix an input's dimensions");
  command.add_option("--inputs", s.inputs_folder, "A folder with input_K.pb or NAME.npy");
  add_repeated(command, "--input", s.input_files, "NAME=FILE: an input's .pb or .npy file");
  takes_seed(command.add_option("--random", s.random, "SEED: make inputs up"));
  command.add_option("--micro-batches", s.micro_batches, "Parts a model's batch is run in")->check(CLI::Range(1, 1 << 20));
  command.add_option("--threads", s.threads, "Cores for each CPU rank (without it: the machine's, divided)")->check(CLI::Range(1, 4096));
  command.add_option("--precision", s.precision,
                     "fp32, tf32, fp16 or bf16: the type that weights and activations of a float32 model are computed in");
  takes_seed(command.add_option("--random-weights", s.random_weights, "SEED: fill missing weights"));
}

void check_device(const std::string& device) {
  if (device != "cpu" && device != "cuda") usage_error("--device names the unknown device '" + device + "'", "write cpu or cuda");
  if (device == "cuda" && !built_with_cuda())
    throw Error("--device cuda is not supported: this build runs on the CPU only", "build with -DFRETSAW_CUDA=ON, or write --device cpu",
                ErrorCode::device);
}

void check_execution_options(const ExecutionSettings& settings, std::vector<std::string>& notes) {
  check_device(settings.device);
  if (settings.device == "cpu" && !settings.devices.empty())
    notes.push_back("--devices has nothing to do on the CPU: every rank is a group of threads");
  static const std::set<std::string> known = {"", "fp32", "tf32", "fp16", "bf16"};
  if (!known.contains(settings.precision))
    usage_error("--precision names the unknown precision '" + settings.precision + "'", "write fp32, tf32, fp16 or bf16");
  if (settings.precision == "tf32" && settings.device == "cpu") notes.push_back("--precision tf32 is float32 on the CPU");
  const int sources = !settings.inputs_folder.empty() + !settings.input_files.empty() + settings.random.has_value();
  if (sources > 1) usage_error("more than one of --inputs, --input and --random is given", "keep one of them");
}

bool has_float32(const Model& model) {
  const std::vector<Value*> weights = model.graph->initializers();
  const auto is_float32 = [](const Value* v) {
    return v->type.dtype == DType::float32 || (v->constant && v->constant->dtype == DType::float32);
  };
  return std::any_of(weights.begin(), weights.end(), is_float32) ||
         std::any_of(model.graph->inputs.begin(), model.graph->inputs.end(), is_float32);
}

std::string idle_precision(const std::string& precision) {
  return "--precision " + precision + " has nothing to do: no weight or input of the model is float32";
}

int machine_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::shared_ptr<const Plan> open_plan(const std::string& path, const ExecutionSettings& settings, int micro_batches,
                                      std::vector<std::string>& notes, const Plan* like) {
  std::error_code error;
  const bool folder = std::filesystem::is_directory(path, error);
  if (folder && !is_plan_folder(path))
    throw Error("is a folder without a plan.json", "give an ONNX file or a folder that `fretsaw partition` wrote").in_file(path);
  Plan plan = folder ? plan_of_folder(path, settings, notes) : plan_of_model(path, settings, micro_batches, like);
  if (!folder) notes.insert(notes.end(), plan.notes.begin(), plan.notes.end());  // a plan's were told when it was made
  const bool narrows = settings.precision == "fp16" || settings.precision == "bf16";
  if (narrows && std::none_of(plan.graphs.begin(), plan.graphs.end(), [](const PlanGraph& graph) { return has_float32(*graph.model); }))
    notes.push_back(idle_precision(settings.precision));
  return std::make_shared<const Plan>(std::move(plan));
}

SessionOptions session_options(const ExecutionSettings& settings, const Plan& plan) {
  SessionOptions options;
  options.device = settings.device;
  options.devices = parse_device_list(settings.devices);
  options.precision = settings.precision.empty() ? "fp32" : settings.precision;
  options.threads = settings.threads > 0 ? settings.threads : std::max(1, machine_cores() / plan.mesh.size());
  options.random_weights = settings.random_weights.has_value();
  options.weight_seed = settings.random_weights.value_or(0);
  return options;
}

Inputs gather_inputs(const Plan& plan, const ExecutionSettings& settings, std::vector<std::string>& notes) {
  const std::map<std::string, Dims> shapes = parse_shapes(settings.shapes);
  Inputs inputs;
  if (!settings.inputs_folder.empty()) {
    inputs = read_input_folder(plan, settings.inputs_folder);
  } else if (!settings.input_files.empty()) {
    read_input_files(plan, settings.input_files, inputs);
  } else {
    if (!settings.random && !plan.inputs.empty())
      notes.push_back("inputs are made up with seed 0 (--inputs, --input or --random chooses them)");
    return random_inputs(plan, settings.random.value_or(0), shapes, notes);
  }
  check_shapes(inputs, shapes);
  return inputs;
}

Timing timing_of(std::vector<double> times_ms) {
  if (times_ms.empty()) return {};
  std::sort(times_ms.begin(), times_ms.end());
  const size_t n = times_ms.size();
  const double median = n % 2 ? times_ms[n / 2] : (times_ms[n / 2 - 1] + times_ms[n / 2]) / 2;
  return {median, times_ms.front(), times_ms.back(), static_cast<int>(n)};
}

Json json_of(const Timing& t) {
  return {{"median", t.median_ms}, {"min", t.min_ms}, {"max", t.max_ms}, {"runs", t.runs}};
}

std::unique_ptr<Session> open_session(std::shared_ptr<const Plan> plan, const SessionOptions& options, const std::string& path) {
  try {
    return std::make_unique<Session>(std::move(plan), options);
  } catch (const Error& error) {
    throw error.code() == ErrorCode::model ? error.in_file(path) : error;
  }
}

std::vector<RuntimeValue> run_session(Session& session, const Inputs& inputs, const std::string& path) {
  try {
    return session.run(inputs);
  } catch (const Error& error) {
    throw error.code() == ErrorCode::model ? error.in_file(path) : error;
  }
}

double run_once(Session& session, const Inputs& inputs, const std::string& path, std::vector<RuntimeValue>& outputs) {
  const auto start = std::chrono::steady_clock::now();
  outputs = run_session(session, inputs, path);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

void print_ranks(const std::vector<RankReport>& ranks) {
  Table table({"rank", "stages", "device", ">weights", ">peak", ">busy"});
  for (const RankReport& r : ranks) {
    std::vector<std::string> stages;
    for (const int stage : r.stages) stages.push_back(std::to_string(stage));
    table.add({std::to_string(r.rank), join(stages, ","), r.device, human_bytes(static_cast<double>(r.weight_bytes)),
               human_bytes(static_cast<double>(r.peak_bytes)), human_percent(r.busy_share)});
  }
  table.print();
}

}  // namespace fretsaw
