// Losses, written with plain operators.
#include "graph/training/loss.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/passes.h"
#include "graph/training/spec.h"

namespace fretsaw {
namespace {

using Kind = LossSpec::Kind;
using Reduction = LossSpec::Reduction;

// --- the option ---

struct KindRow {
  std::string_view name;
  Kind kind;
  std::vector<std::string_view> keys;
};
const std::vector<KindRow>& kinds() {
  static const std::vector<KindRow> rows = {
      {"softmax_cross_entropy", Kind::softmax_cross_entropy, {"ignore_index", "label_smoothing", "output", "reduction"}},
      {"mse", Kind::mse, {"output", "reduction"}},
      {"l1", Kind::l1, {"output", "reduction"}},
      {"bce_with_logits", Kind::bce_with_logits, {"output", "reduction"}},
      {"output", Kind::output, {"reduction"}}};
  return rows;
}

Reduction parse_reduction(const Spec& spec, const std::string& value) {
  if (value == "mean") return Reduction::mean;
  if (value == "sum") return Reduction::sum;
  spec.fail("there is no reduction '" + value + "'", "allowed: mean, sum");
}

// "NAME", "NAME,reduction=sum", "reduction=sum": a name may hold any character.
std::string take_output_name(Spec& spec) {
  const std::string key = "reduction=";
  std::string& rest = spec.rest;
  size_t at = rest.rfind(',');
  at = at == std::string::npos ? 0 : at + 1;
  if (rest.compare(at, key.size(), key) != 0) return std::exchange(rest, "");
  const std::string name = rest.substr(0, at == 0 ? 0 : at - 1);
  rest = rest.substr(at);
  return name;
}

// --- the nodes ---

class LossWriter {
 public:
  LossWriter(Graph& graph, Value* output) : graph_(graph), output_(output) {
    type_ = output->type.dtype == DType::float64 ? DType::float64 : DType::float32;
  }

  Value* add(const std::string& op, std::vector<Value*> inputs, const std::string& name, std::vector<Attribute> attributes = {}) {
    const std::string fresh = graph_.fresh_name("loss/" + name);
    return graph_.add_node(op, std::move(inputs), {fresh}, std::move(attributes))->outputs[0];
  }
  Value* cast(Value* value, DType type, const std::string& name) {
    return add("Cast", {value}, name, {{"to", static_cast<int64_t>(type)}});
  }
  Value* integers(TensorPtr tensor, const std::string& name) { return graph_.add_constant(graph_.fresh_name("loss/" + name), tensor); }
  Value* number(double value, const std::string& name) {
    auto t = make_tensor(type_, {});
    if (type_ == DType::float64) *reinterpret_cast<double*>(mutable_data(*t)) = value;
    if (type_ == DType::float32) *reinterpret_cast<float*>(mutable_data(*t)) = static_cast<float>(value);
    return graph_.add_constant(graph_.fresh_name("loss/" + name), t);
  }
  Value* target(DType type, Shape shape) {
    Value* value = graph_.add_value(graph_.fresh_name("target"), Type::tensor(type, std::move(shape)));
    graph_.inputs.push_back(value);
    return value;
  }
  Value* total(Value* value, const std::string& name) { return add("ReduceSum", {value}, name, {{"keepdims", int64_t{0}}}); }

  Value* add_own(const std::string& op, std::vector<Value*> inputs, const std::string& name, std::vector<Attribute> attributes) {
    return graph_.add_node(op, std::move(inputs), {graph_.fresh_name("loss/" + name)}, std::move(attributes), kCommunicationDomain)
        ->outputs[0];
  }

  Value* output() { return output_; }
  // The output in the type that losses are computed in.
  Value* wide_output() { return output_->type.dtype == type_ ? output_ : cast(output_, type_, "output"); }
  const Shape& shape() const { return *output_->type.shape; }
  DType type() const { return type_; }

  // Under a name that users see, as an output of the graph.
  Value* show(Value* value, const std::string& name) {
    Value* shown = graph_.add_node("Identity", {value}, {graph_.fresh_name(name)})->outputs[0];
    graph_.outputs.push_back(shown);
    return shown;
  }
  Graph& graph() { return graph_; }

