// Movement on the device: transposes of all shapes and widths, joins, splits, slices, pads, and views, with odd sizes and both layouts.
#include <numeric>

#include "tests/kernels/device_case.h"

namespace fretsaw::testing {
namespace {

using Ints = std::vector<int64_t>;

const Tolerance kEqual{0, 0};
constexpr DType kEverySize[] = {DType::uint8, DType::float16, DType::float32, DType::int64};
constexpr Layout kBothLayouts[] = {Layout::plain, Layout::nhwc};

// 0, 1, 2, ... modulo 251, which every type holds.
RuntimeValue counted(DType type, const Dims& dims) {
  std::vector<double> values(static_cast<size_t>(count_of(dims)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i % 251);
  return tensor_as(type, dims, values);
}
Attribute text(const char* name, const char* value) {
  return attribute(name, std::string(value));
}

struct TransposeCase {
  Dims dims;
  Ints perm;
};
const TransposeCase kTransposes[] = {
    {{64, 128}, {1, 0}},               // whole tiles
    {{65, 131}, {1, 0}},               // neither side is a multiple of a wide access
    {{72, 131}, {1, 0}},               // the reads are not, the writes are
    {{131, 72}, {1, 0}},               // the other way
    {{1000, 16}, {1, 0}},              // a thin matrix
    {{1000, 3}, {1, 0}},               // too thin for tiles
    {{3, 1000}, {1, 0}},               //
    {{2, 3, 224, 224}, {0, 2, 3, 1}},  // images of few channels
    {{2, 64, 14, 14}, {0, 2, 3, 1}},   //
    {{2, 14, 14, 64}, {0, 3, 1, 2}},   //
    {{2, 49, 12, 64}, {0, 2, 1, 3}},   // heads of attention: runs stay whole
    {{2, 12, 50, 64}, {0, 1, 3, 2}},   // keys of attention
    {{4, 6, 5, 3}, {2, 0, 1, 3}},      // short runs
    {{4, 6, 5, 2}, {1, 2, 0, 3}},      // pairs, moved as one
    {{3, 4, 5, 6, 7}, {4, 2, 0, 3, 1}},
    {{2, 3, 2, 3, 2, 3, 2, 2, 3, 2, 2, 2, 2}, {12, 0, 11, 1, 10, 2, 9, 3, 8, 4, 7, 5, 6}},  // more dimensions than one launch takes
    {{5, 0, 3}, {2, 1, 0}},
    {{}, {}},
    {{33, 65, 17}, {2, 1, 0}},
    {{16, 40, 24, 32}, {3, 1, 2, 0}},
};

TEST(MovementOnDevice, Transposes) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const TransposeCase& c : kTransposes) {
    for (DType type : kEverySize) {
      expect_same_on_device({"Transpose", {counted(type, c.dims)}, {attribute("perm", c.perm)}}, kEqual);
      if (c.dims.size() != 4) continue;
      expect_same_on_device({"Transpose", {reordered(counted(type, c.dims), Layout::nhwc)}, {attribute("perm", c.perm)}}, kEqual, "nhwc");
    }
  }
  expect_same_on_device({"Transpose", {numbers(DType::float16, {2048, 4104})}, {attribute("perm", Ints{1, 0})}}, kEqual);
  expect_same_on_device({"Transpose", {numbers(DType::float32, {1030, 2052})}, {}, 1, {}, true}, kEqual);
}

TEST(MovementOnDevice, JoinsAndSplits) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kEverySize) {
    for (int64_t axis = 0; axis < 4; ++axis) {
      for (Layout layout : kBothLayouts) {
        for (const Ints& sizes : {Ints{1, 3, 2}, Ints{8, 16}, Ints{0, 5, 0, 8}, Ints(19, 2)}) {
          std::vector<RuntimeValue> parts;
          for (int64_t size : sizes) {
            Dims dims = {2, 5, 7, 9};
            dims[static_cast<size_t>(axis)] = size;
            parts.push_back(reordered(counted(type, dims), layout));
          }
          Dims whole = {2, 5, 7, 9};
          whole[static_cast<size_t>(axis)] = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
          expect_same_on_device({"Concat", parts, {attribute("axis", axis)}}, kEqual);
          expect_same_on_device(
              {"Split", {reordered(counted(type, whole), layout), int_list(sizes)}, {attribute("axis", axis)}, sizes.size(), {1}}, kEqual);
        }
      }
    }
  }
  const RuntimeValue mixed[] = {counted(DType::float32, {1, 8, 5, 5}), counted(DType::float32, {1, 4, 5, 5})};
  expect_same_on_device(
      {"Concat", {reordered(mixed[0], Layout::nhwc), mixed[1], reordered(mixed[0], Layout::nhwc)}, {attribute("axis", int64_t{1})}},
      kEqual);
  expect_same_on_device(
      {"Split", {counted(DType::float16, {3, 3072})}, {attribute("axis", int64_t{1}), attribute("num_outputs", int64_t{3})}, 3}, kEqual);
  expect_same_on_device({"Split", {counted(DType::float32, {7})}, {attribute("num_outputs", int64_t{3})}, 3, {}, true}, kEqual);
}

