// BatchNormalization while a model is trained.
#include "graph/training/batch_norm.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "graph/passes.h"
#include "graph/passes/narrow_floats.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

// A branch has no way to move running statistics.
void refuse_batch_norms(Graph& body) {
  for_each_graph(body, [](const Graph& graph) {
    for (const Node* node : graph.nodes)
      if (node->is("BatchNormalization"))
        throw Error("it stands in a body of If, Loop or Scan, where its running statistics can't be moved",
                    "put it outside, or write it as a Mul and an Add", ErrorCode::model)
            .at_node(node->name, node->op);
  });
}

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
      for (size_t i : {3, 4}) ++uses_[widest(node->input(i))];
    }
    for (Node* node : std::vector<Node*>(graph_.nodes)) {
      if (!node->is("BatchNormalization")) continue;
      if (data_ranks_ > 1)
        synchronise(*node);
      else
        use_own_statistics(*node);
    }
    for (const Move& m : moves_) finish(m);
    for (RunningStatistic& one : statistics_) keep_finite(one);
    remove_dead_nodes();
    sort_nodes(graph_);
    return std::move(statistics_);
  }

 private:
  // What becomes of a running statistic: kept * running + added.
  struct Move {
    Value *running, *added;
    float kept;
    const Node* last;  // of the nodes that move it
  };

  // What a value was cast from, where that holds more.
  static Value* widest(Value* value) {
    const Node* cast = value->producer;
    return cast && cast->is("Cast") && bits_of(cast->input(0)->type.dtype) > bits_of(value->type.dtype) ? cast->input(0) : value;
  }
  // Casts of running statistics that nothing takes any more.
  void remove_dead_nodes() {
    std::unordered_set<const Value*> used(graph_.outputs.begin(), graph_.outputs.end());
    for (const Node* node : graph_.nodes)
      for (const Value* v : operands(*node)) used.insert(v);
    std::erase_if(graph_.nodes, [&](const Node* node) { return node->is("Cast") && !used.contains(node->out(0)); });
  }

  // The node moves the running statistics, in what they are kept in. Of shared ones it gives the batch's own.
  void use_own_statistics(Node& node) {
    const float momentum = node.get_float("momentum", 0.9f);
    Value* running[] = {widest(node.input(3)), widest(node.input(4))};
    const bool shared = uses_.at(running[0]) > 1 || uses_.at(running[1]) > 1;
    node.set("training_mode", int64_t{1});
    if (shared) node.set("momentum", 0.0f);
    node.outputs.resize(3);
    for (size_t i : {0, 1}) {
      const Type type = running[i]->type;
      node.inputs[i + 3] = shared ? graph_.add_constant(graph_.fresh_name(node.name + "_zeros"), zeros(type)) : running[i];
      Value* made = graph_.add_value(graph_.fresh_name(running[i]->name + (shared ? "_batch" : "_next")), type);
      set_output(node, i + 1, made);
      if (shared)
        move(node, running[i], made, momentum);
      else
        statistics_.push_back({running[i], made});
    }
  }
  static TensorPtr zeros(const Type& type) { return make_tensor(type.dtype, dims_of(*type.shape)); }
  Value* add(const Node& of, const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {},
             const std::string& domain = "") {
    Node* made = graph_.add_node(op, std::move(inputs), {graph_.fresh_name(of.name + "_" + op)}, std::move(attributes), domain);
    made->name = made->outputs[0]->name;
    return made->outputs[0];
  }
  Value* number(const Node& of, float value, DType type = DType::float32) {
    return graph_.add_constant(graph_.fresh_name(of.name + "_number"), float_tensor(type, {}, {static_cast<double>(value)}));
  }
  // momentum * running + (1 - momentum) * now, for each node that has it in turn. `now` is of its type.
  void move(const Node& of, Value* running, Value* now, float momentum) {
    const DType type = running->type.dtype;
    Value* added = add(of, "Mul", {now, number(of, 1 - momentum, type)});
    const auto before = std::find_if(moves_.begin(), moves_.end(), [&](const Move& m) { return m.running == running; });
    if (before == moves_.end()) {
      moves_.push_back({running, added, momentum, &of});
    } else {
      Value* earlier = add(of, "Mul", {before->added, number(of, momentum, type)});
      *before = {running, add(of, "Add", {earlier, added}), before->kept * momentum, &of};
    }
  }
  // The running statistic itself is read by one node, so that it is at home where its next value is made.
  void finish(const Move& m) {
    Value* kept = add(*m.last, "Mul", {m.running, number(*m.last, m.kept, m.running->type.dtype)});
    statistics_.push_back({m.running, add(*m.last, "Add", {kept, m.added})});
  }

  // A step whose numbers overflow is left out, and the old value stays with it.
  void keep_finite(RunningStatistic& one) {
    const Node& of = *one.next->producer;
    const double largest = one.running->type.dtype == DType::float64   ? std::numeric_limits<double>::max()
                           : one.running->type.dtype == DType::float32 ? static_cast<double>(std::numeric_limits<float>::max())
                                                                       : 65504;  // of float16, and well within bfloat16
    Value* most = graph_.add_constant(graph_.fresh_name(of.name + "_number"), float_tensor(one.running->type.dtype, {}, {largest}));
    Value* finite = add(of, "LessOrEqual", {add(of, "Abs", {one.next}), most});  // not of NaN
    one.next = add(of, "Where", {finite, one.next, one.running});
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
    const auto move_by = [&](size_t input, Value* statistic) {
      Value *running = widest(node.input(input)), *now = add("Reshape", {statistic, flat});
      move(node, running, running->type.dtype == DType::float32 ? now : cast(now, running->type.dtype), momentum);
    };
    move_by(3, mean), move_by(4, variance);
    std::erase(graph_.nodes, &node);
  }

  Graph& graph_;
  int data_ranks_;
  std::unordered_map<const Value*, int> uses_;  // of running statistics
  std::vector<Move> moves_;
  std::vector<RunningStatistic> statistics_;
};

}  // namespace

