// Models that make their loss themselves, and models with outputs that the loss is not of, over ranks and micro-batches.
#include <gtest/gtest.h>

#include <tuple>

#include "graph/errors.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int64_t kIn = 4, kOut = 3, kBatch = 8;

// y = x w + b, and beside it the mean or sum of (y - t)^2 over all elements.
Model make_model(const std::string& reduction) {
  Model model = *new_model();
  Graph& g = *model.graph;
  Value* x = add_input(model, "x", DType::float32, {Dim("batch"), Dim(kIn)});
  Value* t = add_input(model, "t", DType::float32, {Dim("batch"), Dim(kOut)});
  Value* y =
      add_node(g, "Add", {add_node(g, "MatMul", {x, add_weight(g, "w", {kIn, kOut}, 1)}, "product"), add_row(g, "b", kOut, 0.1f)}, "y");
  Value* error = add_node(g, "Sub", {y, t}, "error");
  Value* own = add_node(g, reduction, {add_node(g, "Mul", {error, error}, "square")}, "own", {attribute("keepdims", int64_t{0})});
  g.outputs = {y, own};
  name_nodes_by_outputs(g);
  return model;
}

Batch batch_of(int step, const std::vector<std::string>& targets) {
  const auto seed = 10 + static_cast<unsigned>(step);
  Batch batch;
  batch["x"] = float_value({kBatch, kIn}, noise(kBatch * kIn, seed));
  for (const std::string& name : targets) batch[name] = float_value({kBatch, kOut}, noise(kBatch * kOut, seed + 50));
  return batch;
}

std::vector<double> losses(const std::string& reduction, const std::string& loss, int data, int micro_batches) {
  TrainingOptions training = with_optimizer("sgd:lr=0.02,momentum=0.9");
  training.loss = parse_loss(loss);
  PartitionOptions options;
  options.mesh.data = data, options.micro_batches = micro_batches;
  Trainer trainer = trainer_of(make_model(reduction), options, training);
  const std::vector<std::string> targets =
      loss.starts_with("output") ? std::vector<std::string>{"t"} : std::vector<std::string>{"t", "target"};
  return losses_of(trainer, 4, 0.02, [&](int step) { return batch_of(step, targets); });
}

TEST(TrainingLossOutputs, AModelsOwnLossIsDividedOverTheBatch) {
  const std::vector<double> mean = losses("ReduceMean", "output:own", 1, 1), sum = losses("ReduceSum", "output:own,reduction=sum", 1, 1);
  expect_close(losses("ReduceMean", "mse:output=y", 1, 1), mean, 1e-6);
  for (const auto& [data, micro_batches] : {std::pair{2, 1}, {1, 2}, {1, 3}, {2, 3}, {3, 2}}) {
    SCOPED_TRACE(std::to_string(data) + " data ranks, micro-batches " + std::to_string(micro_batches));
    expect_close(losses("ReduceMean", "output:own", data, micro_batches), mean, 1e-5);
    expect_close(losses("ReduceSum", "output:own,reduction=sum", data, micro_batches), sum, 1e-5);
  }
}

TEST(TrainingLossOutputs, OutputsThatTheLossIsNotOfMayMixTheBatch) {
  expect_close(losses("ReduceMax", "mse:output=y", 2, 2), losses("ReduceMax", "mse:output=y", 1, 1), 1e-5);
}

// A loss of the model's own that ignores targets: parts of a batch count differently many.
TEST(TrainingLossOutputs, AModelsOwnCrossEntropyMayIgnoreTargets) {
  const auto run = [](const std::string& loss, bool likelihood, int data, int micro_batches, int tensor = 1) {
    Model model = make_model("ReduceMean");
    Graph& g = *model.graph;
    Value *y = g.outputs[0], *classes = add_input(model, "classes", DType::int64, {Dim("batch")});
    const Attribute ignored = attribute("ignore_index", int64_t{1});
    Value* own = likelihood
                     ? add_node(g, "NegativeLogLikelihoodLoss", {add_node(g, "LogSoftmax", {y}, "logs"), classes}, "entropy", {ignored})
                     : add_node(g, "SoftmaxCrossEntropyLoss", {y, classes}, "entropy", {ignored});
    g.outputs = {y, own};
    std::erase_if(g.inputs, [](const Value* v) { return v->name == "t"; });
    std::erase_if(g.nodes, [](const Node* n) { return n->is("Sub") || n->is("Mul") || n->is("ReduceMean"); });
    name_nodes_by_outputs(g);
    TrainingOptions training = with_optimizer("sgd:lr=0.1,momentum=0.9");
    training.loss = parse_loss(loss);
    PartitionOptions options;
    options.mesh.data = data, options.mesh.tensor = tensor, options.micro_batches = micro_batches;
    Trainer trainer = trainer_of(std::move(model), options, training);
    return losses_of(trainer, 4, 0.1, [&](int step) {
      Batch batch = batch_of(step, {});
      batch["classes"] = int_value({kBatch}, {1, 1, 0, 2, 0, 1, 2, step % kOut});
      if (!loss.starts_with("output")) batch["target"] = batch["classes"];
      return batch;
    });
  };
  const std::vector<double> wanted = run("softmax_cross_entropy:output=y,ignore_index=1", false, 1, 1);
  for (const bool likelihood : {false, true})
    for (const auto& [data, micro_batches] : {std::pair{1, 1}, {2, 1}, {1, 3}, {2, 2}}) {
      SCOPED_TRACE(std::to_string(data) + " data ranks, micro-batches " + std::to_string(micro_batches));
      expect_close(run("output:entropy", likelihood, data, micro_batches), wanted, 1e-5);
    }
  expect_close(run("output:entropy", false, 1, 1, 2), wanted, 1e-5);
}

