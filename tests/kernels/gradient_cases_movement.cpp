// Gradients of operators that move, pick and place elements.
#include <limits>

#include "tests/kernels/gradient_case.h"
#include "tests/kernels/operator_case.h"

namespace fretsaw::testing {

namespace {

using Ints = std::vector<int64_t>;

void add_reshapes(std::vector<GradientCase>& cases, Draw& x) {
  cases.push_back({.op = "Reshape", .inputs = {x({2, 3, 4}), ints({6, -1})}});
  cases.push_back({.op = "Reshape", .inputs = {x({2, 3, 4}), ints({0, 12})}});
  cases.push_back({.op = "Reshape", .inputs = {x({2, 3, 4}), ints({4, 6})}, .fed = {1}});
  cases.push_back({.op = "Flatten", .inputs = {x({2, 3, 4})}});
  cases.push_back({.op = "Flatten", .inputs = {x({2, 3, 4})}, .attributes = {{"axis", int64_t{0}}}});
  cases.push_back({.op = "Squeeze", .inputs = {x({1, 3, 1, 4}), ints({0, -2})}});
  cases.push_back({.op = "Squeeze", .inputs = {x({1, 3, 1, 4}), ints({0})}, .fed = {1}});
  cases.push_back({.op = "Squeeze", .inputs = {x({1, 3, 1, 4})}});
  cases.push_back({.op = "Unsqueeze", .inputs = {x({3, 4}), ints({0, -1})}});
  cases.push_back({.op = "Transpose", .inputs = {x({2, 3, 4})}});
  cases.push_back({.op = "Transpose", .inputs = {x({2, 3, 4, 5})}, .attributes = {{"perm", Ints{2, 0, 3, 1}}}});
  cases.push_back({.op = "Expand", .inputs = {x({3, 1}), ints({2, 1, 4})}});
  cases.push_back({.op = "Expand", .inputs = {x({3, 1}), ints({2, 3, 4})}, .fed = {1}});
  cases.push_back({.op = "Expand", .inputs = {x({2, 3}), ints({1})}});
  cases.push_back({.op = "Expand", .inputs = {x({1, 4}), ints({3, 1})}});
  cases.push_back({.op = "Tile", .inputs = {x({2, 3}), ints({3, 2})}});
  cases.push_back({.op = "Tile", .inputs = {x({2, 3}), ints({1, 2})}, .fed = {1}});
  // A size of 0 is one.
  cases.push_back({.op = "Reshape", .inputs = {x({0, 3}), ints({3, 0})}, .attributes = {{"allowzero", int64_t{1}}}});
  cases.push_back({.op = "Flatten", .inputs = {x({2, 0, 3})}});
  cases.push_back({.op = "Tile", .inputs = {x({0, 3}), ints({2, 2})}});
}

void add_joins(std::vector<GradientCase>& cases, Draw& x) {
  cases.push_back({.op = "Concat", .inputs = {x({2, 3}), x({2, 1}), x({2, 2})}, .attributes = {{"axis", int64_t{1}}}});
  cases.push_back({.op = "Concat", .inputs = {x({2, 3}), x({4, 3})}, .attributes = {{"axis", int64_t{-2}}}, .frozen = {0}});
  cases.push_back({.op = "Concat", .inputs = {x({2, 3})}, .attributes = {{"axis", int64_t{0}}}});
  cases.push_back({.op = "Split", .inputs = {x({2, 6}), ints({1, 3, 2})}, .attributes = {{"axis", int64_t{1}}}, .outputs = 3});
  cases.push_back({.op = "Split", .inputs = {x({5, 2})}, .attributes = {{"num_outputs", int64_t{2}}}, .outputs = 2});
  cases.push_back({.op = "DepthToSpace", .inputs = {x({1, 8, 2, 3})}, .attributes = {{"blocksize", int64_t{2}}}});
  cases.push_back(
      {.op = "DepthToSpace", .inputs = {x({1, 8, 2, 3})}, .attributes = {{"blocksize", int64_t{2}}, {"mode", std::string("CRD")}}});
  cases.push_back({.op = "SpaceToDepth", .inputs = {x({1, 2, 4, 6})}, .attributes = {{"blocksize", int64_t{2}}}});
  for (int64_t upper : {0, 1})
    cases.push_back({.op = "Trilu", .inputs = {x({2, 4, 3}), number(int64_t{1})}, .attributes = {{"upper", upper}}});
  cases.push_back({.op = "Trilu", .inputs = {x({4, 4})}});
  cases.push_back({.op = "ReverseSequence", .inputs = {x({4, 3, 2}), ints({2, 4, 1})}});
}

void add_slices(std::vector<GradientCase>& cases, Draw& x) {
  const int64_t end = std::numeric_limits<int64_t>::max();
  cases.push_back({.op = "Slice", .inputs = {x({5, 6}), ints({1}), ints({4})}});
  cases.push_back({.op = "Slice", .inputs = {x({5, 6}), ints({1, -4}), ints({end, -1}), ints({0, -1})}});
  cases.push_back({.op = "Slice", .inputs = {x({5, 6}), ints({0}), ints({end}), ints({1})}});
  cases.push_back({.op = "Slice", .inputs = {x({5, 6}), ints({0}), ints({6}), ints({1}), ints({2})}});
  cases.push_back({.op = "Slice", .inputs = {x({5, 6}), ints({-1, 4}), ints({-end, 0}), ints({0, 1}), ints({-2, -1})}});
  cases.push_back({.op = "Slice", .inputs = {x({5, 6}), ints({1}), ints({4}), ints({0})}, .fed = {1, 2}});
  cases.push_back({.op = "Slice",
                   .inputs = {x({5, 6}), tensor_of({2}, std::vector<int32_t>{1, 2}), tensor_of({2}, std::vector<int32_t>{3, 5})},
                   .fed = {1, 2}});
  cases.push_back({.op = "Pad", .inputs = {x({3, 4}), ints({1, 0, 2, 3})}});
  cases.push_back({.op = "Pad", .inputs = {x({3, 4}), ints({1, -1, 0, 2}), x({})}});
  cases.push_back({.op = "Pad", .inputs = {x({100, 100}), ints({1, 0, 0, 0}), x({})}});
  cases.push_back({.op = "Pad", .inputs = {x({3, 4}), ints({2, 1}), x({1}), ints({-1})}, .fed = {1}});
  cases.push_back({.op = "Pad", .inputs = {x({3, 4}), ints({2, 1}), nothing(), ints({-1})}});
  cases.push_back({.op = "Pad", .inputs = {x({3, 4}), ints({1, 0, 2, 3})}, .fed = {1}});
  for (const char* mode : {"reflect", "edge", "wrap"}) {
    cases.push_back({.op = "Pad", .inputs = {x({3, 4}), ints({1, 0, 2, 3})}, .attributes = {{"mode", std::string(mode)}}});
    cases.push_back({.op = "Pad", .inputs = {x({3, 4}), ints({1, 2}), nothing(), ints({1})}, .attributes = {{"mode", std::string(mode)}}});
  }
  cases.push_back({.op = "CenterCropPad", .inputs = {x({5, 4}), ints({2, 7})}});
  cases.push_back({.op = "CenterCropPad", .inputs = {x({5, 4}), ints({8})}, .attributes = {{"axes", Ints{0}}}});
}

// The second of `starts` reaches beyond the end of a cache of 5, for circular ones.
void add_caches(std::vector<GradientCase>& cases, Draw& x) {
  const auto circular = Attribute{"mode", std::string("circular")};
  const RuntimeValue starts = ints({0, 2, 1}), round = ints({0, 4, 8});
  cases.push_back({.op = "TensorScatter", .inputs = {x({3, 2, 5, 2}), x({3, 2, 3, 2}), starts}});
  cases.push_back({.op = "TensorScatter", .inputs = {x({3, 2, 5, 2}), x({3, 2, 3, 2})}});
  cases.push_back({.op = "TensorScatter", .inputs = {x({3, 2, 5, 2}), x({3, 2, 3, 2}), round}, .attributes = {circular}, .fed = {2}});
  cases.push_back({.op = "TensorScatter", .inputs = {x({3, 5, 4}), x({3, 5, 4}), round}, .attributes = {circular}});
  cases.push_back({.op = "TensorScatter", .inputs = {x({3, 5, 2, 2}), x({3, 1, 2, 2}), starts}, .attributes = {{"axis", int64_t{1}}}});
  cases.push_back({.op = "TensorScatter", .inputs = {x({3, 4}), x({3, 2}), starts}, .attributes = {{"axis", int64_t{-1}}}, .frozen = {0}});
}

}  // namespace

std::vector<GradientCase> movement_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  add_reshapes(cases, x);
  add_joins(cases, x);
  add_slices(cases, x);
  return cases;
}

