// Compiling a specialised graph: kernels made, layouts agreed, steps in order.
//
//   Conv -> Relu (one group)     step 0  Conv+Relu   takes plain, leaves nChw8c
//   MaxPool                      step 1  MaxPool     takes nChw8c, leaves nChw8c
//   Shape-only view              step 2  reorder     nChw8c -> plain
//                                step 3  alias
#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_set>

#include "graph/errors.h"
#include "kernels/cpu/reorder.h"
#include "runtime/collectives.h"
#include "runtime/join_steps.h"
#include "runtime/program.h"
#include "runtime/sums_with_norms.h"

namespace fretsaw {
namespace {

using Place = Slot::Place;

class Compiler {
 public:
  // `border`: the graph that was specialised, which still has its Recv and Send nodes.
  Compiler(Specialised specialised, const Graph& border, RankContext& rank, std::shared_ptr<Device> device, const BindingSpec& binding)
      : specialised_(std::move(specialised)), border_(border), rank_(rank), device_(device.get()), program_(std::make_unique<Program>()) {
    program_->model = specialised_.model;
    program_->device = std::move(device);
    program_->binds = device_ && binding.binds;
    program_->kept = binding.kept, program_->places = binding.places;
    program_->awaited = binding.awaited, program_->consumed = binding.consumed;
    if (program_->binds) local_.insert(binding.local.begin(), binding.local.end());
  }

  // `templates`: the inputs before the graph was specialised.
  std::unique_ptr<Program> run(const std::vector<Value*>& templates, const std::vector<InputSpec>& specs) {
    Graph& graph = *program_->model->graph;
    consumers_ = consumers_of(graph);
    for (const Value* v : graph.outputs) graph_outputs_.insert(v);
    add_inputs(templates, specs);
    if (device_) {
      host_ = find_host_nodes(graph, device_->kernels(), device_, rank_.tf32);
      program_->fallbacks = host_.fallbacks;
    }
    for (const Unit& unit : units(graph)) add_unit(unit);
    for (size_t i = 0; i < graph.outputs.size(); ++i) {
      const Value* v = graph.outputs[i];
      const bool as_it_lies = local_.contains(i) && memory_of(v) == Memory::device;
      program_->outputs.push_back(
          slot_in(v, as_it_lies ? slot_at(main_slot(v)).layout : layout_of_output(*border_.outputs[i]), memory_of(v)));
    }
    if (device_) inputs_first();
    if (device_ && !rank_.detect_anomaly) join_alike_steps(*program_, overwrites_);
    place_values(*program_, overwrites_);
    if (device_) check_device_memory(*program_, constants_, rank_);
    connect_values(*program_, constants_, rank_);
    program_->milestones = find_milestones(*program_);
    if (device_) find_segments(*program_);
    return std::move(program_);
  }

 private:
  using Unit = std::vector<const Node*>;

  int add_slot(Slot slot) {
    program_->slots.push_back(std::move(slot));
    constants_.push_back(nullptr);
    return static_cast<int>(program_->slots.size()) - 1;
  }

  void add_inputs(const std::vector<Value*>& templates, const std::vector<InputSpec>& specs) {
    for (size_t i = 0; i < specialised_.inputs.size(); ++i) {
      const Value* v = specialised_.inputs[i];
      int slot = -1;
      if (v && (consumers_.count(v) || graph_outputs_.count(v))) {
        Slot made = slot_of_type(v->type, Place::input);
        made.external = true;
        made.layout = layout_of_input(*templates[i], border_);
        if (program_->binds && made.fixed && specs[i].memory == Memory::device) made.memory = Memory::device, made.layout = specs[i].layout;
        slot = add_slot(std::move(made));
        main_slot_[v] = slot;
      }
      program_->inputs.push_back(slot);
    }
  }

  // The slot that holds the value, as its producer leaves it.
  int main_slot(const Value* v) {
    auto found = main_slot_.find(v);
    if (found != main_slot_.end()) return found->second;
    if (!v->constant) throw Error("value '" + v->name + "' is used before it is made", "this is a fault of the model");
    Slot slot = slot_of_type(Type::tensor(v->constant->dtype, shape_of(v->constant->dims)), Place::constant);
    slot.external = true;
    int made = add_slot(std::move(slot));
    constants_[static_cast<size_t>(made)] = v->constant;
    main_slot_[v] = made;
    return made;
  }

