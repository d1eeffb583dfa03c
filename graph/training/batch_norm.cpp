// BatchNormalization while a model is trained.
#include "graph/training/batch_norm.h"

#include <cstring>
#include <unordered_set>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/passes.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

class BatchNormTrainer {
 public:
  BatchNormTrainer(Graph& graph, int data_ranks) : graph_(graph), data_ranks_(data_ranks) {}

  std::vector<RunningStatistic> run() {
    for (Node* node : std::vector<Node*>(graph_.nodes)) {
      if (!node->is("BatchNormalization")) continue;
      for (size_t i : {3, 4})
        if (!widest(node->input(i))->is_constant())
          throw Error("its running statistics are computed", "train a model that holds them", ErrorCode::model)
              .at_node(node->name, node->op);
      if (data_ranks_ > 1)
        synchronise(*node);
      else if (bits_of(node->input(0)->type.dtype) < 32)
        use_narrow_statistics(*node);
      else
        use_own_statistics(*node);
    }
    remove_dead_nodes();
    sort_nodes(graph_);
    return std::move(statistics_);
  }

 private:
  // What a value was cast from, where that holds more.
  static Value* widest(Value* value) {
    const Node* cast = value->producer;
    return cast && cast->is("Cast") && bits_of(cast->input(0)->type.dtype) > bits_of(value->type.dtype) ? cast->input(0) : value;
  }
  // Casts of running statistics that nothing takes any more.
  void remove_dead_nodes() {
    std::unordered_set<const Value*> used(graph_.outputs.begin(), graph_.outputs.end());
    for (const Node* node : graph_.nodes) used.insert(node->inputs.begin(), node->inputs.end());
    std::erase_if(graph_.nodes, [&](const Node* node) { return node->is("Cast") && !used.contains(node->out(0)); });
  }

  void use_own_statistics(Node& node) {
    node.set("training_mode", int64_t{1});
    node.outputs.resize(3);
    for (size_t i : {1, 2}) {
      Value* running = node.input(i + 2);
      set_output(node, i, graph_.add_value(graph_.fresh_name(running->name + "_next"), running->type));
      statistics_.push_back({running, node.outputs[i]});
    }
  }

  // In 16 bits: the node gives the batch's own statistics, and the running ones are moved in what they are kept in.
  void use_narrow_statistics(Node& node) {
    node.set("training_mode", int64_t{1});
    const float momentum = node.get_float("momentum", 0.9f);
    node.set("momentum", 0.0f);
    node.outputs.resize(3);
    for (size_t i : {1, 2}) {
      Value* running = widest(node.input(i + 2));
      const DType narrow = node.input(0)->type.dtype;
      auto zeros = make_tensor(narrow, dims_of(*running->type.shape));
      node.inputs[i + 2] = graph_.add_constant(graph_.fresh_name(node.name + "_zeros"), zeros);
      Value* own = graph_.add_value(graph_.fresh_name(running->name + "_batch"), node.inputs[i + 2]->type);
      set_output(node, i, own);
      move(node, running, add(node, "Cast", {own}, {{"to", static_cast<int64_t>(running->type.dtype)}}), momentum);
    }
  }
  Value* add(const Node& of, const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {},
             const std::string& domain = "") {
    Node* made = graph_.add_node(op, std::move(inputs), {graph_.fresh_name(of.name + "_" + op)}, std::move(attributes), domain);
    made->name = made->outputs[0]->name;
    return made->outputs[0];
  }
  Value* number(const Node& of, float value) {
    auto tensor = make_tensor(DType::float32, {});
    std::memcpy(mutable_data(*tensor), &value, sizeof value);
    return graph_.add_constant(graph_.fresh_name(of.name + "_number"), tensor);
  }
  // momentum * running + (1 - momentum) * now
  void move(const Node& of, Value* running, Value* now, float momentum) {
    Value* kept = add(of, "Mul", {running, number(of, momentum)});
    statistics_.push_back({running, add(of, "Add", {kept, add(of, "Mul", {now, number(of, 1 - momentum)})})});
  }

