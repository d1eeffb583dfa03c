// Products on the GPU against the CPU's: sizes and types that the libraries treat differently, and fused steps.
#include <cmath>

#include "tests/kernels/on_device.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

RuntimeValue random_tensor(const Dims& dims, uint32_t seed, DType type) {
  std::vector<double> values = spread_values(count_of(dims), is_integer(type) ? 0 : -1, is_integer(type) ? 9 : 1, seed);
  if (is_integer(type)) {
    for (double& v : values) v = std::floor(v);
  }
  return tensor_as(type, dims, values);
}

double tolerance_of(DType type) {
  return type == DType::float16 ? 2e-3 : type == DType::bfloat16 ? 1.6e-2 : type == DType::float64 ? 1e-13 : 1e-5;
}

// Relative to the largest element.
void expect_close(const RuntimeValue& got, const RuntimeValue& wanted, double tolerance) {
  ASSERT_EQ(got.tensor.dims, wanted.tensor.dims);
  const std::vector<double> a = doubles_of(got), b = doubles_of(wanted);
  double scale = 1e-30;
  for (double v : b) scale = std::max(scale, std::fabs(v));
  for (size_t i = 0; i < b.size(); ++i) ASSERT_NEAR(a[i], b[i], tolerance * scale) << "element " << i;
}

// A step of nodes, run on the CPU node by node and on the device as one. A null input stands for the result of the node before.
class StepCase {
 public:
  Value* input(RuntimeValue value, bool constant) {
    const std::string name = "x" + std::to_string(values_.size());
    Value* v;
    if (constant) {
      auto tensor = make_tensor(value.tensor.dtype, value.tensor.dims);
      std::copy_n(value.tensor.as<std::byte>(), value.tensor.bytes(), mutable_data(*tensor));
      v = graph_.add_constant(name, tensor);
      v->type = Type::tensor(value.tensor.dtype, shape_of(value.tensor.dims));
    } else {
      v = graph_.add_value(name, Type::tensor(value.tensor.dtype, shape_of(value.tensor.dims)));
    }
    values_[v] = std::move(value);
    return v;
  }
  void add(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {}) {
    for (Value*& v : inputs) v = v ? v : nodes_.back()->out(0);
    nodes_.push_back(graph_.add_node(op, std::move(inputs), {"r" + std::to_string(nodes_.size())}, std::move(attributes)));
  }

  // Whether the device takes it as one step; then the results are compared.
  bool check(Device& device, double tolerance, bool tf32 = false) {
    std::map<const Value*, RuntimeValue> known = values_;
    CompileContext c;
    c.device = &device;
    c.tf32 = tf32;
    std::vector<RuntimeValue*> given;
    for (const Node* node : nodes_) {
      std::vector<RuntimeValue*> inputs;
      for (Value* v : node->inputs) {
        inputs.push_back(&known.at(v));
        if (v->producer) continue;
        c.inputs.push_back(v), c.input_types.push_back(v->type), c.constants.push_back(v->constant);
        c.offered.push_back(Layout::plain);
        given.push_back(&values_.at(v));
      }
      c.nodes.push_back(node);
      known[node->out(0)] = run_node(*node, inputs)[0];
      const TensorView& y = known[node->out(0)].tensor;
      node->out(0)->type = Type::tensor(y.dtype, shape_of(y.dims));
    }
    c.outputs = {nodes_.back()->out(0)};
    c.output_types = {c.outputs[0]->type};
    if (!why_unsupported_on_device(c).empty()) return false;
    expect_close(run_on_device(device, c, given)[0], known.at(c.outputs[0]), tolerance);
    return true;
  }

 private:
  Graph graph_;
  std::vector<Node*> nodes_;
  std::map<const Value*, RuntimeValue> values_;
};

class MatMulOnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    device = any_device();
    if (!device) GTEST_SKIP() << "there is no GPU";
  }
  Device* device = nullptr;
};

struct Shapes {
  Dims a, b;
};

