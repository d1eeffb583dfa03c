// A progress bar on stderr: only on a terminal, only for work of more than a second.
#pragma once
#include <chrono>
#include <string>

namespace fretsaw {

class Progress {
 public:
  Progress(std::string what, int total);
  ~Progress();  // wipes the bar
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void done(int steps);

 private:
  std::string what_;
  int total_;
  bool terminal_, shown_ = false;
  std::chrono::steady_clock::time_point start_, last_;
};

}  // namespace fretsaw
