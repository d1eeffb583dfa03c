// Going on from a checkpoint.
#pragma once
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "graph/ir.h"
#include "runtime/training/checkpoint.h"
#include "runtime/training/trainer.h"
#include "tools/train_settings.h"

namespace fretsaw {

// In checkpoints, beside what the trainer keeps.
inline constexpr const char* kUpdates = "updates";       // steps that were not skipped
inline constexpr const char* kRateTotal = "rate_total";  // where the learning rate's schedule ends

// What --resume names; nullopt without it. The checkpoint's seed becomes that of the settings. Throws Error of code usage where another one
// is told, or where the folder of --checkpoint holds newer ones, which would be taken for this run's.
std::optional<Checkpoint> open_resumed(TrainSettings& settings);
// Gives the model's initializers the checkpoint's values, so that those that are not trained any more keep what they learned. Returns their
// names.
std::set<std::string> take_initializers(Model& model, const Checkpoint& checkpoint);
// Puts the trainer and the data where the checkpoint left them; the step that comes next. `known` are names that the trainer's model took.
int64_t resume(Trainer& trainer, DataSource& data, const Checkpoint& checkpoint, const std::set<std::string>& known);
// Says where the schedule of a run with this total differs from that of the checkpoint.
void note_other_rates(const Checkpoint& checkpoint, int64_t total);

}  // namespace fretsaw
