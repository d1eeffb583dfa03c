// Collectives inside the graphs of tensor-parallel ranks: a table of cases, layers cut over ranks, counts, aborts, memory.
#include "runtime/collectives.h"

#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <functional>
#include <numeric>
#include <thread>

#include "graph/errors.h"
#include "runtime/rank.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;
using Models = std::vector<std::shared_ptr<Model>>;
using Inputs = std::map<std::string, RuntimeValue>;
using Attributes = std::vector<Attribute>;

Attribute ints(const std::string& name, std::vector<int64_t> values) {
  return attribute(name, std::move(values));
}
Attribute number(const std::string& name, int64_t value) {
  return attribute(name, value);
}

Value* add_collective(Graph& graph, const std::string& op, Value* x, int ranks, const std::string& output, Attributes attributes = {}) {
  attributes.push_back(attribute("axis", std::string("tensor")));
  attributes.push_back(number("group_size", ranks));
  return graph.add_node(op, {x}, {output}, std::move(attributes), kCommunicationDomain)->outputs[0];
}

// One stage, cut over the tensor axis: a model for each rank, all with the same outputs. Inputs that several models have are one.
std::shared_ptr<Plan> tensor_plan(const Models& models, int micro_batches = 1) {
  auto plan = make_plan({models[0]}, micro_batches);
  plan->mesh.tensor = static_cast<int>(models.size());
  plan->graphs.clear();
  for (size_t t = 0; t < models.size(); ++t) {
    plan->graphs.push_back({0, "forward", {{"tensor", static_cast<int>(t)}}, "", models[t]});
    for (const Value* v : models[t]->graph->inputs) {
      bool known = false;
      for (const PlanInput& input : plan->inputs) known |= input.name == v->name;
      if (!known) plan->inputs.push_back({v->name, v->type, micro_batches > 1 ? 0 : -1, {0}});
    }
  }
  return plan;
}

