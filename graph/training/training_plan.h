// What a trainer must know of a plan that trains (partitioner/training.h makes it).
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "graph/plan.h"

namespace fretsaw {

struct TrainingPlan {
  std::shared_ptr<Plan> plan;
  std::string target;                   // the input that the loss added; "": none
  std::string loss_sum, loss_count;     // outputs, summed over micro-batches and data ranks
  std::vector<std::string> parameters;  // names of their states; gradients are "gradient:NAME"
  std::vector<std::string> statistics;  // states that are no parameters: running means and variances
  int64_t least_batch = 1;              // samples of a step: ranks that meet in every micro-batch must all have some
};

// The states that the update graphs take their numbers from: lr float32 [], step int64 [], scale float32 [].
inline constexpr const char *kLearningRate = "scalar:lr", *kStep = "scalar:step", *kScale = "scalar:scale", *kScalarState = "scalar:";
// The state in which a rank's reduce graph leaves the squared sum of its gradients, float32 [].
inline constexpr const char* kSquaredSum = "squared_sum";
inline std::string gradient_of(const std::string& parameter) {  // the name of its gradient's state
  return "gradient:" + parameter;
}

}  // namespace fretsaw
