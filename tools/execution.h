// Running a model or plan and timing it: what `run` and `bench` share.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/session.h"
#include "tools/inputs.h"
#include "tools/json_output.h"

namespace CLI {
class App;
}

namespace fretsaw {

// The options that `run` and `bench` have in common.
struct ExecutionSettings {
  std::string path, device = "cpu", devices, inputs_folder, precision;
  std::vector<std::string> shapes, input_files;
  std::optional<uint64_t> random, random_weights;
  std::optional<int> micro_batches;
  int threads = 0;
};
void add_execution_options(CLI::App& command, ExecutionSettings& settings);
// Throws Error when there is no such device, or this build has none of its kind.
void check_device(const std::string& device);
void check_execution_options(const ExecutionSettings& settings, std::vector<std::string>& notes);

// Whether it has weights or inputs that --precision would narrow, and what to say where nothing has.
bool has_float32(const Model& model);
std::string idle_precision(const std::string& precision);

int machine_cores();
void refuse_training_plan(const std::string& path);  // throws Error that says what does with it
// The plan at `path`, or the model there as a plan of one stage, its batch divided and outputs merged as in `like` when that is given.
std::shared_ptr<const Plan> open_plan(const std::string& path, const ExecutionSettings& settings, int micro_batches,
                                      std::vector<std::string>& notes, const Plan* like = nullptr);
SessionOptions session_options(const ExecutionSettings& settings, const Plan& plan);
// From --inputs, --input or --random; without any of them, seed 0 and a note.
Inputs gather_inputs(const Plan& plan, const ExecutionSettings& settings, std::vector<std::string>& notes);

struct Timing {
  double median_ms = 0, min_ms = 0, max_ms = 0;
  int runs = 0;
};
Timing timing_of(std::vector<double> times_ms);
Json json_of(const Timing& timing);
// Errors that blame the model name `path`.
std::unique_ptr<Session> open_session(std::shared_ptr<const Plan> plan, const SessionOptions& options, const std::string& path);
std::vector<RuntimeValue> run_session(Session& session, const Inputs& inputs, const std::string& path);
double run_once(Session& session, const Inputs& inputs, const std::string& path, std::vector<RuntimeValue>& outputs);  // milliseconds
void print_ranks(const std::vector<RankReport>& ranks);

}  // namespace fretsaw