double clock_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Output 0 of every rank after one step; a session would give that of the first rank alone.
std::vector<RuntimeValue> run_on_every_rank(const std::shared_ptr<Plan>& plan, const Inputs& inputs) {
  const int count = plan->mesh.size();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int t = 0; t < count; ++t) ranks.push_back(std::make_unique<Rank>(plan, SessionOptions{}, 0, 0, t, 1, clock_us));
  auto communicators = make_thread_communicators(count, std::chrono::seconds(20));
  StepInputs step;
  step.inputs = check_inputs(*plan, inputs, std::vector<bool>(plan->inputs.size(), false));
  step.batches = divide_batch(*plan, step.inputs);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(count));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < ranks.size(); ++t) {
    threads.emplace_back([&, t] {
      try {
        ranks[t]->run_step(step, *communicators[t]);
      } catch (const std::exception& e) {
        errors[t] = std::current_exception();
        communicators[t]->abort(e.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  std::vector<RuntimeValue> outputs;
  for (auto& rank : ranks) outputs.push_back(*rank->output(0, 0));
  return outputs;
}

std::string error_of(const std::shared_ptr<Plan>& plan, const Inputs& inputs) {
  try {
    Session(plan, {.threads = 1}).run(inputs);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

// --- what collectives should give, in the plainest way ---

struct Array {
  Dims dims;
  std::vector<double> values;
};
int64_t inner_of(const Dims& dims, size_t axis) {
  return std::accumulate(dims.begin() + static_cast<ptrdiff_t>(axis) + 1, dims.end(), int64_t{1}, std::multiplies<>());
}
Array slice(const Array& x, size_t axis, int64_t begin, int64_t count) {
  Array y{x.dims, {}};
  y.dims[axis] = count;
  const int64_t inner = inner_of(x.dims, axis);
  for (size_t i = 0; i < x.values.size(); ++i) {
    int64_t at = static_cast<int64_t>(i) / inner % x.dims[axis];
    if (at >= begin && at < begin + count) y.values.push_back(x.values[i]);
  }
  return y;
}
Array joined(const std::vector<Array>& parts, size_t axis) {
  Array y{parts[0].dims, {}};
  y.dims[axis] = 0;
  for (const Array& part : parts) y.dims[axis] += part.dims[axis];
  const int64_t inner = inner_of(y.dims, axis), rows = count_of(y.dims) == 0 ? 0 : count_of(y.dims) / (inner * y.dims[axis]);
  for (int64_t row = 0; row < rows; ++row) {
    for (const Array& part : parts) {
      auto begin = part.values.begin() + row * part.dims[axis] * inner;
      y.values.insert(y.values.end(), begin, begin + part.dims[axis] * inner);
    }
  }
  return y;
}
Array reduced(const std::vector<Array>& parts, const std::string& reduction) {
  Array y = parts[0];
  for (size_t r = 1; r < parts.size(); ++r) {
    for (size_t i = 0; i < y.values.size(); ++i) {
      double &a = y.values[i], b = parts[r].values[i];
      a = reduction == "max" ? std::max(a, b) : reduction == "min" ? std::min(a, b) : reduction == "product" ? a * b : a + b;
    }
  }
  if (reduction == "mean") {
    for (double& v : y.values) v /= static_cast<double>(parts.size());
  }
  return y;
}

// Small whole numbers as elements of any type that has them.
void store(const TensorView& x, const std::vector<double>& values) {
  auto fill = [&]<typename T>(T) {
    for (size_t i = 0; i < values.size(); ++i) x.as<T>()[i] = static_cast<T>(values[i]);
  };
  if (x.dtype == DType::float32) return fill(float{});
  if (x.dtype == DType::float64) return fill(double{});
  if (x.dtype == DType::float16) return fill(_Float16{});
  if (x.dtype == DType::int8 || x.dtype == DType::uint8 || x.dtype == DType::boolean) return fill(int8_t{});
  if (x.dtype == DType::int16 || x.dtype == DType::uint16) return fill(int16_t{});
  if (x.dtype == DType::int32 || x.dtype == DType::uint32) return fill(int32_t{});
  if (x.dtype == DType::int64 || x.dtype == DType::uint64) return fill(int64_t{});
  for (size_t i = 0; i < values.size(); ++i) {
    if (x.dtype == DType::bfloat16) {
      x.as<uint16_t>()[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(values[i])) >> 16);
    } else if (x.dtype == DType::complex128) {
      x.as<double>()[2 * i] = x.as<double>()[2 * i + 1] = values[i];
    } else if (x.dtype == DType::uint4) {
      uint8_t& byte = x.as<uint8_t>()[i / 2];
      byte = static_cast<uint8_t>(i % 2 ? (byte & 15) | static_cast<int>(values[i]) << 4 : static_cast<int>(values[i]));
    }
  }
}
RuntimeValue value_of(DType dtype, const Array& x) {
  RuntimeValue v = make_value(dtype, x.dims);
  store(v.tensor, x.values);
  return v;
}
std::string raw_bytes(const RuntimeValue& v) {
  return {v.tensor.as<const char>(), v.tensor.bytes()};
}

// --- the table ---

struct Case {
  std::string op;
  std::vector<Dims> inputs;  // of each rank
  Attributes attributes = {};
  DType dtype = DType::float32;
};

Array input_of(const Case& c, size_t rank) {
  Array x{c.inputs[rank], {}};
  for (int64_t i = 0; i < count_of(x.dims); ++i) {
    int64_t element = (i * 5 + static_cast<int64_t>(rank) * 7) % 14;
    x.values.push_back(static_cast<double>(c.dtype == DType::boolean ? element % 2 : element + 1));
  }
  return x;
}

std::vector<Array> expected_of(const Case& c, const std::vector<Array>& inputs) {
  Node node;
  node.attributes = c.attributes;
  const auto ranks = static_cast<int64_t>(inputs.size()), dimensions = static_cast<int64_t>(inputs[0].dims.size());
  auto axis = [&](const char* name) { return static_cast<size_t>((node.get_int(name, 0) + dimensions) % dimensions); };
  if (c.op == "AllReduce") return std::vector<Array>(inputs.size(), reduced(inputs, node.get_string("reduction", "sum")));
  if (c.op == "AllGather") return std::vector<Array>(inputs.size(), joined(inputs, axis("tensor_axis")));
  if (c.op == "Broadcast") return std::vector<Array>(inputs.size(), inputs[static_cast<size_t>(node.get_int("root", 0))]);
  std::vector<Array> outputs;
  if (c.op == "ReduceScatter") {
    const size_t along = axis("tensor_axis");
    Array whole = reduced(inputs, node.get_string("reduction", "sum"));
    auto sizes = node.get_ints("sizes");
    int64_t at = 0, ceil = (whole.dims[along] + ranks - 1) / ranks;
    for (int64_t r = 0; r < ranks; ++r) {
      int64_t size = sizes.empty() ? std::clamp<int64_t>(whole.dims[along] - at, 0, ceil) : sizes[static_cast<size_t>(r)];
      outputs.push_back(slice(whole, along, at, size));
      at += size;
    }
    return outputs;
  }
  for (int64_t r = 0; r < ranks; ++r) {  // AllToAll
    std::vector<Array> parts;
    int64_t part = inputs[0].dims[axis("split_axis")] / ranks;
    for (const Array& from : inputs) parts.push_back(slice(from, axis("split_axis"), r * part, part));
    outputs.push_back(joined(parts, axis("concat_axis")));
  }
  return outputs;
}

Models models_of(const Case& c, const std::function<void(Attributes&, int64_t rank)>& change = {}) {
  Models models;
  for (size_t r = 0; r < c.inputs.size(); ++r) {
    auto model = new_model();
    Value* x = add_input(*model, "x" + std::to_string(r), c.dtype, shape_of(c.inputs[r]));
    Attributes attributes = c.attributes;
    if (change) change(attributes, static_cast<int64_t>(r));
    model->graph->outputs = {add_collective(*model->graph, c.op, x, static_cast<int>(c.inputs.size()), "y", std::move(attributes))};
    models.push_back(model);
  }
  return models;
}
Inputs inputs_of(const Case& c) {
  Inputs inputs;
  for (size_t r = 0; r < c.inputs.size(); ++r) inputs["x" + std::to_string(r)] = value_of(c.dtype, input_of(c, r));
  return inputs;
}

std::string text_of(const Case& c) {
  std::string text = c.op + " " + std::string(name_of(c.dtype));
  for (const Dims& dims : c.inputs) text += " " + to_string(dims);
  for (const Attribute& a : c.attributes) {
    text += " " + a.name + "=";
    if (const auto* i = std::get_if<int64_t>(&a.value)) text += std::to_string(*i);
    if (const auto* s = std::get_if<std::string>(&a.value)) text += *s;
    if (const auto* v = std::get_if<std::vector<int64_t>>(&a.value)) text += to_string(*v);
  }
  return text;
}

void expect_as_expected(const Case& c) {
  SCOPED_TRACE(text_of(c));
  std::vector<Array> in;
  for (size_t r = 0; r < c.inputs.size(); ++r) in.push_back(input_of(c, r));
  std::vector<Array> expected = expected_of(c, in);
  auto got = run_on_every_rank(tensor_plan(models_of(c)), inputs_of(c));
  ASSERT_EQ(got.size(), expected.size());
  for (size_t r = 0; r < got.size(); ++r) {
    EXPECT_EQ(got[r].tensor.dims, expected[r].dims) << "rank " << r;
    EXPECT_EQ(got[r].tensor.layout, Layout::plain);
    EXPECT_EQ(raw_bytes(got[r]), raw_bytes(value_of(c.dtype, expected[r]))) << "rank " << r;
  }
}

TEST(Collectives, Table) {
  const std::vector<Case> cases = {
      {"AllReduce", {{3, 5}, {3, 5}}},
      {"AllReduce", {{7}, {7}, {7}}},
      {"AllReduce", {{}, {}, {}, {}}},
      {"AllReduce", {{0, 3}, {0, 3}}},
      {"AllReduce", {{300, 41}, {300, 41}, {300, 41}}},
      {"AllReduce", {{2, 5, 3, 4}, {2, 5, 3, 4}}, {number("channels_last", 1)}},
      {"AllReduce", {{2, 0, 3, 4}, {2, 0, 3, 4}}, {number("channels_last", 1)}},
      {"AllGather", {{2, 3}, {2, 3}}},
      {"AllGather", {{2, 3}, {2, 3}}, {number("tensor_axis", 1)}},
      {"AllGather", {{1, 3}, {1, 3}, {1, 3}}, {number("tensor_axis", -1)}},
      {"AllGather", {{2, 3, 4}, {2, 3, 4}, {2, 3, 4}}, {number("tensor_axis", 1)}},
      {"AllGather", {{3, 2}, {2, 2}}, {ints("sizes", {3, 2}), number("uneven", 1)}},
      {"AllGather", {{4, 3}, {4, 2}}, {number("tensor_axis", 1), ints("sizes", {3, 2})}},
      {"AllGather", {{2, 1, 3}, {2, 4, 3}, {2, 0, 3}, {2, 2, 3}}, {number("tensor_axis", -2), ints("sizes", {1, 4, 0, 2})}},
      {"AllGather", {{0, 3}, {0, 3}}},
      {"AllGather", {{2, 0}, {2, 0}}, {number("tensor_axis", 1), ints("sizes", {0, 0})}},
      {"AllGather", {{2, 3}, {2, 1}, {2, 0}}, {number("tensor_axis", 1), number("uneven", 1)}},  // they tell each other
      {"ReduceScatter", {{4, 3}, {4, 3}}},
      {"ReduceScatter", {{2, 6}, {2, 6}, {2, 6}}, {number("tensor_axis", 1)}},
      {"ReduceScatter", {{2, 4, 3}, {2, 4, 3}}, {number("tensor_axis", -2)}},
      {"ReduceScatter", {{5, 3}, {5, 3}}, {ints("sizes", {3, 2})}},
      {"ReduceScatter", {{2, 7, 2}, {2, 7, 2}, {2, 7, 2}, {2, 7, 2}}, {number("tensor_axis", 1), ints("sizes", {1, 4, 0, 2})}},
      {"ReduceScatter", {{2, 5}, {2, 5}, {2, 5}, {2, 5}}, {number("tensor_axis", 1), number("uneven", 1)}},  // 2, 2, 1, 0
      {"ReduceScatter", {{0, 3}, {0, 3}}},
      {"AllToAll", {{4, 3}, {4, 3}}},
      {"AllToAll", {{4, 3}, {4, 3}}, {number("concat_axis", 1)}},
      {"AllToAll", {{2, 6, 5}, {2, 6, 5}, {2, 6, 5}}, {number("split_axis", 1), number("concat_axis", 0)}},
      {"AllToAll", {{3, 2, 8}, {3, 2, 8}, {3, 2, 8}, {3, 2, 8}}, {number("split_axis", -1), number("concat_axis", 1)}},
      {"AllToAll", {{3, 4}, {3, 4}}, {number("split_axis", 1), number("concat_axis", 1)}},
      {"AllToAll", {{0, 4}, {0, 4}}, {number("split_axis", 1), number("concat_axis", 0)}},
      {"Broadcast", {{2, 3}, {2, 3}}},
      {"Broadcast", {{2, 3}, {2, 3}, {2, 3}}, {number("root", 2)}},
      {"Broadcast", {{0}, {0}}, {number("root", 1)}},
  };
  for (const Case& c : cases) expect_as_expected(c);
}

TEST(Collectives, EveryReductionOfEveryType) {
  const DType types[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16, DType::int8,   DType::int16,
                         DType::int32,   DType::int64,   DType::uint8,   DType::uint16,   DType::uint32, DType::uint64};
  for (DType dtype : types) {
    for (std::string reduction : {"sum", "max", "min", "product", "mean"}) {
      Attributes attributes = {attribute("reduction", reduction)};
      Dims dims = {40, 2};
      // Two ranks: products stay below 256. Means of integers round towards zero, which the cast of the expected value does too.
      if (dtype == DType::int8 && reduction == "product") continue;  // 15 * 15 is too much for it
      expect_as_expected({"AllReduce", {dims, dims}, attributes, dtype});
      attributes.push_back(ints("sizes", {1, 1}));
      attributes.push_back(number("tensor_axis", 1));
      expect_as_expected({"ReduceScatter", {dims, dims}, attributes, dtype});
    }
  }
}

TEST(Collectives, ElementsOfAnySizeAreMoved) {
  for (DType dtype : {DType::boolean, DType::float16, DType::int64, DType::complex128, DType::uint4}) {
    expect_as_expected({"AllGather", {{3, 4}, {3, 2}}, {number("tensor_axis", 1), ints("sizes", {4, 2})}, dtype});
    expect_as_expected({"AllGather", {{2}, {2}}, {}, dtype});
    expect_as_expected({"AllToAll", {{4, 2}, {4, 2}}, {number("concat_axis", 1)}, dtype});
    expect_as_expected({"Broadcast", {{4, 2}, {4, 2}}, {number("root", 1)}, dtype});
  }
}

// One node for several tensors gives what a node for each does.
TEST(Collectives, SeveralTensorsAtOnce) {
  struct Way {
    std::string op;
    std::vector<Dims> dims;
    Attributes attributes = {};
  };
  const Way ways[] = {
      {"AllReduce", {{3, 5}, {}, {0, 2}, {40, 41}}},
      {"AllReduce", {{7}, {2, 2}}, {attribute("reduction", std::string("max"))}},
      {"ReduceScatter", {{6, 5}, {12}, {3, 2, 2}}},                             // as they lie
      {"ReduceScatter", {{2, 6}, {5, 3}, {2, 9}}, {number("tensor_axis", 1)}},  // in blocks
      {"ReduceScatter", {{5, 4}, {5, 2}}, {ints("sizes", {3, 0, 2})}},
  };
  constexpr int kRanks = 3;
  for (const Way& way : ways) {
    std::vector<RuntimeValue> got[2];
    Inputs inputs;
    for (const bool together : {false, true}) {
      Models models;
      for (int r = 0; r < kRanks; ++r) {
        auto model = new_model();
        Graph& g = *model->graph;
        Value* own = g.add_constant("own", floats({}, {static_cast<float>(r) + 0.3f}));
        std::vector<Value*> parts;
        for (size_t i = 0; i < way.dims.size(); ++i) {
          const std::string name = "x" + std::to_string(i);
          inputs[name] = float_value(way.dims[i], noise(static_cast<size_t>(count_of(way.dims[i])), static_cast<unsigned>(i)));
          parts.push_back(add_node(g, "Mul", {add_input(*model, name, DType::float32, shape_of(way.dims[i])), own}, "part" + name));
        }
        std::vector<Value*> made;
        Attributes attributes = way.attributes;
        attributes.push_back(attribute("axis", std::string("tensor")));
        attributes.push_back(number("group_size", kRanks));
        std::vector<std::string> names;
        for (size_t i = 0; i < parts.size(); ++i) names.push_back("y" + std::to_string(i));
        if (together) made = g.add_node(way.op, parts, names, attributes, kCommunicationDomain)->outputs;
        for (size_t i = 0; i < parts.size() && !together; ++i)
          made.push_back(g.add_node(way.op, {parts[i]}, {names[i]}, attributes, kCommunicationDomain)->outputs[0]);
        Value* flat = g.add_constant("flat", make_int64s({-1}));
        std::vector<Value*> rows;
        for (size_t i = 0; i < made.size(); ++i) rows.push_back(add_node(g, "Reshape", {made[i], flat}, "row" + std::to_string(i)));
        g.outputs = {add_node(g, "Concat", rows, "all", {number("axis", 0)})};
        models.push_back(model);
      }
      got[together ? 1 : 0] = run_on_every_rank(tensor_plan(models), inputs);
    }
    for (size_t r = 0; r < kRanks; ++r) {
      EXPECT_EQ(got[1][r].tensor.dims, got[0][r].tensor.dims) << way.op;
      EXPECT_EQ(raw_bytes(got[1][r]), raw_bytes(got[0][r])) << way.op << ", rank " << r;
    }
  }
}

TEST(Collectives, WhatDoesNotFitIsSaid) {
  auto error = [](const Case& c) { return error_of(tensor_plan(models_of(c)), inputs_of(c)); };
  EXPECT_NE(error({"AllReduce", {{2}, {2}}, {attribute("reduction", std::string("median"))}}).find("no reduction 'median'"),
            std::string::npos);
  EXPECT_NE(error({"AllReduce", {{2}, {2}}, {}, DType::boolean}).find("can't be reduced"), std::string::npos);
  EXPECT_NE(error({"AllReduce", {{2}, {3}}}).find("ranks disagree"), std::string::npos);
  EXPECT_NE(error({"AllGather", {{2}, {3}}, {ints("sizes", {2, 2})}}).find("rank 1"), std::string::npos);
  EXPECT_NE(error({"AllGather", {{2}, {2}}, {ints("sizes", {2})}}).find("its sizes"), std::string::npos);
  EXPECT_NE(error({"AllGather", {{3}, {2}}, {ints("sizes", {3, 2})}, DType::uint4}).find("packed"), std::string::npos);
  EXPECT_NE(error({"ReduceScatter", {{5}, {5}}}).find("are not the parts"), std::string::npos);
  EXPECT_NE(error({"ReduceScatter", {{5}, {5}}, {ints("sizes", {2, 2})}}).find("are not the parts"), std::string::npos);
  EXPECT_NE(error({"AllToAll", {{5}, {5}}}).find("are not the parts"), std::string::npos);
  EXPECT_NE(error({"Broadcast", {{5}, {5}}, {number("root", 2)}}).find("root 2"), std::string::npos);
  EXPECT_NE(error({"ReduceScatter", {{4}, {4}}, {number("index", 1)}}).find("made for rank 1"), std::string::npos);
  auto plan = tensor_plan(models_of({"AllReduce", {{2}, {2}, {2}}}));
  plan->mesh.tensor = 2;
  Case three{"AllReduce", {{2}, {2}, {2}}};
  EXPECT_NE(error_of(plan, inputs_of(three)).find("made for 3 ranks"), std::string::npos);
}

TEST(Collectives, ShapesAreInferred) {
  struct Shapes {
    std::string op;
    Shape input;
    Attributes attributes;
    Shape output;
  };
  const Dim n("n"), unknown;
  const std::vector<Shapes> table = {
      {"AllReduce", {n, 3}, {}, {n, 3}},
      {"AllGather", {n, 3}, {number("tensor_axis", 1)}, {n, 6}},
      {"AllGather", {n, 3}, {number("tensor_axis", -1), number("uneven", 1), ints("sizes", {3, 2})}, {n, 5}},
      {"AllGather", {n, 3}, {number("tensor_axis", 1), number("uneven", 1)}, {n, unknown}},
      {"ReduceScatter", {n, 6}, {number("tensor_axis", 1)}, {n, 3}},
      {"ReduceScatter", {n, 5}, {number("tensor_axis", -1), ints("sizes", {3, 2}), number("index", 1)}, {n, 2}},
      {"ReduceScatter", {n, 5}, {number("tensor_axis", -1), ints("sizes", {3, 2})}, {n, unknown}},
      {"ReduceScatter", {n, 5}, {number("tensor_axis", 1), number("uneven", 1)}, {n, unknown}},
      {"AllToAll", {n, 4, 3}, {number("split_axis", 1), number("concat_axis", -1)}, {n, 2, 6}},
      {"AllToAll", {n, 4, 3}, {number("split_axis", 1), number("concat_axis", 1)}, {n, 4, 3}},
      {"Broadcast", {n, 3}, {}, {n, 3}},
  };
  for (const Shapes& row : table) {
    auto model = new_model();
    Value* y = add_collective(*model->graph, row.op, add_input(*model, "x", DType::float16, row.input), 2, "y", row.attributes);
    model->graph->outputs = {y};
    infer_shapes(*model, {.keep_hints = false});
    EXPECT_EQ(y->type.dtype, DType::float16);
    ASSERT_TRUE(y->type.shape) << row.op;
    ASSERT_EQ(y->type.shape->size(), row.output.size());
    for (size_t i = 0; i < row.output.size(); ++i) {
      EXPECT_EQ((*y->type.shape)[i].value, row.output[i].value) << row.op << " " << to_string(*y->type.shape);
    }
  }
}

// --- layers cut over ranks ---

std::vector<int64_t> begins_of(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> begins(sizes.size(), 0);
  std::partial_sum(sizes.begin(), sizes.end() - 1, begins.begin() + 1);
  return begins;
}
TensorPtr part_of(const Array& x, size_t axis, int64_t begin, int64_t count) {
  Array part = slice(x, axis, begin, count);
  return floats(part.dims, std::vector<float>(part.values.begin(), part.values.end()));
}
Array noise_array(Dims dims, unsigned seed) {
  auto values = noise(static_cast<size_t>(count_of(dims)), seed);
  return {std::move(dims), std::vector<double>(values.begin(), values.end())};
}

// y = relu(x w1) w2 with a hidden width of sum(sizes), cut there; then y is scattered along its last axis, negated and gathered again, and
// x is added: each rank's part of a value by another collective.
Models cut_layers(const std::vector<int64_t>& hidden, const std::vector<int64_t>& columns) {
  const auto ranks = static_cast<int>(hidden.size());
  const int64_t width = std::accumulate(columns.begin(), columns.end(), int64_t{0});
  const int64_t inner = std::accumulate(hidden.begin(), hidden.end(), int64_t{0});
  Array w1 = noise_array({width, inner}, 1), w2 = noise_array({inner, width}, 2);
  auto begins = begins_of(hidden);
  Models models;
  for (int r = 0; r < ranks; ++r) {
    auto model = new_model();
    Graph& g = *model->graph;
    const auto at = static_cast<size_t>(r);
    Value* x = add_input(*model, "x", DType::float32, {Dim("batch"), width});
    Value* a = g.add_constant("w1", part_of(w1, 1, begins[at], hidden[at]));
    Value* b = g.add_constant("w2", part_of(w2, 0, begins[at], hidden[at]));
    Value* h = add_node(g, "Relu", {add_node(g, "MatMul", {x, a}, "m1")}, "h");
    Value* partial = add_node(g, "MatMul", {h, b}, "partial");
    Value* sum = add_collective(g, "AllReduce", partial, ranks, "sum");
    Attributes by_columns = {number("tensor_axis", -1), ints("sizes", columns), number("index", r), number("uneven", 1)};
    Value* own = add_node(g, "Neg", {add_collective(g, "ReduceScatter", partial, ranks, "scattered", by_columns)}, "own");
    Value* whole = add_collective(g, "AllGather", own, ranks, "whole", by_columns);
    g.outputs = {add_node(g, "Add", {add_node(g, "Add", {sum, whole}, "zero"), add_node(g, "Add", {sum, x}, "skip")}, "y")};
    models.push_back(model);
  }
  return models;
}
// The sum and what was scattered and gathered cancel: y = x + relu(x w1) w2.
std::vector<double> layers_reference(const std::vector<float>& x, int64_t width, int64_t inner) {
  Array w1 = noise_array({width, inner}, 1), w2 = noise_array({inner, width}, 2);
  std::vector<double> y(x.begin(), x.end());
  for (size_t row = 0; row < x.size() / static_cast<size_t>(width); ++row) {
    for (int64_t k = 0; k < inner; ++k) {
      double h = 0;
      for (int64_t i = 0; i < width; ++i) h += x[row * width + i] * w1.values[i * inner + k];
      for (int64_t i = 0; i < width; ++i) y[row * width + i] += std::max(h, 0.0) * w2.values[k * width + i];
    }
  }
  return y;
}
struct Cut {
  std::vector<int64_t> hidden, columns;
};
const Cut cuts[] = {{{32, 32}, {24, 24}}, {{20, 13}, {7, 30}}, {{3, 0, 2}, {16, 16, 1}}, {{8, 8, 8, 8}, {10, 10, 10, 0}}};

TEST(Collectives, LayersCutOverRanksEqualTheWhole) {
  for (const Cut& cut : cuts) {
    const int64_t width = std::accumulate(cut.columns.begin(), cut.columns.end(), int64_t{0});
    const int64_t inner = std::accumulate(cut.hidden.begin(), cut.hidden.end(), int64_t{0});
    auto x = noise(static_cast<size_t>(6 * width), 3);
    for (int micro_batches : {1, 3}) {
      auto out =
          Session(tensor_plan(cut_layers(cut.hidden, cut.columns), micro_batches), {.threads = 1}).run({{"x", float_value({6, width}, x)}});
      auto got = elements<float>(out[0]);
      auto expected = layers_reference(x, width, inner);
      ASSERT_EQ(got.size(), expected.size());
      for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-4) << i << " of " << to_string(cut.hidden);
    }
  }
}

TEST(Collectives, WarmStepsAllocateNothing) {
  for (const Cut& cut : cuts) {
    const int64_t width = std::accumulate(cut.columns.begin(), cut.columns.end(), int64_t{0});
    Session session(tensor_plan(cut_layers(cut.hidden, cut.columns), 2), {.threads = 1});
    Inputs inputs{{"x", float_value({6, width}, noise(static_cast<size_t>(6 * width), 3))}};
    for (int i = 0; i < 2; ++i) session.run(inputs);
    for (int i = 0; i < 10; ++i) {
      auto outputs = session.run(inputs);
      EXPECT_EQ(session.allocations_in_last_step(), 0) << "step " << i;
    }
  }
}

TEST(Collectives, CountsAreThoseOfOneMicroBatchOnTheFirstRank) {
  Session session(tensor_plan(cut_layers({3, 0, 2}, {4, 3, 1}), 3), {.threads = 1, .trace = true});
  for (int step = 0; step < 2; ++step) {
    session.run({{"x", float_value({6, 8}, noise(6 * 8, 3))}});
    std::map<std::string, CommunicationCount> counts;
    for (const CommunicationCount& c : session.communication()) {
      EXPECT_EQ(c.axis, "tensor");
      counts[c.op] = c;
    }
    ASSERT_EQ(counts.size(), 3u);
    const int64_t whole_bytes = 2 * 8 * 4;  // [2, 8] of float32: what is given is as much as what is gathered
    for (const char* op : {"AllReduce", "ReduceScatter", "AllGather"}) {
      EXPECT_EQ(counts[op].count, 1) << op;
      EXPECT_EQ(counts[op].bytes, whole_bytes) << op;
    }
  }
  int events = 0;
  for (const TraceEvent& event : session.trace()) events += event.category == "collective";
  EXPECT_EQ(events, 3 * 3 * 3);  // collectives, micro-batches, ranks
}

// Two stages, each cut in two: collectives and sends side by side. The counts are those of one rank of each stage.
TEST(Collectives, StagesAndTensorRanks) {
  auto model = [](int stage, int rank) {
    auto made = new_model();
    Graph& g = *made->graph;
    Value* x = stage == 0 ? add_input(*made, "x", DType::float32, {Dim("n"), 4}) : receive(*made, "h", DType::float32, {Dim("n"), 4});
    Value* scale = g.add_constant("scale", floats({1}, {static_cast<float>(rank + 1)}));
    Value* sum = add_collective(g, "AllReduce", add_node(g, "Mul", {x, scale}, "part"), 2, stage == 0 ? "h" : "y");
    if (stage == 0) {
      send(*made, sum, 1);
    } else {
      g.outputs = {sum};
    }
    return made;
  };
  auto plan = make_plan({model(0, 0), model(1, 0)}, 4);
  plan->mesh.tensor = 2;
  plan->graphs.clear();
  for (int stage = 0; stage < 2; ++stage) {
    for (int t = 0; t < 2; ++t) plan->graphs.push_back({stage, "forward", {{"tensor", t}}, "", model(stage, t)});
  }
  Session session(plan, {.threads = 1});
  auto x = noise(8 * 4, 5);
  auto got = elements<float>(session.run({{"x", float_value({8, 4}, x)}})[0]);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_FLOAT_EQ(got[i], 9 * x[i]);
  auto counts = session.communication();
  ASSERT_EQ(counts.size(), 2u);
  EXPECT_EQ(counts[0].op, "AllReduce");
  EXPECT_EQ(counts[0].count, 2);
  EXPECT_EQ(counts[0].bytes, 2 * 2 * 4 * 4);
  EXPECT_EQ(counts[1].op, "Send");
  EXPECT_EQ(counts[1].count, 1);
}

// A convolution cut over its input channels, unevenly; the ranks' convolutions may leave different layouts.
TEST(Collectives, ConvolutionsAreReducedChannelsLast) {
  const Array w = noise_array({24, 19, 3, 3}, 1), x = noise_array({2, 19, 9, 10}, 2);
  auto build = [&](int64_t begin, int64_t count, int ranks) {
    auto model = new_model();
    Graph& g = *model->graph;
    Value* in = add_input(*model, "x" + std::to_string(begin), DType::float32, {2, count, 9, 10});
    Value* y = add_node(g, "Conv", {in, g.add_constant("w", part_of(w, 1, begin, count))}, "conv", {ints("pads", {1, 1, 1, 1})});
    if (ranks > 1) y = add_collective(g, "AllReduce", y, ranks, "sum", {number("channels_last", 1)});
    g.outputs = {add_node(g, "Relu", {y}, "y")};
    return model;
  };
  auto whole = elements<float>(run_on_every_rank(tensor_plan({build(0, 19, 1)}), {{"x0", value_of(DType::float32, x)}})[0]);
  auto plan = tensor_plan({build(0, 16, 2), build(16, 3, 2)});
  auto parts = run_on_every_rank(plan, {{"x0", value_of(DType::float32, slice(x, 1, 0, 16))},  //
                                        {"x16", value_of(DType::float32, slice(x, 1, 16, 3))}});
  for (const RuntimeValue& part : parts) {
    auto got = elements<float>(part);
    ASSERT_EQ(got.size(), whole.size());
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], whole[i], 1e-4) << i;
  }
}

// --- what may go wrong ---

// Nobody takes what rank 1 gathers, and all it holds is a constant: rank 0 must not wait for ever.
TEST(Collectives, RunAlsoWhereNothingTakesTheirResult) {
  Models models;
  for (int r = 0; r < 2; ++r) {
    auto model = new_model();
    Graph& g = *model->graph;
    Value* x = add_input(*model, "x", DType::float32, {2});
    Value* own = r == 0 ? x : g.add_constant("c", floats({2}, {10, 20}));
    Value* sum = add_collective(g, "AllReduce", own, 2, "sum");
    g.outputs = {add_node(g, "Neg", {r == 0 ? sum : x}, "y")};
    models.push_back(model);
  }
  auto out = run_on_every_rank(tensor_plan(models), {{"x", float_value({2}, {1, 2})}});
  EXPECT_EQ(elements<float>(out[0]), (std::vector<float>{-11, -22}));
  EXPECT_EQ(elements<float>(out[1]), (std::vector<float>{-1, -2}));
}

TEST(Collectives, AFailingRankEndsThoseThatWaitForIt) {
  for (int failing : {0, 1}) {
    for (int micro_batch : {0, 2}) {
      std::atomic<bool> fails{true};
      SessionOptions options{.threads = 1};
      options.before_forward = [&](int r, int m) {
        if (!fails || r != failing || m != micro_batch) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the other is asleep in its collective by then
        throw Error("the device fell off", "", ErrorCode::device);
      };
      Session session(tensor_plan(cut_layers({20, 13}, {7, 9}), 3), options);
      auto x = noise(6 * 16, 3);
      Inputs inputs{{"x", float_value({6, 16}, x)}};
      auto start = std::chrono::steady_clock::now();
      try {
        session.run(inputs);
        FAIL() << "the failure went unnoticed";
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("rank " + std::to_string(failing)), std::string::npos) << e.what();
        EXPECT_NE(std::string(e.what()).find("the device fell off"), std::string::npos) << e.what();
        EXPECT_EQ(e.code(), ErrorCode::device);
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
      fails = false;  // the session goes on, with new groups
      auto got = elements<float>(session.run(inputs)[0]);
      auto expected = layers_reference(x, 16, 33);
      for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-4);
    }
  }
}

// A loop that never runs keeps a shape of [2] where inference says [4], so its program is compiled and run again.
Models models_with_a_wrong_shape(bool on_every_rank) {
  Models models;
  for (int r = 0; r < 2; ++r) {
    auto model = new_model();
    Graph& g = *model->graph;
    Value* x = add_input(*model, "x", DType::float32, {2});
    Value* trips = add_input(*model, r == 0 || on_every_rank ? "trips" : "other_trips", DType::int64, {});
    Value* sum = add_collective(g, "AllReduce", x, 2, "sum");
    auto body = std::make_shared<Graph>();
    body->parent = &g;
    Value* i = body->add_value("i", Type::tensor(DType::int64, Shape{}));
    Value* go_on = body->add_value("go_on", Type::tensor(DType::boolean, Shape{}));
    Value* v = body->add_value("v", Type::tensor(DType::float32, Shape{Dim("m")}));
    body->inputs = {i, go_on, v};
    body->outputs = {add_node(*body, "Identity", {go_on}, "again"),
                     add_node(*body, "Neg", {body->add_constant("c", floats({4}, {1, 2, 3, 4}))}, "four")};
    Value* looped = add_node(g, "Loop", {trips, nullptr, sum}, "looped", {attribute("body", GraphPtr(body))});
    g.outputs = {add_collective(g, "AllReduce", add_node(g, "Neg", {looped}, "negated"), 2, "y")};
    models.push_back(model);
  }
  return models;
}

TEST(Collectives, AProgramThatRunsAgainDoesSoOnEveryRank) {
  auto plan = tensor_plan(models_with_a_wrong_shape(true));
  Session session(plan, {.threads = 1});
  auto out = session.run({{"x", float_value({2}, {1, 2})}, {"trips", int_value({}, {0})}});
  EXPECT_EQ(elements<float>(out[0]), (std::vector<float>{-4, -8}));
  ASSERT_EQ(session.communication().size(), 1u);
  EXPECT_EQ(session.communication()[0].count, 2);  // not 3: what ran in vain is not counted
}

TEST(Collectives, AProgramThatRunsAgainAloneIsAnError) {
  auto start = std::chrono::steady_clock::now();
  std::string error = error_of(tensor_plan(models_with_a_wrong_shape(false)),
                               {{"x", float_value({2}, {1, 2})}, {"trips", int_value({}, {0})}, {"other_trips", int_value({}, {1})}});
  EXPECT_NE(error.find("ranks disagree"), std::string::npos) << error;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
}

}  // namespace
}  // namespace fretsaw
