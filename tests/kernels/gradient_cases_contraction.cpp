// Gradients of matrix products, convolutions and poolings.
#include "tests/kernels/gradient_case.h"
#include "tests/kernels/operator_case.h"

namespace fretsaw::testing {

namespace {

using Ints = std::vector<int64_t>;

}  // namespace

std::vector<GradientCase> contraction_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  const std::vector<std::pair<Dims, Dims>> products = {
      {{3, 4}, {4, 5}},
      {{2, 3, 4}, {4, 5}},
      {{2, 2, 3, 4}, {4, 5}},
      {{2, 3, 4}, {2, 4, 5}},
      {{2, 1, 3, 4}, {6, 4, 5}},
      {{3, 4}, {2, 4, 5}},
      {{4}, {4, 5}},
      {{3, 4}, {4}},
      {{4}, {4}},
      {{4}, {2, 4, 5}},
      {{2, 3, 4}, {4}},
      {{1, 3, 4}, {2, 4, 5}},
      {{2, 2, 3, 4}, {1, 1, 4, 5}},
  };
  for (const auto& [a, b] : products) cases.push_back({.op = "MatMul", .inputs = {x(a), x(b)}});
  cases.push_back({.op = "MatMul", .inputs = {x({2, 3, 4}), x({4, 5})}, .frozen = {0}});
  cases.push_back({.op = "MatMul", .inputs = {x({2, 3, 4}), x({4, 5})}, .frozen = {1}});
  for (int64_t ta : {0, 1})
    for (int64_t tb : {0, 1}) {
      const std::vector<Attribute> turned = {{"transA", ta}, {"transB", tb}, {"alpha", 0.7F}, {"beta", 1.3F}};
      const Dims a = ta ? Dims{4, 3} : Dims{3, 4}, b = tb ? Dims{5, 4} : Dims{4, 5};
      cases.push_back({.op = "Gemm", .inputs = {x(a), x(b), x({5})}, .attributes = turned});
    }
  for (const Dims& bias : std::vector<Dims>{{}, {1}, {3, 1}, {1, 5}, {3, 5}, {1, 1}})
    cases.push_back({.op = "Gemm", .inputs = {x({3, 4}), x({4, 5}), x(bias)}});
  cases.push_back({.op = "Gemm", .inputs = {x({3, 4}), x({4, 5})}});
  const std::vector<std::pair<const char*, std::vector<Dims>>> equations = {
      {"ij,jk->ik", {{2, 3}, {3, 4}}},
      {"bij,bjk->bik", {{2, 3, 4}, {2, 4, 5}}},
      {"bhqd,bhkd->bhqk", {{2, 2, 3, 4}, {2, 2, 5, 4}}},
      {"ij->ji", {{2, 3}}},
      {"ij->i", {{2, 3}}},
      {"ij->", {{2, 3}}},
      {"ij,kl->jk", {{2, 3}, {4, 5}}},
      {"i,j,k->ijk", {{2}, {3}, {4}}},
      {"i,i->", {{3}, {3}}},
      {"ij,jk", {{2, 3}, {3, 4}}},
      {"...ij,...jk->...ik", {{2, 3, 4}, {2, 4, 5}}},
      {"...ij,jk->...ik", {{2, 2, 3, 4}, {4, 5}}},
      {"...ij,jk->...ik", {{3, 4}, {4, 5}}},
      {"i...,i->...", {{3, 2, 2}, {3}}},
      // Sizes of 1 broadcast, under a label and in the ellipsis; beside them labels of one operand alone.
      {"bij,bjk->bik", {{1, 3, 4}, {2, 4, 5}}},
      {"bij,bjk->bik", {{2, 3, 4}, {1, 4, 5}}},
      {"bij,bjk->ik", {{1, 3, 4}, {2, 4, 5}}},
      {"bij,b->i", {{1, 3, 4}, {2}}},
      {"bij,b->i", {{2, 3, 4}, {1}}},
      {"...ij,...jk->...ik", {{1, 2, 3}, {4, 3, 2}}},
      {"...ij,...jk->...ik", {{4, 2, 3}, {1, 3, 2}}},
      {"...ij,...jk->...ik", {{5, 1, 2, 3}, {1, 4, 3, 2}}},
      // Diagonals, summed or kept, of one operand or beside others.
      {"ii->i", {{3, 3}}},
      {"ii->", {{3, 3}}},
      {"bii->b", {{2, 3, 3}}},
      {"bii,bij->bj", {{2, 3, 3}, {2, 3, 4}}},
      {"ij,ii->ji", {{3, 4}, {3, 3}}},
      {"iijj->ji", {{2, 2, 3, 3}}},
      {"iji,i->j", {{3, 4, 3}, {3}}},
      {"iii->i", {{3, 3, 3}}},
      {"...ii->...", {{2, 4, 3, 3}}},
      // Labels of one operand alone beside an ellipsis.
      {"...ij->...", {{2, 5, 3, 4}}},
      {"i...->...", {{3, 2, 4}}},
      {"a...ib,...j->...ij", {{2, 3, 4, 5}, {3, 6}}},
      {"...jk,...i->...ki", {{3, 4, 5}, {3, 6}}},
      {"jk,...i->...ki", {{4, 5}, {2, 3, 6}}},
      {"i...i,i->...i", {{3, 2, 3}, {3}}},
      {"bii,b->b", {{1, 3, 3}, {2}}},
  };
  for (const auto& [equation, shapes] : equations) {
    GradientCase c{.op = "Einsum", .attributes = {{"equation", std::string(equation)}}};
    for (const Dims& dims : shapes) c.inputs.push_back(x(dims));
    cases.push_back(c);
  }
  return cases;
}

