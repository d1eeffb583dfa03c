// The graphs that --optimizer stands for.
#include <bit>
#include <cstring>
#include <functional>
#include <map>
#include <utility>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/passes.h"
#include "graph/training/optimizer.h"

namespace fretsaw {
namespace {

using Kind = OptimizerSpec::Kind;

// What a parameter's update is computed in.
DType compute_type(DType type) {
  return type == DType::float64 ? DType::float64 : DType::float32;
}

TensorPtr make_scalar(double value, DType type) {
  auto tensor = make_tensor(type, {});
  const auto narrow = static_cast<float>(value);
  std::memcpy(mutable_data(*tensor), type == DType::float64 ? static_cast<const void*>(&value) : &narrow, tensor->bytes());
  return tensor;
}

// Writes nodes that compute in one type. Scalars that all parameters share are made once.
class UpdateWriter {
 public:
  UpdateWriter(Graph& graph, DType type) : graph_(graph), type_(type) {}

  Value* add(const std::string& op, std::vector<Value*> inputs, const std::string& name, std::vector<Attribute> attributes = {},
             const std::string& domain = "") {
    return graph_.add_node(op, std::move(inputs), {graph_.fresh_name(name)}, std::move(attributes), domain)->outputs[0];
  }
  Value* cast(Value* value, DType type, const std::string& name) {
    return add("Cast", {value}, name, {{"to", static_cast<int64_t>(type)}});
  }
  // An input's value in the type at hand.
  Value* computed(Value* input) {
    return input->type.dtype == type_ ? input : cast(input, type_, input->name + ":" + std::string(name_of(type_)));
  }

  Value* number(double value) { return number(value, type_); }
  Value* number(double value, DType type) {
    const std::string name = "constant:" + std::string(name_of(type)) + ":" + std::to_string(std::bit_cast<uint64_t>(value));
    return shared(name, [&] { return graph_.add_constant(graph_.fresh_name(name), make_scalar(value, type)); });
  }
  Value* wide(Value* scalar) {
    const std::string name = scalar->name + ":wide";
    return shared(name, [&] { return scalar->type.dtype == DType::float64 ? scalar : cast(scalar, DType::float64, name); });
  }
  Value* own(Value* scalar) {
    return shared(scalar->name + ":own", [&] { return computed(scalar); });
  }
  // What `make` computes in float64 from scalars, in the type at hand.
  Value* scalar(const std::string& name, const std::function<Value*()>& make) {
    return shared(name, [&] { return type_ == DType::float64 ? make() : cast(make(), type_, name); });
  }

  Value* input(const std::string& name, DType type, const Shape& shape, const std::string& source = "") {
    Value* value = graph_.add_value(graph_.fresh_name(name), Type::tensor(type, shape));
    value->source = source;
    graph_.inputs.push_back(value);
    return value;
  }
  Value* output(Value* value, const std::string& source = "") {
    value->source = source;
    graph_.outputs.push_back(value);
    return value;
  }

 private:
  Value* shared(const std::string& name, const std::function<Value*()>& make) {
    const auto known = shared_.find(name);
    if (known != shared_.end()) return known->second;
    Value* made = make();  // which may ask for others
    shared_[name] = made;
    return made;
  }

  Graph& graph_;
  DType type_;
  std::map<std::string, Value*> shared_;
};

// The update of one parameter. Values that belong to the parameter NAME are called "exp_avg:NAME".
class ParameterWriter {
 public:
  ParameterWriter(UpdateWriter& w, const OptimizerSpec& spec, const TrainedParameter& parameter, const UpdateScalars& scalars)
      : w_(w), spec_(spec), parameter_(parameter), scalars_(scalars), compute_(compute_type(parameter.type.dtype)) {
    decay_ = spec.weight_decay_of(parameter.name, parameter.type.shape->size());
  }

  ParameterUpdate write() {
    add_inputs();
    Value* updated = spec_.kind == Kind::sgd ? sgd() : spec_.kind == Kind::lamb ? lamb() : adam();
    add_outputs(updated);
    return update_;
  }

 private:
  void add_inputs() {
    const Shape& shape = *parameter_.type.shape;
    update_.name = parameter_.name;
    update_.parameter = w_.input(parameter_.name, parameter_.type.dtype, shape, parameter_.name);
    update_.gradient = w_.input(named("gradient"), parameter_.gradient, shape);
    for (const std::string& state : spec_.states()) update_.states.push_back(w_.input(named(state), compute_, shape));
    p_ = w_.computed(update_.parameter);
    g_ = mul(w_.computed(update_.gradient), w_.own(scalars_.scale), "scaled");
  }

