// The graphs of the end of a step: gradients are added up over ranks, and parameters updated.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "graph/communication_schemas.h"
#include "graph/passes.h"
#include "graph/passes/rewrite.h"
#include "graph/training/training_plan.h"
#include "partitioner/cost.h"
#include "partitioner/gradient_buckets.h"
#include "partitioner/training_job.h"

namespace fretsaw {
namespace {

class StepGraphWriter {
 public:
  StepGraphWriter(const TrainingJob& job, const std::map<std::string, int>& homes, Plan& plan)
      : job_(job), homes_(homes), plan_(plan), places_(places_of_new_states(plan)) {}

  StepGraphs run() {
    StepGraphs numbers;
    const int first = job_.micro_batch_graphs(), ranks = job_.pipeline_ranks();
    for (int p = 0; p < ranks; ++p) {
      std::vector<std::string> own;
      for (const std::string& name : job_.parameters)
        if (job_.rank_of(homes_.at(name)) == p) own.push_back(name);
      if (own.empty()) continue;
      numbers.reduce.emplace_back(p, first + p);
      numbers.update.emplace_back(p, first + ranks + p);
      for (int t = 0; t < job_.options.mesh.tensor; ++t) {
        add_graph(first + p, "reduce", p, {{"tensor", t}}, reduce_model(own, t));
        for (int d = 0; d < (slices_parameters() ? job_.options.mesh.data : 1); ++d)
          add_graph(first + ranks + p, "update", p, {{"data", d}, {"tensor", t}}, update_model(own, t, d));
      }
    }
    add_states();
    return numbers;
  }

 private:
  bool slices_parameters() const { return job_.training.zero == 1 || job_.training.zero == 2; }
  bool is_divided(const std::string& name) const { return job_.data.contains(name); }
  Type type_of(const std::string& name, bool with_data, int tensor) const {
    return part_type(job_.types.at(name), job_.parts_of(name, with_data), {{"tensor", tensor}});
  }

  void add_graph(int number, const std::string& kind, int pipeline, std::map<std::string, int> place, Model model) {
    PlanGraph& g = plan_.graphs.emplace_back();
    g.stage = number, g.kind = kind;
    g.file = fmt::format("rank{}.{}", pipeline, kind);
    if (kind != "update" || !slices_parameters()) place.erase("data");
    if (job_.options.mesh.tensor == 1) place.erase("tensor");
    for (const auto& [axis, index] : place) g.file += fmt::format(".{}{}", axis, index);
    g.file += ".onnx";
    g.coordinates = std::move(place);
    g.model = std::make_shared<Model>(std::move(model));
  }

  // --- reduce ---

  // What may be added up together: gradients of one type whose parts lie on the same axes.
  struct Over {
    std::string tensor;  // the axis; "": none
    bool data = false;
    DType dtype = DType::float32;
    auto operator<=>(const Over&) const = default;
  };
  Over squares_over(const std::string& name) const { return {job_.layouts.at(name).cut_over, is_divided(name), job_.types.at(name).dtype}; }

  // Sums gradients over the ranks that found parts of them, and leaves the sum of their squares over all ranks but those of other stages.
  Model reduce_model(const std::vector<std::string>& own, int tensor) const {
    Model model;
    model.ir_version = 11;
    model.opsets = {{"", newest_opset()}, {kCommunicationDomain, 1}};
    model.graph = std::make_shared<Graph>();
    Graph& g = *model.graph;
    const std::map<std::string, Value*> gradients = reduced(g, own, tensor);
    std::map<Over, std::vector<Value*>> squares;  // gradients, by where their parts are
    for (const std::string& name : own) squares[squares_over(name)].push_back(gradients.at(name));
    std::vector<Value*> sums;
    for (const auto& [over, values] : squares) {
      Value* sum = g.add_node("SquaredSum", values, {g.fresh_name("squares")}, {}, kCommunicationDomain)->outputs[0];
      if (!over.tensor.empty()) sum = all_reduce(g, sum, over.tensor, g.fresh_name("squares"));
      if (over.data) sum = all_reduce(g, sum, "data", g.fresh_name("squares"));
      sums.push_back(sum);
    }
    Value* all = sums.size() == 1 ? sums[0] : g.add_node("Sum", sums, {g.fresh_name("squares")})->outputs[0];
    all->name = std::string(kStateOutput) + kSquaredSum;
    g.outputs.push_back(all);
    infer_shapes(model);
    return model;
  }
  // How the gradient's sum over micro-batches becomes that of all ranks.
  ReducedGradient to_reduce(const std::string& name, int tensor) const {
    using OverData = GradientExchange::OverData;
    const bool divided = is_divided(name), scatters = job_.training.zero == 1 && divided;
    ReducedGradient g{name, scatters ? gradient_sum_of(name) : gradient_of(name), {}, 0};
    g.exchange.over_tensor = job_.layouts.at(name).alike_over;
    if (scatters)
      g.exchange.over_data = OverData::parts, g.exchange.dim = job_.data.at(name).dim;
    else if (job_.options.mesh.data > 1 && !arrives_divided(name))
      g.exchange.over_data = OverData::all;
    g.exchange.dtype = job_.types.at(name).dtype;
    g.bytes = type_bytes(type_of(name, arrives_divided(name), tensor));
    return g;
  }
  bool arrives_divided(const std::string& name) const { return job_.divides_gradients() && is_divided(name); }