std::vector<GradientCase> convolution_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  const auto conv = [&](const Dims& input, const Dims& weights, const std::vector<Attribute>& attributes, bool symbolic = true) {
    cases.push_back({.op = "Conv", .inputs = {x(input), x(weights), x({weights[0]})}, .attributes = attributes, .symbolic = symbolic});
    if (!symbolic) return;
    // With the kernel's shape, so that the rule needs no other.
    cases.back().attributes.push_back({"kernel_shape", Ints(weights.begin() + 2, weights.end())});
  };
  conv({2, 3, 7, 6}, {4, 3, 3, 3}, {});
  conv({2, 3, 7, 6}, {4, 3, 3, 2}, {{"strides", Ints{2, 3}}, {"pads", Ints{1, 0, 2, 1}}});
  conv({2, 3, 8, 8}, {4, 3, 3, 3}, {{"strides", Ints{3, 3}}});
  conv({1, 3, 9, 9}, {4, 3, 3, 3}, {{"dilations", Ints{2, 3}}, {"pads", Ints{2, 2, 2, 2}}});
  conv({2, 4, 5, 5}, {6, 2, 3, 3}, {{"group", int64_t{2}}, {"pads", Ints{1, 1, 1, 1}}});
  conv({2, 4, 5, 5}, {4, 1, 3, 3}, {{"group", int64_t{4}}, {"strides", Ints{2, 2}}, {"pads", Ints{1, 1, 1, 1}}});
  conv({2, 3, 5, 6}, {4, 3, 3, 3}, {{"auto_pad", std::string("SAME_UPPER")}, {"strides", Ints{2, 2}}});
  conv({2, 3, 5, 6}, {4, 3, 2, 2}, {{"auto_pad", std::string("SAME_LOWER")}});
  conv({2, 3, 5, 6}, {4, 3, 2, 2}, {{"auto_pad", std::string("VALID")}});
  conv({2, 3, 4, 4}, {4, 3, 1, 1}, {{"strides", Ints{2, 2}}});
  conv({2, 3, 9}, {4, 3, 3}, {{"strides", Ints{2}}});
  conv({1, 2, 4, 4, 4}, {3, 2, 2, 2, 2}, {{"pads", Ints{1, 0, 1, 0, 1, 0}}});
  cases.push_back({.op = "Conv", .inputs = {x({2, 3, 7, 6}), x({4, 3, 3, 3})}, .symbolic = false});
  const auto transposed = [&](const Dims& input, const Dims& weights, int64_t groups, std::vector<Attribute> attributes) {
    attributes.push_back({"group", groups});
    cases.push_back(
        {.op = "ConvTranspose", .inputs = {x(input), x(weights), x({weights[1] * groups})}, .attributes = attributes, .symbolic = false});
  };
  transposed({2, 3, 4, 5}, {3, 4, 3, 3}, 1, {});
  transposed({2, 3, 4, 5}, {3, 4, 3, 3}, 1, {{"strides", Ints{2, 3}}, {"pads", Ints{1, 0, 0, 1}}, {"output_padding", Ints{1, 2}}});
  transposed({2, 4, 4, 4}, {4, 3, 2, 2}, 2, {{"strides", Ints{2, 2}}, {"dilations", Ints{2, 1}}});
  transposed({1, 2, 3, 3}, {2, 2, 3, 3}, 1, {{"strides", Ints{2, 2}}, {"output_shape", Ints{6, 6}}});
  transposed({1, 2, 3, 3}, {2, 2, 3, 3}, 1, {{"strides", Ints{2, 2}}, {"auto_pad", std::string("SAME_UPPER")}});
  transposed({1, 2, 3, 3}, {2, 2, 3, 3}, 1, {{"strides", Ints{2, 2}}, {"auto_pad", std::string("SAME_LOWER")}});
  return cases;
}

