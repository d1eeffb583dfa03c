// The reduction of gradients over ranks, beside the backward pass.
//
// A plan's reduce graph exchanges gradients in buckets, and then squares them. It is cut into parts: each bucket's exchange, and the rest.
// A thread of the rank runs the parts in their order, each as soon as the states that it reads are final:
//
//   rank's thread   ... backward of the last micro-batch: milestone 0 ---- milestone 1 ---- end, wait  ------------------- update
//   this thread                                           bucket 0           bucket 1       bucket 2, squares
//
// On a device the thread has a stream of its own, which waits for the event that the rank's thread recorded with a state. All ranks of an
// axis run the same parts in the same order, over communicators that nothing else uses.
#pragma once
#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/program.h"

namespace fretsaw {

// The buckets' exchanges, each with the states that it takes and gives, and the rest. Empty where there is no exchange that could begin
// before all states are there, or the graph is not of that form.
std::vector<std::shared_ptr<const Model>> parts_of_reduction(const Model& reduce);
// Whether the plan's ranks can reduce beside their micro-batches at all. All ranks of the plan agree.
bool reduces_beside(const Plan& plan, bool on_devices);

class GradientReduction {
 public:
  // `settings`: what the programs of the rank share; the thread's own has the same. `device` is one of its own, null for CPU ranks.
  // `place_of`: where the rank keeps a state; on a device new values go there. `before`: called on the thread before each part.
  GradientReduction(const Model& reduce, int stage, const RankContext& settings, std::shared_ptr<Device> device,
                    const std::function<const RuntimeValue*(const std::string&)>& place_of,
                    std::function<void(int rank, int part)> before = {});
  ~GradientReduction();  // ends the thread, which must not wait for other ranks any more

  // The states that each part waits for, by the names in the plan.
  const std::vector<std::vector<std::string>>& awaited() const { return awaited_; }

  // --- the rank's thread ---
  bool awaits(const std::string& state) const { return given_.contains(state); }
  void begin();  // of a step
  bool has(const std::string& state) const;
  // The state's last value of this step, and the point of the rank's stream where it is there. Every state that is awaited, once a step.
  void give(const std::string& state, const RuntimeValue& value, std::shared_ptr<DeviceEvent> there);
  void check();  // throws what the thread's part has thrown
  // Waits until all parts have run (on a device: are on the stream; the event is their end). Throws what one of them threw.
  std::shared_ptr<DeviceEvent> finish();
  // After `finish`: the new values of states, which are taken from here.
  std::map<std::string, RuntimeValue>& results() { return results_; }
  void stop();  // after a failure: runs no further part, and waits for the one that runs; the communicators must have been aborted

  RankContext& context() { return context_; }  // between steps, and in the step after `finish`
  const RankContext& context() const { return context_; }
  void forget_captured();
  double busy_us() const { return busy_us_; }

 private:
  struct Part {
    std::string name;
    std::unique_ptr<ProgramCache> cache;
    std::vector<std::string> inputs, outputs;  // states
  };
  struct Given {
    RuntimeValue value;
    std::shared_ptr<DeviceEvent> there;
    bool is_given = false;
  };
  void work();
  void run_parts();
  bool wait_for(const Part& part);  // false: the step is over
  void run(Part& part);
  std::string trace_name(const Part& part) const { return std::to_string(stage_) + " " + part.name; }

  int stage_;
  RankContext context_;
  std::vector<Part> parts_;
  std::vector<std::vector<std::string>> awaited_;
  std::map<std::string, Given> given_;           // by state
  std::map<std::string, RuntimeValue> results_;  // likewise
  std::shared_ptr<DeviceEvent> end_;
  std::vector<double> ready_us_;  // by part, when tracing: when its last state was given
  double busy_us_ = 0;
  std::function<void(int, int)> before_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool running_ = false, stopped_ = false, ends_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace fretsaw