  // The gradients' sums over all ranks.
  std::map<std::string, Value*> reduced(Graph& g, const std::vector<std::string>& own, int tensor) const {
    std::vector<ReducedGradient> gradients;
    for (const std::string& name : own) gradients.push_back(to_reduce(name, tensor));
    std::map<std::string, Value*> made;
    for (const ReducedGradient& one : gradients) {
      made[one.parameter] = g.add_value(kStateInput + one.state, type_of(one.parameter, arrives_divided(one.parameter), tensor));
      g.inputs.push_back(made[one.parameter]);
    }
    for (const GradientBucket& bucket : gradient_buckets(gradients, places_, job_.training.bucket_mb * (1 << 20))) {
      std::vector<Value*> values;
      for (const ReducedGradient& one : bucket.gradients) values.push_back(made.at(one.parameter));
      values = exchanged(g, values, bucket);
      for (size_t i = 0; i < values.size(); ++i) {
        const std::string& name = bucket.gradients[i].parameter;
        values[i]->name = kStateOutput + gradient_of(name);
        g.outputs.push_back(values[i]);
        made[name] = values[i];
      }
    }
    return made;
  }
  std::vector<Value*> exchanged(Graph& g, std::vector<Value*> values, const GradientBucket& bucket) const {
    const auto add = [&](const char* op, const char* of, std::vector<Attribute> attributes) {
      std::vector<std::string> names;
      for (const ReducedGradient& one : bucket.gradients) names.push_back(g.fresh_name(of + one.parameter));
      values = g.add_node(op, values, names, std::move(attributes), kCommunicationDomain)->outputs;
    };
    const std::string& tensor = bucket.exchange.over_tensor;
    if (!tensor.empty()) add("AllReduce", "of_tensor_ranks:", over_axis(tensor));
    if (bucket.exchange.over_data == GradientExchange::OverData::all) add("AllReduce", "of_data_ranks:", over_axis("data"));
    if (bucket.exchange.over_data == GradientExchange::OverData::parts) {
      std::vector<Attribute> attributes = over_data(bucket.gradients.front().parameter);
      attributes.push_back({"reduction", std::string("sum")});
      add("ReduceScatter", "of_data_ranks:", std::move(attributes));
    }
    return values;
  }
  std::vector<Attribute> over_axis(const std::string& axis) const {
    return {{"axis", axis}, {"group_size", int64_t{job_.options.mesh.ranks_of(axis)}}};
  }
  Value* all_reduce(Graph& g, Value* value, const std::string& axis, const std::string& name) const {
    return g.add_node("AllReduce", {value}, {name}, over_axis(axis), kCommunicationDomain)->outputs[0];
  }
  std::vector<Attribute> over_data(const std::string& name) const {
    return {
        {"axis", std::string("data")}, {"group_size", int64_t{job_.options.mesh.data}}, {"tensor_axis", int64_t{job_.data.at(name).dim}}};
  }

  // --- update ---

