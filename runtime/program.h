// A program: a graph compiled for one set of input shapes. Kernels are chosen, layouts agreed and buffers placed; running it
// only calls the steps in order.
//
//   graph template --ProgramCache::get(inputs)--> Program --run_program--> outputs
//
// A rank holds a cache for each graph it runs, and one for each control-flow body inside a program.
#pragma once
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "graph/ir.h"
#include "graph/passes.h"
#include "kernels/device.h"
#include "runtime/communicator.h"
#include "runtime/device_communicator.h"
#include "runtime/device_steps.h"
#include "runtime/memory.h"
#include "runtime/session.h"
#include "runtime/staged_inputs.h"

namespace fretsaw {

struct ControlFlow;
struct Milestone;
struct Program;

// Something a device does. When it did is known only once it is done, for the host runs ahead.
struct DeviceSpan {
  TraceEvent event;  // its times are still to be filled in
  std::shared_ptr<DeviceEvent> begin, end;
};

// What programs of one rank share.
struct RankContext {
  int rank = 0;
  int threads = 1;
  uint64_t random_seed = 0;
  bool tf32 = false;
  std::shared_ptr<Device> device;  // null: the CPU. Control-flow bodies run on the host all the same
  RankMemory memory;
  std::unique_ptr<RankMemory> device_memory;  // of `device`
  std::unique_ptr<BufferPool> pinned;         // memory of the host that the device reaches directly
  std::unique_ptr<StagedInputs> staged;       // null: every input is uploaded by the program that reads it
  bool trace = false;
  bool detect_anomaly = false;
  std::vector<TraceEvent> events;
  std::vector<DeviceSpan> device_runs;         // of programs: from the inputs being there to the outputs not yet fetched
  std::vector<DeviceSpan> device_steps;        // when tracing
  std::shared_ptr<DeviceEvent> device_origin;  // when tracing: a point on the device's clock ...
  double device_origin_us = 0;                 // ... and on that of the trace
  double (*now_us)() = nullptr;                // time of the trace
  // The ranks along each mesh axis that has several, this one among them. Made when the session starts, and anew after an abort.
  struct Group {
    std::string axis;
    std::unique_ptr<Communicator> ranks;
    std::unique_ptr<DeviceCommunicator> devices;  // the same ranks' devices; null on the CPU
    int64_t calls = 0;
  };
  std::vector<Group> groups;
  Group* group(const std::string& axis);  // null: this rank is alone on the axis
  // What this rank has sent in the step at hand, while `counts_communication`.
  std::vector<CommunicationCount> communication;
  bool counts_communication = false;
  void count_communication(const std::string& op, const std::string& axis, size_t bytes, int64_t count = 1);
  double communicating_us = 0;                              // in collectives, since the beginning
  std::function<void(Program&, const Milestone&)> reached;  // called while a program runs
  int64_t compiled_programs = 0;
  // Large results of constant folding, which the programs of a rank share.
  struct Folded {
    std::string node;
    std::vector<TensorPtr> inputs, outputs;
  };
  std::vector<Folded> folded;
  MergedWeights merged_weights;                                                       // of products that run as one on a device
  std::map<std::pair<const void*, size_t>, std::shared_ptr<void>> aligned_constants;  // copies of constants that lie at odd addresses
  std::map<TensorPtr, TensorPtr> made_constants;  // with their bytes, of those that had only a generator
};

// One edge of a program: what is known about it when the program is compiled.
struct Slot {
  enum class Place : uint8_t { input, constant, arena, pool, bound };
  Place place = Place::pool;
  bool fixed = false;     // a tensor whose dtype and dims below are known
  bool external = false;  // input's or constant's bytes, perhaps through views: not ours to hand out
  Memory memory = Memory::host;
  DType dtype = DType::undefined;
  Dims dims;
  Layout layout = Layout::plain;
  size_t offset = 0;  // in the arena of its memory, or in the memory that it is bound to
  int binding = -1;   // of Place::bound, and of inputs in device memory: whose memory it lies in
};

struct Step {
  enum class Kind : uint8_t { kernel, alias, control, copy };  // copy: between the host's and the device's memory
  Kind kind = Kind::kernel;
  const Node* node = nullptr;  // names it in errors and traces
  CompiledKernel kernel;
  size_t alias_offset = 0;  // of an alias: bytes from the input's beginning to the output's
  bool view = false;        // the output may share the input's bytes at run time
  bool reorders = false;
  bool on_device = false;            // its kernel puts work on the device's stream
  bool elementwise = false;          // of a device's kernel: each element of its outputs is made of the inputs' at that place alone
  bool capturable = false;           // the same work at the same addresses every time
  std::vector<int> inputs, outputs;  // slots; -1 where left out. Of control flow: the node's inputs, then captures
  std::vector<RuntimeValue*> input_values, output_values;
  std::vector<int> releases;  // pool slots used here for the last time
  std::shared_ptr<ControlFlow> control;
};

// Steps [first, last] whose work on the device is captured the second time they run, and replayed from then on.
struct Segment {
  struct Captured {
    std::vector<const void*> addresses;  // of the program's bindings when the work was captured
    std::shared_ptr<CapturedWork> work;
    const void* scratch = nullptr;                  // where it was then
    std::vector<CommunicationCount> communication;  // of its collectives
    int64_t last_run = 0;                           // the program's, when it was replayed
  };
  size_t first = 0, last = 0;
  std::vector<Captured> captured;
  bool refused = false;  // something in it could not be captured
};

// Memory of a device whose address is known when a program runs: that of an input, or what an output is handed over in.
struct Binding {
  int input = -1;                       // among the program's inputs; -1: of an output
  bool overwritten = false;             // of an input: a step writes over it
  size_t bytes = 0;                     // of what lies in it
  const RuntimeValue* place = nullptr;  // of an output: where it is kept; null: it is handed over
  std::shared_ptr<void> memory;         // while the program runs: of an output, or of a copy of an input that others hold too
};

// A point of a program from which on some of its outputs are what they are in the end: they are made, and nothing touches them any more.
// Those that are kept lie where they are kept.
struct Milestone {
  size_t step = 0;  // behind it; the last of a segment, if of any
  std::vector<size_t> outputs;
};

struct Program {
  std::shared_ptr<Model> model;  // specialised; keeps nodes, bodies and constants alive
  std::vector<Slot> slots;
  std::vector<RuntimeValue> values;  // one for each slot
  std::vector<Step> steps;
  std::vector<int> inputs;   // slot of each input of the template; -1: nothing reads it
  std::vector<int> outputs;  // slot of each output
  size_t arena_bytes = 0, device_arena_bytes = 0;
  std::byte *bound_arena = nullptr, *bound_device_arena = nullptr;  // where `values` point now
  std::shared_ptr<Device> device;                                   // null: all on the host
  std::vector<Segment> segments;
  std::vector<std::vector<size_t>> awaited;  // as BindingSpec says
  std::vector<size_t> consumed;              // likewise
  std::vector<Milestone> milestones;         // by step
  std::vector<bool> settled;                 // outputs whose values were put where they are kept already, in the run at hand
  int64_t runs = 0;
  std::vector<HostFallback> fallbacks;
  bool binds = false;                       // its inputs and outputs in device memory are bound, not copied
  std::vector<int> kept;                    // for each output: the input in whose memory its value stays; -1: none
  std::vector<const RuntimeValue*> places;  // for each output: what else it is kept in; null: nothing. The rest is handed over
  std::vector<Binding> bindings;
  std::vector<const void*> addresses;            // of the bindings, in the run at hand
  std::vector<std::vector<const void*>> before;  // those of earlier runs
  bool ran_before = false;                       // with the addresses at hand
};

// What one input is, as far as compiling cares.
struct InputSpec {
  bool given = true;  // false: left out, the default counts
  Type type;          // concrete, or with unknown dimensions
  TensorPtr content;  // its contents are part of the signature: compiled in
  Memory memory = Memory::host;
  Layout layout = Layout::plain;  // of a value in device memory
};
// What the graphs of a plan that trains do with values in device memory.
struct BindingSpec {
  bool binds = false;                       // they are read and written where they lie
  std::vector<int> kept;                    // for each output: the input whose new value it is, which goes where the old one lies; -1: none
  std::vector<const RuntimeValue*> places;  // for each output: what is kept and not among the inputs, likewise; null: none
  std::vector<size_t> local;     // outputs that only other graphs of this rank take: they stay in the layout that they are made in
  std::vector<size_t> consumed;  // inputs that nobody needs once the program has read them: its steps may write over them
  std::vector<std::vector<size_t>> awaited;  // sets of outputs that somebody waits for while the program runs, on the host too
};
// `inputs` are values of `model.graph`; the contents of `model` are not changed.
// Shapes that inference gives for the outputs of the nodes named in `distrusted` are not believed.
// `device`: null for a program of the host.
std::unique_ptr<Program> compile_program(const Model& model, const std::vector<Value*>& inputs, const std::vector<InputSpec>& specs,
                                         const std::set<std::string>& distrusted, RankContext& rank, std::shared_ptr<Device> device,
                                         const BindingSpec& binding = {});

// A node makes another shape than inference said (an operator's inference function is wrong, or a loop never ran its body).
class ShapeMismatch : public Error {
 public:
  ShapeMismatch(const Error& error, std::string node_name) : Error(error), node_name(std::move(node_name)) {}
  std::string node_name;
};
// Captured work that is of no use any more: it was made for other addresses or communicators.
void forget_captured(Program& program);
// Runs it. `outputs` own their memory afterwards. `depth`: how many programs around this one run now.
void run_program(Program& program, std::span<const RuntimeValue* const> inputs, std::span<RuntimeValue> outputs, RankContext& rank,
                 size_t depth);

// The programs of one graph, by signature: types of the inputs, and the contents of those small integer inputs that decide shapes.
class ProgramCache {
 public:
  // `generalise`: an input whose shape keeps changing is compiled with unknown dimensions (for the bodies of loops).
  ProgramCache(std::shared_ptr<const Model> model, std::vector<Value*> inputs, bool generalise);
  // `on_device`: on the rank's device, if it has one. A cache has programs of one kind. Null inputs are left out.
  Program& get(std::span<const RuntimeValue* const> inputs, RankContext& rank, bool on_device = false);
  // Finds the program and runs it; compiles again without the shapes that turn out to be wrong.
  void run(std::span<const RuntimeValue* const> inputs, std::span<RuntimeValue> outputs, RankContext& rank, size_t depth);
  const std::vector<Value*>& inputs() const { return inputs_; }
  const Model& model() const { return *model_; }
  void forget_captured();  // work that was captured; it is recorded anew
  void bind(BindingSpec binding) { binding_ = std::move(binding); }
  void stays_on_rank(size_t output) { binding_.local.push_back(output); }
  void may_overwrite(size_t input) { binding_.consumed.push_back(input); }
  void await(std::vector<std::vector<size_t>> outputs) { binding_.awaited = std::move(outputs); }
  const Program* last_program() const { return entries_.empty() ? nullptr : entries_.front().program.get(); }

