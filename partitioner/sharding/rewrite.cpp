// Copies each node with its operands in the forms that its strategy takes, and with the sizes of this rank's part.
#include "partitioner/sharding/rewrite.h"

#include <fmt/format.h>

#include <algorithm>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "partitioner/sharding/divided_operators.h"
#include "partitioner/sharding/local_graph.h"
#include "partitioner/sharding/parts.h"

namespace fretsaw {

const Strategy* strategy_for(const NodeStrategies& producer, int output, Form form) {
  for (const Strategy& s : producer.all)
    if (s.outputs[static_cast<size_t>(output)] == form) return &s;
  return nullptr;
}

namespace {

class Rewriter {
 public:
  Rewriter(const Model& model, const Choice& choice, int rank, OuterParts& outer)
      : model_(model),
        source_(*model.graph),
        choice_(choice),
        forms_(choice.strategies.forms),
        local_(source_, forms_, rank),
        rank_(rank),
        outer_(outer) {
    for (size_t i = 0; i < source_.nodes.size(); ++i) position_[source_.nodes[i]] = i;
  }

  Model run() {
    for (const Value* v : source_.inputs) {
      Value* input = local_.graph().add_value(v->name, v->type);
      input->source = v->source;
      input->constant = v->constant;
      local_.graph().inputs.push_back(input);
      local_.define(v, kWhole, input);
      apply_pin(v);
    }
    for (size_t i = 0; i < source_.nodes.size(); ++i) {
      const Node& node = *source_.nodes[i];
      if (is_derived(node)) continue;  // made in the forms that are needed
      emit(node, choice_.strategies.nodes[i].all[static_cast<size_t>(choice_.chosen[i])]);
      for (const Value* v : node.outputs)
        if (v) apply_pin(v);
    }
    for (const Value* v : source_.outputs) local_.graph().outputs.push_back(value(v, kWhole));
    return finish();
  }

 private:
  bool is_derived(const Node& node) const {
    return std::all_of(node.outputs.begin(), node.outputs.end(),
                       [&](const Value* v) { return !v || choice_.strategies.derived_constants.count(v); });
  }

  void apply_pin(const Value* v) {
    if (const auto pin = choice_.pins.find(v); pin != choice_.pins.end()) local_.get(v, pin->second);
  }

  // The value in this form; constants and what is derived from them are made in it.
  Value* value(const Value* v, Form form) {
    const bool derived = choice_.strategies.derived_constants.count(v) > 0;
    if (derived && v->constant) return constant(v, form);
    if (!derived || !v->producer) return local_.get(v, form);
    const auto made = derived_.find({v, form});
    if (made != derived_.end()) return made->second;
    return derived_[{v, form}] = derive(v, form);
  }

  Value* constant(const Value* v, Form form) {
    auto& made = derived_[{v, form}];
    if (made) return made;
    TensorPtr tensor = v->constant;
    if (form == kPending && rank_ != 0) tensor = zeros_like(*tensor);
    if (forms_.is_cut(form)) tensor = part_of(tensor, forms_.dim_of(form), forms_.cut_of(form).parts[static_cast<size_t>(rank_)]);
    const bool first = takes_name(v, form);
    made = local_.graph().add_constant(first ? v->name : local_.graph().fresh_name(v->name), std::move(tensor));
    made->type = local_.local_type(v->type, form);
    made->source = v->source_name();
    made->extra = form == kWhole ? v->extra : "";
    made->part = part(*v, form, first);
    if (made->part && made->part->of_part) outer_[made] = v->part;
    return made;
  }

  // Which part of the source tensor the value is in this form.
  std::shared_ptr<const ValuePart> part(const Value& v, Form form, bool first) const {
    if (form == kPending && rank_ != 0) return std::make_shared<ValuePart>();
    if (!forms_.is_cut(form)) return v.part || first ? v.part : std::make_shared<ValuePart>(ValuePart{v.source_name(), -1, 0, {}});
    const Cut& cut = forms_.cut_of(form);
    auto own =
        std::make_shared<ValuePart>(ValuePart{v.source_name(), forms_.dim_of(form), cut.size, cut.parts[static_cast<size_t>(rank_)]});
    if (v.part && v.part->of.empty()) return v.part;  // a part of zeros is zeros
    if (!v.part || v.part->dim < 0) return own;
    own->of_part = true;  // of what another mesh axis has cut
    return own;
  }

  // An output of the graph has its name where it is whole, every other constant where it is first made.
  bool takes_name(const Value* v, Form form) {
    if (form != kWhole && local_.is_output(v)) return false;
    return named_.insert({v, true}).second;
  }

