// Training steps of a plan: forward and backward of a batch, then the update, on all ranks.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "graph/training/loss.h"
#include "graph/training/loss_scale.h"
#include "graph/training/training_plan.h"
#include "runtime/session.h"
#include "runtime/training/data.h"

namespace fretsaw {

struct TrainerOptions {
  SessionOptions session;
  LossSpec loss;
  double clip = 0;  // the largest global norm of the gradient; 0: any
};

struct StepResult {
  double loss = 0;           // before the update
  double gradient_norm = 0;  // of the mean gradient, before it is clipped
  int64_t count = 0;         // what the loss is the mean over
  bool skipped = false;      // the loss or a gradient was not finite: no rank changed its parameters
};

class Trainer {
 public:
  Trainer(TrainingPlan plan, const TrainerOptions& options);

  // One update from one batch, the model's inputs and the loss's target by name.
  StepResult step(const Batch& batch, double learning_rate);
  int64_t updates() const { return updates_; }           // that were not skipped
  void finish_updates() { session_->finish_updates(); }  // the last one may still be under way on devices; returns when it is made

  // On the host. A gradient is that of the last step's loss, before it was clipped; of 16 bits as float32. Throws Error for a name that
  // there is not.
  RuntimeValue parameter(const std::string& name) const;  // or a statistic
  RuntimeValue gradient(const std::string& parameter) const;
  // Ahead of the step that is given it, beside the one before; from another thread. See Session::stage.
  void stage(const Batch& batch) { session_->stage(batch); }
  const TrainingPlan& plan() const { return plan_; }

  // What a run needs to go on: parameters, statistics and what the optimizer keeps, whole tensors under the names of their states; the
  // loss scale and the place in the random numbers, where there are some.
  std::map<std::string, RuntimeValue> kept() const;
  // Goes on from there after so many updates. `frozen` are names that this run does not keep, and whose values there its model has: those
  // that it took from the same checkpoint. What the optimizer had of them is dropped; then a note says so. Scale and random numbers begin
  // anew where they are missing. Throws Error naming a tensor that is missing, has another type or shape, or that this run would lose.
  void restore(const std::map<std::string, RuntimeValue>& kept, int64_t updates, const std::set<std::string>& frozen = {},
               std::vector<std::string>* notes = nullptr);
  const Session& session() const { return *session_; }

 private:
  void check_batch(const Batch& batch) const;
  int64_t losses_in(const Batch& batch) const;
  std::optional<double> expected_divisor(const Batch& batch) const;
  void set_numbers(double learning_rate, float scale);
  double squared_sum() const;

  TrainingPlan plan_;
  TrainerOptions options_;
  std::unique_ptr<Session> session_;
  LossScale scale_;      // of plans that scale the loss
  int64_t counter_ = 0;  // of random numbers: by the seed, and the steps made
  int64_t updates_ = 0;
  double divisor_ = 1;  // of the last step's gradients
  // Of the last step, for the next one: how many losses its batch had, how many counted, and whether it changed parameters by the whole
  // gradient.
  struct Last {
    int64_t losses = 0, count = 0;
    bool is_plain = false;
  };
  Last last_;
};

// The model as it was read, with the trained values in place of its own, and BatchNormalization and Dropout as in inference.
Model trained_model(const Model& source, const Trainer& trainer);

}  // namespace fretsaw
