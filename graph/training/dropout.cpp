// Random numbers that depend on the step and on each element's place in the batch.
#include "graph/training/dropout.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <optional>
#include <set>
#include <vector>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/passes.h"
#include "graph/passes/narrow_floats.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

std::optional<bool> constant_flag(const Value* value) {
  if (!value) return false;
  if (!value->constant || !value->constant->data || value->constant->bytes() != 1) return std::nullopt;
  return *value->constant->data != std::byte{0};
}

// Dropout's ratio, where it is constant.
std::optional<double> ratio_of(const Node& node) {
  if (!node.input(1)) return 0.5;
  std::vector<double> numbers;
  if (!node.input(1)->constant || !float_values(node.input(1), numbers) || numbers.size() != 1) return std::nullopt;
  return numbers[0];
}

bool drops(const Node& node) {
  if (!node.is("Dropout") || !is_float(node.input(0)->type.dtype) || constant_flag(node.input(2)) == false) return false;
  const std::optional<double> ratio = ratio_of(node);
  return !ratio || (*ratio > 0 && *ratio < 1);
}

bool draws_numbers(const Node& node) {
  static const std::set<std::string> kOps = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli"};
  return node.domain.empty() && kOps.contains(node.op);
}

// Its own generator, whatever graph the node stands in: by its name (FNV-1a), or its seed.
int64_t key_of(const Node& node) {
  uint64_t hash = 0xCBF29CE484222325u;
  const auto add = [&](uint8_t byte) { hash = (hash ^ byte) * 0x100000001B3u; };
  if (node.has("seed") && !node.is("Dropout")) {
    const auto seed = std::bit_cast<uint32_t>(node.get_float("seed", 0));
    for (int k = 0; k < 32; k += 8) add(static_cast<uint8_t>(seed >> k));
  } else {
    const std::string name = !node.name.empty() || !node.out(0) ? node.name : node.out(0)->source_name();
    for (const char c : name) add(static_cast<uint8_t>(c));
  }
  return static_cast<int64_t>(hash);
}

class DrawWriter {
 public:
  DrawWriter(Graph& graph, const std::string& counter, const SampleDims& dims) : graph_(graph), counter_name_(counter), dims_(dims) {}

  bool run() {
    for (Node* node : std::vector<Node*>(graph_.nodes)) {
      if (drops(*node))
        rewrite_dropout(*node);
      else if (draws_numbers(*node))
        rewrite_numbers(*node);
      else
        continue;
      std::erase(graph_.nodes, node);
    }
    sort_nodes(graph_);
    return samples_ != nullptr;
  }

 private:
  Node* add_node(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {},
                 const std::string& domain = "") {
    Node* made = graph_.add_node(op, std::move(inputs), {graph_.fresh_name(of_->name + "/" + op)}, std::move(attributes), domain);
    made->name = made->outputs[0]->name;
    return made;
  }
  Value* add(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {}) {
    return add_node(op, std::move(inputs), std::move(attributes))->outputs[0];
  }
  Value* cast(Value* value, DType type) { return add("Cast", {value}, {{"to", static_cast<int64_t>(type)}}); }
  Value* number(DType type, double value) {
    return graph_.add_constant(graph_.fresh_name(of_->name + "/number"), float_tensor(type, {}, {value}));
  }
  Value* ints(const std::vector<int64_t>& values) {
    return graph_.add_constant(graph_.fresh_name(of_->name + "/ints"), make_int64s(values));
  }

  // What `op` draws for the elements of `like`, or of a tensor of `shape`. What a sample has lies in one piece where its dimension is the
  // first one: it is drawn so, and turned back.
  Node* draw(const std::string& op, const Value* like, const std::vector<int64_t>& shape, std::vector<Attribute> attributes,
             Value* limits = nullptr) {
    add_inputs();
    attributes.push_back({"key", key_of(*of_)});
    const auto found = dims_.find(like);
    const int dim = !like ? -1 : found == dims_.end() ? 0 : found->second;
    Value* size = like ? add("Shape", {const_cast<Value*>(like)}) : ints(shape);
    std::vector<int64_t> first, back;
    if (dim > 0 && like->type.shape && static_cast<size_t>(dim) < like->type.shape->size()) {
      first.resize(like->type.shape->size());
      std::iota(first.begin(), first.end(), int64_t{0});
      std::rotate(first.begin(), first.begin() + dim, first.begin() + dim + 1);
      back.resize(first.size());
      for (size_t k = 0; k < first.size(); ++k) back[static_cast<size_t>(first[k])] = static_cast<int64_t>(k);
      size = add("Gather", {size, ints(first)});
      if (limits == like) limits = add("Transpose", {limits}, {{"perm", first}});
    }
    if (limits && limits->type.dtype != DType::float32) limits = cast(limits, DType::float32);
    std::vector<Value*> inputs = {size, dim < 0 ? ints({0, 1}) : samples_, counter_};
    if (limits) inputs.push_back(limits);
    Node* made = add_node(op, std::move(inputs), std::move(attributes), kCommunicationDomain);
    const DType type = op == "DropoutMask" ? DType::boolean : DType::float32;
    made->outputs[0]->type = Type::tensor(type);
    if (!back.empty()) made = add("Transpose", {made->outputs[0]}, {{"perm", back}})->producer;
    if (like) made->outputs[0]->type = Type::tensor(type, like->type.shape);
    return made;
  }