TEST(MovementOnDevice, SlicesExpandsAndTiles) {
  if (!any_device()) GTEST_SKIP() << "no device";
  struct Slice {
    Ints starts, ends, axes, steps;
  };
  const Slice slices[] = {
      {{0}, {3}, {1}, {1}}, {{1, 2}, {100, -1}, {2, 3}, {1, 1}}, {{-1, 100}, {-100, -100}, {1, 3}, {-1, -2}}, {{1}, {100}, {3}, {2}},
      {{4}, {4}, {0}, {1}}, {{0, 0}, {1, 2}, {0, 1}, {1, 1}},    {{5}, {INT64_MIN}, {2}, {INT64_MIN}}};
  for (DType type : kEverySize) {
    for (Layout layout : kBothLayouts) {
      const RuntimeValue x = reordered(counted(type, {2, 5, 6, 16}), layout);
      for (const Slice& s : slices) {
        expect_same_on_device(
            {"Slice", {x, int_list(s.starts), int_list(s.ends), int_list(s.axes), int_list(s.steps)}, {}, 1, {1, 2, 3, 4}}, kEqual);
      }
    }
    const std::pair<Dims, Ints> expands[] = {{{3, 1}, {3, 64}}, {{1, 8}, {7, 8}}, {{5}, {2, 3, 1}}, {{2, 1, 3}, {4, 1, 7, 1}}, {{1}, {0}}};
    for (const auto& [dims, to] : expands) expect_same_on_device({"Expand", {counted(type, dims), int_list(to)}, {}, 1, {1}}, kEqual);
    const std::pair<Dims, Ints> tiles[] = {{{3, 5}, {2, 3}}, {{2, 16}, {4, 1}}, {{7}, {9}}, {{2, 3}, {0, 2}}, {{1, 1, 8}, {3, 5, 1}}};
    for (const auto& [dims, repeats] : tiles) expect_same_on_device({"Tile", {counted(type, dims), int_list(repeats)}, {}, 1, {1}}, kEqual);
  }
}

TEST(MovementOnDevice, DepthAndSpace) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kEverySize) {
    for (Layout layout : kBothLayouts) {
      for (int64_t block : {1, 2, 3}) {
        for (const char* mode : {"DCR", "CRD"}) {
          const std::vector<Attribute> attributes = {attribute("blocksize", block), text("mode", mode)};
          expect_same_on_device({"DepthToSpace", {reordered(counted(type, {2, 16 * block * block, 5, 7}), layout)}, attributes}, kEqual);
        }
        expect_same_on_device(
            {"SpaceToDepth", {reordered(counted(type, {2, 3, 5 * block, 8 * block}), layout)}, {attribute("blocksize", block)}}, kEqual);
      }
    }
  }
}

