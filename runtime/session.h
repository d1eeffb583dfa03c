// Running a plan: ranks, their programs, and steps from whole inputs to whole outputs.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "graph/plan.h"
#include "kernels/tensor_view.h"

namespace fretsaw {

struct SessionOptions {
  std::string device = "cpu";  // or "cuda"
  std::vector<int> devices;    // of "cuda": each rank's GPU; empty: one GPU each, from 0 on. Ranks may share a GPU
  // What float32 models compute in: "fp32", "tf32" (products and convolutions round their operands), "fp16" or "bf16" (weights and
  // activations; norms, softmax and sums stay in float32).
  std::string precision = "fp32";
  int threads = 0;              // cores for each CPU rank; 0: the machine's, divided
  uint64_t random_seed = 0;     // of Random operators
  bool random_weights = false;  // fill missing weights by (weight_seed, source name, element)
  uint64_t weight_seed = 0;
  bool trace = false;
  bool detect_anomaly = false;  // look at what every node makes (anomaly.h): slow
  bool reduce_beside = true;    // gradients are added up over ranks while the backward pass runs, where they can be
  double stop_limit_s = 5;      // how long the other ranks may take to stop once one has failed
  // For tests: called on the rank's thread before each forward; what it throws is that rank's failure.
  std::function<void(int rank, int micro_batch)> before_forward;
  // Likewise on the thread that reduces gradients beside, before each part: a bucket's exchange, by number, and behind them the rest.
  std::function<void(int rank, int part)> before_reduction;
};

struct RankReport {
  int rank = 0;
  std::vector<int> stages;
  std::string device;
  int64_t weight_bytes = 0, peak_bytes = 0;
  double busy_ms = 0, busy_share = 0;   // of the last step: computing; on a device from inputs there to outputs there
  std::vector<std::string> host_nodes;  // of a device: "name (op): reason" of the nodes that it has no kernel for, in what has run
};
struct TraceEvent {
  int rank = 0;
  std::string name, category;
  double start_us = 0, duration_us = 0;
};
struct CommunicationCount {
  std::string op, axis;
  int64_t count = 0, bytes = 0;
};

// Whether a step of any session failed and left something running: a rank that did not stop, or NCCL, which clears up after an abort. The
// process had best end without the usual clean-up, which would wait for it or take from under it what it uses.
bool must_exit_at_once();

// Threads, memory and compiled programs for one plan. Not thread-safe but for `stage`: one step at a time. After an error the next step
// starts anew, unless something was left running: then every step fails.
class Session {
 public:
  explicit Session(std::shared_ptr<const Plan> plan, const SessionOptions& options = {});
  ~Session();

  // Inputs by the source model's names, whole batches; an input with a default may be left out. Outputs in the source's order. Throws
  // Error naming the input that is missing or has the wrong type or rank, or rank, stage, node and cause of what failed.
  // `update_ahead`: ranks that would wait for others at the end of the step make their update meanwhile (graph/plan.h: updates_ahead).
  // What it takes must be set before; `update` or `take_back_updates` follows.
  std::vector<RuntimeValue> run(const std::map<std::string, RuntimeValue>& inputs, bool update_ahead = false);
  // For ranks on devices: brings inputs there ahead of the `run` that is given the same values, beside the one before it. Called from one
  // thread, which may be another than `run`'s; returns when they are there. Nothing is staged of what `run` will refuse, or for want of
  // memory.
  void stage(const std::map<std::string, RuntimeValue>& inputs);
  // Of a plan that trains, after `run`: every rank's update graphs, but of those that have made theirs. Ranks on devices may still be at it
  // when it returns; what is asked of them next waits for it, and what fails there shows then.
  void update();
  void finish_updates();       // returns when they are made
  bool updates_ahead() const;  // whether some rank can
  void take_back_updates();    // that `run` made ahead: what ranks keep is again as it was
  // What ranks keep under a name (PlanState), on the host and whole, put together from the ranks' parts; absent where no rank keeps it.
  RuntimeValue state(const std::string& name) const;
  // What the first data and tensor rank of each pipeline rank keeps under it.
  std::vector<RuntimeValue> states(const std::string& name) const;
  void set_state(const std::string& name, const RuntimeValue& whole);  // on every rank that keeps it, or a part of it

  std::vector<RankReport> ranks() const;
  std::vector<CommunicationCount> communication() const;  // of one micro-batch, as counted in the last step
  std::vector<TraceEvent> trace() const;
  // Allocations from the system that ranks made during the last step; 0 once warm.
  int64_t allocations_in_last_step() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fretsaw