  Slot& slot_at(int number) { return program_->slots[static_cast<size_t>(number)]; }
  // Where the value's producer leaves it.
  Memory memory_of(const Value* v) { return slot_at(main_slot(v)).memory; }

  // The slot that holds the value in this layout and memory; a step that copies or reorders is added where there is none yet.
  int slot_in(const Value* v, Layout layout, Memory memory = Memory::host) {
    int from = main_slot(v);
    if (slot_at(from).memory != memory) from = copied_slot(v, from, memory);
    if (slot_at(from).layout == layout) return from;
    auto [found, added] = reordered_.try_emplace({v, layout, memory}, -1);
    if (!added) return found->second;
    Slot slot = slot_at(from);
    slot.layout = layout;
    slot.place = Place::pool;
    slot.external = false;
    int made = add_slot(std::move(slot));
    found->second = made;
    Step step;
    step.node = v->producer;
    step.reorders = true;
    step.on_device = memory == Memory::device;
    step.inputs = {from};
    step.outputs = {made};
    step.kernel.run = [layout](RunContext& r) {
      const TensorView& x = r.input(0);
      TensorView& y = r.output(0, x.dims, x.dtype, layout);
      if (y.memory == Memory::device) {
        r.device().reorder(x, y);
      } else {
        reorder(x, y);
      }
    };
    add_step(std::move(step));
    return made;
  }

  // The value of slot `from` in the other memory, as it lies there. Constants are uploaded when the program is compiled.
  int copied_slot(const Value* v, int from, Memory memory) {
    auto [found, added] = copied_.try_emplace(from, -1);
    if (!added) return found->second;
    Slot slot = slot_at(from);
    slot.memory = memory;
    if (v->constant) {
      found->second = add_slot(std::move(slot));
      constants_[static_cast<size_t>(found->second)] = v->constant;
      return found->second;
    }
    slot.place = Place::pool;
    slot.external = false;
    const int made = add_slot(std::move(slot));
    copied_[from] = made;
    Step step;
    step.kind = Step::Kind::copy;
    step.node = v->producer;
    step.inputs = {from};
    step.outputs = {made};
    add_step(std::move(step));
    return made;
  }

  void add_step(Step step, int overwrites = kOverwriteNone) {
    program_->steps.push_back(std::move(step));
    overwrites_.push_back(rank_.detect_anomaly ? kOverwriteNone : overwrites);  // its inputs are looked at, too
  }

  // Single nodes and those that run together, each such unit at the place of its last member.
  std::vector<Unit> units(const Graph& graph) {
    if (rank_.detect_anomaly) {  // each node is looked at
      std::vector<Unit> nodes;
      for (const Node* node : graph.nodes) nodes.push_back({node});
      return nodes;
    }
    if (!device_) {
      return host_steps(graph, consumers_, graph_outputs_, [&](const KernelRecord& record, const Unit& group) {
        return !record.unsupported || record.unsupported(context(group)).empty();
      });
    }
    std::vector<Unit> steps = device_steps(graph, host_, consumers_, graph_outputs_, *device_, rank_.tf32);
    join_norms_to_sums(steps, host_, consumers_, graph_outputs_, rank_);
    return steps;
  }

  CompileContext context(const Unit& unit) {
    const bool on_device = runs_on_device(unit);
    CompileContext c =
        on_device ? device_context(unit, consumers_, graph_outputs_, *device_, rank_.tf32) : make_context(unit, rank_.threads);
    if (!on_device)
      for (TensorPtr& constant : c.constants) constant = readable(constant, rank_);
    for (size_t i = 0; i < c.inputs.size(); ++i) {
      if (c.inputs[i] && !c.constants[i]) c.offered[i] = slot_at(main_slot(c.inputs[i])).layout;
    }
    return c;
  }
  bool runs_on_device(const Unit& unit) const { return device_ && !is_control_flow(*unit.front()) && !host_.nodes.count(unit.front()); }

  void add_unit(const Unit& unit) {
    try {
      if (is_control_flow(*unit.front())) {
        add_control_flow(*unit.front());
      } else if (is_collective(*unit.front())) {
        add_collective(unit);
      } else if (runs_on_device(unit)) {
        add_device_kernel(unit);
      } else {
        add_kernel(unit);
      }
    } catch (const Error& e) {
      throw e.at_node(unit.front()->name, unit.front()->op);
    }
  }

