// The subcommands of fretsaw: each adds itself, its options and what it does to the command line.
#pragma once

namespace CLI {
class App;
}

namespace fretsaw {

// The exit code of a command that did its work is 0, or 1 when results differ or a check failed; whatever else goes wrong is an exception.
struct Outcome {
  int exit_code = 0;
};

void add_inspect(CLI::App& app, Outcome& outcome);
void add_check(CLI::App& app, Outcome& outcome);
void add_model(CLI::App& app, Outcome& outcome);
void add_partition(CLI::App& app, Outcome& outcome);
void add_run(CLI::App& app, Outcome& outcome);
void add_merge(CLI::App& app, Outcome& outcome);
void add_simulate(CLI::App& app, Outcome& outcome);
void add_train(CLI::App& app, Outcome& outcome);
void add_bench(CLI::App& app, Outcome& outcome);
void add_devices(CLI::App& app, Outcome& outcome);

// The whole program: parses the arguments, runs the subcommand, reports any error. Returns the process's exit code.
int run_command_line(int argc, char** argv);

}  // namespace fretsaw
