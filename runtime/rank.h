// One rank: the stages it runs, their values for each micro-batch, and its action list.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "graph/plan.h"
#include "runtime/batches.h"
#include "runtime/communicator.h"
#include "runtime/device_mailbox.h"
#include "runtime/gradient_reduction.h"
#include "runtime/program.h"
#include "runtime/session.h"
#include "runtime/whole_outputs.h"

namespace fretsaw {

// What every rank needs to know of the step at hand.
struct StepInputs {
  std::vector<const RuntimeValue*> inputs;  // in the plan's order; null: the default
  StepBatches batches;
  WholeOutputs* wholes = nullptr;  // where parts of the plan's outputs go; null: they stay apart
  bool update = false;             // what is done once, after all micro-batches: the updates of parameters
  bool update_ahead = false;       // ranks that would wait for others at the end of the step make theirs meanwhile
};

class Rank {
 public:
  // What ranks that run on devices have besides.
  struct OnDevice {
    std::shared_ptr<Device> device;
    std::shared_ptr<DeviceMailbox> mailbox;
    // Makes the collectives of a group that this rank joins; called by every rank of it. `beside`: they run while the device computes.
    std::function<std::unique_ptr<DeviceCommunicator>(Communicator& group, Device& device, bool beside)> connect;
    std::function<std::shared_ptr<Device>()> open_again;  // the same device with a stream of its own; null: there is none
  };
  Rank(std::shared_ptr<const Plan> plan, const SessionOptions& options, int data, int pipeline, int tensor, int threads, double (*now_us)(),
       OnDevice on_device = {});
  ~Rank();

  // The plan's outputs are on the host when it returns. A device may still be making the rank's update: what is asked of the rank next
  // waits for it, and what fails there shows then. Its time counts to the next step's.
  void run_step(const StepInputs& step, Communicator& communicator);
  // Of a later step to the device, while this one runs; from another thread. Not before the first steps have taken the memory they need.
  void stage_inputs(const StepInputs& step);
  void abort_devices();     // ends collectives among devices that wait for other ranks; from any thread
  bool can_rejoin() const;  // whether new groups of devices can be made after that
  // The plan's output `index` of a micro-batch after a step; null where another rank makes it.
  const RuntimeValue* output(size_t index, int micro_batch) const;
  void forget_step();      // lets go of the last step's values
  void finish_update();    // returns when it is made
  void end_device_work();  // of a step that failed: waits for its copies, and takes no notice of what its kernels report
  void leave_groups();     // their communicator is gone; the next step makes new ones
  void stop_reduction();   // after a failed step whose communicators were aborted: returns when nothing runs beside any more

  // What the rank keeps from step to step (PlanState), while no step runs. Its part is read on the host; it is set from the whole. Absent,
  // and no effect, where the rank does not keep it.
  RuntimeValue state(const std::string& name);
  bool updates_ahead() const { return ahead_ != nullptr; }
  bool has_updated_ahead() const { return ahead_ && ahead_->stand != Ahead::Stand::none; }  // and not all ranks have agreed yet
  void take_back_update();  // that this step made ahead; no effect where it made none
  void set_state(const PlanState& state, const RuntimeValue& whole);
  std::map<std::string, int> coordinates() const { return {{"data", data_}, {"pipeline", pipeline_}, {"tensor", tensor_}}; }

  RankReport report() const;
  const std::vector<CommunicationCount>& communication() const { return context_.communication; }
  std::vector<TraceEvent>& events() { return context_.events; }
  int64_t allocations() const {
    const auto of = [](const RankContext& context) {
      return context.memory.count->allocations + (context.device_memory ? context.device_memory->count->allocations.load() : 0);
    };
    return of(context_) + (reduction_ ? of(reduction_->context()) : 0);
  }
  BufferPool& pool() { return context_.memory.pool; }
  int data() const { return data_; }
  int tensor() const { return tensor_; }
  int running_stage() const { return running_stage_; }
  int64_t compiled_programs() const { return context_.compiled_programs; }

 private:
  // A value that crosses to or from another rank, or stays.
  struct Crossing {
    const Route* route = nullptr;
    int peer_rank = -1;     // -1: the other stage is on this rank
    size_t place = 0;       // among the stage graph's inputs (received) or outputs (sent)
    size_t peer_place = 0;  // on this rank: among the other stage's outputs
    Layout layout = Layout::plain;
  };
  struct Receiving {
    RequestPtr request;                    // of host memory
    std::shared_ptr<DeviceEvent> arrived;  // of device memory
    bool has_header = false;
    Header header;
    const void* place = nullptr;  // where it lay in the step before, and lies again if it can: what was captured has that address
  };
  struct MicroBatch {
    std::vector<RuntimeValue> inputs, outputs;
    std::vector<Receiving> receiving;  // by incoming crossing
    std::vector<RequestPtr> sends;
    bool posted = false, received = false;
  };
  struct Stage {
    int number = 0;
    std::string kind;  // of PlanGraph
    std::shared_ptr<const Model> model;
    std::unique_ptr<ProgramCache> cache;
    std::vector<int> plan_inputs;                            // for each graph input: the plan's input, or -1
    std::vector<RuntimeValue*> state_inputs, state_outputs;  // for each graph input and output: what is kept, or null
    int samples_input = -1;                                  // the graph input kSamplesAtHand
    std::vector<Crossing> incoming, outgoing;
    std::vector<MicroBatch> micro_batches;
    std::vector<const RuntimeValue*> arguments;
  };
  struct OutputPlace {
    int stage = -1;  // index in stages_; -1: elsewhere
    size_t place = 0;
  };
  // An output of one micro-batch on its way from the device to the host, or to its place in the whole.
  struct Fetched {
    RuntimeValue value;                // its owner keeps the memory, that of the whole too, until all is over
    std::shared_ptr<DeviceEvent> end;  // null: it is there
    std::shared_ptr<void> source;      // keeps the device's memory
  };