 private:
  struct Facts {  // of one input
    bool decides_shapes = false;
    int content_changes = 0;
    std::vector<int> dim_changes;
    int rank_changes = 0;
  };
  struct Entry {
    std::vector<int64_t> key;
    std::unique_ptr<Program> program;
  };
  bool content_counts(size_t i, const RuntimeValue& value) const;
  void make_key(std::span<const RuntimeValue* const> inputs);
  std::vector<InputSpec> specs(std::span<const RuntimeValue* const> inputs) const;
  void learn_from_miss(std::span<const RuntimeValue* const> inputs);

  std::shared_ptr<const Model> model_;
  std::vector<Value*> inputs_;
  bool generalise_;
  BindingSpec binding_;
  std::vector<Facts> facts_;
  std::vector<int64_t> key_;  // of the call at hand; keeps its room
  std::vector<std::vector<int64_t>> last_contents_;
  std::vector<Dims> last_dims_;
  bool has_last_ = false;
  std::set<std::string> distrusted_;  // nodes
  std::list<Entry> entries_;          // the most recently used first
  static constexpr size_t kept_programs = 8;
};

// border_layouts.cpp: how the values at the border of a stage's graph lie: channels last where their Recv or Send says so, plain otherwise.
Layout layout_of_input(const Value& graph_input, const Graph& graph);
Layout layout_of_output(const Value& graph_output);

// --- parts of compiling (each in a file of its name) ---
// specialise.cpp: the template with these inputs, shapes inferred, constants folded, constant branches inlined.
struct Specialised {
  std::shared_ptr<Model> model;
  std::vector<Value*> inputs;  // null: compiled in, or nothing reads it
};
// For a device, whose kernels these are, what is fused there is recognised too.
Specialised specialise(const Model& model, const std::vector<Value*>& inputs, const std::vector<InputSpec>& specs,
                       const std::set<std::string>& distrusted, RankContext& rank, const KernelRegistry* device_kernels);
// fold.cpp: runs the node's kernel on constants; false when it can't be or would make more than `limit_bytes`.
bool evaluate_node(const Node& node, const std::vector<TensorPtr>& inputs, int threads, size_t limit_bytes,
                   std::vector<TensorPtr>& outputs);
// The same with the rank's memory of large results, and a limit that fits the inputs.
bool fold_node(const Node& node, const std::vector<TensorPtr>& inputs, RankContext& rank, std::vector<TensorPtr>& outputs);
// A context for the steps `nodes` (one, or a fusion group); `constant_of` may be null.
CompileContext make_context(const std::vector<const Node*>& nodes, int threads);
bool is_control_flow(const Node& node);
// host_steps.cpp: single nodes and fusion groups, each at the place of its last member. `takes`: whether the kernel of a group's first
// node does the whole group.
using TakesGroup = std::function<bool(const KernelRecord&, const std::vector<const Node*>& group)>;
std::vector<std::vector<const Node*>> host_steps(const Graph& graph, const Consumers& consumers,
                                                 const std::unordered_set<const Value*>& graph_outputs, const TakesGroup& takes);
// aliases.cpp: where the outputs of a node begin in the bytes of its first input, which lies in `source`. Empty: they are not bytes of
// it, or not known to be, and the node has to run. `view`: its kernel is one of a view.
std::vector<size_t> offsets_in_input(const Node& node, bool view, const Slot& source);
// compile.cpp: a slot for a value of this type, fixed where the type says all.
Slot slot_of_type(const Type& type, Slot::Place place);
// place_values.cpp: decides where each slot lives and when pool memory goes. `overwrites` says for each step which input its first
// output may be placed on: an index, kOverwriteAny or kOverwriteNone.
constexpr int kOverwriteNone = -1, kOverwriteAny = -2;
void place_values(Program& program, const std::vector<int>& overwrites);
// connect_values.cpp: makes the values once their number is known, and tells the steps where they are. `constants`: of each slot, or null.
void connect_values(Program& program, const std::vector<TensorPtr>& constants, RankContext& rank);
// Throws Error when the device has no room for what the program needs beyond what the rank has there: constants that are still to be put
// there, and a larger arena.
void check_device_memory(const Program& program, const std::vector<TensorPtr>& constants, const RankContext& rank);
// bindings.cpp: gives what is bound its addresses of this run, and the outputs that are kept their new values.
void bind_values(Program& program, RankContext& rank);
void keep_values(Program& program, std::span<RuntimeValue> outputs, RankContext& rank);
// In the run at hand: where the output's value stays, the old one until then; null: it is handed over.
const RuntimeValue* kept_in(const Program& program, size_t output);
// milestones.cpp: finds where sets of outputs are final, and tells RankContext::reached when a run is there.
std::vector<Milestone> find_milestones(const Program& program);
void pass_milestones(Program& program, size_t first, size_t last, RankContext& rank);
// segments.cpp: finds runs of steps that do the same every time; steps that only point somewhere go along.
void find_segments(Program& program);
// A few integers are shapes more often than data: who takes them will want them on the host.
inline bool is_small_list(DType dtype, const Dims& dims) {
  return is_integer(dtype) && dims.size() <= 1 && count_of(dims) <= 64;
}
// shape_inputs.cpp: for each of `inputs`, whether its contents decide shapes in the graph.
std::vector<bool> inputs_that_decide_shapes(const Graph& graph, const std::vector<Value*>& inputs);
// The tensor's bytes under a TensorPtr's terms, and the other way round.
TensorPtr to_constant(const RuntimeValue& value);
void from_constant(const TensorPtr& tensor, RuntimeValue& value, RankContext* rank);
// The constant with bytes that the host can read; made once for a rank.
TensorPtr readable(const TensorPtr& tensor, RankContext& rank);

// control_flow.cpp: If, Loop, Scan and SequenceMap.
std::shared_ptr<ControlFlow> make_control_flow(const Node& node, const Model& model, const std::vector<Value*>& captured);
void run_control_flow(ControlFlow& control, Step& step, RankContext& rank, size_t depth);

}  // namespace fretsaw
