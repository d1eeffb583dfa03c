// Plans that train, in folders: what the command train makes of them.
#pragma once
#include "graph/training/training_plan.h"
#include "tools/train_settings.h"

namespace fretsaw {

// The plan at `settings.path`. What it was made with takes the place of the settings: the loss, the optimizer, the mesh and all that
// decides how graphs are cut. Throws Error of code usage where the command line says something else.
TrainingPlan open_training_plan(TrainSettings& settings);
// Writes the plan to `settings.save_plan`.
void save_training_plan(const TrainingPlan& plan, const TrainSettings& settings);
// The model that the plan was made from. Throws Error where its file is gone or has changed.
Model source_of(const Plan& plan);

}  // namespace fretsaw
