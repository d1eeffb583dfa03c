// The file of --log: a line of JSON for each step.
#pragma once
#include <cstdio>
#include <memory>
#include <string>

#include "tools/json_output.h"

namespace fretsaw {

class TrainLog {
 public:
  // "" writes nothing. A run that goes on adds to what is there. Throws Error naming the file, as `write` does.
  TrainLog(const std::string& path, bool append);
  void write(const Json& line);

 private:
  [[noreturn]] void fail() const;
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace fretsaw