// A cross-entropy among other terms: the mean of the parts' means as long as no target is ignored, which is an error.
TEST(TrainingLossOutputs, ACrossEntropyMayBeATermOfALoss) {
  const auto run = [](int data, int micro_batches, int tensor, const std::vector<int64_t>& classes, int64_t ignored) {
    Model model = make_model("ReduceMean");
    Graph& g = *model.graph;
    Value *y = g.outputs[0], *own = g.outputs[1], *targets = add_input(model, "classes", DType::int64, {Dim("batch")});
    Value* entropy = add_node(g, "SoftmaxCrossEntropyLoss", {y, targets}, "entropy", {attribute("ignore_index", ignored)});
    Value* scale = add_node(g, "Exp", {g.add_constant("scale", floats({}, {-0.3f}))}, "factor");
    g.outputs = {add_node(g, "Add", {add_node(g, "Mul", {entropy, scale}, "scaled"), own}, "total")};
    name_nodes_by_outputs(g);
    TrainingOptions training = with_optimizer("sgd:lr=0.1,momentum=0.9");
    training.loss = parse_loss("output");
    PartitionOptions options;
    options.mesh.data = data, options.mesh.tensor = tensor, options.micro_batches = micro_batches;
    Trainer trainer = trainer_of(std::move(model), options, training);
    return losses_of(trainer, 4, 0.1, [&](int step) {
      Batch batch = batch_of(step, {"t"});
      batch["classes"] = int_value({kBatch}, classes);
      return batch;
    });
  };
  const std::vector<int64_t> all = {1, 1, 0, 2, 0, 1, 2, 0}, some = {1, 1, 0, 2, 0, -1, 2, 0};
  const std::vector<double> wanted = run(1, 1, 1, all, -1);
  for (const auto& [data, micro_batches, tensor] : {std::tuple{2, 1, 1}, {1, 3, 1}, {3, 2, 1}, {2, 2, 2}}) {
    SCOPED_TRACE(std::to_string(data) + " data ranks, micro-batches " + std::to_string(micro_batches));
    for (const int64_t ignored : {-1, -100}) expect_close(run(data, micro_batches, tensor, all, ignored), wanted, 1e-5);
  }
  EXPECT_NE(run(1, 1, 1, some, -1), wanted);
  EXPECT_THROW(run(2, 1, 1, some, -1), Error);
  EXPECT_THROW(run(1, 2, 1, some, -1), Error);
  EXPECT_THROW(run(2, 1, 1, all, 2), Error);  // one of the classes: it is refused before
}

TEST(TrainingLossOutputs, WhatIsTakenForAnotherReductionIsAnError) {
  const auto error_of = [](const std::string& reduction, const std::string& loss) {
    try {
      losses(reduction, loss, 2, 1);
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).find("--merge"), std::string::npos) << e.what();
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(error_of("ReduceSum", "output:own").find("use --loss output:own,reduction=sum"), std::string::npos);
  EXPECT_NE(error_of("ReduceMean", "output:own,reduction=sum").find("use --loss output:own,reduction=mean"), std::string::npos);
  EXPECT_NE(error_of("ReduceMax", "output:own").find("train with one data rank and one micro-batch"), std::string::npos);
}

// sum(m (y - t)^2) / sum(m): neither a mean over samples nor anything that is proved, so another loss than the model's would be trained.
TEST(TrainingLossOutputs, AMaskedMeanIsNotMadeFromParts) {
  const auto run = [](int data, int micro_batches) {
    Model model = make_model("ReduceMean");
    Graph& g = *model.graph;
    Value *own = g.outputs[1], *square = own->producer->inputs[0], *t = g.inputs[1];
    Value* mask = add_node(g, "Sigmoid", {t}, "mask");
    const Attribute flat = attribute("keepdims", int64_t{0});
    Value* sum = add_node(g, "ReduceSum", {add_node(g, "Mul", {square, mask}, "masked")}, "sum", {flat});
    g.outputs = {add_node(g, "Div", {sum, add_node(g, "ReduceSum", {mask}, "count", {flat})}, "ratio")};
    name_nodes_by_outputs(g);
    TrainingOptions training = with_optimizer("sgd:lr=0.02");
    training.loss = parse_loss("output");
    PartitionOptions options;
    options.mesh.data = data, options.micro_batches = micro_batches;
    Trainer trainer = trainer_of(std::move(model), options, training);
    return trainer.step(batch_of(0, {"t"}), 0.02).loss;
  };
  EXPECT_GT(run(1, 1), 0);
  for (const auto& [data, micro_batches] : {std::pair{2, 1}, {1, 2}}) {
    try {
      run(data, micro_batches);
      ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("it is not proved to be a mean over samples"), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace fretsaw
