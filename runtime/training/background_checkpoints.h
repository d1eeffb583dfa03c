// Checkpoints that are written while training goes on.
#pragma once
#include <atomic>
#include <exception>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "kernels/tensor_view.h"
#include "runtime/training/checkpoint.h"

namespace fretsaw {

// Divides tensors over `writers` files of about as many bytes, in the order of their names: tensors that straddle a border are cut along
// their first axis. Pieces point into `tensors`.
std::vector<std::vector<CheckpointPiece>> divide_tensors(const std::map<std::string, RuntimeValue>& tensors, int writers);

// One checkpoint is written at a time: a thread for each rank writes "rankN.safetensors", then the manifest makes it count, so a process
// that dies leaves a checkpoint that is complete, or none.
class BackgroundCheckpoints {
 public:
  // In the folder `root`, with `keep` > 0 so many of the newest.
  BackgroundCheckpoints(std::string root, int writers, int keep);
  BackgroundCheckpoints(const BackgroundCheckpoints&) = delete;
  BackgroundCheckpoints& operator=(const BackgroundCheckpoints&) = delete;
  ~BackgroundCheckpoints();  // waits; an error that nobody asked for is lost

  // Begins to write, once the one before is there. `tensors` are copies of the caller's, on the host. Throws what that one failed with.
  void begin(const CheckpointState& state, std::map<std::string, RuntimeValue> tensors);
  void check();   // throws what the last one failed with, if it is over
  void finish();  // waits for the last one; throws what it failed with

 private:
  void write(const CheckpointState& state, const std::map<std::string, RuntimeValue>& tensors) const;

  std::string root_;
  int writers_, keep_;
  std::thread thread_;
  std::atomic<bool> over_{true};
  std::exception_ptr failure_;  // the thread's until it is over
};

}  // namespace fretsaw