std::set<std::string> frozen_running_means(const Graph& graph) {
  std::set<std::string> frozen, trained, computed;
  for (const Node* node : graph.nodes) {
    if (!node->is("BatchNormalization") || !node->input(3)) continue;
    const bool trains = node->get_int("training_mode", 0) != 0 || node->out(1);  // before opset 14 the outputs say it
    const Node* by = node->input(3)->producer;
    (trains ? trained : by && !by->is("Constant") && !by->is("Identity") ? computed : frozen).insert(node->input(3)->name);
  }
  if (trained.empty()) return computed;
  for (const std::string& name : trained) frozen.erase(name);
  frozen.merge(computed);
  return frozen;
}

// y = (x - mean) * (scale / sqrt(var + epsilon)) + bias
std::set<std::string> write_frozen_batch_norms(Model& model, const std::set<std::string>& means) {
  Graph& graph = *model.graph;
  std::set<std::string> statistics;
  for (Node* node : std::vector<Node*>(graph.nodes)) {
    if (!node->is("BatchNormalization") || !means.contains(node->input(3)->name)) continue;
    const Value* x = node->input(0);
    if (!x->type.shape || x->type.shape->size() < 2)
      throw Error("it stays as in inference, and its input's rank is not known", "give the model's inputs shapes", ErrorCode::model)
          .at_node(node->name, node->op);
    for (size_t i : {3, 4}) statistics.insert(node->input(i)->name);
    std::vector<int64_t> channels(x->type.shape->size(), 1);
    channels[1] = -1;
    const auto add = [&](const std::string& op, std::vector<Value*> inputs) {
      Node* made = graph.add_node(op, std::move(inputs), {graph.fresh_name(node->name + "_" + op)});
      made->name = made->outputs[0]->name;
      return made->outputs[0];
    };
    Value* row = graph.add_constant(graph.fresh_name(node->name + "_channels"), make_int64s(channels));
    const auto along_channels = [&](Value* value) { return add("Reshape", {value, row}); };
    const DType type = node->input(4)->type.dtype;
    Value* epsilon = graph.add_constant(graph.fresh_name(node->name + "_epsilon"),
                                        float_tensor(type, {}, {static_cast<double>(node->get_float("epsilon", 1e-5f))}));
    Value* factor = add("Div", {node->input(1), add("Sqrt", {add("Add", {node->input(4), epsilon})})});
    Value* centred = add("Sub", {node->input(0), along_channels(node->input(3))});
    Node* last = add("Add", {add("Mul", {centred, along_channels(factor)}), along_channels(node->input(2))})->producer;
    Value* y = node->out(0);
    y->producer = nullptr;
    set_output(*last, 0, y);
    std::erase(graph.nodes, node);
  }
  if (statistics.empty()) return statistics;
  sort_nodes(graph);
  infer_shapes(model);
  return statistics;
}

void batch_norms_for_inference(Graph& graph) {
  std::unordered_set<const Value*> used(graph.outputs.begin(), graph.outputs.end());
  for (const Node* node : graph.nodes)
    for (const Value* v : operands(*node)) used.insert(v);
  bool changed = false;
  for (Node* node : std::vector<Node*>(graph.nodes)) {
    if (!node->is("BatchNormalization")) continue;
    node->remove("training_mode");
    const std::vector<Value*> outputs = node->outputs;
    node->outputs.resize(1);
    for (size_t i = 1; i < outputs.size(); ++i) {  // the mean or the variance; before opset 14 four of them, twice in this order
      if (!outputs[i] || !used.contains(outputs[i])) continue;
      outputs[i]->producer = nullptr;
      Node* kept = graph.add_node("Identity", {node->input(i % 2 == 1 ? 3 : 4)}, {graph.fresh_name(node->name + "_running")});
      kept->name = kept->outputs[0]->name;
      set_output(*kept, 0, outputs[i]);
      changed = true;
    }
  }
  if (changed) sort_nodes(graph);
}

std::vector<RunningStatistic> train_batch_norms(Model& model, int data_ranks) {
  for (const Node* node : model.graph->nodes)
    for (const GraphPtr& body : bodies(*node)) refuse_batch_norms(*body);
  std::vector<RunningStatistic> statistics = BatchNormTrainer(*model.graph, data_ranks).run();
  infer_shapes(model);
  return statistics;
}

}  // namespace fretsaw
