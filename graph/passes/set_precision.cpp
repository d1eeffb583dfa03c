// float32 models as float16 or bfloat16 ones.
#include <algorithm>
#include <unordered_set>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/passes.h"
#include "graph/passes/narrow_floats.h"
#include "graph/passes/precision_rules.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

class PrecisionSetter {
 public:
  PrecisionSetter(Model& model, DType type, const PrecisionOptions& options)
      : model_(model), type_(type), options_(options), indexes_(*model.graph), rules_(type, model.opsets), narrower_(type, options.lazy) {}

  void run() {
    Graph& graph = *model_.graph;
    auto kept_sequence = [&](const Value* v) { return !v->type.is_tensor() && holds_float32(v->type) && keeps(v); };
    rules_.narrow_sequences = rules_.allows_sequences() && std::none_of(graph.inputs.begin(), graph.inputs.end(), kept_sequence) &&
                              std::none_of(graph.outputs.begin(), graph.outputs.end(), kept_sequence);
    for (Value* v : graph.inputs)
      if (holds_float32(v->type)) set_input(v, keeps(v) ? DType::float32 : type_);
    visit(graph);
    name_outputs(graph);
    settle_constants();
    place_casts(graph);
    narrower_.finish();
  }

 private:
  bool keeps(const Value* v) const { return options_.keep.count(v->name) > 0; }
  bool is_output(const Value* v) const {
    const auto& outputs = model_.graph->outputs;
    return std::find(outputs.begin(), outputs.end(), v) != outputs.end();
  }

  // The element type that a value has now.
  static DType now(const Value* v) { return element_of(v->type); }
  static DType element_of(const Type& type) { return type.is_tensor() || !type.element ? type.dtype : element_of(*type.element); }
  void set(Value* v, DType dtype) {
    if (!v->type.is_tensor() && !rules_.narrow_sequences) dtype = DType::float32;
    floats_.insert(v);
    v->type = with_element(v->type, dtype);
  }
  // An input of a graph; its default goes with it.
  void set_input(Value* v, DType dtype) {
    if (v->constant && dtype != DType::float32) v->constant = narrower_.narrowed(v->constant);
    inputs_.insert(v);
    set(v, dtype);
  }

  static bool holds_floats(const Value* v) { return v && holds_float32(v->type); }

  // Whether a value held float32 before this pass.
  bool was_float(const Value* v) const { return v && (floats_.count(v) > 0 || holds_float32(v->type)); }

  void visit(Graph& graph) {
    Rewriter(graph).walk([&](Node& node) {
      std::vector<bool> floats;  // of inputs, as the model had them
      for (Value*& v : node.inputs) {
        floats.push_back(was_float(v));
        if (v) v = resolved(v);
      }
      if (node.is("Cast") && node.input(0) && node.out(0)) return visit_cast(node);
      if (!bodies(node).empty())
        visit_bodies(node, floats);
      else if (indexes_.has_any(node))
        apply(node, floats, {std::vector<Want>(node.inputs.size(), Want::wide), std::vector<bool>(node.outputs.size(), false)});
      else
        visit_plain(node, floats);
      return true;
    });
    for (Value*& v : graph.outputs) v = resolved(v);
  }

  Value* resolved(Value* v) const {
    for (auto it = replaced_.find(v); it != replaced_.end(); it = replaced_.find(v)) v = it->second;
    return v;
  }

