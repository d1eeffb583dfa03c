// Going on from a checkpoint.
#include "tools/train_resume.h"

#include <charconv>
#include <cstdio>
#include <filesystem>

#include "graph/errors.h"
#include "runtime/tensor_values.h"
#include "tools/options.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

// A number of the manifest's "more"; nullopt where it is not there.
std::optional<int64_t> number_of(const Checkpoint& checkpoint, const char* field) {
  const auto found = checkpoint.state().more.find(field);
  if (found == checkpoint.state().more.end()) return std::nullopt;
  const std::string& text = found->second;
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0)
    throw Error("field 'more." + std::string(field) + "' is '" + text + "', which is no number",
                "remove this checkpoint, or name another one")
        .in_file((fs::path(checkpoint.folder()) / kManifestFile).string());
  return number;
}

void refuse_newer_ones(const TrainSettings& s, int64_t step) {
  if (s.checkpoints.empty()) return;
  std::vector<std::string> names;
  for (const std::string& folder : checkpoints_after(s.checkpoints, step)) names.push_back(fs::path(folder).filename().string());
  if (names.empty()) return;
  usage_error("--checkpoint " + s.checkpoints + " holds " + join(names, ", ") + ", newer than step " + std::to_string(step) +
                  " that --resume goes on from",
              "resume from the newest, remove what is not wanted any more, or name another folder");
}

}  // namespace

std::optional<Checkpoint> open_resumed(TrainSettings& s) {
  if (s.resume.empty()) return std::nullopt;
  if (!s.save_plan.empty())
    usage_error("--save-plan writes what a run begins with, and --resume goes on from something else",
                "save the plan first, then train it with --resume");
  std::vector<std::string> notes;
  Checkpoint checkpoint = open_newest_checkpoint(s.resume, notes);
  for (const std::string& note : notes) std::fprintf(stderr, "note: %s\n", note.c_str());
  const CheckpointState& state = checkpoint.state();
  if (s.told.contains("--seed") && s.seed != state.seed)
    usage_error("--seed " + std::to_string(s.seed) + ": the run that is resumed has the seed " + std::to_string(state.seed),
                "leave --seed out");
  s.seed = state.seed;
  refuse_newer_ones(s, state.step);
  if (s.checkpoints.empty()) std::fprintf(stderr, "note: without --checkpoint this run writes no checkpoints\n");
  return checkpoint;
}

std::set<std::string> take_initializers(Model& model, const Checkpoint& checkpoint) {
  std::set<std::string> taken;
  for (Value* v : model.graph->initializers()) {
    if (!checkpoint.has(v->name)) continue;
    const TensorPtr tensor = checkpoint.read(v->name);
    if (tensor->dtype != v->constant->dtype || tensor->dims != v->constant->dims) continue;
    v->constant = tensor;
    taken.insert(v->name);
  }
  return taken;
}

int64_t resume(Trainer& trainer, DataSource& data, const Checkpoint& checkpoint, const std::set<std::string>& known) {
  std::map<std::string, RuntimeValue> kept;
  for (const std::string& name : checkpoint.names()) kept[name] = value_from_tensor(*checkpoint.read(name));
  const CheckpointState& state = checkpoint.state();
  std::vector<std::string> notes;
  try {
    trainer.restore(kept, number_of(checkpoint, kUpdates).value_or(state.step), known, &notes);
  } catch (const Error& e) {
    throw e.in_file(checkpoint.folder());
  }
  data.seek(state.data);
  for (const std::string& note : notes) std::fprintf(stderr, "note: %s\n", note.c_str());
  return state.step;
}

void note_other_rates(const Checkpoint& checkpoint, int64_t total) {
  const std::optional<int64_t> before = number_of(checkpoint, kRateTotal);
  if (!before || *before == total || *before == 0 || total == 0) return;
  std::fprintf(stderr,
               "note: the learning rate's schedule ends at step %lld, and that of the run before at step %lld; total=%lld keeps it\n",
               static_cast<long long>(total), static_cast<long long>(*before), static_cast<long long>(*before));
}

}  // namespace fretsaw
