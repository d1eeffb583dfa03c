// A child process that runs cases one after another and reports each; what takes it down counts against the case it was in.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fretsaw {

// Runs one case; "" when it passed, else why not.
using RunCase = std::function<std::string(const std::string& name)>;

class Worker {
 public:
  Worker(std::vector<std::string> cases, RunCase run) : cases_(std::move(cases)), run_(std::move(run)) { start(); }
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  int descriptor() const { return pipe_; }
  bool finished() const { return next_ == cases_.size(); }
  // Takes what the child wrote; called when the descriptor is readable. `report` gets a case's name and why it failed.
  void take(const std::function<void(const std::string&, const std::string&)>& report);
  // Ends a child whose case has been running for longer than `limit`.
  void end_if_stuck(std::chrono::seconds limit, const std::function<void(const std::string&, const std::string&)>& report);

 private:
  void start();
  void stop();
  void serve(int out) const;  // in the child
  void advance(const std::string& why, const std::function<void(const std::string&, const std::string&)>& report);

  std::vector<std::string> cases_;
  RunCase run_;
  size_t next_ = 0;  // the case the child is in
  pid_t child_ = -1;
  int pipe_ = -1;
  std::string buffer_;
  std::chrono::steady_clock::time_point since_;
};

// Every case's outcome, from one child process a core. Cases that fail must not disturb each other, so each worker has every n-th case.
std::map<std::string, std::string> run_in_workers(const std::vector<std::string>& names, const RunCase& run, std::chrono::seconds limit);

}  // namespace fretsaw
