// What a trainer must know of a plan that trains (partitioner/training.h makes it).
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "graph/plan.h"

namespace fretsaw {

// The states that the update graphs take their numbers from: lr float32 [], step int64 [], scale float32 [].
inline constexpr const char *kLearningRate = "scalar:lr", *kStep = "scalar:step", *kScale = "scalar:scale", *kScalarState = "scalar:";
// The state that the backward pass of float16 starts from, float32 []: the loss's own gradient.
inline constexpr const char* kLossScale = "scalar:loss_scale";
// The state that random numbers are drawn by, int64 []: another in every step, counted up from a number that the run's seed makes.
inline constexpr const char* kRandomCounter = "scalar:random_counter";
// The state in which a rank's reduce graph leaves the squared sum of its gradients, float32 [].
inline constexpr const char* kSquaredSum = "squared_sum";
inline std::string gradient_of(const std::string& parameter) {  // the name of its gradient's state
  return "gradient:" + parameter;
}
// The sum over micro-batches before ranks have added theirs up, where that is a state of its own.
inline std::string gradient_sum_of(const std::string& parameter) {
  return "gradient_sum:" + parameter;
}
// A parameter rounded to the type that the model computes in, which the update makes.
inline std::string copy_of(const std::string& parameter) {
  return "copy:" + parameter;
}
// Whether it holds something from step to step that no other state tells: all but gradients, scalars and copies.
inline bool outlives_step(const PlanState& state) {
  if (!state.rounded_from.empty()) return false;
  if (state.name == kLossScale || state.name == kRandomCounter) return true;
  const bool passes = state.starts_at_zero || state.name == kSquaredSum || state.name.starts_with(kScalarState);
  return !passes && !state.name.starts_with(gradient_of("")) && !state.name.starts_with(gradient_sum_of(""));
}

struct TrainingPlan {
  std::shared_ptr<Plan> plan;
  std::string target;                   // the input that the loss added; "": none
  std::string loss_sum, loss_count;     // outputs, summed over micro-batches and data ranks
  std::vector<std::string> parameters;  // names of their states; gradients are "gradient:NAME"
  std::vector<std::string> statistics;  // states that no step's update moves: running means and variances, weights without a gradient
  bool scales_loss = false;             // gradients are those of the loss times the state kLossScale
  bool draws_masks = false;             // some of its nodes take the state kRandomCounter
  int64_t least_batch = 1;              // samples of a step: ranks that meet in every micro-batch must all have some
};

}  // namespace fretsaw
