// Sums over ranks that run as one step with the addition and the norm behind them: which are recognised, and what their kernel is given.
#include "runtime/sums_with_norms.h"

#include <gtest/gtest.h>

#include <functional>

#include "graph/errors.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

// Joins whatever it is asked for, up to 8 rows, and keeps the last call.
class Recorder : public DeviceCommunicator {
 public:
  bool capturable() const override { return true; }
  void all_reduce(const void*, void*, size_t, DType, Reduction) override {}
  void all_gather(const void*, void*, size_t) override {}
  void reduce_scatter(const void*, void*, size_t, DType, Reduction) override {}
  void all_to_all(const void*, void*, size_t) override {}
  void broadcast(void*, size_t, int) override {}
  void abort() override {}
  bool joins_norm(int64_t rows, int64_t, DType) const override { return rows <= 8; }
  void sum_with_norm(const SumWithNorm& sum) override { last = sum; }
  SumWithNorm last;
};

// p -> AllReduce -> Add(x, .) -> RMSNormalization -> y, of which a test changes a part.
struct Block {
  std::shared_ptr<Model> model = new_model();
  Graph& graph = *model->graph;
  std::vector<std::unique_ptr<Communicator>> ranks = make_thread_communicators(2);
  RankContext rank;
  HostNodes host;
  std::vector<std::vector<const Node*>> steps;

  Shape shape = {Dim(1), Dim(3), Dim(16)};
  DType dtype = DType::bfloat16;
  Value *p = nullptr, *x = nullptr, *scale = nullptr, *sum = nullptr, *added = nullptr, *y = nullptr;
  std::string reduction = "sum";
  bool residual_first = true;
  std::vector<Attribute> norm_attributes = {attribute("epsilon", 1e-3f)};

  void operands() {
    p = add_input(*model, "p", dtype, shape), x = add_input(*model, "x", dtype, shape);
    scale = graph.add_constant("scale", make_tensor(dtype, {16}));
    scale->type = Type::tensor(dtype, shape_of(Dims{16}));
  }
  void add_sum() {
    const std::vector<Attribute> attributes = {attribute("axis", std::string("tensor")), attribute("group_size", int64_t{2}),
                                               attribute("reduction", reduction)};
    sum = graph.add_node("AllReduce", {p}, {"sum"}, attributes, kCommunicationDomain)->out(0);
    sum->type = Type::tensor(dtype, shape);
    steps.push_back({sum->producer});
  }
  void add_norm() {
    added = add_node(graph, "Add", residual_first ? std::vector<Value*>{x, sum} : std::vector<Value*>{sum, x}, "added");
    y = add_node(graph, "RMSNormalization", {added, scale}, "y", norm_attributes);
    added->type = y->type = Type::tensor(dtype, shape);
    steps.push_back({added->producer, y->producer});
    graph.outputs = {added, y};
  }
  void finish() {
    rank.groups.push_back({"tensor", std::move(ranks[0]), std::make_unique<Recorder>(), 0});
    rank.now_us = [] { return 0.0; };
  }
  bool joins() {
    const Consumers consumers = consumers_of(graph);
    std::unordered_set<const Value*> outputs(graph.outputs.begin(), graph.outputs.end());
    join_norms_to_sums(steps, host, consumers, outputs, rank);
    for (const auto& step : steps) EXPECT_FALSE(step.empty());
    return std::any_of(steps.begin(), steps.end(), [](const auto& step) { return step.size() == 3 && step[0]->op == "AllReduce"; });
  }
};

// How a case differs from the plain block.
struct Case {
  const char* what;
  bool joins;
  std::function<void(Block&)> before = nullptr, between = nullptr, after = nullptr;  // the operands; sum and norm; all is there
};