  void add_kernel(const Unit& unit) {
    const Node& node = *unit.front();
    const KernelRecord* record = cpu_kernels().find(node.op, node.domain);
    if (!record || !record->make) {
      throw Error("there is no CPU kernel for the operator " + (node.domain.empty() ? "" : node.domain + ".") + node.op,
                  "replace the operator, or give the model a function body for it");
    }
    if (unit.size() == 1 && add_aliases(node, record->view)) return;
    CompileContext c = context_for_kernel(unit, *record);
    Step step;
    step.kernel = record->make(c);
    step.view = unit.size() == 1 && record->view;
    const int overwrites = record->in_place && unit.size() == 1 ? kOverwriteAny : step.kernel.overwrites;
    add_kernel_step(unit, c, std::move(step), overwrites);
  }

  void add_device_kernel(const Unit& unit) {
    const Node& node = *unit.front();
    const KernelRecord& record = *device_->kernels().find(node.op, node.domain);
    if (unit.size() == 1 && add_aliases(node, record.view, Memory::device)) return;
    CompileContext c = context(unit);
    if (const std::string reason = why_unsupported_on_device(c); !reason.empty())
      throw Error("the kernel on " + device_->name() + " does not support " + reason, "report this as a fault");
    Step step;
    step.on_device = true;
    step.kernel = record.make(c);
    step.view = unit.size() == 1 && record.view;
    step.elementwise = std::all_of(unit.begin(), unit.end(), [&](const Node* member) {
      const KernelRecord* own = device_->kernels().find(member->op, member->domain);
      return own && own->in_place;
    });
    const int overwrites = record.in_place && unit.size() == 1 ? kOverwriteAny : step.kernel.overwrites;
    add_kernel_step(unit, c, std::move(step), overwrites, record.host_inputs);
  }

  void add_collective(const Unit& unit) {
    CompileContext c = context(unit);
    Step step;
    step.on_device = device_ != nullptr;
    step.kernel = unit.size() > 1 ? make_sum_with_norm(c, rank_) : make_collective(c, rank_);
    step.elementwise = unit.size() == 1 && unit.front()->op == "AllReduce";
    const int overwrites = step.kernel.overwrites;
    add_kernel_step(unit, c, std::move(step), overwrites);
  }

  // Gives the step its inputs in the layouts and the memory it wants, and slots for its outputs.
  void add_kernel_step(const Unit& unit, const CompileContext& c, Step step, int overwrites, const std::vector<size_t>& host_inputs = {}) {
    step.node = step.on_device ? unit.front() : unit.back();  // named in errors; on the host its outputs are the step's
    const auto contains = [](const std::vector<size_t>& list, size_t i) { return std::find(list.begin(), list.end(), i) != list.end(); };
    for (size_t i = 0; i < c.inputs.size(); ++i) {
      if (!c.inputs[i] || contains(step.kernel.packed_inputs, i)) {
        step.inputs.push_back(-1);
        continue;
      }
      Layout wanted = i < step.kernel.input_layouts.size() ? step.kernel.input_layouts[i] : Layout::plain;
      const bool on_host = !step.on_device || contains(host_inputs, i);
      step.inputs.push_back(device_ && !step.on_device && reads_only_dims(*unit.front())
                                ? main_slot(c.inputs[i])
                                : slot_in(c.inputs[i], wanted, on_host ? Memory::host : Memory::device));
    }
    for (size_t i = 0; i < c.outputs.size(); ++i) {
      if (!c.outputs[i]) {
        step.outputs.push_back(-1);
        continue;
      }
      Slot slot = slot_of_type(c.outputs[i]->type, Place::pool);
      if (step.on_device) slot.memory = Memory::device;
      if (i < step.kernel.output_layouts.size()) slot.layout = step.kernel.output_layouts[i];
      slot.external = step.view && program_->slots[static_cast<size_t>(step.inputs[0])].external;
      step.outputs.push_back(add_slot(std::move(slot)));
      main_slot_[c.outputs[i]] = step.outputs.back();
    }
    add_step(std::move(step), overwrites);
  }

  CompileContext context_for_kernel(const Unit& unit, const KernelRecord& record) {
    CompileContext c = context(unit);
    if (record.unsupported) {
      std::string reason = record.unsupported(c);
      if (!reason.empty()) throw Error("the CPU kernel does not support " + reason, "convert the model's types");
    }
    return c;
  }