  void visit_plain(Node& node, const std::vector<bool>& floats) {
    std::vector<Type> inputs;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      inputs.push_back(node.inputs[i] ? node.inputs[i]->type : Type());
      if (floats[i]) inputs[i] = with_element(inputs[i], DType::float32);
      if (!floats[i] && was_float(node.inputs[i])) inputs[i] = with_element(inputs[i], type_);
    }
    const TypePlan plan = rules_.plan(node, inputs);
    if (node.is("ConstantOfShape") && plan.outputs[0]) {
      TensorPtr value = node.get_tensor("value");
      node.set("value", value ? narrower_.narrowed(value) : TensorPtr(make_tensor(type_, {1})));
    }
    apply(node, floats, plan);
  }

  void apply(Node& node, const std::vector<bool>& floats, const TypePlan& plan) {
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      Value*& v = node.inputs[i];
      if (floats[i])
        want(v, plan.inputs[i] == Want::either ? now(v) : plan.inputs[i] == Want::narrow ? type_ : DType::float32);
      else if (was_float(v))  // it was cast to the type for this node
        want(v, type_);
    }
    for (size_t i = 0; i < node.outputs.size(); ++i)
      if (holds_floats(node.outputs[i])) set(node.outputs[i], plan.outputs[i] ? type_ : DType::float32);
  }

  // Casts to float32 become casts to the type, or go; casts to the type of what has it already go. False: it goes.
  bool visit_cast(Node& node) {
    Value *x = node.inputs[0], *y = node.out(0);
    auto to = static_cast<DType>(node.get_int("to", 0));
    if (to == DType::float32) {
      if (!indexes_.has(y)) to = type_;
      node.set("to", static_cast<int64_t>(to));
      set(y, to);
    }
    // A constant may be had in both types.
    const bool weight = is_weight(x);
    const DType from = weight && to == type_ ? type_ : now(x);
    if (from == to && !is_named(y)) {
      replaced_[y] = x;
      return false;
    }
    if (weight) want(node.inputs[0], from);
    return true;
  }

  bool is_named(const Value* v) const {
    const auto& outputs = v->graph->outputs;
    return std::find(outputs.begin(), outputs.end(), v) != outputs.end();
  }
  bool is_weight(const Value* v) const { return v->constant && !inputs_.count(v) && holds_float32(v->type); }

  // Bodies take and give the type, as their node does; what they catch from around is as it is there.
  void visit_bodies(Node& node, const std::vector<bool>& floats) {
    auto border = [&](const Value* v) { return v->type.is_tensor() || rules_.narrow_sequences ? type_ : DType::float32; };
    for (size_t i = 0; i < node.inputs.size(); ++i)
      if (floats[i] || was_float(node.inputs[i])) want(node.inputs[i], border(node.inputs[i]));
    for (const GraphPtr& body : bodies(node)) {
      for (Value* v : body->inputs)
        if (holds_floats(v)) set_input(v, border(v));
      visit(*body);
      for (Value*& v : body->outputs)
        if (was_float(v)) want(v, border(v));
    }
    for (Value* v : node.outputs)
      if (holds_floats(v)) set(v, border(v));
  }

  // The slot gets its value in this type.
  void want(Value*& slot, DType dtype) {
    if (is_weight(slot)) {
      (dtype == type_ ? constants_[slot].narrow : constants_[slot].wide).push_back(&slot);
      if (constants_[slot].narrow.size() + constants_[slot].wide.size() == 1) order_.push_back(slot);
    } else if (now(slot) != dtype && slot->type.is_tensor()) {
      slot = cast(slot, dtype);
    }
  }

  Value* cast(Value* v, DType dtype) {
    Value*& made = casts_[v][dtype];
    if (made) return made;
    const bool clips = dtype == DType::float16 && indexes_.is_large(v);
    Value* from = clips ? clipped(v) : v;
    made = add(*v->graph, v, "Cast", {from}, with_element(v->type, dtype), std::string(name_of(dtype)));
    made->producer->attributes = {{"to", static_cast<int64_t>(dtype)}};
    return made;
  }

  // Masks made of integers may hold numbers that float16 knows only as infinity.
  Value* clipped(Value* v) {
    auto bound = [&](float x) {
      Value* b = v->graph->add_constant(v->graph->fresh_name("float16_bound"), make_float(x));
      b->type = Type::tensor(DType::float32, Shape());
      return b;
    };
    return add(*v->graph, v, "Clip", {v, bound(-65504), bound(65504)}, v->type, "clipped");
  }

  // A node after the one that makes `after`, or before all nodes.
  Value* add(Graph& graph, const Value* after, const std::string& op, std::vector<Value*> inputs, Type type, const std::string& suffix) {
    Node* node = graph.add_node_object();
    node->op = op;
    node->inputs = std::move(inputs);
    node->name = graph.fresh_name(after->name + "_" + op);
    node->outputs.resize(1);
    set_output(*node, 0, graph.add_value(graph.fresh_name(after->name + "_" + suffix), std::move(type)));
    floats_.insert(node->outputs[0]);
    (after->producer ? after_[after->producer] : front_[&graph]).push_back(node);
    return node->outputs[0];
  }

  // Outputs have the type that the border wants, under their own names.
  void name_outputs(Graph& graph) {
    ValueMap renamed;
    std::vector<Value*> outputs = graph.outputs;
    for (Value* v : outputs) {
      if (!was_float(v)) continue;
      const DType wanted = keeps(v) ? DType::float32 : type_;
      if (is_weight(v)) {
        want(*std::find(graph.outputs.begin(), graph.outputs.end(), v), wanted);
        continue;
      }
      if (now(v) == wanted || !v->producer || renamed.count(v) || !v->type.is_tensor()) continue;
      Value* made = graph.add_value(graph.fresh_name(v->name + "_" + std::string(name_of(now(v)))), v->type);
      floats_.insert(made);
      Node* producer = v->producer;
      set_output(*producer, static_cast<size_t>(v->output), made);
      renamed[v] = made;
      Node* node = graph.add_node_object();
      node->op = "Cast";
      node->attributes = {{"to", static_cast<int64_t>(wanted)}};
      node->inputs = {made};
      node->name = graph.fresh_name(v->name + "_Cast");
      node->outputs.resize(1);
      set_output(*node, 0, v);
      set(v, wanted);
      after_[producer].push_back(node);
    }
    replace_in_new_nodes(renamed);
    replace_uses(graph, renamed);
    for (size_t i = 0; i < outputs.size(); ++i)
      if (renamed.count(outputs[i])) graph.outputs[i] = outputs[i];
  }

  // The nodes that are not in the lists yet.
  void replace_in_new_nodes(const ValueMap& renamed) {
    auto replace = [&](std::vector<Node*>& nodes) {
      for (Node* node : nodes)
        for (Value*& v : node->inputs)
          if (auto it = renamed.find(v); it != renamed.end()) v = it->second;
    };
    for (auto& [place, nodes] : after_) replace(nodes);
    for (auto& [place, nodes] : front_) replace(nodes);
  }

  // Constants are converted where all users want that; where some want float32, there are two.
  void settle_constants() {
    for (Value* v : order_) {
      ConstantUse& use = constants_[v];
      if (use.narrow.empty()) continue;
      if (use.wide.empty()) {
        v->constant = narrower_.narrowed(v->constant);
        v->type = with_element(v->type, type_);
        continue;
      }
      const bool named = is_output(v) && keeps(v);  // the float32 one keeps the name of an output
      Value* other = v->graph->add_constant(v->graph->fresh_name(v->name + (named ? "_narrow" : "_float32")), v->constant);
      other->type = v->type;
      other->source = v->source_name();
      other->part = v->part;
      Value* narrow = named ? other : v;
      narrow->constant = narrower_.narrowed(v->constant);
      narrow->type = with_element(v->type, type_);
      for (Value** slot : named ? use.narrow : use.wide) *slot = other;
    }
  }

  void place_casts(Graph& graph) {
    std::vector<Node*> nodes;
    std::function<void(Node*)> place = [&](Node* node) {
      nodes.push_back(node);
      if (auto it = after_.find(node); it != after_.end())
        for (Node* more : it->second) place(more);
    };
    for (Node* node : front_[&graph]) place(node);
    for (Node* node : graph.nodes) {
      for (const GraphPtr& body : bodies(*node)) place_casts(*body);
      place(node);
    }
    graph.nodes = std::move(nodes);
  }

  struct ConstantUse {
    std::vector<Value**> narrow, wide;
  };

  Model& model_;
  DType type_;
  const PrecisionOptions& options_;
  IndexArithmetic indexes_;
  PrecisionRules rules_;
  FloatNarrower narrower_;
  std::unordered_set<const Value*> floats_;  // values that held float32, or do
  std::unordered_set<const Value*> inputs_;
  ValueMap replaced_;
  std::unordered_map<Value*, std::map<DType, Value*>> casts_;
  std::unordered_map<Value*, ConstantUse> constants_;
  std::vector<Value*> order_;  // of constants, by first use
  std::unordered_map<const Node*, std::vector<Node*>> after_;
  std::unordered_map<const Graph*, std::vector<Node*>> front_;
};

}  // namespace

void set_precision(Model& model, DType type, const PrecisionOptions& options) {
  if (type != DType::float16 && type != DType::bfloat16)
    throw Error("a model can't be set to " + std::string(name_of(type)), "choose float16 or bfloat16");
  register_communication_schemas();
  constants_to_initializers(model);
  infer_shapes(model);
  PrecisionSetter(model, type, options).run();
}

}  // namespace fretsaw
