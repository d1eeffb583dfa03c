// The loss of a model in training on data that it is not trained on.
#pragma once
#include <memory>

#include "graph/ir.h"
#include "runtime/training/data.h"
#include "runtime/training/trainer.h"
#include "tools/train_settings.h"

namespace fretsaw {

// The model as --export would write it now, so with BatchNormalization and Dropout as in inference, with the loss behind it, cut by the
// same mesh and run in float32. The loss is the mean over all samples of the data.
class Evaluation {
 public:
  // `source` outlives it. Throws Error when the data at `settings.eval` does not fit the model.
  Evaluation(const Model& source, const TrainSettings& settings, const TrainingPlan& plan);
  double loss(const Trainer& trainer);

 private:
  Plan make_plan(const Trainer& trainer);
  int64_t batch() const;

  const Model& source_;
  TrainSettings settings_;
  std::vector<PlanInput> inputs_;  // of the training plan
  std::string target_;
  std::unique_ptr<DataSource> data_;
  std::string sum_, count_;  // the outputs
};

}  // namespace fretsaw
