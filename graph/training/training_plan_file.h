// Plans that train, as folders: those of any plan (graph/plan.h), with the values that states begin with in states.onnx, and training.json:
//
//   {"format_version": 1, "loss": "softmax_cross_entropy", "optimizer": "adamw:lr=1e-3", "options": {"zero": "1", ...},
//    "target": "target", "loss_sum": "loss_sum", "loss_count": "loss_count", "parameters": ["fc.weight", ...], "statistics": [],
//    "scales_loss": false, "draws_masks": false, "least_batch": 1}
#pragma once
#include <map>
#include <string>

#include "graph/training/training_plan.h"

namespace fretsaw {

// What a plan was made from, as its user wrote it.
struct TrainingSpecs {
  std::string loss, optimizer;                 // graph/training/loss.h, optimizer.h
  std::map<std::string, std::string> options;  // whatever else was chosen, by the writer's names
};
struct TrainingPlanFile {
  TrainingPlan training;
  TrainingSpecs specs;
};

// Writes the folder as write_plan() does: all of it or nothing, and nothing in place of what is no plan.
void write_training_plan(const TrainingPlan& training, const TrainingSpecs& specs, const std::string& folder,
                         const WritePlanOptions& options = {});
// Throws Error naming the file and the field that is missing or wrong.
TrainingPlanFile read_training_plan(const std::string& folder, bool structure_only_weights = false);
bool is_training_plan(const std::string& path);  // holds a plan.json and a training.json

}  // namespace fretsaw
