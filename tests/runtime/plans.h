// Small models and plans made in memory, for the tests of the runtime.
#pragma once
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "graph/communication_schemas.h"
#include "graph/passes.h"
#include "graph/plan.h"
#include "kernels/tensor_view.h"
#include "runtime/session.h"

namespace fretsaw::testing_plans {

inline std::shared_ptr<Model> new_model() {
  auto model = std::make_shared<Model>();
  model->ir_version = 10;
  model->opsets[""] = newest_opset();
  model->opsets[kCommunicationDomain] = 1;
  model->graph = std::make_shared<Graph>();
  register_communication_schemas();
  return model;
}
inline Value* add_input(Model& model, const std::string& name, DType dtype, Shape shape) {
  Value* v = model.graph->add_value(name, Type::tensor(dtype, std::move(shape)));
  model.graph->inputs.push_back(v);
  return v;
}
inline Value* add_node(Graph& graph, const std::string& op, std::vector<Value*> inputs, const std::string& output,
                       std::vector<Attribute> attributes = {}) {
  return graph.add_node(op, std::move(inputs), {output}, std::move(attributes))->outputs[0];
}
inline Attribute attribute(const std::string& name, AttributeValue value) {
  return {name, std::move(value), "", ""};
}

inline TensorPtr floats(Dims dims, const std::vector<float>& values) {
  auto t = make_tensor(DType::float32, std::move(dims));
  if (!values.empty()) std::memcpy(mutable_data(*t), values.data(), values.size() * sizeof(float));
  return t;
}
inline RuntimeValue float_value(Dims dims, const std::vector<float>& values) {
  RuntimeValue v = make_value(DType::float32, std::move(dims));
  if (!values.empty()) std::memcpy(v.tensor.data, values.data(), values.size() * sizeof(float));
  return v;
}
inline RuntimeValue int_value(Dims dims, const std::vector<int64_t>& values) {
  RuntimeValue v = make_value(DType::int64, std::move(dims));
  if (!values.empty()) std::memcpy(v.tensor.data, values.data(), values.size() * sizeof(int64_t));
  return v;
}
inline RuntimeValue bool_value(bool value) {
  RuntimeValue v = make_value(DType::boolean, {});
  *v.tensor.as<bool>() = value;
  return v;
}
template <typename T>
std::vector<T> elements(const RuntimeValue& v) {
  auto span = v.tensor.span<T>();
  return {span.begin(), span.end()};
}
// Numbers from -size to size that look random, the same each time.
inline std::vector<float> noise(size_t count, unsigned seed, float size = 1) {
  std::vector<float> values(count);
  unsigned state = seed * 2654435761u + 12345u;
  for (float& v : values) {
    state = state * 1664525u + 1013904223u;
    v = static_cast<float>(static_cast<int>(state >> 8) % 2001 - 1000) / 1000.0f * size;
  }
  return values;
}

// The stages of a chain, one a rank: fill and drain.
inline Schedule fill_drain(int stages, int micro_batches, const std::vector<Route>& routes) {
  Schedule schedule{"gpipe", {}};
  schedule.ranks.resize(static_cast<size_t>(stages));
  for (int s = 0; s < stages; ++s) {
    auto& list = schedule.ranks[static_cast<size_t>(s)];
    for (int m = 0; m < micro_batches; ++m) {
      std::vector<bool> from(static_cast<size_t>(stages)), to(static_cast<size_t>(stages));
      for (const Route& route : routes) {
        if (route.to_stage == s) from[static_cast<size_t>(route.from_stage)] = true;
        if (route.from_stage == s) to[static_cast<size_t>(route.to_stage)] = true;
      }
      for (int p = 0; p < stages; ++p) {
        if (from[static_cast<size_t>(p)]) list.push_back({Action::Kind::recv, s, m, p});
      }
      list.push_back({Action::Kind::forward, s, m, -1});
      for (int p = 0; p < stages; ++p) {
        if (to[static_cast<size_t>(p)]) list.push_back({Action::Kind::send, s, m, p});
      }
      list.push_back({Action::Kind::free, s, m, -1});
    }
  }
  return schedule;
}

// A plan over these stage graphs. Graph inputs "recv:VALUE" and outputs "send:VALUE>STAGE" become routes.
inline std::shared_ptr<Plan> make_plan(const std::vector<std::shared_ptr<Model>>& stages, int micro_batches = 1,
                                       std::map<std::string, int> batch_axes = {}) {
  auto plan = std::make_shared<Plan>();
  plan->mesh.pipeline = static_cast<int>(stages.size());
  plan->micro_batches = micro_batches;
  for (size_t s = 0; s < stages.size(); ++s) {
    plan->graphs.push_back({static_cast<int>(s), "forward", {}, "", stages[s]});
    for (const Value* v : stages[s]->graph->outputs) {
      if (v->name.rfind("send:", 0) != 0) {
        plan->outputs.push_back({v->name, v->type, static_cast<int>(s), "concat", 0});
        continue;
      }
      Route route;
      size_t at = v->name.find('>');
      route.tag = static_cast<int>(plan->routes.size()) + 1;
      route.from_stage = static_cast<int>(s);
      route.to_stage = std::stoi(v->name.substr(at + 1));
      route.value = route.source = v->name.substr(5, at - 5);
      route.from_name = v->name;
      route.to_name = "recv:" + route.value;
      plan->routes.push_back(route);
    }
    for (const Value* v : stages[s]->graph->inputs) {
      bool known = v->name.rfind("recv:", 0) == 0;
      for (const PlanInput& input : plan->inputs) known |= input.name == v->name;
      if (known) continue;
      int axis = micro_batches > 1 ? 0 : -1;
      if (batch_axes.count(v->name)) axis = batch_axes[v->name];
      plan->inputs.push_back({v->name, v->type, axis, {static_cast<int>(s)}});
    }
  }
  plan->schedule = fill_drain(static_cast<int>(stages.size()), micro_batches, plan->routes);
  return plan;
}
inline void send(Model& model, Value* value, int stage) {
  Node* node = model.graph->add_node("Send", {value}, {"send:" + value->name + ">" + std::to_string(stage)}, {}, kCommunicationDomain);
  model.graph->outputs.push_back(node->outputs[0]);
}
inline Value* receive(Model& model, const std::string& name, DType dtype, Shape shape) {
  Value* outside = add_input(model, "recv:" + name, dtype, std::move(shape));
  return model.graph->add_node("Recv", {outside}, {name}, {}, kCommunicationDomain)->outputs[0];
}

}  // namespace fretsaw::testing_plans