  // The same from sums over data ranks, in operators that are differentiated one by one:
  //   mean = sum(x) / n,  var = sum((x - mean)^2) / n,  y = (x - mean) / sqrt(var + eps) * scale + bias
  void synchronise(Node& node) {
    Value* x = node.input(0);
    const DType type = x->type.dtype;
    if (!x->type.shape || x->type.shape->size() < 2 || !(*x->type.shape)[1].known() || bits_of(type) > 32)
      throw Error("it can be synchronised in at most 32 bits and with a known number of channels only", "leave out --sync-batch-norm",
                  ErrorCode::model)
          .at_node(node.name, node.op);
    const auto add = [&](const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {},
                         const std::string& domain = "") { return this->add(node, op, std::move(inputs), std::move(attributes), domain); };
    const auto number = [&](float value) { return this->number(node, value); };
    const auto cast = [&](Value* value, DType to) { return add("Cast", {value}, {{"to", static_cast<int64_t>(to)}}); };
    const auto wide = [&](Value* value) {
      Value* widest = BatchNormTrainer::widest(value);
      return widest->type.dtype == DType::float32 ? widest : cast(value, DType::float32);
    };
    if (type != DType::float32) x = cast(x, DType::float32), x->type = Type::tensor(DType::float32, *node.input(0)->type.shape);
    const auto ints = [&](const std::vector<int64_t>& values) {
      return graph_.add_constant(graph_.fresh_name(node.name + "_ints"), make_int64s(values));
    };
    std::vector<int64_t> others = {0}, channels(x->type.shape->size(), 1);
    for (size_t d = 2; d < x->type.shape->size(); ++d) others.push_back(static_cast<int64_t>(d));
    channels[1] = -1;
    Value *axes = ints(others), *row = ints(channels), *flat = ints({-1});
    const std::vector<Attribute> group = {{"axis", std::string("data")}, {"group_size", int64_t{data_ranks_}}};
    const auto over_ranks = [&](Value* value) { return add("AllReduce", {value}, group, kCommunicationDomain); };
    const auto summed = [&](Value* value) { return over_ranks(add("ReduceSum", {value, axes}, {{"keepdims", int64_t{1}}})); };
    Value* elements = add("Cast", {add("Size", {x})}, {{"to", static_cast<int64_t>(DType::float32)}});
    Value* count = over_ranks(add("Mul", {elements, number(1.0f / static_cast<float>((*x->type.shape)[1].value))}));
    Value* mean = add("Div", {summed(x), count});
    Value* centred = add("Sub", {x, mean});
    Value* variance = add("Div", {summed(add("Mul", {centred, centred})), count});
    Value* root = add("Sqrt", {add("Add", {variance, number(node.get_float("epsilon", 1e-5f))})});
    Value* scaled = add("Mul", {add("Div", {centred, root}), add("Reshape", {wide(node.input(1)), row})});
    Value* y = node.out(0);
    y->producer = nullptr;
    Value* shifted = add("Add", {scaled, add("Reshape", {wide(node.input(2)), row})});
    Node* last = shifted->producer;
    if (type != DType::float32) last = cast(shifted, type)->producer;
    set_output(*last, 0, y);
    const float momentum = node.get_float("momentum", 0.9f);
    move(node, widest(node.input(3)), add("Reshape", {mean, flat}), momentum);
    move(node, widest(node.input(4)), add("Reshape", {variance, flat}), momentum);
    std::erase(graph_.nodes, &node);
  }

  Graph& graph_;
  int data_ranks_;
  std::vector<RunningStatistic> statistics_;
};

}  // namespace

void batch_norms_for_inference(Graph& graph) {
  for (Node* node : graph.nodes) {
    if (!node->is("BatchNormalization")) continue;
    node->remove("training_mode");
    node->outputs.resize(1);
  }
}

std::vector<RunningStatistic> train_batch_norms(Model& model, int data_ranks) {
  std::vector<RunningStatistic> statistics = BatchNormTrainer(*model.graph, data_ranks).run();
  infer_shapes(model);
  return statistics;
}

}  // namespace fretsaw