  void add_outputs(Value* updated) {
    const bool rounded = parameter_.type.dtype != compute_;
    update_.new_parameter = w_.output(rounded ? w_.cast(updated, parameter_.type.dtype, named("new")) : updated, parameter_.name);
    for (Value* state : new_states_) update_.new_states.push_back(w_.output(state));
    if (parameter_.copy != DType::undefined) update_.copy = w_.output(w_.cast(updated, parameter_.copy, named("copy")), parameter_.name);
  }

  Value* sgd() {
    add_decay_to_gradient();
    Value* direction = g_;
    if (spec_.momentum != 0) {
      Value* added = spec_.dampening == 0 ? g_ : mul(g_, undampened(), "undampened");
      Value* momentum = w_.number(spec_.momentum);
      Value* buffer = sum(mul(update_.states[0], momentum, "kept"), added, "new_momentum_buffer");
      new_states_ = {buffer};
      direction = spec_.nesterov ? sum(g_, mul(buffer, momentum, "ahead"), "direction") : buffer;
    }
    return stepped(p_, mul(direction, w_.own(scalars_.lr), "step"));
  }

  Value* adam() {
    if (spec_.kind == Kind::adam) add_decay_to_gradient();
    update_moments();
    Value* denominator = sum(divide(root(new_states_[1]), root_of_correction(), "corrected_root"), w_.number(spec_.eps), "denominator");
    Value* rate = w_.scalar("rate", [&] { return w_.add("Div", {w_.wide(scalars_.lr), correction(spec_.beta1)}, "rate"); });
    Value* step = divide(mul(new_states_[0], rate, "numerator"), denominator, "step");
    Value* kept = spec_.kind == Kind::adamw && decay_ != 0 ? mul(p_, decay_factor(), "decayed") : p_;
    return stepped(kept, step);
  }

  Value* lamb() {
    update_moments();
    const auto corrected = [&](size_t state, double beta, const char* name) {
      Value* divisor = w_.scalar(std::string("correction:") + name, [&] { return correction(beta); });
      return divide(new_states_[state], divisor, name);
    };
    Value* denominator = sum(root(corrected(1, spec_.beta2, "corrected_sq")), w_.number(spec_.eps), "denominator");
    Value* direction = divide(corrected(0, spec_.beta1, "corrected"), denominator, "adaptive");
    Value* rate = w_.own(scalars_.lr);
    if (decay_ != 0) {
      direction = sum(direction, mul(p_, w_.number(decay_), "decay"), "direction");
      rate = mul(rate, trust_ratio(direction), "layer_rate");
    }
    return stepped(p_, mul(direction, rate, "step"));
  }

  void update_moments() {
    const auto average = [&](Value* old, Value* now, double beta, const std::string& name) {
      return sum(mul(old, w_.number(beta), "kept"), mul(now, w_.number(1 - beta), "added"), "new_" + name);
    };
    new_states_ = {average(update_.states[0], g_, spec_.beta1, "exp_avg"),
                   average(update_.states[1], mul(g_, g_, "squared"), spec_.beta2, "exp_avg_sq")};
  }

  void add_decay_to_gradient() {
    if (decay_ != 0) g_ = sum(g_, mul(p_, w_.number(decay_), "decay"), "decayed");
  }

  // |p| / |direction|, 1 where one of them is 0.
  Value* trust_ratio(Value* direction) {
    const auto norm = [&](Value* x, const char* name) {
      Value* square = w_.add("ReduceSumSquare", {x}, named(name), {{"keepdims", int64_t{0}}});
      for (const auto& [axis, ranks] : parameter_.cut_over)
        square = w_.add("AllReduce", {square}, named(std::string(name) + "_of_all"), {{"axis", axis}, {"group_size", int64_t{ranks}}},
                        kCommunicationDomain);
      return root(square);
    };
    Value* of_parameter = norm(p_, "parameter_square");
    Value* of_direction = norm(direction, "direction_square");
    Value* zero = w_.number(0);
    Value* both = w_.add("And",
                         {w_.add("Greater", {of_parameter, zero}, named("parameter_positive")),
                          w_.add("Greater", {of_direction, zero}, named("direction_positive"))},
                         named("both_positive"));
    return w_.add("Where", {both, divide(of_parameter, of_direction, "norm_ratio"), w_.number(1)}, named("trust_ratio"));
  }