 private:
  Graph& graph_;
  Value* output_;
  DType type_;
};

// Class indexes [..., 1] that can be gathered by. `valid`: which of them count; null: all do.
struct Classes {
  Value* index = nullptr;
  Value* valid = nullptr;
};
Classes make_classes(LossWriter& w, const LossSpec& spec, Value* target) {
  Classes classes;
  Value* index = w.add("Unsqueeze", {target, w.integers(make_int64s({-1}), "axis")}, "index");
  // Gathering would count a negative index from the end: one that is not to be ignored is made too large, and so found out.
  const Dim& count = w.shape().back();
  Value* zero = w.integers(make_int64(0), "zero");
  Value* too_large = w.integers(make_int64(count.known() ? count.value : std::numeric_limits<int64_t>::max()), "too_large");
  classes.index = w.add("Where", {w.add("Less", {index, zero}, "negative"), too_large, index}, "checked_index");
  if (!spec.ignore_index) return classes;
  Value* ignored = w.add("Equal", {index, w.integers(make_int64(*spec.ignore_index), "ignore_index")}, "ignored");
  classes.valid = w.add("Not", {ignored}, "valid");
  classes.index = w.add("Where", {classes.valid, classes.index, zero}, "valid_index");
  return classes;
}

// The same by one operator for the rows.
void row_cross_entropy(LossWriter& w, const LossSpec& spec, LossValues& loss) {
  Shape target_shape = w.shape();
  const int64_t classes = target_shape.back().value;
  target_shape.pop_back();
  loss.target = w.target(DType::int64, target_shape);
  std::vector<Attribute> attributes;
  if (spec.label_smoothing > 0) attributes.push_back({"label_smoothing", static_cast<float>(spec.label_smoothing)});
  if (spec.ignore_index) attributes.push_back({"ignore_index", *spec.ignore_index});
  Value* rows = w.add("Reshape", {w.output(), w.integers(make_int64s({-1, classes}), "rows")}, "rows");
  Value* targets = w.add("Reshape", {loss.target, w.integers(make_int64s({-1}), "flat")}, "targets");
  loss.sum = w.total(w.add_own("CrossEntropy", {rows, targets}, "cross_entropy", std::move(attributes)), "sum");
  if (spec.ignore_index) {
    Value* ignored = w.add("Equal", {targets, w.integers(make_int64(*spec.ignore_index), "ignore_index")}, "ignored");
    loss.count = w.total(w.cast(w.add("Not", {ignored}, "valid"), DType::int64, "valid_number"), "count");
  } else {
    loss.count = w.add("Size", {loss.target}, "count");
  }
}

void softmax_cross_entropy(LossWriter& w, const LossSpec& spec, LossForm form, LossValues& loss) {
  if (form == LossForm::rows && w.type() == DType::float32 && w.shape().back().known() && w.shape().back().value > 0)
    return row_cross_entropy(w, spec, loss);

  Shape target_shape = w.shape();
  target_shape.pop_back();
  loss.target = w.target(DType::int64, target_shape);
  const Classes classes = make_classes(w, spec, loss.target);
  Value* logs = w.add("LogSoftmax", {w.wide_output()}, "log_probabilities", {{"axis", int64_t{-1}}});        // [..., C]
  Value* each = w.add("GatherElements", {logs, classes.index}, "log_probability", {{"axis", int64_t{-1}}});  // [..., 1]
  if (spec.label_smoothing > 0) {
    Value* mean = w.add("ReduceMean", {logs, w.integers(make_int64s({-1}), "axis")}, "mean_log_probability");
    each = w.add("Add",
                 {w.add("Mul", {each, w.number(1 - spec.label_smoothing, "one_minus_smoothing")}, "sharp"),
                  w.add("Mul", {mean, w.number(spec.label_smoothing, "smoothing")}, "smooth")},
                 "smoothed");
  }
  if (classes.valid) {
    each = w.add("Where", {classes.valid, each, w.number(0, "nothing")}, "counted");
    loss.count = w.total(w.cast(classes.valid, DType::int64, "valid_number"), "count");
  } else {
    loss.count = w.add("Size", {loss.target}, "count");
  }
  loss.sum = w.add("Neg", {w.total(each, "log_likelihood")}, "sum");
}

void elementwise(LossWriter& w, const LossSpec& spec, LossValues& loss) {
  loss.target = w.target(w.type(), w.shape());
  Value* output = w.wide_output();
  Value* each = nullptr;
  if (spec.kind == Kind::bce_with_logits) {
    Value* no = w.add("Sub", {w.number(1, "one"), loss.target}, "complement");
    each = w.add("Add",
                 {w.add("Mul", {loss.target, w.add("Softplus", {w.add("Neg", {output}, "opposite")}, "if_one")}, "of_one"),
                  w.add("Mul", {no, w.add("Softplus", {output}, "if_zero")}, "of_zero")},
                 "each");
  } else {
    Value* difference = w.add("Sub", {output, loss.target}, "difference");
    each = spec.kind == Kind::l1 ? w.add("Abs", {difference}, "each") : w.add("Mul", {difference, difference}, "each");
  }
  loss.sum = w.total(each, "sum");
  loss.count = w.add("Size", {loss.target}, "count");
}

// int64 []: the number of samples; null where no input has an axis.
Value* batch_size(LossWriter& w, const LossBatch& batch) {
  for (Value* input : w.graph().inputs) {
    if (batch.input.empty() ? input->is_constant() || !input->type.shape || input->type.shape->empty() : input->name != batch.input)
      continue;
    const int64_t rank = input->type.shape ? static_cast<int64_t>(input->type.shape->size()) : 0;
    if (batch.axis < 0 || batch.axis >= rank)
      throw Error("the input '" + input->name + "' has no axis " + std::to_string(batch.axis) + " for the batch of the loss",
                  "name another input or axis", ErrorCode::usage);
    Value* size = w.add("Shape", {input}, "batch", {{"start", int64_t{batch.axis}}, {"end", int64_t{batch.axis} + 1}});
    return w.add("Squeeze", {size, w.integers(make_int64s({0}), "axis")}, "count");
  }
  if (!batch.input.empty())
    throw Error("there is no input '" + batch.input + "' for the batch of the loss", "name an input of the model", ErrorCode::usage);
  return nullptr;
}

void own_output(LossWriter& w, const LossSpec& spec, const LossBatch& batch, LossValues& loss) {
  Value* value = w.total(w.wide_output(), "value");  // [1] becomes []
  if (batch.targets) {
    Value* targets = batch.targets->type.dtype == DType::int64 ? batch.targets : w.cast(batch.targets, DType::int64, "targets");
    Value* ignored = w.add("Equal", {targets, w.integers(make_int64(batch.ignored), "ignore_index")}, "ignored");
    loss.count = w.total(w.cast(w.add("Not", {ignored}, "valid"), DType::int64, "valid_number"), "count");
    loss.sum = value;
    return;
  }
  loss.count = batch_size(w, batch);
  if (!loss.count) loss.count = w.integers(make_int64(1), "count");
  loss.sum = value;
  if (spec.reduction == Reduction::mean) loss.sum = w.add("Mul", {value, w.cast(loss.count, w.type(), "samples")}, "sum");
  loss.loss = value;
}

Value* reduced(LossWriter& w, const LossSpec& spec, const LossValues& loss) {
  if (spec.reduction == Reduction::sum) return loss.sum;
  Value* divisor = w.add("Max", {w.cast(loss.count, w.type(), "count_number"), w.number(1, "one")}, "divisor");
  return w.add("Div", {loss.sum, divisor}, "mean");
}

// --- losses of the model's own ---

// The mean over those targets that are not ignored.
bool is_mean_over_targets(const Node& node) {
  if (!node.is("SoftmaxCrossEntropyLoss") && !node.is("NegativeLogLikelihoodLoss")) return false;
  return node.get_string("reduction", "mean") == "mean" && !node.input(2) && node.has("ignore_index");
}

// --- the output ---

std::string names_of(const std::vector<Value*>& values) {
  std::string text;
  for (const Value* v : values) text += (text.empty() ? "'" : ", '") + v->name + "'";
  return text;
}

void check_output(const Value& output, const LossSpec& spec) {
  const std::string what = "the output '" + output.name + "' (" + to_string(output.type) + ") ";
  const std::string remedy = "choose another output or loss";
  const DType type = output.type.dtype;
  const bool wide = type == DType::float32 || type == DType::float64 || type == DType::float16 || type == DType::bfloat16;
  if (!output.type.is_tensor() || !wide) throw Error(what + "holds no floats for a loss", remedy);
  if (!output.type.shape) throw Error(what + "has an unknown rank", "give input shapes with --shape, or choose another output");
  const Shape& shape = *output.type.shape;
  if (spec.kind == Kind::softmax_cross_entropy && shape.empty()) throw Error(what + "has no axis of classes", remedy);
  const bool single = std::all_of(shape.begin(), shape.end(), [](const Dim& d) { return d.value == 1; });
  if (spec.kind == Kind::output && !single) throw Error(what + "is not a scalar, so it is no loss by itself", remedy);
}

}  // namespace

LossSpec parse_loss(const std::string& text) {
  Spec spec = Spec::parse("--loss", text);
  const auto row = std::find_if(kinds().begin(), kinds().end(), [&](const KindRow& r) { return r.name == spec.kind; });
  if (row == kinds().end())
    spec.fail("there is no such loss",
              "allowed: softmax_cross_entropy[:ignore_index=K,label_smoothing=E], mse, l1, bce_with_logits, output[:NAME]");
  LossSpec loss;
  loss.kind = row->kind;
  if (loss.kind == Kind::output) loss.output = take_output_name(spec);
  spec.read_settings(row->keys);
  for (const auto& [key, value] : spec.settings) {
    if (key == "ignore_index") loss.ignore_index = spec_integer(spec, key, value);
    if (key == "label_smoothing") loss.label_smoothing = spec_number(spec, key, value, 0, 1);
    if (key == "output") loss.output = value;
    if (key == "reduction") loss.reduction = parse_reduction(spec, value);
  }
  return loss;
}

Value* loss_output(const Graph& graph, const LossSpec& spec) {
  if (graph.outputs.empty()) throw Error("the model has no output for a loss");
  if (spec.output.empty()) return graph.outputs[0];
  for (Value* v : graph.outputs)
    if (v->name == spec.output) return v;
  throw Error("the model has no output '" + spec.output + "' for the loss", "its outputs are " + names_of(graph.outputs), ErrorCode::usage);
}

LossBatch split_own_loss(Graph& graph, const LossSpec& spec) {
  LossBatch batch;
  Node* node = graph.outputs[0]->producer;
  if (spec.kind != Kind::output || spec.reduction != Reduction::mean || !node || graph.outputs[0]->output != 0) return batch;
  if (!is_mean_over_targets(*node)) return batch;
  batch.targets = node->input(1);
  batch.ignored = node->get_int("ignore_index", 0);
  node->set("reduction", std::string("sum"));
  return batch;
}

std::vector<const Node*> demand_all_targets(Graph& graph, const LossSpec& spec) {
  std::vector<const Node*> found;
  if (spec.kind != Kind::output || spec.reduction != Reduction::mean) return found;
  for (Node* node : std::vector<Node*>(graph.nodes)) {
    if (!is_mean_over_targets(*node) || node->get_int("ignore_index", 0) >= 0) continue;
    Value* targets = node->input(1);
    const auto integer = [&](int64_t value, const std::string& name) {
      auto tensor = make_tensor(targets->type.dtype, {});
      if (targets->type.dtype == DType::int32)
        *reinterpret_cast<int32_t*>(mutable_data(*tensor)) = static_cast<int32_t>(value);
      else
        *reinterpret_cast<int64_t*>(mutable_data(*tensor)) = value;
      return graph.add_constant(graph.fresh_name(node->name + "/" + name), tensor);
    };
    const auto add = [&](const std::string& op, std::vector<Value*> inputs, const std::string& name) {
      Node* made = graph.add_node(op, std::move(inputs), {graph.fresh_name(node->name + "/" + name)});
      made->name = made->outputs[0]->name;
      return made->outputs[0];
    };
    // Negative numbers would count from the last class: one that is no class at all is found out when run.
    Value* ignored = add("Equal", {targets, integer(node->get_int("ignore_index", 0), "ignored")}, "is_ignored");
    node->inputs[1] = add("Where", {ignored, integer(std::numeric_limits<int32_t>::max(), "no_class"), targets}, "targets");
    node->remove("ignore_index");
    found.push_back(node);
  }
  if (!found.empty()) sort_nodes(graph);
  return found;
}

LossValues append_loss(Model& model, const LossSpec& spec, const LossBatch& batch, LossForm form) {
  Graph& graph = *model.graph;
  const auto opset = model.opsets.find("");
  if (opset == model.opsets.end() || opset->second < 18)
    throw Error("a loss is appended to models of operator set 18 or later", "bring the model to the newest one first");
  Value* output = loss_output(graph, spec);
  if (!output->type.shape) infer_shapes(model);
  check_output(*output, spec);

  register_communication_schemas();
  if (form == LossForm::rows) model.opsets[kCommunicationDomain] = 1;
  LossWriter writer(graph, output);
  LossValues loss;
  if (spec.kind == Kind::softmax_cross_entropy) {
    softmax_cross_entropy(writer, spec, form, loss);
  } else if (spec.kind == Kind::output) {
    own_output(writer, spec, batch, loss);
  } else {
    elementwise(writer, spec, loss);
  }
  if (!loss.loss) loss.loss = reduced(writer, spec, loss);
  loss.sum = writer.show(loss.sum, "loss_sum");
  loss.count = writer.show(loss.count, "loss_count");
  loss.loss = writer.show(loss.loss, "loss");
  infer_shapes(model);
  return loss;
}

double loss_divisor(const LossSpec& spec, int64_t count) {
  return spec.reduction == Reduction::sum ? 1 : static_cast<double>(std::max<int64_t>(count, 1));
}

}  // namespace fretsaw
