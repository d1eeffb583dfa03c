// Running the built command in tests, in a folder of its own, on small models made here.
#pragma once
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

struct CommandResult {
  int exit_code = -1;
  std::string out, err;
  nlohmann::json json() const { return nlohmann::json::parse(out, nullptr, false); }
};

class CommandTest : public testing::Test {
 protected:
  CommandTest();
  ~CommandTest() override;
  CommandResult fretsaw(const std::vector<std::string>& arguments) const;
  // The same, killed after so many milliseconds unless it ended before.
  CommandResult fretsaw_killed(const std::vector<std::string>& arguments, int after_ms) const;
  // The same, sent a signal as soon as `file` is there.
  CommandResult fretsaw_signalled(const std::vector<std::string>& arguments, int signal, const std::string& file) const;
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  // x: float32[BATCH, 4] -> MatMul w1 [4, HIDDEN] -> h -> Relu -> r -> MatMul w2 [HIDDEN, 2] -> y. BATCH 0 is symbolic ("batch").
  static Model mlp(int64_t batch, int64_t hidden = 8);
  std::string write_mlp(const std::string& name, int64_t batch) const;

 private:
  int start(const std::vector<std::string>& arguments) const;  // its process
  CommandResult result_of(int process) const;

  std::filesystem::path folder_;
};

std::string read_text(const std::string& path);
void write_text(const std::string& text, const std::string& path);

}  // namespace fretsaw
