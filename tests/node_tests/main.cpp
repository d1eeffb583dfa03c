// Runs ONNX's own node tests through partition() and Session, against a list of those that are known to fail: node_tests FOLDER LIST
// [NAME...]. Fails when a test that is not on the list fails, and when one that is on it passes: the list may only shrink.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "graph/io.h"
#include "partitioner/partition.h"
#include "runtime/session.h"
#include "tests/node_tests/worker.h"
#include "tools/compare.h"
#include "tools/inputs.h"
#include "tools/value_files.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

// One data set of a case; "" when every output is as it should be.
std::string run_data_set(const std::shared_ptr<const Plan>& plan, Session& session, const fs::path& folder) {
  const std::vector<RuntimeValue> got = session.run(read_input_folder(*plan, folder.string()));
  for (size_t i = 0; i < got.size(); ++i) {
    const fs::path file = folder / ("output_" + std::to_string(i) + ".pb");
    const RuntimeValue want = read_value_file(file.string(), plan->outputs[i].type);
    const Type& type = plan->outputs[i].type;
    const bool exact = type.is_tensor() && !is_float(type.dtype);  // complex numbers have a tolerance of their own
    const Difference difference = compare(got[i], want, exact ? Tolerance{} : Tolerance{.rtol = 1e-3, .atol = 1e-5});
    if (!difference.ok) return "output " + std::to_string(i) + ": " + difference.why;
  }
  return "";
}

std::string run_case(const fs::path& folder) {
  try {
    const auto plan = std::make_shared<const Plan>(partition(read_model((folder / "model.onnx").string()), {}));
    Session session(plan, {.threads = 1});
    for (int k = 0; fs::exists(folder / ("test_data_set_" + std::to_string(k))); ++k) {
      const std::string why = run_data_set(plan, session, folder / ("test_data_set_" + std::to_string(k)));
      if (!why.empty()) return why;
    }
    return "";
  } catch (const std::exception& error) {
    return error.what()[0] ? error.what() : "an exception";
  }
}

// "test_name  # reason" lines.
std::set<std::string> read_list(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw std::runtime_error("can't read " + path);
  std::set<std::string> names;
  for (std::string line; std::getline(in, line);) {
    const std::string name = line.substr(0, line.find_first_of(" \t#"));
    if (name.empty()) continue;
    if (line.find('#') == std::string::npos) throw std::runtime_error(path + ": " + name + " has no reason");
    names.insert(name);
  }
  return names;
}

std::vector<std::string> list_cases(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    if (fs::exists(entry.path() / "model.onnx")) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

void write_counts(size_t passed, size_t failed, const std::string& line) {
  const char* folder = std::getenv("FRETSAW_TEST_RESULTS");
  if (!folder) return;
  std::ofstream(fs::path(folder) / "node_tests.json") << nlohmann::json({{"passed", passed}, {"failed", failed}});
  std::ofstream(fs::path(folder) / "node_tests.txt") << line << "\n";
}

int run(const std::string& folder, const std::string& list, const std::vector<std::string>& only) {
  std::set<std::string> excluded = read_list(list);
  const std::vector<std::string> names = only.empty() ? list_cases(folder) : only;
  size_t passed = 0, wrong = 0;
  for (const auto& [name, why] : run_in_workers(
           names, [&](const std::string& name) { return run_case(fs::path(folder) / name); }, std::chrono::seconds(60))) {
    const bool listed = excluded.erase(name) > 0;
    passed += why.empty();
    if (why.empty() == listed) {
      ++wrong;
      std::printf("%s: %s\n", name.c_str(), listed ? "passes and must leave the list of exclusions" : why.c_str());
    }
  }
  if (only.empty()) {
    for (const std::string& name : excluded) std::printf("%s: is on the list of exclusions, and there is no such test\n", name.c_str());
    wrong += excluded.size();
  }
  const std::string line = "node tests: " + std::to_string(passed) + " of " + std::to_string(names.size()) + " pass";
  if (only.empty()) write_counts(passed, wrong, line);
  std::printf("%s\n", line.c_str());
  return wrong == 0 && !names.empty() ? 0 : 1;
}

}  // namespace
}  // namespace fretsaw

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: node_tests FOLDER EXCLUSIONS [NAME...]\n");
    return 2;
  }
  try {
    return fretsaw::run(argv[1], argv[2], {argv + 3, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "node_tests: %s\n", error.what());
    return 1;
  }
}