std::vector<GradientCase> pooling_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  const std::vector<std::vector<Attribute>> windows = {
      {{"kernel_shape", Ints{2, 2}}},
      {{"kernel_shape", Ints{3, 2}}, {"strides", Ints{2, 2}}, {"pads", Ints{1, 0, 1, 1}}},
      {{"kernel_shape", Ints{3, 3}}, {"strides", Ints{2, 2}}, {"auto_pad", std::string("SAME_UPPER")}},
      {{"kernel_shape", Ints{2, 2}}, {"dilations", Ints{2, 1}}},
      {{"kernel_shape", Ints{3, 3}}, {"strides", Ints{2, 2}}, {"ceil_mode", int64_t{1}}},
      {{"kernel_shape", Ints{3, 3}}, {"strides", Ints{3, 3}}, {"pads", Ints{1, 1, 1, 1}}, {"ceil_mode", int64_t{1}}},
      {{"kernel_shape", Ints{8, 9}}, {"strides", Ints{2, 2}}, {"ceil_mode", int64_t{1}}},
  };
  for (const auto& window : windows) {
    cases.push_back({.op = "MaxPool", .inputs = {x({2, 3, 7, 8})}, .attributes = window});
    for (int64_t counts : {0, 1}) {
      cases.push_back({.op = "AveragePool", .inputs = {x({2, 3, 7, 8})}, .attributes = window});
      cases.back().attributes.push_back({"count_include_pad", counts});
    }
    if (window.back().name == "ceil_mode") continue;
    for (int64_t p : {1, 2, 3}) {
      cases.push_back({.op = "LpPool", .inputs = {x({2, 3, 7, 8})}, .attributes = window});
      cases.back().attributes.push_back({"p", p});
    }
  }
  cases.push_back({.op = "MaxPool", .inputs = {x({2, 3, 9})}, .attributes = {{"kernel_shape", Ints{3}}}, .outputs = 2});
  cases.push_back({.op = "AveragePool", .inputs = {x({1, 2, 4, 4, 4})}, .attributes = {{"kernel_shape", Ints{2, 2, 2}}}});
  for (const char* op : {"GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"}) {
    cases.push_back({.op = op, .inputs = {x({2, 3, 4, 5})}});
    cases.push_back({.op = op, .inputs = {x({2, 3, 4})}});
  }
  cases.push_back({.op = "GlobalLpPool", .inputs = {x({2, 3, 4})}, .attributes = {{"p", int64_t{3}}}});
  cases.push_back({.op = "GlobalLpPool", .inputs = {x({1, 2, 4}, 300, 600)}, .attributes = {{"p", int64_t{3}}}});
  cases.push_back({.op = "GlobalAveragePool", .inputs = {x({1, 2, 300, 300})}});
  cases.push_back({.op = "MaxUnpool",
                   .inputs = {x({1, 1, 2, 2}), tensor_of({1, 1, 2, 2}, Ints{1, 6, 8, 15})},
                   .attributes = {{"kernel_shape", Ints{2, 2}}, {"strides", Ints{2, 2}}}});
  return cases;
}

}  // namespace fretsaw::testing