TEST(SumsWithNorms, WhichAreRecognised) {
  const Case cases[] = {
      {"the plain block", true},
      {"the sum as the first operand", true, [](Block& b) { b.residual_first = false; }},
      {"the last axis by its number", true, [](Block& b) { b.norm_attributes.push_back(attribute("axis", int64_t{2})); }},
      {"more rows than the kernel takes", false, [](Block& b) { b.shape[1] = Dim(9); }},
      {"another axis", false, [](Block& b) { b.norm_attributes.push_back(attribute("axis", int64_t{1})); }},
      {"statistics in half precision", false,
       [](Block& b) { b.norm_attributes.push_back(attribute("stash_type", static_cast<int64_t>(DType::bfloat16))); }},
      {"a maximum", false, [](Block& b) { b.reduction = "max"; }},
      {"a residual that broadcasts", false, nullptr, [](Block& b) { b.x->type = Type::tensor(b.dtype, shape_of(Dims{16})); }},
      {"a residual of another type", false, nullptr, [](Block& b) { b.x->type = Type::tensor(DType::float32, b.shape); }},
      {"a scale that is computed", false, nullptr, [](Block& b) { b.scale = add_input(*b.model, "s", b.dtype, shape_of(Dims{16})); }},
      {"a scale of one number", false, nullptr, [](Block& b) { b.scale = b.graph.add_constant("one", make_tensor(b.dtype, {1})); }},
      {"a sum that is added to itself", false, nullptr, [](Block& b) { b.x = b.sum; }},
      {"an elementwise step in between", true, nullptr,
       [](Block& b) { b.steps.push_back({add_node(b.graph, "Neg", {b.x}, "n")->producer}); }},
      {"another collective in between", false, nullptr,
       [](Block& b) {
         Node* other = b.graph.add_node("AllGather", {b.x}, {"g"}, {attribute("axis", std::string("tensor"))}, kCommunicationDomain);
         b.steps.push_back({other});
       }},
      {"a sum that another node takes", false, nullptr,
       [](Block& b) { b.steps.push_back({add_node(b.graph, "Neg", {b.sum}, "n")->producer}); }},
      {"a sum that the graph gives", false, nullptr, nullptr, [](Block& b) { b.graph.outputs.push_back(b.sum); }},
      {"a norm of something else", false, nullptr, nullptr, [](Block& b) { b.y->producer->inputs[0] = b.x; }},
      {"an addition on the host", false, nullptr, nullptr, [](Block& b) { b.host.nodes.insert(b.added->producer); }},
      {"no devices along the axis", false, nullptr, nullptr, [](Block& b) { b.rank.groups[0].devices = nullptr; }},
      {"no such axis", false, nullptr, nullptr, [](Block& b) { b.rank.groups[0].axis = "data"; }},
  };
  for (const Case& c : cases) {
    Block b;
    if (c.before) c.before(b);
    b.operands();
    b.add_sum();
    if (c.between) c.between(b);
    b.add_norm();
    b.finish();
    if (c.after) c.after(b);
    EXPECT_EQ(b.joins(), c.joins) << c.what;
  }
}

// The memory that the values of a run have already.
class Planned : public KernelMemory {
 public:
  explicit Planned(const std::vector<RuntimeValue*>& places) : places_(places) {}
  void* output(size_t i, DType, const Dims&, Layout) override { return places_[i]->tensor.data; }
  void* scratch(size_t) override { throw Error("this step needs no scratch memory", ""); }

 private:
  const std::vector<RuntimeValue*>& places_;
};

TEST(SumsWithNorms, TheKernelGetsEveryOperand) {
  for (bool takes_sum : {true, false}) {
    Block b;
    b.residual_first = takes_sum;
    b.operands(), b.add_sum(), b.add_norm(), b.finish();
    ASSERT_TRUE(b.joins());
    CompileContext c;
    c.nodes = b.steps.back();
    c.inputs = {b.p, b.x, b.scale};
    c.input_types = {b.p->type, b.x->type, b.scale->type};
    c.constants = {nullptr, nullptr, b.scale->constant};
    c.offered.assign(3, Layout::plain);
    c.outputs = takes_sum ? std::vector<const Value*>{b.added, b.y} : std::vector<const Value*>{b.y};
    c.output_types.assign(c.outputs.size(), b.y->type);
    const CompiledKernel kernel = make_sum_with_norm(c, b.rank);
    EXPECT_TRUE(kernel.capturable);

    std::vector<RuntimeValue> values;
    for (const Dims& dims : {Dims{1, 3, 16}, Dims{1, 3, 16}, Dims{16}, Dims{1, 3, 16}, Dims{1, 3, 16}})
      values.push_back(make_value(b.dtype, dims));
    std::vector<RuntimeValue*> inputs = {&values[0], &values[1], &values[2]}, outputs;
    for (size_t i = 0; i < c.outputs.size(); ++i) outputs.push_back(&values[3 + i]);
    Planned memory(outputs);
    RunContext run(inputs, outputs, memory, 1);
    kernel.run(run);

    const SumWithNorm& got = static_cast<Recorder&>(*b.rank.groups[0].devices).last;
    EXPECT_EQ(got.rows, 3);
    EXPECT_EQ(got.n, 16);
    EXPECT_EQ(got.dtype, b.dtype);
    EXPECT_FLOAT_EQ(got.epsilon, 1e-3f);
    EXPECT_EQ(got.in, values[0].tensor.data);
    EXPECT_EQ(got.residual, values[1].tensor.data);
    EXPECT_EQ(got.scale, values[2].tensor.data);
    EXPECT_EQ(got.sum, takes_sum ? values[3].tensor.data : nullptr);
    EXPECT_EQ(got.y, values[takes_sum ? 4 : 3].tensor.data);
    EXPECT_EQ(b.rank.groups[0].calls, 1);
  }
}

}  // namespace
}  // namespace fretsaw
