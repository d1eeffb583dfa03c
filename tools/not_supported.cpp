// fretsaw merge and train: known to the command line, refused by this build.
#include <CLI/App.hpp>

#include "tools/commands.h"
#include "tools/options.h"

namespace fretsaw {
namespace {

void add_refused(CLI::App& app, const char* name, const char* help, const char* why, const char* remedy) {
  CLI::App* command = app.add_subcommand(name, help);
  command->allow_extras();
  command->callback([name, why, remedy] { not_supported(std::string("the command ") + name, why, remedy); });
}

}  // namespace

void add_merge(CLI::App& app, Outcome&) {
  add_refused(app, "merge", "Bring a plan's pieces back into one model (not in this build)",
              "this build can't bring a plan's pieces back together", "keep the model the plan was made from");
}

void add_train(CLI::App& app, Outcome&) {
  add_refused(app, "train", "Train a model or plan (not in this build)", "this build runs models forward only", "use fretsaw run");
}

}  // namespace fretsaw