TEST_F(MatMulOnDevice, EqualsTheCpu) {
  const Shapes cases[] = {
      {{64, 64}, {64, 64}},
      {{1, 1024}, {1024, 512}},
      {{1, 4096}, {4096, 1000}},
      {{2, 300}, {300, 640}},
      {{3, 1000}, {1000, 96}},
      {{8, 1111}, {1111, 264}},
      {{5, 640}, {640, 8}},
      {{1, 9000}, {9000, 64}},
      {{7, 13}, {13, 5}},
      {{129, 65}, {65, 127}},
      {{130, 96}, {96, 2001}},
      {{3, 96}, {96, 2001}},
      {{2, 70, 96}, {96, 333}},
      {{1, 7}, {7, 1}},
      {{4, 1, 512}, {512, 128}},
      {{2, 3, 17, 33}, {33, 40}},
      {{4, 33, 20}, {4, 20, 31}},
      {{2, 1, 9, 16}, {3, 16, 8}},
      {{3, 9, 16}, {2, 1, 16, 8}},
      {{5, 1, 64}, {5, 64, 32}},
      {{16, 40}, {3, 40, 24}},
      {{96}, {96, 64}},
      {{6, 96}, {96}},
      {{2, 5, 96}, {96}},
      {{96}, {3, 96, 7}},
      {{2, 0}, {0, 3}},
      {{0, 4}, {4, 3}},
      {{2, 3, 1, 5, 4}, {1, 3, 2, 4, 6}},
  };
  for (const Shapes& s : cases) {
    for (DType type : {DType::float32, DType::float16, DType::bfloat16, DType::float64, DType::int32, DType::uint64}) {
      for (bool constant : {false, true}) {
        SCOPED_TRACE(to_string(s.a) + " x " + to_string(s.b) + " " + std::string(name_of(type)) + (constant ? " constant" : ""));
        StepCase c;
        c.add("MatMul", {c.input(random_tensor(s.a, 1, type), false), c.input(random_tensor(s.b, 2, type), constant)});
        EXPECT_TRUE(c.check(*device, is_integer(type) ? 0 : tolerance_of(type)));
      }
    }
  }
}

TEST_F(MatMulOnDevice, Tf32RoundsOperands) {
  StepCase c;
  c.add("MatMul",
        {c.input(random_tensor({256, 512}, 1, DType::float32), false), c.input(random_tensor({512, 384}, 2, DType::float32), true)});
  EXPECT_TRUE(c.check(*device, 2e-3, true));
}

TEST_F(MatMulOnDevice, GemmInAllForms) {
  for (bool ta : {false, true}) {
    for (bool tb : {false, true}) {
      for (const Dims& c_dims : {Dims{}, Dims{1}, Dims{72}, Dims{1, 72}, Dims{40, 1}, Dims{40, 72}}) {
        for (DType type : {DType::float32, DType::float16, DType::bfloat16, DType::float64, DType::int64}) {
          for (float beta : {0.0f, 1.0f, 3.0f}) {
            StepCase c;
            c.add("Gemm",
                  {c.input(random_tensor(ta ? Dims{50, 40} : Dims{40, 50}, 1, type), false),
                   c.input(random_tensor(tb ? Dims{72, 50} : Dims{50, 72}, 2, type), true), c.input(random_tensor(c_dims, 3, type), false)},
                  {attribute("transA", int64_t{ta}), attribute("transB", int64_t{tb}), attribute("alpha", 2.0f), attribute("beta", beta)});
            SCOPED_TRACE(to_string(c_dims) + " " + std::string(name_of(type)) + " " + std::to_string(beta) + (ta ? " A'" : "") +
                         (tb ? " B'" : ""));
            EXPECT_TRUE(c.check(*device, is_integer(type) ? 0 : tolerance_of(type)));
          }
        }
      }
    }
  }
}