  void add_stage(int number, const SessionOptions& options);
  void find_crossings();
  bool is_taken_once(const Route& route) const;
  Stage& stage(int number);
  void join_groups(Communicator& world);
  int wire_tag(const Route& route, int micro_batch) const { return route.tag * plan_->micro_batches + micro_batch; }

  void add_states();
  void add_ahead(Stage& update);
  void make_update(const Action& action, const StepInputs& step, Communicator& communicator);
  void settle_update();
  void place_together(const Graph& reduce);
  void begin_states(bool has_samples);
  void clear_late_zeros();
  void keep_states(Stage& stage, MicroBatch& slot);
  void add_reduction(const SessionOptions& options);
  void pass_on(Stage& stage, const std::vector<size_t>& finals, Program& program, const Milestone& milestone);
  void give_finals(Stage& stage, const std::vector<size_t>& outputs);
  void finish_reduction();
  void do_micro_batch(const Action& action, const StepInputs& step, Communicator& communicator);
  void do_once(const Action& action, const StepInputs& step, Communicator& communicator);
  void do_forward(const Action& action, const StepInputs& step, Communicator& communicator);
  void run_graph(Stage& stage, const Action& action);
  void do_send(const Action& action, Communicator& communicator);
  void do_free(const Action& action);
  void receive_parcel(Receiving& state, const Crossing& from, RuntimeValue& value, int tag);
  std::shared_ptr<std::atomic<bool>> send_parcel(const RuntimeValue& value, int to, int tag);
  void let_go_of_parcels(bool wait);
  void align_clocks();  // of the device and the trace
  void place_outputs(Stage& stage, int micro_batch, const StepInputs& step);
  void fetch(Fetched& fetched, const RuntimeValue& value);
  void finish_on_device(DeviceEvent* results);
  void gather_arguments(Stage& stage, int micro_batch, const StepInputs& step);
  bool advance_receive(Stage& stage, MicroBatch& slot, size_t crossing, int micro_batch, Communicator& communicator, bool wait);
  void advance_posted(Communicator& communicator);
  void finish_receives(Stage& stage, int micro_batch, Communicator& communicator);
  void limit_sends(Communicator& communicator);
  void finish_step(DeviceEvent* results);
  void warm_pool();

  std::shared_ptr<const Plan> plan_;
  RankContext context_;
  bool reduces_beside_ = false;                   // the same on all ranks, also those without a reduce graph
  std::unique_ptr<GradientReduction> reduction_;  // null: the reduce graph runs when all micro-batches have. States may lie in its memory
  int data_, pipeline_, tensor_;
  const std::vector<Action>* actions_ = nullptr;
  std::vector<std::unique_ptr<Stage>> stages_;
  std::map<std::string, RuntimeValue> states_;
  // Of a rank that makes its update before it is known whether the step counts: how its states become again what they were.
  struct Ahead {
    struct Other {
      RuntimeValue* state;
      RuntimeValue value;
    };
    // On a device, of what the update alone reads: the new value goes to the other place, and then the two change places.
    std::vector<Other> in_turn;
    std::vector<Other> aside;                                              // a copy; on the host the old value itself
    std::vector<std::pair<RuntimeValue*, RuntimeValue*>> rounded;          // made anew from what they are rounded from
    enum class Stand : uint8_t { none, begun, made } stand = Stand::none;  // this step's
  };
  std::unique_ptr<Ahead> ahead_;  // null: the update waits for all ranks
  Fetched squared_sum_;           // of a step that updates ahead: it is to be read while the update runs
  // Those that start at zero in every step, those of them on a device that no forward graph reads apart. What micro-batches make anew, and
  // add to nothing, is zero where there are none.
  std::vector<RuntimeValue*> zeros_, late_zeros_, made_anew_;
  bool late_zeros_are_due_ = false;
  std::map<const Action*, std::vector<size_t>> final_states_;  // outputs of the action's stage that nothing writes later in the step
  std::vector<OutputPlace> output_places_;
  std::vector<std::vector<Fetched>> fetched_;                          // [output][micro-batch]; those that do not stay where they are
  std::vector<Fetched> abandoned_;                                     // of a step that failed
  std::vector<std::pair<int, int>> posted_;                            // (index of stage, micro-batch) whose receives are wanted, in order
  std::vector<std::pair<RequestPtr, std::shared_ptr<void>>> sending_;  // with what keeps the buffer
  OnDevice on_device_;
  struct Reading {  // a parcel that is being copied from
    std::shared_ptr<DeviceEvent> end;
    Parcel parcel;
  };
  std::vector<Reading> reading_;
  mutable std::mutex groups_mutex_;
  int64_t weight_bytes_ = 0;
  double busy_us_ = 0, step_us_ = 0;
  std::vector<DeviceSpan> updating_, updated_;  // runs of the last update, which nobody has waited for; of the one before the step at hand
  std::vector<DeviceSpan> timed_;               // runs of the step that are over, whose times nobody has asked for yet
  int running_stage_ = -1;
  std::atomic<int> steps_run_{0};
  int64_t allocations_before_ = 0;
  std::function<void(int, int)> before_forward_;
  static constexpr size_t receives_ahead = 2;   // micro-batches whose receives are kept in flight
  static constexpr size_t sends_in_flight = 4;  // messages a rank may be ahead of its receivers
};

}  // namespace fretsaw
