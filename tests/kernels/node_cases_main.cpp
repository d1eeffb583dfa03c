// node_cases [options] FOLDER...: runs folders of ONNX node tests (model.onnx, test_data_set_0/) through the interpreter.
//
//   node_cases /tmp/cases/test_add*                 prints the failing tests with the reason, and a count
//   --threads=N --hide-shapes --layout=nhwc|8c|16c  as InterpreterOptions has them
//   FRETSAW_TEST_DEVICE=cuda                        on the GPU where it has a kernel; counts and lists what it has none for
//   --verbose                                       names the passing tests too
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "graph/errors.h"
#include "graph/io.h"
#include "tests/kernels/interpreter.h"
#include "tests/kernels/on_device.h"
#include "tests/kernels/test_data.h"

namespace fretsaw::testing {
namespace {

// "" when the test passes.
std::string failure_of(const std::string& folder, const InterpreterOptions& options) {
  try {
    Model model = read_model(folder + "/model.onnx");
    std::vector<Type> input_types, output_types;
    for (const Value* v : model.graph->inputs) input_types.push_back(v->type);
    for (const Value* v : model.graph->outputs) output_types.push_back(v->type);
    const std::string data = folder + "/test_data_set_0";
    std::vector<RuntimeValue> inputs;
    for (const std::string& path : data_files(data, "input")) inputs.push_back(read_value(path, input_types.at(inputs.size())));
    const std::vector<RuntimeValue> outputs = Interpreter(std::move(model), options).run(inputs);
    const std::vector<std::string> wanted = data_files(data, "output");
    if (wanted.size() != outputs.size()) return std::to_string(outputs.size()) + " outputs for " + std::to_string(wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      const std::string reason = difference(outputs[i], read_value(wanted[i], output_types.at(i)));
      if (!reason.empty()) return "output " + std::to_string(i) + ": " + reason;
    }
    return "";
  } catch (const std::exception& e) {
    return e.what();
  }
}

int run_cases(const std::vector<std::string>& folders, const InterpreterOptions& options, bool verbose) {
  int passed = 0, without_fallback = 0;
  std::map<std::string, std::string> failures;
  for (const std::string& folder : folders) {
    if (!std::filesystem::exists(folder + "/model.onnx")) continue;
    const std::string name = std::filesystem::path(folder).filename().string();
    if (verbose) {
      std::printf("%s\n", name.c_str());  // before it runs, so that the last line names a test that crashed
      std::fflush(stdout);
    }
    const auto fallbacks = host_fallbacks();
    const std::string reason = failure_of(folder, options);
    if (reason.empty())
      ++passed, without_fallback += fallbacks == host_fallbacks();
    else
      failures[name] = reason;
  }
  for (const auto& [name, reason] : failures) std::printf("FAIL %s: %s\n", name.c_str(), reason.c_str());
  std::printf("%d of %zu pass\n", passed, static_cast<size_t>(passed) + failures.size());
  if (test_device()) {
    std::printf("%d of them on the device alone; on the host:\n", without_fallback);
    for (const auto& [what, count] : host_fallbacks()) std::printf("  %4d %s\n", count, what.c_str());
  }
  return failures.empty() ? 0 : 1;
}

}  // namespace
}  // namespace fretsaw::testing

int main(int argc, char** argv) {
  using namespace fretsaw;
  testing::InterpreterOptions options;
  std::vector<std::string> folders;
  bool verbose = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--hide-shapes")
      options.hide_shapes = true;
    else if (argument == "--verbose")
      verbose = true;
    else if (argument.starts_with("--threads="))
      options.threads = std::stoi(argument.substr(10));
    else if (argument == "--layout=nhwc")
      options.layout = Layout::nhwc;
    else if (argument == "--layout=8c")
      options.layout = Layout::nChw8c;
    else if (argument == "--layout=16c")
      options.layout = Layout::nChw16c;
    else if (argument.starts_with("--"))
      return std::fprintf(stderr, "unknown option %s\n", argv[i]), 2;
    else
      folders.push_back(argument);
  }
  return testing::run_cases(folders, options, verbose);
}