TEST_F(MatMulOnDevice, GemmOfFewRows) {
  for (int64_t M : {1, 2, 4, 7, 8}) {
    for (DType type : {DType::float32, DType::float16, DType::bfloat16}) {
      for (bool tb : {false, true}) {
        StepCase c;
        c.add("Gemm",
              {c.input(random_tensor({M, 2048}, 1, type), false),
               c.input(random_tensor(tb ? Dims{1000, 2048} : Dims{2048, 1000}, 2, type), true),
               c.input(random_tensor({1000}, 3, type), true)},
              {attribute("transB", int64_t{tb})});
        SCOPED_TRACE(std::to_string(M) + " rows " + std::string(name_of(type)) + (tb ? " B'" : ""));
        EXPECT_TRUE(c.check(*device, tolerance_of(type)));
      }
    }
  }
}

TEST_F(MatMulOnDevice, FollowersAreFused) {
  for (int64_t rows : {1, 6, 200}) {
    for (DType type : {DType::float32, DType::float16, DType::bfloat16}) {
      for (const std::string activation : {"", "Relu", "Gelu"}) {
        for (bool residual : {false, true}) {
          StepCase c;
          c.add("MatMul", {c.input(random_tensor({2, rows, 320}, 1, type), false), c.input(random_tensor({320, 256}, 2, type), true)});
          c.add("Add", {c.input(random_tensor({256}, 3, type), true), nullptr});
          if (residual) c.add("Add", {nullptr, c.input(random_tensor({2, rows, 256}, 4, type), false)});
          if (activation == "Gelu") c.add("Gelu", {nullptr}, {attribute("approximate", std::string("tanh"))});
          if (activation == "Relu") c.add("Relu", {nullptr});
          SCOPED_TRACE(std::to_string(rows) + " " + std::string(name_of(type)) + " " + activation + (residual ? " residual" : ""));
          EXPECT_EQ(c.check(*device, 2 * tolerance_of(type)), activation != "Gelu" || type != DType::float32);
        }
      }
    }
  }
}

TEST_F(MatMulOnDevice, AFollowerMayTakeWhatTheProductTakes) {
  for (int64_t size : {96, 100}) {
    StepCase c;
    Value *x = c.input(random_tensor({size, size}, 1, DType::float16), false),
          *w = c.input(random_tensor({size, size}, 2, DType::float16), true);
    c.add("MatMul", {x, w});
    c.add("Add", {nullptr, w});
    SCOPED_TRACE(std::to_string(size));
    EXPECT_TRUE(c.check(*device, tolerance_of(DType::float16)));
  }
}

TEST_F(MatMulOnDevice, SumsOfHalvesAreCastToFloat) {
  for (int64_t rows : {1, 6, 200}) {
    for (int64_t columns : {256, 201, 20001}) {
      for (DType type : {DType::float16, DType::bfloat16}) {
        StepCase c;
        c.add("MatMul", {c.input(random_tensor({rows, 320}, 1, type), false), c.input(random_tensor({320, columns}, 2, type), true)});
        c.add("Cast", {nullptr}, {attribute("to", static_cast<int64_t>(DType::float32))});
        SCOPED_TRACE(std::to_string(rows) + " rows " + std::to_string(columns) + " columns " + std::string(name_of(type)));
        EXPECT_TRUE(c.check(*device, tolerance_of(type)));
      }
    }
  }
}

// As gradients of several micro-batches are added up.
TEST_F(MatMulOnDevice, SumsOfHalvesAreAddedToFloats) {
  for (int64_t rows : {1, 6, 200}) {
    for (int64_t columns : {256, 201}) {
      for (DType type : {DType::float16, DType::bfloat16}) {
        StepCase c;
        c.add("Gemm", {c.input(random_tensor({320, rows}, 1, type), false), c.input(random_tensor({320, columns}, 2, type), false)},
              {attribute("transA", 1)});
        c.add("Cast", {nullptr}, {attribute("to", static_cast<int64_t>(DType::float32))});
        c.add("Add", {c.input(random_tensor({rows, columns}, 3, DType::float32), false), nullptr});
        SCOPED_TRACE(std::to_string(rows) + " rows " + std::to_string(columns) + " columns " + std::string(name_of(type)));
        EXPECT_TRUE(c.check(*device, tolerance_of(type)));
      }
    }
  }
}