  Value* derive(const Value* v, Form form) {
    const Node& node = *v->producer;
    const NodeStrategies& own = choice_.strategies.nodes[position_.at(&node)];
    const Strategy* strategy = strategy_for(own, v->output, form);
    if (!strategy) {
      Value* whole = value(v, kWhole);
      if (!local_.is_defined(v)) local_.define(v, kWhole, whole);
      return local_.get(v, form);
    }
    emit_node(node, own, *strategy, [&](const Value* out) {
      const Form own_form = strategy->outputs[static_cast<size_t>(out->output)];
      Value* made = local_.graph().add_value(takes_name(out, own_form) ? out->name : local_.graph().fresh_name(out->name),
                                             local_.local_type(out->type, own_form));
      made->source = out->source_name();
      derived_[{out, own_form}] = made;
      return made;
    });
    return derived_.at({v, form});
  }

  void emit(const Node& node, const Strategy& strategy) {
    if (strategy.kind == Strategy::Kind::measure) return emit_measure(node, strategy);
    const NodeStrategies& own = choice_.strategies.nodes[position_.at(&node)];
    std::vector<std::pair<const Value*, Value*>> made;
    size_t k = 0;
    emit_node(node, own, strategy, [&](const Value* out) {
      while (node.outputs[k] != out) ++k;
      Value* v = local_.add(out, strategy.outputs[k]);
      made.push_back({out, v});
      return v;
    });
    for (const auto& [out, v] : made) local_.define(out, strategy.outputs[static_cast<size_t>(out->output)], v);
  }

  template <typename MakeOutput>
  void emit_node(const Node& node, const NodeStrategies& own, const Strategy& strategy, MakeOutput make_output) {
    std::vector<Value*> inputs;
    for (size_t k = 0; k < node.inputs.size(); ++k) inputs.push_back(operand(node, strategy, k));
    if (strategy.kind == Strategy::Kind::divided) return emit_divided(local_, {node, own.rule, strategy, inputs, make_output});
    std::unordered_map<const Value*, Value*> captured;
    for (Value* v : captures(node)) captured[v] = value(v, kWhole);
    adjust_operands(node, own, strategy, inputs);
    Node* n = local_.graph().add_node_object();
    n->name = node.name;
    n->op = node.op;
    n->domain = node.domain;
    n->metadata = node.metadata;
    n->overload = node.overload;
    n->inputs = std::move(inputs);
    for (const Attribute& a : node.attributes) n->attributes.push_back({a.name, copy_attribute(a.value, captured), a.refers_to, a.doc});
    adjust_attributes(*n, own, strategy);
    for (const Value* out : node.outputs) {
      Value* made = out ? make_output(out) : nullptr;
      if (made) made->producer = n, made->output = static_cast<int>(n->outputs.size());
      n->outputs.push_back(made);
    }
    local_.graph().nodes.push_back(n);
  }

  Value* operand(const Node& node, const Strategy& strategy, size_t k) {
    const Value* v = node.inputs[k];
    if (!v) return nullptr;
    return value(v, strategy.inputs[k]);
  }

  AttributeValue copy_attribute(const AttributeValue& value, const std::unordered_map<const Value*, Value*>& captured) {
    auto copy = [&](const Graph& body) {
      std::unordered_map<const Value*, Value*> mapping = captured;
      GraphPtr made = clone(body, &mapping);
      made->parent = &local_.graph();
      return made;
    };
    if (const auto* g = std::get_if<GraphPtr>(&value)) return copy(**g);
    if (const auto* gs = std::get_if<std::vector<GraphPtr>>(&value)) {
      std::vector<GraphPtr> list;
      for (const GraphPtr& g : *gs) list.push_back(copy(*g));
      return list;
    }
    return value;
  }

  int64_t local_size(const Strategy& strategy) const { return forms_.cut(strategy.cut).part_size(rank_); }

  // Operands that hold sizes: the shape of a Reshape, the lengths of a Split.
  void adjust_operands(const Node& node, const NodeStrategies& own, const Strategy& strategy, std::vector<Value*>& inputs) {
    if (strategy.kind == Strategy::Kind::segments && own.rule.segments->splits) {
      std::vector<int64_t> lengths;
      for (const int64_t size : own.rule.segments->sizes) lengths.push_back(local_size(strategy) * (size / own.rule.segments->factor));
      inputs.resize(2);
      inputs[1] = local_.int_list(node.name + "/lengths", lengths);
    }
    const int k = own.rule.shape_operand;
    if (k < 0 || static_cast<size_t>(k) >= inputs.size() || !inputs[static_cast<size_t>(k)] || !node.out(0)) return;
    const Form out = strategy.outputs[0];
    const auto& shape = node.out(0)->type.shape;
    if (!shape) return;
    std::map<int64_t, int64_t> elements;
    if (forms_.is_cut(out)) elements[forms_.dim_of(out)] = forms_.cut_of(out).part_size(rank_);
    // An element 0 of a Reshape copies the operand's dimension, which may be a part.
    const Form in = strategy.inputs[0];
    if (forms_.is_cut(in) && node.is("Reshape") && forms_.dim_of(in) < static_cast<int>(shape->size()) &&
        !elements.count(forms_.dim_of(in)) && (*shape)[static_cast<size_t>(forms_.dim_of(in))].known())
      elements[forms_.dim_of(in)] = (*shape)[static_cast<size_t>(forms_.dim_of(in))].value;
    Value*& holder = inputs[static_cast<size_t>(k)];
    const int64_t length = length_of(*holder, static_cast<int64_t>(shape->size()));
    holder = local_.with_elements(holder, length, last_of(elements, static_cast<int64_t>(shape->size()) - length));
  }

