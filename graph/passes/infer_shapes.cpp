// Types of all values, by ONNX's own inference functions, in one walk over the graph.
#include <fmt/format.h>
#include <google/protobuf/arena.h>
#include <onnx/defs/schema.h>
#include <onnx/defs/shape_inference.h>

#include <deque>

#include "graph/errors.h"
#include "graph/operators/einsum_inference.h"
#include "graph/passes.h"
#include "graph/passes/beyond_inference.h"
#include "graph/passes/broadcast_symbols.h"
#include "graph/passes/loops.h"
#include "graph/passes/rewrite.h"
#include "graph/passes/shape_contents.h"

namespace fretsaw {
namespace {

constexpr std::string_view kUnknown = "unknown_";  // begins the symbols of dimensions of which nothing is known
constexpr int64_t kMaxKnownElements = 1 << 16;     // larger constants are not shown to inference functions

class Engine {
 public:
  Engine(Model& model, const InferOptions& options, ShapeFacts& facts) : model_(model), options_(options), facts_(facts) {}

  void run(Graph& graph) {
    if (&graph == model_.graph.get()) count_named(graph);
    for (Value& v : graph.all_values()) {
      if (!v.constant) continue;
      v.type = Type::tensor(v.constant->dtype, shape_of(v.constant->dims));
      bool default_only = std::find(graph.inputs.begin(), graph.inputs.end(), &v) != graph.inputs.end();
      if (!default_only) note_constant(&v, v.constant);
    }
    for (Node* node : graph.nodes) infer(*node);
  }

  const onnx::TypeProto* type_proto(const Value* v) {
    auto& slot = types_[v];
    if (!slot && v->type.kind != Type::Kind::unknown) {
      slot = google::protobuf::Arena::CreateMessage<onnx::TypeProto>(&arena_);
      to_proto(v->type, *slot);
    }
    return slot;
  }

  const onnx::TensorProto* data_proto(const Value* v) {
    TensorPtr t = tensor_of(v);
    if (!t || t->count() > kMaxKnownElements || t->is_missing() || t->generate) return nullptr;
    auto& slot = tensors_[v];
    if (!slot) {
      slot = std::make_unique<onnx::TensorProto>();
      to_proto(*t, *slot);
    }
    return slot.get();
  }

  // A shape whose elements are partly symbols, as a TensorShapeProto.
  const onnx::TensorShapeProto* symbolic_proto(const Value* v) {
    auto it = facts_.contents.find(v);
    if (it == facts_.contents.end()) return nullptr;
    auto& slot = symbolic_[v];
    if (!slot) {
      slot = std::make_unique<onnx::TensorShapeProto>();
      for (const ShapeElement& e : it->second) {
        auto* d = slot->add_dim();
        if (e.value)
          d->set_dim_value(*e.value);
        else if (!e.symbol.empty())
          d->set_dim_param(e.symbol);
      }
    }
    return slot.get();
  }

  std::vector<const onnx::TypeProto*> infer_body(Graph& body, const std::vector<const onnx::TypeProto*>& inputs) {
    for (size_t i = 0; i < body.inputs.size() && i < inputs.size(); ++i)
      if (inputs[i]) body.inputs[i]->type = type_from_proto(*inputs[i]);
    run_body(body);
    std::vector<const onnx::TypeProto*> outputs;
    static const onnx::TypeProto not_known;  // ONNX's functions read what they are given without looking for null
    for (const Value* v : body.outputs) {
      const onnx::TypeProto* type = type_proto(v);
      outputs.push_back(type ? type : &not_known);
    }
    return outputs;
  }

 private:
  // New symbols count on from those that the inputs of a piece of a model have.
  void count_named(const Graph& graph) {
    for (const Value* v : graph.inputs) {
      if (!v->type.shape) continue;
      for (const Dim& d : *v->type.shape)
        for (size_t at = d.symbol.find(kUnknown); at != std::string::npos; at = d.symbol.find(kUnknown, at + 1))
          named_ = std::max(named_, std::atoi(d.symbol.c_str() + at + kUnknown.size()));
    }
  }

  TensorPtr tensor_of(const Value* v) const {
    auto it = facts_.known.find(v);
    if (it != facts_.known.end()) return it->second;
    return v->constant && facts_.constants.count(v) ? v->constant : nullptr;
  }

