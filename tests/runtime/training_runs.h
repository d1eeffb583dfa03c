// Steps of training small models, for the tests of it.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "partitioner/training.h"
#include "runtime/training/trainer.h"
#include "tests/runtime/plans.h"

namespace fretsaw::testing_plans {

// --- models ---

// A parameter whose numbers look random.
inline Value* add_weight(Graph& graph, const std::string& name, const Dims& dims, unsigned seed, float size = 0.5f) {
  return graph.add_constant(name, floats(dims, noise(static_cast<size_t>(count_of(dims)), seed, size)));
}
// The same number everywhere.
inline Value* add_row(Graph& graph, const std::string& name, int64_t count, float value) {
  return graph.add_constant(name, floats({count}, std::vector<float>(static_cast<size_t>(count), value)));
}
inline void name_nodes_by_outputs(Graph& graph) {
  for (Node* node : graph.nodes) node->name = node->outputs[0]->name;
}
inline int count_nodes(const Trainer& trainer, const std::string& op) {
  int count = 0;
  for (const PlanGraph& graph : trainer.plan().plan->graphs)
    for (const Node* node : graph.model->graph->nodes) count += node->op == op;
  return count;
}

// --- batches ---

// Samples of noise, of `width` numbers each, and the class of each.
inline Batch classified_noise(int64_t width, const std::vector<int64_t>& classes, unsigned seed, float size = 1) {
  const auto samples = static_cast<int64_t>(classes.size());
  Batch batch;
  batch["x"] = float_value({samples, width}, noise(static_cast<size_t>(samples * width), seed, size));
  batch["target"] = int_value({samples}, classes);
  return batch;
}
// Words and those that follow, others in each step.
inline Batch some_text(int64_t samples, int64_t length, int64_t words, int step) {
  std::vector<int64_t> ids, next;
  for (int64_t i = 0; i < samples * length; ++i) ids.push_back((i * 5 + step * 3) % words), next.push_back((i * 7 + step) % words);
  Batch batch;
  batch["ids"] = int_value({samples, length}, ids), batch["target"] = int_value({samples, length}, next);
  return batch;
}
// A class for each of `count` samples: those of one are `stride` apart.
inline std::vector<int64_t> some_classes(int64_t count, int64_t below, int64_t stride = 1, int64_t first = 0) {
  std::vector<int64_t> classes;
  for (int64_t i = 0; i < count; ++i) classes.push_back((i * stride + first) % below);
  return classes;
}

// --- runs ---

// How a test's case is cut, by those of these names that it has.
template <typename Case>
PartitionOptions cut_of(const Case& c) {
  PartitionOptions options;
  if constexpr (requires { c.data; }) options.mesh.data = c.data;
  if constexpr (requires { c.pipeline; }) options.mesh.pipeline = c.pipeline;
  if constexpr (requires { c.tensor; }) options.mesh.tensor = c.tensor;
  if constexpr (requires { c.tensor_y; }) options.mesh.tensor_y = c.tensor_y;
  if constexpr (requires { c.micro_batches; }) options.micro_batches = c.micro_batches;
  if constexpr (requires { c.schedule; }) options.schedule = c.schedule;
  return options;
}
inline TrainingOptions with_optimizer(const std::string& optimizer, const std::string& precision = "fp32") {
  TrainingOptions training;
  training.optimizer = parse_optimizer(optimizer), training.precision = precision;
  return training;
}
// On the host, where each rank has one thread.
inline Trainer trainer_of(Model model, const PartitionOptions& options, const TrainingOptions& training, double clip = 0) {
  return Trainer(partition_for_training(std::move(model), options, training),
                 {.session = {.threads = 1}, .loss = training.loss, .clip = clip});
}
inline std::vector<double> losses_of(Trainer& trainer, int steps, double learning_rate, const std::function<Batch(int step)>& batch) {
  std::vector<double> losses;
  for (int s = 0; s < steps; ++s) losses.push_back(trainer.step(batch(s), learning_rate).loss);
  return losses;
}
// `tolerance`: a share of what is wanted.
inline void expect_close(const std::vector<double>& got, const std::vector<double>& wanted, double tolerance) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(got[i], wanted[i], tolerance * wanted[i]) << "step " << i;
}

}  // namespace fretsaw::testing_plans