  static int64_t length_of(const Value& vector, int64_t unless_known) {
    const auto& shape = vector.type.shape;
    return shape && shape->size() == 1 && (*shape)[0].known() ? (*shape)[0].value : unless_known;
  }
  // The shape of an Expand may hold the last sizes alone: those before are the operand's own.
  static std::map<int64_t, int64_t> last_of(const std::map<int64_t, int64_t>& elements, int64_t left_out) {
    std::map<int64_t, int64_t> last;
    for (const auto& [at, size] : elements)
      if (at >= left_out) last[at - left_out] = size;
    return last;
  }

  // Attributes that count what is cut: groups, heads.
  void adjust_attributes(Node& node, const NodeStrategies& own, const Strategy& strategy) {
    if (strategy.kind == Strategy::Kind::segments && own.rule.segments->splits) node.remove("num_outputs");
    if (strategy.kind != Strategy::Kind::factor) return;
    for (const CountAttribute& count : own.rule.counts) {
      int64_t product = 1;
      bool touched = false;
      for (const int f : count.factors) {
        touched |= f == strategy.factor;
        product *= f == strategy.factor ? local_size(strategy) : own.rule.factors[static_cast<size_t>(f)].size.value;
      }
      if (touched) node.set(count.name, product);
    }
  }

  // Shape or Size of a part: the dimension that is cut is put right.
  void emit_measure(const Node& node, const Strategy& strategy) {
    const Value* out = node.out(0);
    const Form form = strategy.inputs[0];
    const auto rank = static_cast<int64_t>(node.input(0)->type.shape->size());
    auto clamp = [&](int64_t i) { return std::clamp<int64_t>(i < 0 ? i + rank : i, 0, rank); };
    const int64_t start = node.is("Shape") ? clamp(node.get_int("start", 0)) : 0;
    const int64_t end = node.is("Shape") ? clamp(node.get_int("end", rank)) : rank;
    const bool touched = forms_.is_cut(form) && forms_.dim_of(form) >= start && forms_.dim_of(form) < end;
    Value* measured = nullptr;
    emit_node(node, choice_.strategies.nodes[position_.at(&node)], strategy, [&](const Value*) {
      measured = local_.add(out, kWhole);
      if (touched) measured->name = local_.graph().fresh_name(out->name + "/part");
      return measured;
    });
    if (touched) {
      const Cut& cut = forms_.cut_of(form);
      if (node.is("Size")) {
        Value* rows = local_.node("Div", {measured, local_.constant(out->name + "/of_part", make_int64(cut.part_size(rank_)))},
                                  out->name + "/rows", out->type);
        measured = local_.node("Mul", {rows, local_.constant(out->name + "/of_whole", make_int64(cut.size))}, out->name, out->type);
      } else {
        measured = local_.with_elements(measured, end - start, {{forms_.dim_of(form) - start, cut.size}});
      }
      measured->name = out->name;
      measured->source = out->source_name();
    }
    local_.define(out, kWhole, measured);
  }

  Model finish() {
    Model local;
    local.path = model_.path;
    local.ir_version = model_.ir_version;
    local.opsets = model_.opsets;
    local.opsets[kCommunicationDomain] = 1;
    local.metadata = model_.metadata;
    local.functions = model_.functions;
    local.extra = model_.extra;
    local.graph = local_.take();
    return local;
  }

  const Model& model_;
  const Graph& source_;
  const Choice& choice_;
  const FormTable& forms_;
  LocalGraph local_;
  int rank_;
  OuterParts& outer_;
  std::unordered_map<const Node*, size_t> position_;
  std::map<std::pair<const Value*, Form>, Value*> derived_;
  std::unordered_map<const Value*, bool> named_;
};

}  // namespace

Model local_model(const Model& model, const Choice& choice, int rank, OuterParts& outer) {
  return Rewriter(model, choice, rank, outer).run();
}

}  // namespace fretsaw