  // Outputs that are bytes of the input cost nothing: their slots point where its slot points, in the memory that is wanted.
  bool add_aliases(const Node& node, bool view, std::optional<Memory> wanted = std::nullopt) {
    const Value* in = node.input(0);
    if (!in || !(view || node.is("Split"))) return false;
    const Memory memory = wanted.value_or(memory_of(in));
    const std::vector<size_t> offsets = offsets_in_input(node, view, slot_at(main_slot(in)));
    for (size_t i = 0; i < offsets.size(); ++i)
      add_alias_step(node, in, node.outputs[i], slot_of_type(node.outputs[i]->type, Place::pool), offsets[i], memory);
    return !offsets.empty();
  }

  void add_alias_step(const Node& node, const Value* in, const Value* out, Slot slot, size_t offset, Memory memory) {
    Step step;
    step.kind = Step::Kind::alias;
    step.node = &node;
    step.alias_offset = offset;
    slot.memory = memory;
    step.inputs = {slot_in(in, Layout::plain, memory)};
    slot.external = program_->slots[static_cast<size_t>(step.inputs[0])].external;
    step.outputs = {add_slot(std::move(slot))};
    main_slot_[out] = step.outputs[0];
    add_step(std::move(step));
  }

  void add_control_flow(const Node& node) {
    Step step;
    step.kind = Step::Kind::control;
    step.node = &node;
    std::vector<Value*> captured;
    for (Value* v : captures(node)) {
      if (!v->constant) captured.push_back(v);  // constants go into the bodies
    }
    for (const Value* v : node.inputs) step.inputs.push_back(v ? slot_in(v, Layout::plain) : -1);
    for (const Value* v : captured) step.inputs.push_back(slot_in(v, Layout::plain));
    for (const Value* v : node.outputs) {
      if (!v) {
        step.outputs.push_back(-1);
        continue;
      }
      step.outputs.push_back(add_slot(slot_of_type(v->type, Place::pool)));
      main_slot_[v] = step.outputs.back();
    }
    step.control = make_control_flow(node, *program_->model, captured);
    add_step(std::move(step));
  }

  // Inputs go up before anything else, so that what follows is one segment.
  void inputs_first() {
    std::vector<std::pair<Step, int>> first, rest;
    for (size_t i = 0; i < program_->steps.size(); ++i) {
      Step& step = program_->steps[i];
      const bool input = step.kind == Step::Kind::copy && slot_at(step.inputs[0]).place == Place::input;
      (input ? first : rest).emplace_back(std::move(step), overwrites_[i]);
    }
    first.insert(first.end(), std::make_move_iterator(rest.begin()), std::make_move_iterator(rest.end()));
    for (size_t i = 0; i < first.size(); ++i) {
      program_->steps[i] = std::move(first[i].first);
      overwrites_[i] = first[i].second;
    }
  }

  Specialised specialised_;
  const Graph& border_;
  RankContext& rank_;
  Device* device_;
  HostNodes host_;
  std::unordered_set<size_t> local_;  // outputs that only other programs of the rank take
  std::unique_ptr<Program> program_;
  Consumers consumers_;
  std::unordered_set<const Value*> graph_outputs_;
  std::unordered_map<const Value*, int> main_slot_;
  std::map<std::tuple<const Value*, Layout, Memory>, int> reordered_;
  std::map<int, int> copied_;         // from a slot to that with the value in the other memory
  std::vector<TensorPtr> constants_;  // by slot
  std::vector<int> overwrites_;       // by step
};

}  // namespace

Slot slot_of_type(const Type& type, Slot::Place place) {
  Slot slot;
  slot.place = place;
  if (type.is_tensor() && type.dtype != DType::undefined && type.shape && is_static(*type.shape)) {
    slot.fixed = true;
    slot.dtype = type.dtype;
    slot.dims = dims_of(*type.shape);
  }
  return slot;
}

std::unique_ptr<Program> compile_program(const Model& model, const std::vector<Value*>& inputs, const std::vector<InputSpec>& specs,
                                         const std::set<std::string>& distrusted, RankContext& rank, std::shared_ptr<Device> device,
                                         const BindingSpec& binding) {
  ++rank.compiled_programs;
  Specialised specialised = specialise(model, inputs, specs, distrusted, rank, device ? &device->kernels() : nullptr);
  return Compiler(std::move(specialised), *model.graph, rank, std::move(device), binding).run(inputs, specs);
}

}  // namespace fretsaw