TEST(MovementOnDevice, PadsAndKin) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const Ints pads[] = {
      {0, 0, 1, 1, 0, 0, 1, 1}, {0, 0, 0, 2, 0, 0, 0, 4}, {0, 8, 0, 0, 0, 8, 0, 0}, {1, 0, -1, 2, 0, 3, 2, -3}, Ints(8, 0)};
  for (DType type : kEverySize) {
    for (Layout layout : kBothLayouts) {
      const RuntimeValue x = reordered(counted(type, {2, 8, 5, 16}), layout), seven = tensor_as(type, {}, {7});
      for (const Ints& pad : pads) {
        for (const char* mode : {"constant", "reflect", "edge", "wrap"}) {
          expect_same_on_device({"Pad", {x, int_list(pad)}, {text("mode", mode)}, 1, {1}}, kEqual, mode);
        }
        expect_same_on_device({"Pad", {x, int_list(pad), seven}, {}, 1, {1, 2}}, kEqual);
      }
    }
    expect_same_on_device({"CenterCropPad", {counted(type, {7, 6, 3}), int_list({4, 9})}, {attribute("axes", Ints{0, 1})}, 1, {1}}, kEqual);
    for (int64_t k : {-100, -2, 0, 1, 100}) {
      for (int64_t upper : {0, 1}) {
        const RuntimeValue diagonal = tensor<int64_t>({}, {k});
        expect_same_on_device({"Trilu", {counted(type, {3, 17, 20}), diagonal}, {attribute("upper", upper)}, 1, {1}}, kEqual);
      }
    }
    const std::vector<Attribute> axes = {attribute("time_axis", int64_t{1}), attribute("batch_axis", int64_t{0})};
    expect_same_on_device({"ReverseSequence", {counted(type, {4, 6, 5}), int_list({0, 1, 4, 6})}, axes}, kEqual);
    expect_same_on_device({"ReverseSequence", {counted(type, {6, 4, 3}), int_list({2, 6, 1, 5})}}, kEqual);
  }
  expect_same_on_device({"Pad", {counted(DType::float32, {0, 3}), int_list({1, 0, 1, 2}), tensor<float>({}, {5})}, {}, 1, {1, 2}}, kEqual);
}

TEST(MovementOnDevice, ViewsAndConstants) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (bool hidden : {false, true}) {
    const RuntimeValue x = counted(DType::float16, {2, 1, 6});
    expect_same_on_device({"Reshape", {x, int_list({0, -1})}, {}, 1, {1}, hidden}, kEqual);
    expect_same_on_device({"Flatten", {x}, {attribute("axis", int64_t{-1})}, 1, {}, hidden}, kEqual);
    expect_same_on_device({"Squeeze", {x, int_list({1})}, {}, 1, {1}, hidden}, kEqual);
    expect_same_on_device({"Unsqueeze", {x, int_list({0, -1})}, {}, 1, {1}, hidden}, kEqual);
    expect_same_on_device({"Identity", {x}, {}, 1, {}, hidden}, kEqual);
    for (const Dims& dims : {Dims{3, 8, 1, 1}, Dims{3, 8, 2, 3}, Dims{3, 1, 4, 5}}) {
      expect_same_on_device({"Flatten", {reordered(counted(DType::float32, dims), Layout::nhwc)}, {}, 1, {}, hidden}, kEqual);
    }
    expect_same_on_device({"EyeLike", {counted(DType::float32, {5, 9})}, {attribute("k", int64_t{2})}, 1, {}, hidden}, kEqual);
  }
  expect_same_on_device({"EyeLike", {counted(DType::int64, {9, 4})}, {attribute("dtype", int64_t{10}), attribute("k", int64_t{-1})}},
                        kEqual);
  auto half = make_tensor(DType::float16, {1});
  const uint16_t bits = 0x3c01;
  std::memcpy(mutable_data(*half), &bits, sizeof(bits));
  for (const Ints& dims : {Ints{3, 5, 7}, Ints{0, 2}, Ints{}, Ints{100000}}) {
    expect_same_on_device({"ConstantOfShape", {int_list(dims)}, {}, 1, {0}}, kEqual);
    expect_same_on_device({"ConstantOfShape", {int_list(dims)}, {attribute("value", TensorPtr(half))}, 1, {0}}, kEqual);
  }
}

}  // namespace
}  // namespace fretsaw::testing
