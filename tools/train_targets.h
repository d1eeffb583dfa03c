// Where the command train is to write.
#pragma once
#include <string>
#include <vector>

#include "graph/ir.h"
#include "tools/train_settings.h"

namespace fretsaw {

// The files that a model is read from: its own and those of its weights.
std::vector<std::string> files_of(const Model& model);
// Throws Error naming a target of the settings that can't be written, or that is one of the files `sources`, of the data, or of another
// target: before hours of training.
void check_train_targets(const TrainSettings& settings, std::vector<std::string> sources);

}  // namespace fretsaw