  const Elements* contents_of(const Value* v) const {
    auto it = facts_.contents.find(v);
    return it == facts_.contents.end() ? nullptr : &it->second;
  }

  void note_constant(const Value* v, const TensorPtr& t) {
    if (!v->producer) facts_.constants.insert(v);
    if (t->dims.size() > 1 || t->count() > static_cast<int64_t>(kMaxContents)) return;
    if (t->dtype != DType::int64 && t->dtype != DType::int32 && t->dtype != DType::boolean) return;
    if (auto values = int_values(*t)) {
      Elements e;
      for (int64_t x : *values) e.push_back({x, ""});
      facts_.contents[v] = std::move(e);
    }
  }

  // Anew, from the types of its inputs.
  void run_body(Graph& body) {
    for (const Value* v : body.inputs) forget(v);
    for (const Node* node : body.nodes)
      for (const Value* v : node->outputs)
        if (v) forget(v);
    run(body);
  }
  void forget(const Value* v) {
    types_.erase(v);
    tensors_.erase(v);
    symbolic_.erase(v);
    facts_.contents.erase(v);
    facts_.known.erase(v);
  }

  void infer(Node& node);
  bool evaluate(Node& node);
  void infer_types(Node& node);
  bool infer_loop(Node& node);
  void name_unknown(Node& node);
  void note_contents(Node& node);
  const onnx::OpSchema* schema_of(const Node& node);

  Model& model_;
  const InferOptions& options_;
  ShapeFacts& facts_;
  google::protobuf::Arena arena_;  // of types_: a large graph has many
  std::unordered_map<const Value*, onnx::TypeProto*> types_;
  std::unordered_map<const Value*, std::unique_ptr<onnx::TensorProto>> tensors_;
  std::unordered_map<const Value*, std::unique_ptr<onnx::TensorShapeProto>> symbolic_;
  std::unordered_map<std::string, const onnx::OpSchema*> schemas_;
  BroadcastSymbols broadcast_;
  int named_ = 0;  // dimensions that were given a symbol
};

class BodyInferencer : public onnx::GraphInferencer {
 public:
  BodyInferencer(Engine& engine, Graph& body) : engine_(engine), body_(body) {}
  std::vector<const onnx::TypeProto*> doInferencing(const std::vector<const onnx::TypeProto*>& types,
                                                    const std::vector<const onnx::TensorProto*>&) override {
    return engine_.infer_body(body_, types);
  }

 private:
  Engine& engine_;
  Graph& body_;
};

// What ONNX's inference functions ask of a node.
class NodeContext : public onnx::InferenceContext {
 public:
  NodeContext(Engine& engine, const Node& node) : engine_(engine), node_(node), outputs_(node.outputs.size()) {}

  const onnx::AttributeProto* getAttribute(const std::string& name) const override {
    const Attribute* a = node_.attribute(name);
    if (!a) return nullptr;
    auto it = attributes_.find(a);
    return it != attributes_.end() ? &it->second : &convert(*a);
  }
  size_t getNumInputs() const override { return node_.inputs.size(); }
  const onnx::TypeProto* getInputType(size_t i) const override { return node_.input(i) ? engine_.type_proto(node_.input(i)) : nullptr; }
  bool hasInput(size_t i) const override { return node_.input(i) != nullptr; }
  const onnx::TensorProto* getInputData(size_t i) const override {
    const onnx::TensorProto* data = node_.input(i) ? engine_.data_proto(node_.input(i)) : nullptr;
    if (!data || !node_.is("Range") || data->dims_size() != 1 || data->dims(0) != 1) return data;
    // Models, and ONNX's own function of AffineGrid, give Range tensors of one element, which its inference refuses.
    onnx::TensorProto& number = numbers_.emplace_back(*data);
    number.clear_dims();
    return &number;
  }
  const onnx::TensorShapeProto* getSymbolicInput(size_t i) const override {
    return node_.input(i) ? engine_.symbolic_proto(node_.input(i)) : nullptr;
  }
  const onnx::SparseTensorProto* getInputSparseData(size_t) const override { return nullptr; }
  size_t getNumOutputs() const override { return outputs_.size(); }
  onnx::TypeProto* getOutputType(size_t i) override {
    if (i >= outputs_.size()) throw Error("has more outputs than its operator");
    return &outputs_[i];
  }
  bool hasOutput(size_t i) override { return node_.out(i) != nullptr; }
  onnx::GraphInferencer* getGraphAttributeInferencer(const std::string& name) override {
    GraphPtr body = node_.get_graph(name);
    if (!body) throw Error("attribute '" + name + "' holds no graph").at_node(node_.name, node_.op);
    return &inferencers_.emplace_back(engine_, *body);
  }
  std::string getDisplayName() const override { return node_.name; }
  const onnx::TypeProto& output(size_t i) const { return outputs_[i]; }

