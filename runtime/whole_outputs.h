// A step's outputs as wholes, into which the ranks write their parts: nobody has to put them together afterwards.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "graph/plan.h"
#include "runtime/batches.h"
#include "runtime/memory.h"

namespace fretsaw {

//   begin(batches) --ranks: place(part), and write there--> take(output): the whole; absent: merge_parts must do it
//
// For outputs whose parts lie one behind the other: tensors that are put together along axis 0, with as many rows a sample in each part.
// The first part to come says how many, and the whole is made for them. A part that then does not fit gets no place, nor do those after
// it, and there is no whole; those that have a place stay there until they are let go. Such an output is not tried in later steps.
//
// - Places of different parts do not overlap. Each part of a step is placed once at most.
// - Who holds a place keeps the whole's memory: it is given to nobody else while a copy into it is under way, also after a failed step.
// - A whole is handed out only when every part of its step has a place in it. That the parts have been written is the ranks' business.
// - An output's state has a lock of its own, so that a rank that makes memory keeps waiting none but those that need the same memory.
class WholeOutputs {
 public:
  // `pins`: one of the ranks' devices, which all of them reach the memory through; null: the ranks are on the CPU.
  WholeOutputs(std::shared_ptr<const Plan> plan, const std::shared_ptr<Device>& pins);

  void begin(const StepBatches& batches);  // while no rank runs a step
  // Where the plan's output `index` of these samples is to be written, `made` telling what it is; null: it stays apart. From any thread.
  std::shared_ptr<void> place(size_t index, BatchPart samples, const TensorView& made);
  RuntimeValue take(size_t index);  // once all ranks have finished the step
  void forget();                    // lets go of the wholes; as `take` and `begin` do
  int64_t allocations() const { return count_->allocations; }

 private:
  struct Output {
    explicit Output(BufferPool memory) : pool(std::move(memory)) {}
    std::mutex mutex;  // of all that follows
    BufferPool pool;
    bool fits = true;    // false: its parts do not lie one behind the other
    RuntimeValue whole;  // absent: no part has come
    size_t placed = 0;   // parts
  };
  bool make_whole(Output& output, BatchPart samples, const TensorView& part) const;
  bool fits(const TensorView& whole, BatchPart samples, const TensorView& part) const;

  std::shared_ptr<AllocationCount> count_ = std::make_shared<AllocationCount>();
  std::vector<std::unique_ptr<Output>> outputs_;
  size_t parts_ = 0;     // of the step
  int64_t samples_ = 0;  // in all of them
};

}  // namespace fretsaw
