// Collectives one by one: a table of operators, types, shapes and attributes on every rank, what is refused, and shapes.
#include <gtest/gtest.h>

#include <functional>

#include "runtime/collectives.h"
#include "tests/runtime/collective_plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

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

}  // namespace
}  // namespace fretsaw
