// What a device has no kernel for, told from its registry alone.
#include "runtime/host_nodes.h"

#include <gtest/gtest.h>

#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

CompiledKernel make_nothing(const CompileContext&) {
  return {};
}
std::string refuse_matrices(const CompileContext& c) {
  return c.input_dims(0)->size() == 2 ? "matrices" : "";
}

TEST(HostNodes, AreThoseWithoutAKernelWithTheReason) {
  KernelRegistry kernels;
  kernels.add({.op = "MatMul", .make = make_nothing});
  kernels.add({.op = "Cos", .make = make_nothing, .unsupported = refuse_matrices});
  auto model = new_model();
  Graph& g = *model->graph;
  Value* x = add_input(*model, "x", DType::float32, {Dim(2), Dim(3)});
  Value* y = add_node(g, "MatMul", {x, g.add_constant("w", floats({3, 4}, noise(12, 1)))}, "y");
  Value* cosine = add_node(g, "Cos", {y}, "cosine");
  Value* sine = add_node(g, "Sin", {cosine}, "sine");
  g.outputs = {sine, add_node(g, "Shape", {add_node(g, "Transpose", {x}, "turned")}, "shape")};
  const std::vector<HostFallback> nodes = nodes_without_kernel(*model, kernels);
  ASSERT_EQ(nodes.size(), 2U);  // the shape is known: what made it has gone
  EXPECT_EQ(nodes[0].op, "Cos");
  EXPECT_EQ(nodes[0].reason, "matrices");
  EXPECT_EQ(nodes[1].op, "Sin");
  EXPECT_EQ(nodes[1].reason, "there is no kernel for it");
}

}  // namespace
}  // namespace fretsaw