 private:
  const onnx::AttributeProto& convert(const Attribute& a) const {
    onnx::AttributeProto& p = attributes_[&a];
    p.set_name(a.name);
    if (const auto* i = std::get_if<int64_t>(&a.value)) {
      p.set_type(onnx::AttributeProto::INT);
      p.set_i(*i);
    } else if (const auto* f = std::get_if<float>(&a.value)) {
      p.set_type(onnx::AttributeProto::FLOAT);
      p.set_f(*f);
    } else if (const auto* s = std::get_if<std::string>(&a.value)) {
      p.set_type(onnx::AttributeProto::STRING);
      p.set_s(*s);
    } else if (const auto* is = std::get_if<std::vector<int64_t>>(&a.value)) {
      p.set_type(onnx::AttributeProto::INTS);
      p.mutable_ints()->Add(is->begin(), is->end());
    } else if (const auto* fs = std::get_if<std::vector<float>>(&a.value)) {
      p.set_type(onnx::AttributeProto::FLOATS);
      p.mutable_floats()->Add(fs->begin(), fs->end());
    } else if (const auto* ss = std::get_if<std::vector<std::string>>(&a.value)) {
      p.set_type(onnx::AttributeProto::STRINGS);
      for (const auto& one : *ss) p.add_strings(one);
    } else if (const auto* t = std::get_if<TensorPtr>(&a.value)) {
      p.set_type(onnx::AttributeProto::TENSOR);
      to_proto(**t, *p.mutable_t());
    } else if (const auto* o = std::get_if<OpaqueAttribute>(&a.value)) {
      p.ParseFromString(o->proto);
    } else if (std::holds_alternative<GraphPtr>(a.value)) {
      p.set_type(onnx::AttributeProto::GRAPH);
      p.mutable_g();  // there, and empty: bodies are inferred by doInferencing
    }
    return p;
  }