  Model update_model(const std::vector<std::string>& own, int tensor, int data) const {
    std::vector<TrainedParameter> trained;
    for (const std::string& name : own) {
      TrainedParameter& p = trained.emplace_back();
      p.name = name, p.type = type_of(name, true, tensor), p.gradient = p.type.dtype;
      if (const std::string& axis = job_.layouts.at(name).cut_over; !axis.empty())
        p.cut_over.emplace_back(axis, job_.options.mesh.ranks_of(axis));
      if (is_divided(name)) p.cut_over.emplace_back("data", job_.options.mesh.data);
      if (const auto copy = job_.copies.find(name); copy != job_.copies.end()) p.copy = copy->second;
    }
    UpdateModel update = make_update(job_.training.optimizer, trained);
    Graph& g = *update.model.graph;
    const auto input = [](Value* value, const std::string& name) { value->name = kStateInput + name; };
    input(update.scalars.lr, kLearningRate), input(update.scalars.step, kStep), input(update.scalars.scale, kScale);
    const std::vector<std::string> kept = job_.training.optimizer.states();
    for (const ParameterUpdate& p : update.parameters) {
      input(p.gradient, gradient_of(p.name));
      for (size_t s = 0; s < kept.size(); ++s) {
        input(p.states[s], kept[s] + ":" + p.name);
        p.new_states[s]->name = kStateOutput + kept[s] + ":" + p.name;
      }
      if (is_divided(p.name) && !job_.divides(p.name)) {
        take_part(g, p, tensor, data);
      } else {
        input(p.parameter, p.name);
        p.new_parameter->name = kStateOutput + p.name;
      }
      if (p.copy) give_copy(g, p);
    }
    sort_nodes(g);
    infer_shapes(update.model);
    return std::move(update.model);
  }
  // The parameter is there whole: the rank updates its part, and gathers the others'.
  void take_part(Graph& g, const ParameterUpdate& p, int tensor, int data) const {
    const PlanState::Part& part = job_.data.at(p.name);
    const Interval own = part.cut.parts[static_cast<size_t>(data)].at(0);
    Value* whole = g.add_value(kStateInput + p.name, type_of(p.name, false, tensor));
    std::replace(g.inputs.begin(), g.inputs.end(), p.parameter, whole);
    const auto ints = [&](const char* what, int64_t value) {
      return g.add_constant(g.fresh_name(std::string(what) + ":" + p.name), make_int64s({value}));
    };
    Node* slice = g.add_node("Slice", {whole, ints("begin", own.begin), ints("end", own.end), ints("dimension", part.dim)},
                             {g.fresh_name("own:" + p.name)});
    set_output(*slice, 0, p.parameter);
    p.parameter->name = g.fresh_name("part:" + p.name);
    gather(g, p.new_parameter, p.name, p.name);
  }
  // The copy is whole where micro-batches take it whole.
  void give_copy(Graph& g, const ParameterUpdate& p) const {
    if (is_divided(p.name) && !job_.divides_parameters())
      gather(g, p.copy, p.name, copy_of(p.name));
    else
      p.copy->name = kStateOutput + copy_of(p.name);
  }
  // Puts the whole of `part` in its place as the new value of `state`.
  void gather(Graph& g, Value* part, const std::string& parameter, const std::string& state) const {
    Value* whole = g.add_node("AllGather", {part}, {kStateOutput + state}, over_data(parameter), kCommunicationDomain)->outputs[0];
    std::replace(g.outputs.begin(), g.outputs.end(), part, whole);
  }

  // What micro-batches do not know of.
  void add_states() {
    for (const std::string& name : job_.parameters) {
      const auto add = [&](const std::string& state, DType dtype) {
        PlanState& made = plan_.states.emplace_back();
        made.name = state;
        made.type = job_.types.at(name);
        made.type.dtype = dtype;
        made.parts = job_.parts_of(name, true);
      };
      const DType own = job_.types.at(name).dtype;
      if (job_.training.zero == 1 && is_divided(name)) add(gradient_of(name), own);
      for (const std::string& kept : job_.training.optimizer.states())
        add(kept + ":" + name, own == DType::float64 ? DType::float64 : DType::float32);
    }
    plan_.states.push_back({kLearningRate, Type::tensor(DType::float32, Shape{}), nullptr, false, {}});
    plan_.states.push_back({kStep, Type::tensor(DType::int64, Shape{}), nullptr, false, {}});
    plan_.states.push_back({kScale, Type::tensor(DType::float32, Shape{}), nullptr, false, {}});
    plan_.states.push_back({kSquaredSum, Type::tensor(DType::float32, Shape{}), nullptr, false, {}});
  }

  const TrainingJob& job_;
  const std::map<std::string, int>& homes_;
  Plan& plan_;
  std::map<std::string, std::pair<int, size_t>> places_;  // of the sums of gradients
};

}  // namespace

StepGraphs add_step_graphs(const TrainingJob& job, const std::map<std::string, int>& homes, Plan& plan) {
  return StepGraphWriter(job, homes, plan).run();
}

}  // namespace fretsaw