std::vector<GradientCase> indexing_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  const RuntimeValue repeated = tensor_of({2, 3}, Ints{0, 3, -1, 3, 3, 1});
  cases.push_back({.op = "Gather", .inputs = {x({4, 5}), repeated}});
  cases.push_back({.op = "Gather", .inputs = {x({2, 4, 3}), repeated}, .attributes = {{"axis", int64_t{1}}}, .fed = {1}});
  cases.push_back({.op = "Gather", .inputs = {x({4, 5}), number(int64_t{2})}, .attributes = {{"axis", int64_t{-1}}}});
  cases.push_back({.op = "Gather", .inputs = {x({4, 130}), tensor_of({3}, std::vector<int32_t>{1, 1, 0})}});
  const RuntimeValue columns = tensor_of({2, 3}, Ints{0, 0, 2, -1, 1, 1});
  cases.push_back({.op = "GatherElements", .inputs = {x({2, 4}), columns}, .attributes = {{"axis", int64_t{1}}}});
  cases.push_back({.op = "GatherND", .inputs = {x({2, 3, 4}), tensor_of({3, 2}, Ints{0, 1, 1, 2, 0, 1})}});
  cases.push_back({.op = "GatherND",
                   .inputs = {x({2, 3, 4}), tensor_of({2, 2, 1}, Ints{2, -1, 1, 1})},
                   .attributes = {{"batch_dims", int64_t{1}}},
                   .fed = {1}});
  cases.push_back({.op = "GatherND",
                   .inputs = {x({2, 2, 3, 4}), tensor_of({2, 2, 2}, Ints{0, 1, 2, 3, 1, 0, 1, 0})},
                   .attributes = {{"batch_dims", int64_t{2}}}});
  // More to one place than 16 bits can add up one by one.
  const RuntimeValue many = tensor_of({6000}, Ints(6000, 1)), many_rows = tensor_of({6000, 1}, Ints(6000, 1));
  cases.push_back({.op = "GatherElements", .inputs = {x({6001}), many}});
  cases.push_back({.op = "GatherND", .inputs = {x({2}), many_rows}});
  const RuntimeValue distinct = tensor_of({2, 2}, Ints{0, 2, 3, 1});
  for (const char* reduction : {"none", "add"}) {
    const std::vector<Attribute> how = {{"axis", int64_t{1}}, {"reduction", std::string(reduction)}};
    cases.push_back({.op = "ScatterElements", .inputs = {x({2, 4}), distinct, x({2, 2})}, .attributes = how});
    cases.push_back({.op = "ScatterND",
                     .inputs = {x({4, 3}), tensor_of({2, 1}, Ints{2, 0}), x({2, 3})},
                     .attributes = {{"reduction", std::string(reduction)}}});
  }
  cases.push_back({.op = "ScatterElements",
                   .inputs = {x({2, 4}), columns, x({2, 3})},
                   .attributes = {{"axis", int64_t{1}}, {"reduction", std::string("add")}}});
  for (const char* reduction : {"max", "min"}) {
    const std::vector<Attribute> how = {{"axis", int64_t{1}}, {"reduction", std::string(reduction)}};
    cases.push_back({.op = "ScatterElements", .inputs = {x({2, 4}), columns, x({2, 3})}, .attributes = how});
    cases.push_back({.op = "ScatterND",
                     .inputs = {x({4, 3}), tensor_of({3, 1}, Ints{2, 0, 2}), x({3, 3})},
                     .attributes = {{"reduction", std::string(reduction)}}});
  }
  cases.push_back({.op = "TopK", .inputs = {x({3, 6}), ints({2})}, .outputs = 2});
  cases.push_back(
      {.op = "TopK", .inputs = {x({6, 2}), ints({3})}, .attributes = {{"axis", int64_t{0}}, {"largest", int64_t{0}}}, .outputs = 2});
  for (int64_t exclusive : {0, 1})
    for (int64_t reverse : {0, 1})
      cases.push_back(
          {.op = "CumSum", .inputs = {x({3, 4}), number(int64_t{1})}, .attributes = {{"exclusive", exclusive}, {"reverse", reverse}}});
  cases.push_back({.op = "Range", .inputs = {x({}, 0.2, 0.4), x({}, 5, 5.2), x({}, 0.69, 0.71)}});
  cases.push_back({.op = "OneHot", .inputs = {ints({1, 0, 3}), ints({4}), x({2})}, .attributes = {{"axis", int64_t{0}}}});
  const RuntimeValue kept = tensor_of({4}, std::vector<bool>{true, false, false, true});
  cases.push_back({.op = "Compress", .inputs = {x({3, 4}), kept}, .attributes = {{"axis", int64_t{1}}}});
  cases.push_back({.op = "Compress", .inputs = {x({3, 4}), kept}});
  // Of numbers that are all different; tests/kernels/gradients_exact_test.cpp has equal ones. What lies behind a Unique has a size that
  // nobody knows before.
  for (const int64_t sorted : {0, 1}) {
    cases.push_back({.op = "Unique", .inputs = {x({3, 4})}, .attributes = {{"sorted", sorted}}});
    cases.push_back({.op = "Unique", .inputs = {x({3, 4})}, .attributes = {{"sorted", sorted}, {"axis", int64_t{0}}}, .outputs = 4});
    cases.push_back({.op = "Unique",
                     .inputs = {x({2, 4, 3})},
                     .attributes = {{"sorted", sorted}, {"axis", int64_t{-2}}},
                     .outputs = 3,
                     .left_out = {1}});
  }
  add_caches(cases, x);
  return cases;
}

}  // namespace fretsaw::testing