  // --- scalars, shared by all parameters ---
  Value* wide_number(double value) { return w_.number(value, DType::float64); }
  // 1 - beta^step
  Value* correction(double beta) {
    Value* power = w_.add("Pow", {wide_number(beta), w_.wide(scalars_.step)}, "beta_power");
    return w_.add("Sub", {wide_number(1), power}, "bias_correction");
  }
  Value* root_of_correction() {
    return w_.scalar("root_of_correction", [&] { return w_.add("Sqrt", {correction(spec_.beta2)}, "root_of_correction"); });
  }
  // 1 - lr w
  Value* decay_factor() {
    return w_.scalar("decay_factor:" + std::to_string(std::bit_cast<uint64_t>(decay_)), [&] {
      return w_.add("Sub", {wide_number(1), w_.add("Mul", {w_.wide(scalars_.lr), wide_number(decay_)}, "decay")}, "decay_factor");
    });
  }
  // 1 - dampening, but 1 in step 1
  Value* undampened() {
    return w_.scalar("undampened", [&] {
      Value* first = w_.add("LessOrEqual", {w_.wide(scalars_.step), wide_number(1)}, "first_step");
      return w_.add("Where", {first, wide_number(1), wide_number(1 - spec_.dampening)}, "undampened");
    });
  }

  // --- single operators ---
  std::string named(const std::string& name) const { return name + ":" + parameter_.name; }
  Value* mul(Value* a, Value* b, const std::string& name) { return w_.add("Mul", {a, b}, named(name)); }
  Value* sum(Value* a, Value* b, const std::string& name) { return w_.add("Add", {a, b}, named(name)); }
  Value* divide(Value* a, Value* b, const std::string& name) { return w_.add("Div", {a, b}, named(name)); }
  Value* root(Value* a) { return w_.add("Sqrt", {a}, named("root")); }
  Value* stepped(Value* from, Value* step) { return w_.add("Sub", {from, step}, named("new")); }

  UpdateWriter& w_;
  const OptimizerSpec& spec_;
  const TrainedParameter& parameter_;
  const UpdateScalars& scalars_;
  DType compute_;
  double decay_ = 0;
  ParameterUpdate update_;
  Value *p_ = nullptr, *g_ = nullptr;
  std::vector<Value*> new_states_;
};

void check(const TrainedParameter& parameter) {
  const DType type = parameter.type.dtype;
  const bool wide = type == DType::float32 || type == DType::float64 || type == DType::float16 || type == DType::bfloat16;
  if (!parameter.type.is_tensor() || !parameter.type.shape || !wide)
    throw Error("the parameter '" + parameter.name + "' (" + to_string(parameter.type) + ") can't be trained", "freeze it");
}

Model new_model(const std::string& name) {
  Model model;
  model.ir_version = 11;
  model.opsets[""] = newest_opset();
  model.opsets[kCommunicationDomain] = 1;
  model.graph = std::make_shared<Graph>();
  model.graph->name = name;
  return model;
}

}  // namespace

std::vector<ParameterUpdate> append_updates(Graph& graph, const OptimizerSpec& spec, const std::vector<TrainedParameter>& parameters,
                                            const UpdateScalars& scalars) {
  std::map<DType, UpdateWriter> writers;
  std::vector<ParameterUpdate> updates;
  for (const TrainedParameter& parameter : parameters) {
    check(parameter);
    const DType type = compute_type(parameter.type.dtype);
    UpdateWriter& writer = writers.try_emplace(type, graph, type).first->second;
    updates.push_back(ParameterWriter(writer, spec, parameter, scalars).write());
  }
  return updates;
}

UpdateModel make_update(const OptimizerSpec& spec, const std::vector<TrainedParameter>& parameters) {
  UpdateModel update;
  update.model = new_model("update");
  UpdateWriter writer(*update.model.graph, DType::float32);
  update.scalars.lr = writer.input("lr", DType::float32, {});
  update.scalars.step = writer.input("step", DType::int64, {});
  update.scalars.scale = writer.input("scale", DType::float32, {});
  update.parameters = append_updates(*update.model.graph, spec, parameters, update.scalars);
  infer_shapes(update.model);
  return update;
}

}  // namespace fretsaw
