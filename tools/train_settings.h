// What the command train was told, and the options of the parts that it goes to.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "partitioner/training.h"
#include "runtime/training/data.h"
#include "runtime/training/trainer.h"

namespace CLI {
class App;
}

namespace fretsaw {

struct TrainSettings {
  std::string path, data, loss = "softmax_cross_entropy", optimizer = "sgd", lr, mesh, schedule = "gpipe", train, freeze;
  std::string precision = "fp32", recompute = "none", memory, device = "cpu", devices;
  std::vector<std::string> shapes;
  std::string save_plan, save_gradients, export_path, log, trace, checkpoints, resume, eval;
  std::optional<int> chunks;
  int64_t every = 0, eval_every = 0;
  int zero = 0, keep = 3, micro_batches = 1, threads = 0;
  int64_t batch = 0, steps = 0, epochs = 0, sequence = 0;
  double clip = 0, bucket_mb = 25;
  uint64_t seed = 0;
  bool json = false, sync_batch_norm = false, detect_anomaly = false, overwrite = false;
  std::set<std::string> told;  // the options that the command line has, as "--mesh"
};

void add_train_options(CLI::App& command, TrainSettings& settings);
void check_train_settings(const TrainSettings& settings);  // throws Error for what does not go together, before anything is read

PartitionOptions partition_options(const TrainSettings& settings);
TrainingOptions training_options(const TrainSettings& settings);
SessionOptions session_options(const TrainSettings& settings, const Plan& plan);
TrainerOptions trainer_options(const TrainSettings& settings, const Plan& plan);
// Tokens go to the model's one input, and the next ones to the loss's target.
DataOptions data_options(const TrainSettings& settings, const TrainingPlan& plan);
// Throws Error naming an input that the data has nothing for, or a file of another type.
void check_inputs(const DataSource& data, const std::vector<PlanInput>& inputs);
// Of the model's inputs in a batch, where the data tells; nothing without data.
std::map<std::string, Dims> batch_dims(const TrainSettings& settings, const Model& model);

}  // namespace fretsaw
