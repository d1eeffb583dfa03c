// A child process that runs cases one after another and reports each; what takes it down counts against the case it was in.
#include "tests/node_tests/worker.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <thread>

namespace fretsaw {

Worker::~Worker() {
  if (child_ > 0) kill(child_, SIGKILL);
  stop();
}

void Worker::start() {
  if (finished()) return;
  int ends[2];
  std::fflush(nullptr);
  if (pipe(ends) != 0) throw std::runtime_error("no pipe");
  child_ = fork();
  if (child_ < 0) throw std::runtime_error("no process");
  if (child_ == 0) {
    close(ends[0]);
    serve(ends[1]);
    _exit(0);
  }
  close(ends[1]);
  pipe_ = ends[0];
  buffer_.clear();
  since_ = std::chrono::steady_clock::now();
}

void Worker::stop() {
  if (child_ > 0) waitpid(child_, nullptr, 0);
  if (pipe_ >= 0) close(pipe_);
  child_ = -1;
  pipe_ = -1;
}

// Each case's answer is one line.
void Worker::serve(int out) const {
  for (size_t i = next_; i < cases_.size(); ++i) {
    std::string line = run_(cases_[i]);
    for (char& c : line)
      if (c == '\n') c = ' ';
    line += '\n';
    for (size_t done = 0; done < line.size();) {
      const ssize_t n = write(out, line.data() + done, line.size() - done);
      if (n <= 0) _exit(1);
      done += static_cast<size_t>(n);
    }
  }
}

void Worker::advance(const std::string& why, const std::function<void(const std::string&, const std::string&)>& report) {
  report(cases_[next_++], why);
  since_ = std::chrono::steady_clock::now();
}

void Worker::take(const std::function<void(const std::string&, const std::string&)>& report) {
  char bytes[4096];
  const ssize_t n = read(pipe_, bytes, sizeof bytes);
  if (n > 0) {
    buffer_.append(bytes, static_cast<size_t>(n));
    for (size_t end = buffer_.find('\n'); end != std::string::npos; end = buffer_.find('\n')) {
      advance(buffer_.substr(0, end), report);
      buffer_.erase(0, end + 1);
    }
    return;
  }
  stop();
  if (finished()) return;
  advance("the process went down", report);
  start();
}

void Worker::end_if_stuck(std::chrono::seconds limit, const std::function<void(const std::string&, const std::string&)>& report) {
  if (finished() || std::chrono::steady_clock::now() - since_ < limit) return;
  kill(child_, SIGKILL);
  stop();
  advance("no answer in " + std::to_string(limit.count()) + " s", report);
  start();
}

std::map<std::string, std::string> run_in_workers(const std::vector<std::string>& names, const RunCase& run, std::chrono::seconds limit) {
  const size_t count = std::max(1U, std::min(8U, std::thread::hardware_concurrency()));
  std::vector<std::unique_ptr<Worker>> workers;
  for (size_t w = 0; w < count; ++w) {
    std::vector<std::string> share;
    for (size_t i = w; i < names.size(); i += count) share.push_back(names[i]);
    if (!share.empty()) workers.push_back(std::make_unique<Worker>(share, run));
  }
  std::map<std::string, std::string> outcomes;
  const auto report = [&](const std::string& name, const std::string& why) { outcomes[name] = why; };
  for (;;) {
    std::vector<pollfd> descriptors;
    std::vector<Worker*> waiting;
    for (const auto& worker : workers) {
      if (worker->finished()) continue;
      descriptors.push_back({worker->descriptor(), POLLIN, 0});
      waiting.push_back(worker.get());
    }
    if (waiting.empty()) return outcomes;
    poll(descriptors.data(), descriptors.size(), 1000);
    for (size_t i = 0; i < waiting.size(); ++i) {
      if (descriptors[i].revents)
        waiting[i]->take(report);
      else
        waiting[i]->end_if_stuck(limit, report);
    }
  }
}

}  // namespace fretsaw