TEST_F(MatMulOnDevice, WhatNoEpilogueDoesIsRefused) {
  const auto product = [](StepCase& c) {
    c.add("MatMul", {c.input(random_tensor({4, 8}, 1, DType::float32), false), c.input(random_tensor({8, 4}, 2, DType::float32), true)});
  };
  StepCase after_activation, rows, exact_gelu;
  product(after_activation);
  after_activation.add("Relu", {nullptr});
  after_activation.add("Add", {nullptr, after_activation.input(random_tensor({4, 4}, 3, DType::float32), false)});
  EXPECT_FALSE(after_activation.check(*device, 1e-5));
  product(rows);
  rows.add("Add", {nullptr, rows.input(random_tensor({4, 1}, 3, DType::float32), false)});
  EXPECT_FALSE(rows.check(*device, 1e-5));
  StepCase added_rows;
  added_rows.add("MatMul", {added_rows.input(random_tensor({4, 8}, 1, DType::bfloat16), false),
                            added_rows.input(random_tensor({8, 4}, 2, DType::bfloat16), true)});
  added_rows.add("Cast", {nullptr}, {attribute("to", static_cast<int64_t>(DType::float32))});
  added_rows.add("Add", {nullptr, added_rows.input(random_tensor({4}, 3, DType::float32), false)});
  EXPECT_FALSE(added_rows.check(*device, 1e-5));
  StepCase narrowed;
  product(narrowed);
  narrowed.add("Cast", {nullptr}, {attribute("to", static_cast<int64_t>(DType::float16))});
  EXPECT_FALSE(narrowed.check(*device, 1e-5));
  product(exact_gelu);
  exact_gelu.add("Gelu", {nullptr});
  EXPECT_FALSE(exact_gelu.check(*device, 1e-5));
}

TEST_F(MatMulOnDevice, Einsum) {
  const struct {
    const char* equation;
    std::vector<Dims> inputs;
  } cases[] = {
      {"bij,bjk->bik", {{3, 40, 24}, {3, 24, 56}}},
      {"bqhd,bkhd->bhqk", {{2, 30, 4, 16}, {2, 20, 4, 16}}},
      {"bhqk,bkhd->bqhd", {{2, 4, 30, 20}, {2, 20, 4, 16}}},
      {"ij,kj->ki", {{12, 30}, {20, 30}}},
      {"i,j->ij", {{7}, {9}}},
      {"bi,bi->b", {{5, 100}, {5, 100}}},
      {"i,i->", {{300}, {300}}},
      {"...ij,...jk", {{2, 1, 5, 6}, {3, 6, 7}}},
      {"ii->i", {{6, 6}}},
      {"ii", {{6, 6}}},
      {"ij->ji", {{33, 65}}},
      {"ijk->j", {{4, 5, 70}}},
      {"i,j,ij->", {{6}, {7}, {6, 7}}},
      {"abc,cd,de->abe", {{2, 3, 4}, {4, 5}, {5, 6}}},
      {"abi,ajc->bc", {{2, 3, 4}, {2, 5, 6}}},
      {"bsd,hde->bhse", {{2, 9, 16}, {3, 16, 8}}},
      {"ij,jk->ik", {{4, 0}, {0, 3}}},
  };
  for (const auto& e : cases) {
    for (DType type : {DType::float32, DType::bfloat16, DType::int32}) {
      StepCase c;
      std::vector<Value*> inputs;
      for (size_t i = 0; i < e.inputs.size(); ++i)
        inputs.push_back(c.input(random_tensor(e.inputs[i], static_cast<uint32_t>(i + 1), type), false));
      c.add("Einsum", inputs, {attribute("equation", std::string(e.equation))});
      SCOPED_TRACE(std::string(e.equation) + " " + std::string(name_of(type)));
      EXPECT_TRUE(c.check(*device, is_integer(type) ? 0 : 2 * tolerance_of(type)));
    }
  }
}

}  // namespace
}  // namespace fretsaw::testing