  void rewrite_dropout(Node& node) {
    of_ = &node;
    Value* x = node.input(0);
    const DType type = x->type.dtype;
    const std::optional<double> ratio = ratio_of(node);
    const bool always = constant_flag(node.input(2)) == true;
    Value* factor = ratio && always ? mask_times(node, x, *ratio) : computed_factor(node, x, ratio, always);
    Node* product = add_node("Mul", {x, factor->type.dtype == type ? factor : cast(factor, type)});
    set_output(*product, 0, node.out(0));
  }
  Value* mask_times(Node& node, Value* x, double ratio) {
    Node* mask = draw("DropoutMask", x, {}, {{"ratio", static_cast<float>(ratio)}});
    if (Value* given = node.out(1)) set_output(*mask, 0, given), given->type = Type::tensor(DType::boolean, x->type.shape);
    const DType type = x->type.dtype;
    Value* factor = add("Mul", {cast(mask->outputs[0], type), number(type, 1 / (1 - ratio))});
    factor->type = Type::tensor(type, x->type.shape);
    return factor;
  }
  // Ratio or mode are known in each step only. 1 where there is nothing to drop.
  Value* computed_factor(Node& node, Value* x, std::optional<double> ratio, bool always) {
    Value* share = ratio ? number(DType::float32, *ratio) : cast(node.input(1), DType::float32);
    Value *one = number(DType::float32, 1), *mode = node.input(2);
    Value* kept = add("Sub", {one, draw("RandomAt", x, {}, {}, share)->outputs[0]});
    Value* factor = add("Div", {kept, add("Sub", {one, share})});
    if (!always) factor = add("Where", {mode, factor, one});
    factor->type = Type::tensor(DType::float32, x->type.shape);
    if (Value* given = node.out(1)) {
      Value* mask = cast(kept, DType::boolean);
      if (!always) mask = add("Or", {mask, add("Not", {mode})});
      set_output(*mask->producer, 0, given);
    }
    return factor;
  }

  void rewrite_numbers(Node& node) {
    of_ = &node;
    Value* like = node.input(0);
    const auto told = static_cast<DType>(node.get_int("dtype", like ? 0 : static_cast<int64_t>(DType::float32)));
    const DType type = told == DType::undefined ? like->type.dtype : told;
    const bool normal = node.op.starts_with("RandomNormal");
    const std::vector<int64_t> shape = node.get_ints("shape");
    Node* made = draw("RandomAt", like, shape, {{"normal", int64_t{normal}}}, node.is("Bernoulli") ? like : nullptr);
    if (!node.is("Bernoulli")) {
      const double at = node.get_float(normal ? "mean" : "low", 0), to = node.get_float(normal ? "scale" : "high", 1);
      const double times = normal ? to : to - at;
      if (times != 1) made = add_node("Mul", {made->outputs[0], number(DType::float32, times)});
      if (at != 0) made = add_node("Add", {made->outputs[0], number(DType::float32, at)});
    }
    if (type != DType::float32) made = cast(made->outputs[0], type)->producer;
    set_output(*made, 0, node.out(0));
  }

  void add_inputs() {
    if (samples_) return;
    const auto input = [&](const std::string& name, Shape shape) {
      Value* value = graph_.add_value(name, Type::tensor(DType::int64, std::move(shape)));
      graph_.inputs.push_back(value);
      return value;
    };
    samples_ = input(kSamplesAtHand, Shape{Dim(2)}), counter_ = input(counter_name_, Shape{});
  }

  Graph& graph_;
  std::string counter_name_;
  const SampleDims& dims_;
  Value *samples_ = nullptr, *counter_ = nullptr;
  const Node* of_ = nullptr;  // the node at hand
};

}  // namespace

bool has_draws(const Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const Node* n) { return drops(*n) || draws_numbers(*n); });
}

bool count_draws(Model& model, const std::string& counter, const SampleDims& dims) {
  if (!has_draws(*model.graph)) return false;
  register_communication_schemas();
  DrawWriter(*model.graph, counter, dims).run();
  model.opsets[kCommunicationDomain] = 1;
  infer_shapes(model);
  return true;
}

void refuse_uncounted_draws(const Graph& graph) {
  for (const Node* node : graph.nodes) {
    const OperatorRecord* known = find_operator(node->op, node->domain);
    if (node->is("Dropout") ? drops(*node) : known && known->random)
      throw Error("it would draw the same random numbers in every step of training",
                  "leave it out of bodies, and draw by Dropout, Bernoulli, RandomNormal, RandomUniform or their Like forms",
                  ErrorCode::model)
          .at_node(node->name, node->op);
    for (const GraphPtr& body : bodies(*node)) refuse_uncounted_draws(*body);
  }
}

}  // namespace fretsaw
