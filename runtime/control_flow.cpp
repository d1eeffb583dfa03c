// If, Loop, Scan and SequenceMap.
#include "runtime/control_flow.h"

#include <algorithm>

#include "graph/errors.h"

namespace fretsaw {
namespace {

using Kind = RuntimeValue::Kind;

// A graph of its own: what the body captures becomes inputs after its own ones, or constants where it is known.
Body make_body(const Graph& graph, const Model& outer, const std::vector<Value*>& captured, size_t first_capture) {
  auto model = std::make_shared<Model>();
  model->path = outer.path;
  model->ir_version = outer.ir_version;
  model->opsets = outer.opsets;
  model->functions = outer.functions;
  model->graph = clone(graph);
  Graph& copy = *model->graph;
  copy.parent = nullptr;
  Body body;
  body.own_inputs = copy.inputs.size();
  Node holder;
  holder.attributes.push_back({"body", model->graph, "", ""});
  for (Value* v : captures(holder)) {
    Value* inside;
    if (v->constant) {
      inside = copy.add_constant(copy.fresh_name(v->name), v->constant);
    } else {
      auto place = std::find(captured.begin(), captured.end(), v);
      if (place == captured.end()) throw Error("a body uses '" + v->name + "', which is not made before it", "check the model");
      inside = copy.add_value(copy.fresh_name(v->name), v->type);
      copy.inputs.push_back(inside);
      body.captured.push_back(first_capture + static_cast<size_t>(place - captured.begin()));
    }
    inside->source = v->source_name();
    replace_uses(copy, v, inside);
  }
  body.results.resize(copy.outputs.size());
  std::vector<Value*> inputs = copy.inputs;
  body.cache = std::make_unique<ProgramCache>(model, inputs, /*generalise=*/true);
  body.arguments.assign(inputs.size(), nullptr);
  return body;
}

bool read_bool(const RuntimeValue& value) {
  if (value.kind != Kind::tensor || value.tensor.count() != 1) throw Error("the condition is not one boolean", "give it one element");
  return *value.tensor.as<const uint8_t>() != 0;
}

int64_t read_int(const RuntimeValue& value) {
  if (value.kind != Kind::tensor || value.tensor.count() != 1) throw Error("the trip count is not one number", "give it one element");
  return value.tensor.dtype == DType::int32 ? *value.tensor.as<const int32_t>() : *value.tensor.as<const int64_t>();
}

const RuntimeValue* input_of(const Step& step, size_t i) {
  if (i >= step.input_values.size() || !step.input_values[i] || step.inputs[i] < 0) return nullptr;
  return step.input_values[i]->kind == Kind::absent ? nullptr : step.input_values[i];
}

void set_output(Step& step, size_t i, RuntimeValue value) {
  if (i < step.output_values.size() && step.output_values[i]) *step.output_values[i] = std::move(value);
}

// What is carried must own its memory: the next iteration writes over the last one's.
RuntimeValue kept(const RuntimeValue& value, RankContext& rank) {
  if (value.kind != Kind::absent && owns_memory(value)) return value;
  RuntimeValue copy;
  if (value.kind != Kind::absent) copy_pooled(rank.memory.pool, value, copy);
  return copy;
}

void run_if(ControlFlow& control, Step& step, RankContext& rank, size_t depth) {
  const RuntimeValue* condition = input_of(step, 0);
  if (!condition) throw Error("the condition is left out", "give the node its input");
  Body& body = control.bodies[read_bool(*condition) ? 0 : 1];
  body.capture(step);
  body.run(rank, depth);
  for (size_t i = 0; i < body.results.size(); ++i) set_output(step, i, std::move(body.results[i]));
}

// v_0 .. v_N-1 are carried; what the body makes besides is stacked over the iterations.
void run_loop(ControlFlow& control, Step& step, RankContext& rank, size_t depth) {
  Body& body = control.bodies[0];
  const RuntimeValue *trips = input_of(step, 0), *condition = input_of(step, 1);
  int64_t limit = trips ? read_int(*trips) : INT64_MAX;
  bool go_on = condition ? read_bool(*condition) : true;
  size_t carried = control.node->inputs.size() < 2 ? 0 : control.node->inputs.size() - 2;
  if (body.own_inputs != carried + 2 || body.results.size() < carried + 1) {
    throw Error("the body has " + std::to_string(body.own_inputs) + " inputs and " + std::to_string(body.results.size()) + " outputs for " +
                    std::to_string(carried) + " carried values",
                "a body takes the iteration, the condition and the carried values, and gives the condition and them");
  }
  std::vector<RuntimeValue> state(carried);
  for (size_t i = 0; i < carried; ++i) {
    if (const RuntimeValue* initial = input_of(step, i + 2)) state[i] = kept(*initial, rank);
  }
  std::vector<std::vector<RuntimeValue>> stacked(body.results.size() - carried - 1);
  RuntimeValue iteration = make_value(DType::int64, {}), flag = make_value(DType::boolean, {});
  body.capture(step);
  body.arguments[0] = &iteration;
  body.arguments[1] = &flag;
  for (size_t v = 0; v < carried; ++v) body.arguments[v + 2] = &state[v];
  *flag.tensor.as<uint8_t>() = 1;
  for (int64_t i = 0; i < limit && go_on; ++i) {
    *iteration.tensor.as<int64_t>() = i;
    body.run(rank, depth);
    go_on = read_bool(body.results[0]);
    for (size_t v = 0; v < carried; ++v) state[v] = std::move(body.results[v + 1]);
    for (size_t s = 0; s < stacked.size(); ++s) stacked[s].push_back(std::move(body.results[carried + 1 + s]));
  }
  for (size_t s = 0; s < stacked.size(); ++s) {
    if (carried + s >= step.output_values.size() || !step.output_values[carried + s]) continue;
    RuntimeValue whole;
    Type part = stacked[s].empty() ? body.type_of_result(carried + 1 + s, rank) : Type{};
    stack_parts(stacked[s], 0, false, part, whole, rank);
    set_output(step, carried + s, std::move(whole));
  }
  for (size_t v = 0; v < carried; ++v) set_output(step, v, std::move(state[v]));
}

// state and one slice of each scan input -> state and one slice of each scan output.
void run_scan(ControlFlow& control, Step& step, RankContext& rank, size_t depth) {
  Body& body = control.bodies[0];
  const Node& node = *control.node;
  auto scans = static_cast<size_t>(std::max<int64_t>(node.get_int("num_scan_inputs", 0), 0));
  if (scans == 0 || scans > node.inputs.size() || body.own_inputs != node.inputs.size()) {
    throw Error("num_scan_inputs does not fit its inputs and body", "check the node");
  }
  size_t carried = node.inputs.size() - scans;
  if (body.results.size() < carried) throw Error("the body gives fewer values than it carries", "check the body's outputs");
  auto in_axes = node.get_ints("scan_input_axes"), in_directions = node.get_ints("scan_input_directions");
  auto out_axes = node.get_ints("scan_output_axes"), out_directions = node.get_ints("scan_output_directions");
  auto at_or_zero = [](const std::vector<int64_t>& v, size_t i) { return i < v.size() ? v[i] : 0; };

  int64_t length = -1;
  std::vector<int64_t> axes(scans);
  for (size_t s = 0; s < scans; ++s) {
    const RuntimeValue* whole = input_of(step, carried + s);
    if (!whole || whole->kind != Kind::tensor) throw Error("scan input " + std::to_string(s) + " is no tensor", "check the node's inputs");
    auto dims = static_cast<int64_t>(whole->tensor.dims.size());
    axes[s] = at_or_zero(in_axes, s) + (at_or_zero(in_axes, s) < 0 ? dims : 0);
    if (axes[s] < 0 || axes[s] >= dims)
      throw Error("the axis of scan input " + std::to_string(s) + " lies outside its shape", "check scan_input_axes");
    int64_t own = whole->tensor.dims[static_cast<size_t>(axes[s])];
    if (length >= 0 && own != length) {
      throw Error("scan inputs have " + std::to_string(length) + " and " + std::to_string(own) + " slices", "they must have as many");
    }
    length = own;
  }
  std::vector<RuntimeValue> state(carried), slices(scans);
  for (size_t i = 0; i < carried; ++i) {
    if (const RuntimeValue* initial = input_of(step, i)) state[i] = kept(*initial, rank);
  }
  std::vector<std::vector<RuntimeValue>> stacked(body.results.size() - carried);
  body.capture(step);
  for (int64_t t = 0; t < length; ++t) {
    for (size_t v = 0; v < carried; ++v) body.arguments[v] = &state[v];
    for (size_t s = 0; s < scans; ++s) {
      take_slice(*input_of(step, carried + s), axes[s], at_or_zero(in_directions, s) ? length - 1 - t : t, slices[s], rank);
      body.arguments[carried + s] = &slices[s];
    }
    body.run(rank, depth);
    for (size_t v = 0; v < carried; ++v) state[v] = std::move(body.results[v]);
    for (size_t s = 0; s < stacked.size(); ++s) stacked[s].push_back(std::move(body.results[carried + s]));
  }
  for (size_t v = 0; v < carried; ++v) set_output(step, v, std::move(state[v]));
  for (size_t s = 0; s < stacked.size(); ++s) {
    RuntimeValue whole;
    stack_parts(stacked[s], at_or_zero(out_axes, s), at_or_zero(out_directions, s) != 0,
                body.cache->model().graph->outputs[carried + s]->type, whole, rank);
    set_output(step, carried + s, std::move(whole));
  }
}

// The body for each item of the first sequence, with the items of other sequences beside it and tensors as they are.
void run_sequence_map(ControlFlow& control, Step& step, RankContext& rank, size_t depth) {
  Body& body = control.bodies[0];
  size_t count = control.node->inputs.size();
  const RuntimeValue* first = input_of(step, 0);
  if (!first || first->kind != Kind::sequence || body.own_inputs != count) {
    throw Error("the first input must be a sequence, and the body must take as many inputs as the node", "check the node");
  }
  std::vector<RuntimeValue> made(body.results.size());
  for (size_t o = 0; o < made.size(); ++o) {
    made[o].kind = Kind::sequence;
    made[o].element = body.cache->model().graph->outputs[o]->type.dtype;
  }
  body.capture(step);
  for (size_t i = 0; i < first->items.size(); ++i) {
    for (size_t a = 0; a < count; ++a) {
      const RuntimeValue* value = input_of(step, a);
      if (value && value->kind == Kind::sequence) {
        if (i >= value->items.size())
          throw Error("input " + std::to_string(a) + " has fewer items than the first", "sequences must be as long");
        value = &value->items[i];
      }
      body.arguments[a] = value;
    }
    body.run(rank, depth);
    for (size_t o = 0; o < made.size(); ++o) {
      made[o].element = body.results[o].tensor.dtype;
      made[o].items.push_back(std::move(body.results[o]));
    }
  }
  for (size_t o = 0; o < made.size(); ++o) set_output(step, o, std::move(made[o]));
}

}  // namespace

void Body::capture(const Step& step) {
  for (size_t i = 0; i < captured.size(); ++i) arguments[own_inputs + i] = step.input_values[captured[i]];
}

Type Body::type_of_result(size_t i, RankContext& rank) {
  const Type& declared = cache->model().graph->outputs[i]->type;
  try {
    Program& program = cache->get(arguments, rank);
    const Slot& slot = program.slots[static_cast<size_t>(program.outputs[i])];
    if (slot.fixed) return Type::tensor(slot.dtype, shape_of(slot.dims));
    const Type& inferred = program.model->graph->outputs[i]->type;
    return inferred.is_tensor() && inferred.shape ? inferred : declared;
  } catch (const Error&) {
    return declared;  // the body is never run, so its faults are none
  }
}

void Body::run(RankContext& rank, size_t depth) {
  cache->run(arguments, results, rank, depth);
}

std::shared_ptr<ControlFlow> make_control_flow(const Node& node, const Model& model, const std::vector<Value*>& captured) {
  auto control = std::make_shared<ControlFlow>();
  control->node = &node;
  std::vector<const char*> names = {"body"};
  if (node.op == "If") names = {"then_branch", "else_branch"};
  control->kind = node.op == "If"     ? ControlFlow::Kind::conditional
                  : node.op == "Loop" ? ControlFlow::Kind::loop
                  : node.op == "Scan" ? ControlFlow::Kind::scan
                                      : ControlFlow::Kind::sequence_map;
  for (const char* name : names) {
    GraphPtr graph = node.get_graph(name);
    if (!graph) throw Error(std::string("it has no ") + name, "give the node its graph attribute");
    control->bodies.push_back(make_body(*graph, model, captured, node.inputs.size()));
  }
  return control;
}

void run_control_flow(ControlFlow& control, Step& step, RankContext& rank, size_t depth) {
  switch (control.kind) {
    case ControlFlow::Kind::conditional:
      return run_if(control, step, rank, depth);
    case ControlFlow::Kind::loop:
      return run_loop(control, step, rank, depth);
    case ControlFlow::Kind::scan:
      return run_scan(control, step, rank, depth);
    case ControlFlow::Kind::sequence_map:
      return run_sequence_map(control, step, rank, depth);
  }
}

}  // namespace fretsaw