  Engine& engine_;
  const Node& node_;
  std::vector<onnx::TypeProto> outputs_;
  mutable std::unordered_map<const Attribute*, onnx::AttributeProto> attributes_;
  mutable std::deque<onnx::TensorProto> numbers_;
  std::deque<BodyInferencer> inferencers_;
};

const onnx::OpSchema* Engine::schema_of(const Node& node) {
  auto [it, added] = schemas_.try_emplace(node.domain + ":" + node.op, nullptr);
  if (added) {
    auto opset = model_.opsets.find(node.domain);
    int version = opset == model_.opsets.end() ? 1 : static_cast<int>(std::min<int64_t>(opset->second, INT32_MAX));
    it->second = onnx::OpSchemaRegistry::Schema(node.op, version, node.domain);
  }
  return it->second;
}

// Where inference knows less than a hint of the same rank, the hint's dimensions stay.
void keep_hint(Type& type, const Type& hint) {
  if (type.kind == Type::Kind::unknown) {
    type = hint;
    return;
  }
  if (type.kind != hint.kind || !type.is_tensor()) return;
  if (type.dtype == DType::undefined) type.dtype = hint.dtype;
  if (!hint.shape) return;
  if (!type.shape) type.shape = hint.shape;
  if (type.shape->size() != hint.shape->size()) return;
  for (size_t i = 0; i < type.shape->size(); ++i) {
    Dim& d = (*type.shape)[i];
    // A symbol that an earlier inference made up means nothing in this one.
    if (!d.known() && d.symbol.empty() && (*hint.shape)[i].symbol.find(kUnknown) == std::string::npos) d = (*hint.shape)[i];
  }
}

void Engine::infer(Node& node) {
  std::vector<Type> hints;
  for (Value* v : node.outputs) {
    hints.push_back(v && options_.keep_hints ? v->type : Type());
    if (v) v->type = {};
  }
  if (evaluate(node)) return;
  infer_types(node);
  refine_shape(node, [&](const Value* v) { return contents_of(v); });
  if (options_.distrust && options_.distrust(node)) {
    for (Value* v : node.outputs)
      if (v) v->type.shape.reset();
    return;
  }
  for (size_t i = 0; i < node.outputs.size(); ++i)
    if (node.outputs[i]) keep_hint(node.outputs[i]->type, hints[i]);
  if (options_.name_unknown && node.graph == model_.graph.get()) name_unknown(node);
  note_contents(node);
}

bool Engine::evaluate(Node& node) {
  if (!options_.evaluate) return false;
  std::vector<TensorPtr> inputs, outputs(node.outputs.size());
  for (const Value* v : node.inputs) {
    inputs.push_back(v ? tensor_of(v) : nullptr);
    if (v && !inputs.back()) return false;
  }
  for (const Value* v : captures(node))
    if (!tensor_of(v)) return false;
  if (!options_.evaluate(node, inputs, outputs)) return false;
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    Value* v = node.outputs[i];
    if (!v || !outputs[i]) continue;
    v->type = Type::tensor(outputs[i]->dtype, shape_of(outputs[i]->dims));
    facts_.known[v] = outputs[i];
    note_constant(v, outputs[i]);
  }
  return true;
}

void Engine::infer_types(Node& node) {
  const onnx::OpSchema* schema = schema_of(node);
  if (schema && !schema->has_type_and_shape_inference_function()) infer_without_schema(node);
  if (!schema || !schema->has_type_and_shape_inference_function()) return;
  if (node.is("Loop") && infer_loop(node)) return;
  NodeContext context(*this, node);
  try {
    if (node.is("Einsum") && !is_einsum_equation(node.get_string("equation", "")))
      throw Error("the equation holds more than terms of letters");
    schema->GetTypeAndShapeInferenceFunction()(context);
  } catch (const std::exception& e) {
    facts_.faults.push_back({"error", node.name, node.out(0) ? node.out(0)->name : "", "shape-inference",
                             fmt::format("node '{}' ({}): {}", node.name, node.op, e.what())});
    return;
  }
  for (size_t i = 0; i < node.outputs.size(); ++i)
    if (node.outputs[i]) node.outputs[i]->type = type_from_proto(context.output(i));
  if (node.is("Einsum") && node.out(0)) correct_einsum(node);
}

// What is true of a value that is now of the one type and now of the other.
Type common_type(const Type& a, const Type& b) {
  Type common = a.kind == Type::Kind::unknown ? b : a;
  if (common.element) {
    static const Type unknown;
    common.element = std::make_shared<Type>(common_type(*common.element, a.kind == b.kind && b.element ? *b.element : unknown));
  }
  if (!common.is_tensor()) return common;
  if (common.dtype == DType::undefined) common.dtype = b.dtype;
  if (a.kind != b.kind || !a.shape || !b.shape || a.shape->size() != b.shape->size()) {
    common.shape.reset();
    return common;
  }
  for (size_t d = 0; d < a.shape->size(); ++d)
    if ((*a.shape)[d] != (*b.shape)[d]) (*common.shape)[d] = Dim();
  return common;
}

// ONNX's inference gives carried values no shape, since a pass may change it. Here they have what the initial value and the results of all
// passes have in common. False where the body does not fit the node, or is not understood.
bool Engine::infer_loop(Node& node) {
  const GraphPtr body = fitting_body(node);
  if (!body) return false;
  const size_t carried = node.inputs.size() - 2;
  std::vector<Type> types = {Type::tensor(DType::int64, Shape{}),
                             node.input(1) ? node.input(1)->type : Type::tensor(DType::boolean, Shape{})};
  for (size_t k = 0; k < carried; ++k) types.push_back(node.input(2 + k) ? node.input(2 + k)->type : body->inputs[2 + k]->type);
  std::vector<std::pair<Value*, Type>> hints;
  for_each_graph(*body, [&](Graph& graph) {
    for (Value& v : graph.all_values()) hints.emplace_back(&v, v.type);
  });
  const auto faults = std::ssize(facts_.faults);
  for (bool settled = false; !settled;) {
    facts_.faults.erase(facts_.faults.begin() + faults, facts_.faults.end());  // the last round's alone count
    for (const auto& [value, hint] : hints) value->type = hint;
    for (size_t i = 0; i < types.size(); ++i) body->inputs[i]->type = types[i];
    run_body(*body);
    settled = true;
    for (size_t i = 1; i < types.size(); ++i) {
      Type common = common_type(types[i], body->outputs[i - 1]->type);
      settled = settled && common == types[i];
      types[i] = std::move(common);
    }
  }
  for (size_t o = 0; o < node.outputs.size() && o + 1 < body->outputs.size(); ++o) {
    if (!node.outputs[o]) continue;
    Type& type = node.outputs[o]->type;
    type = body->outputs[1 + o]->type;
    if (o < carried) type = common_type(type, types[2 + o]);  // of an optional that passes make a sequence: a sequence
    if (o >= carried && type.shape) type.shape->insert(type.shape->begin(), Dim());  // a row from each pass
  }
  return true;
}

// A dimension of which nothing is known gets a symbol, so that arithmetic on it can cancel: [?, ?, 64] reshaped to its own first two
// dimensions, -1 and 16 has 4 in the third. Not in bodies, where a value's size may change from one pass to the next.
void Engine::name_unknown(Node& node) {
  const auto fresh = [&] { return std::string(kUnknown) + std::to_string(++named_); };
  for (Value* v : node.outputs) {
    if (!v || !v->type.is_tensor() || !v->type.shape) continue;
    Shape& shape = *v->type.shape;
    for (size_t d = 0; d < shape.size(); ++d) {
      if (shape[d].known() || !shape[d].symbol.empty()) continue;
      shape[d].symbol = broadcast_.find(node, shape.size() - 1 - d, fresh);
      if (shape[d].symbol.empty()) shape[d].symbol = fresh();
    }
  }
}

// The tensor that fully known elements make, in the value's type.
TensorPtr tensor_from(const Type& type, const Elements& elements) {
  if (!type.shape || !is_static(*type.shape)) return nullptr;
  auto t = make_tensor(type.dtype, dims_of(*type.shape));
  if (t->count() != static_cast<int64_t>(elements.size())) return nullptr;
  for (size_t i = 0; i < elements.size(); ++i) {
    if (!elements[i].value) return nullptr;
    int64_t v = *elements[i].value;
    switch (type.dtype) {
      case DType::int64:
        reinterpret_cast<int64_t*>(mutable_data(*t))[i] = v;
        break;
      case DType::int32:
        reinterpret_cast<int32_t*>(mutable_data(*t))[i] = static_cast<int32_t>(v);
        break;
      case DType::boolean:
        reinterpret_cast<uint8_t*>(mutable_data(*t))[i] = v != 0;
        break;
      default:
        return nullptr;
    }
  }
  return t;
}

void Engine::note_contents(Node& node) {
  const auto lookup = [&](const Value* v) { return contents_of(v); };
  auto note = [&](Value* v, Elements elements) {
    if (v->type.shape && is_static(*v->type.shape) && count_of(dims_of(*v->type.shape)) != static_cast<int64_t>(elements.size())) return;
    if (TensorPtr t = tensor_from(v->type, elements)) facts_.known[v] = t;
    facts_.contents[v] = std::move(elements);
  };
  if (node.is("Constant") && node.out(0)) {
    if (TensorPtr t = node.get_tensor("value")) {
      facts_.known[node.out(0)] = t;
      note_constant(node.out(0), t);
    }
    return;
  }
  if (node.is("Split")) {
    auto parts = contents_of_split(node, lookup);
    for (size_t i = 0; i < parts.size(); ++i) note(node.outputs[i], std::move(parts[i]));
    return;
  }
  if (auto elements = contents_of_node(node, lookup)) note(node.out(0), std::move(*elements));
}

}  // namespace

ShapeFacts infer_shapes(Model& model, const InferOptions& options) {
  ShapeFacts facts;
  Engine(model, options, facts).run(*model.graph);
  return facts;
}

}  // namespace fretsaw
