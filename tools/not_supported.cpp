// fretsaw train: known to the command line, refused by this build.
#include <CLI/App.hpp>

#include "tools/commands.h"
#include "tools/options.h"

namespace fretsaw {

void add_train(CLI::App& app, Outcome&) {
  CLI::App* command = app.add_subcommand("train", "Train a model or plan (not in this build)");
  command->allow_extras();
  command->callback([] { not_supported("the command train", "this build runs models forward only", "use fretsaw run"); });
}

}  // namespace fretsaw
