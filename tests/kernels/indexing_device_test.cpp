// Gathering, scattering, sorting, random numbers, rotary embeddings and products of bytes on the device.
#include "graph/errors.h"
#include "tests/kernels/device_case.h"

namespace fretsaw::testing {
namespace {

constexpr DType kEverySize[] = {DType::uint8, DType::float16, DType::float32, DType::int64};
constexpr DType kSortable[] = {DType::int8,  DType::uint8,  DType::int16,   DType::uint16,   DType::int32,   DType::uint32,
                               DType::int64, DType::uint64, DType::float16, DType::bfloat16, DType::float32, DType::float64};
const Tolerance kEqual{0, 0};

// Whole numbers from low to high.
RuntimeValue whole(DType type, const Dims& dims, int64_t low, int64_t high, uint32_t seed = 1) {
  std::vector<double> values = spread_values(count_of(dims), static_cast<double>(low), static_cast<double>(high) + 1, seed);
  for (double& v : values) v = std::min(std::floor(v), static_cast<double>(high));
  return tensor_as(type, dims, values);
}
Attribute text(const char* name, const char* value) {
  return attribute(name, std::string(value));
}

TEST(IndexingOnDevice, GatherOfRowsOfAllWidths) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kEverySize) {
    for (int64_t row : {1, 3, 8, 64, 257}) {
      const RuntimeValue x = whole(type, {50, row}, 0, 100);
      for (DType index : {DType::int32, DType::int64}) {
        expect_same_on_device({"Gather", {x, whole(index, {4, 70}, -50, 49)}}, kEqual);
        expect_same_on_device({"Gather", {x, whole(index, {5}, -row, row - 1)}, {attribute("axis", int64_t{-1})}}, kEqual);
      }
    }
  }
  const RuntimeValue x = whole(DType::float32, {3, 7, 5, 4}, 0, 1000);
  for (bool hidden : {false, true}) {
    for (int64_t axis = 0; axis < 4; ++axis) {
      const int64_t extent = x.tensor.dims[static_cast<size_t>(axis)];
      expect_same_on_device({"Gather", {x, whole(DType::int64, {2, 3}, -extent, extent - 1)}, {attribute("axis", axis)}, 1, {}, hidden},
                            kEqual);
    }
  }
  expect_same_on_device({"Gather", {x, whole(DType::int64, {}, 1, 1)}}, kEqual);
  expect_same_on_device({"Gather", {x, whole(DType::int64, {0}, 0, 0)}}, kEqual);
  expect_same_on_device({"Gather", {numbers(DType::bfloat16, {3000, 4096}), whole(DType::int64, {2, 512}, 0, 2999)}}, kEqual);
}

TEST(IndexingOnDevice, GatherElementsAndTuples) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kEverySize) {
    const RuntimeValue x = whole(type, {6, 7, 8}, 0, 100);
    for (int64_t axis = 0; axis < 3; ++axis) {
      const int64_t extent = x.tensor.dims[static_cast<size_t>(axis)];
      Dims dims = {5, 6, 7};
      dims[static_cast<size_t>(axis)] = 11;
      expect_same_on_device({"GatherElements", {x, whole(DType::int64, dims, -extent, extent - 1)}, {attribute("axis", axis)}}, kEqual);
    }
    expect_same_on_device({"GatherND", {x, whole(DType::int64, {30, 1}, -6, 5)}}, kEqual);
    expect_same_on_device({"GatherND", {x, whole(DType::int64, {30, 2}, -6, 5)}}, kEqual);
    expect_same_on_device({"GatherND", {x, whole(DType::int64, {3, 10, 3}, -6, 5)}}, kEqual);
    expect_same_on_device({"GatherND", {x, whole(DType::int64, {6, 4, 1}, -7, 6)}, {attribute("batch_dims", int64_t{1})}}, kEqual);
  }
}

// The node on the device alone: the CPU would throw first.
std::vector<RuntimeValue> run_alone(const std::string& op, std::vector<RuntimeValue> inputs) {
  Graph graph;
  CompileContext c;
  std::vector<Value*> values;
  std::vector<RuntimeValue*> pointers;
  for (RuntimeValue& input : inputs) {
    values.push_back(graph.add_value("x" + std::to_string(values.size())));
    pointers.push_back(&input);
    c.inputs.push_back(values.back());
    c.input_types.push_back(Type::tensor(input.tensor.dtype, shape_of(input.tensor.dims)));
    c.constants.push_back(nullptr);
    c.offered.push_back(Layout::plain);
  }
  Node* node = graph.add_node(op, values, {"y"}, {});
  node->name = "the_node";
  c.nodes = {node};
  c.outputs = {node->outputs[0]};
  c.output_types = {Type::tensor(inputs[0].tensor.dtype)};
  return run_on_device(*any_device(), c, pointers);
}

TEST(IndexingOnDevice, IndexesOutOfRangeAreErrorsThatNameTheNode) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const RuntimeValue x = numbers(DType::float32, {5, 4}), rows = numbers(DType::float32, {2, 4});
  const auto says = [&](const std::string& op, std::vector<RuntimeValue> inputs) -> std::string {
    try {
      run_alone(op, std::move(inputs));
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  for (const std::string& message :
       {says("Gather", {x, int_list({1, -6})}), says("GatherND", {x, tensor<int64_t>({2, 1}, {0, -6})}),
        says("ScatterND", {x, tensor<int64_t>({2, 1}, {0, -6}), rows}), says("GatherElements", {x, tensor<int64_t>({1, 2}, {0, -6})})}) {
    EXPECT_NE(message.find("index -6 is outside a dimension of 5"), std::string::npos) << message;
    EXPECT_NE(message.find("the_node"), std::string::npos) << message;
  }
  // The device is as good as new.
  EXPECT_EQ(says("Gather", {x, int_list({1, -5})}), "");
}

TEST(IndexingOnDevice, ScattersTakeUpdatesOfOnePlaceInOrder) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const char* reduction : {"none", "add", "mul", "min", "max"}) {
    const std::vector<Attribute> how = {text("reduction", reduction)};
    for (DType type : kSortable) {
      const RuntimeValue x = whole(type, {9, 8}, 0, 3);
      for (int64_t axis : {0, 1}) {
        const int64_t extent = x.tensor.dims[static_cast<size_t>(axis)];
        const Dims dims = axis == 0 ? Dims{40, 7} : Dims{5, 40};
        expect_same_on_device({"ScatterElements",
                               {x, whole(DType::int64, dims, -extent, extent - 1), whole(type, dims, 0, 3, 2)},
                               {text("reduction", reduction), attribute("axis", axis)}},
                              kEqual);
      }
      expect_same_on_device({"ScatterND", {x, whole(DType::int64, {30, 1}, -9, 8), whole(type, {30, 8}, 0, 3, 2)}, how}, kEqual);
      expect_same_on_device({"ScatterND", {x, whole(DType::int64, {6, 30, 2}, -8, 7), whole(type, {6, 30}, 0, 3, 2)}, how}, kEqual);
    }
    // Many updates, whose sums depend on their order.
    for (DType type : kFloatTypes) {
      const RuntimeValue x = numbers(type, {500, 12});
      expect_same_on_device({"ScatterND", {x, whole(DType::int64, {20000, 1}, 0, 499), numbers(type, {20000, 12}, 0.9, 1.1, 2)}, how},
                            kEqual);
    }
    const RuntimeValue flags = whole(DType::boolean, {6}, 0, 1);
    expect_same_on_device({"ScatterElements", {flags, whole(DType::int64, {9}, 0, 5), whole(DType::boolean, {9}, 0, 1, 2)}, how}, kEqual);
  }
  expect_same_on_device({"ScatterND", {numbers(DType::float32, {3}), tensor<int64_t>({0, 1}, {}), tensor<float>({0}, {})}}, kEqual);
  expect_same_on_device({"ScatterND", {numbers(DType::float32, {3}), tensor<int64_t>({0}, {}), numbers(DType::float32, {3})}}, kEqual);
}

TEST(IndexingOnDevice, CachesAreUpdated) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kEverySize) {
    const RuntimeValue cache = whole(type, {3, 4, 10, 8}, 0, 50), update = whole(type, {3, 4, 3, 8}, 50, 100);
    expect_same_on_device({"TensorScatter", {cache, update, int_list({0, 7, 3})}}, kEqual);
    expect_same_on_device({"TensorScatter", {cache, update, int_list({8, 19, 3})}, {text("mode", "circular")}}, kEqual);
    expect_same_on_device({"TensorScatter", {cache, update}}, kEqual);
    expect_same_on_device(
        {"TensorScatter", {cache, whole(type, {3, 2, 10, 8}, 50, 100), int_list({0, 1, 2})}, {attribute("axis", int64_t{1})}}, kEqual);
  }
}

TEST(IndexingOnDevice, SelectionsAndOneHot) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kSortable) {
    expect_same_on_device({"NonZero", {whole(type, {17, 100, 3}, 0, 2)}}, kEqual);
    expect_same_on_device(
        {"OneHot", {whole(type, {5, 30}, 0, 12), tensor<int64_t>({}, {10}), tensor_as(type, {2}, {1, 4})}, {attribute("axis", int64_t{1})}},
        kEqual);
  }
  expect_same_on_device({"NonZero", {tensor<float>({4}, {0, -0.0f, NAN, 1e-40f})}}, kEqual);
  expect_same_on_device({"NonZero", {tensor<float>({0, 3}, {})}}, kEqual);
  expect_same_on_device({"NonZero", {tensor<float>({}, {2})}}, kEqual);
  const RuntimeValue x = whole(DType::float16, {6, 300}, 0, 100), some = whole(DType::boolean, {250}, 0, 1);
  expect_same_on_device({"Compress", {x, some}}, kEqual);
  expect_same_on_device({"Compress", {x, some}, {attribute("axis", int64_t{1})}}, kEqual);
  expect_same_on_device({"Compress", {x, whole(DType::boolean, {6}, 0, 0)}, {attribute("axis", int64_t{0})}}, kEqual);
}

struct TopKShape {
  Dims dims;
  int64_t axis, k;
};
const TopKShape kTopK[] = {
    {{100, 8}, 1, 2},     {{33, 200}, 1, 32},  {{7, 512}, 1, 5},      {{4, 60, 5}, 1, 7},       // by warps
    {{9, 300}, 1, 100},   {{5, 512}, 1, 512},  {{3, 2000}, 1, 700},   {{3, 2048}, 1, 2048},     // sorted by blocks
    {{2, 5000}, 1, 1},    {{2, 40000}, 1, 50}, {{1, 128256}, 1, 64},  {{2, 5000, 3}, 1, 2048},  // selected by blocks
    {{3, 5000}, 1, 3000}, {{1, 300000}, 1, 9}, {{2, 70000}, 1, 2049}, {{4000, 2, 3}, 0, 4000},  // sorted by the device
};
TEST(SortingOnDevice, TopKOfAllSizes) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const TopKShape& s : kTopK) {
    for (DType type : kSortable) {
      const bool negative = type != DType::uint8 && type != DType::uint16 && type != DType::uint32 && type != DType::uint64;
      const RuntimeValue x = whole(type, s.dims, negative ? -100 : 0, 100);  // many ties
      for (int64_t largest : {0, 1}) {
        expect_same_on_device({"TopK", {x, int_list({s.k})}, {attribute("axis", s.axis), attribute("largest", largest)}, 2}, kEqual,
                              std::to_string(s.k));
      }
    }
    for (DType type : {DType::float32, DType::float64}) {
      RuntimeValue x = numbers(type, s.dims, -3, 3);
      expect_same_on_device({"TopK", {x, int_list({s.k})}, {attribute("axis", s.axis)}, 2}, kEqual, std::to_string(s.k));
    }
  }
  RuntimeValue odd = numbers(DType::float32, {2, 3000});
  for (int64_t i = 0; i < 6000; i += 7) odd.tensor.as<float>()[i] = i % 5 == 0 ? NAN : i % 5 == 1 ? -NAN : i % 5 == 2 ? -0.0f : 0.0f;
  for (int64_t k : {10, 900, 2500}) {
    for (int64_t largest : {0, 1}) expect_same_on_device({"TopK", {odd, int_list({k})}, {attribute("largest", largest)}, 2}, kEqual);
  }
}

TEST(RandomOnDevice, NumbersAreThoseOfTheCpu) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const Attribute seed = attribute("seed", 3.0f);
  for (DType type : kFloatTypes) {
    const Attribute as = attribute("dtype", static_cast<int64_t>(type)), shape = attribute("shape", std::vector<int64_t>{101, 33});
    expect_same_on_device({"RandomUniform", {}, {seed, as, shape, attribute("low", -2.0f), attribute("high", 5.0f)}}, kEqual);
    expect_same_on_device({"RandomNormal", {}, {seed, as, shape, attribute("mean", 1.0f)}}, tolerance_for(type));
    const RuntimeValue x = numbers(type, {1000}, 0, 1);
    expect_same_on_device({"RandomUniformLike", {x}, {seed}}, kEqual);
    expect_same_on_device({"Bernoulli", {x}, {seed}}, kEqual);
    expect_same_on_device({"Bernoulli", {x}, {attribute("dtype", int64_t{9})}}, kEqual);
    expect_same_on_device({"Multinomial", {numbers(type, {5, 700}, -2, 2)}, {seed, attribute("sample_size", int64_t{50})}}, kEqual);
    for (const char* window : {"HannWindow", "HammingWindow", "BlackmanWindow"}) {
      expect_same_on_device({window, {tensor<int64_t>({}, {37})}, {attribute("output_datatype", static_cast<int64_t>(type))}},
                            tolerance_for(type));
    }
  }
  expect_same_on_device({"Range", {tensor<float>({}, {0.1f}), tensor<float>({}, {50}), tensor<float>({}, {0.3f})}}, kEqual);
  expect_same_on_device({"Range", {tensor<int64_t>({}, {5}), tensor<int64_t>({}, {-900}), tensor<int64_t>({}, {-7})}}, kEqual);
}

TEST(RotaryOnDevice, AllForms) {
  if (!any_device()) GTEST_SKIP() << "no device";
  struct Form {
    int64_t D, rotated;
  };
  for (const Form& f : {Form{64, 0}, Form{128, 64}, Form{16, 16}, Form{10, 6}, Form{20, 4}}) {
    const int64_t half = (f.rotated ? f.rotated : f.D) / 2;
    for (DType type : kFloatTypes) {
      const RuntimeValue four = numbers(type, {2, 3, 7, f.D}), three = numbers(type, {2, 7, 3 * f.D});
      const RuntimeValue cosine = numbers(type, {20, half}, -1, 1, 2), sine = numbers(type, {20, half}, -1, 1, 3);
      const RuntimeValue own_cosine = numbers(type, {2, 7, half}, -1, 1, 2), own_sine = numbers(type, {2, 7, half}, -1, 1, 3);
      const RuntimeValue positions = whole(DType::int64, {2, 7}, 0, 19);
      for (int64_t interleaved : {0, 1}) {
        const std::vector<Attribute> how = {attribute("interleaved", interleaved), attribute("rotary_embedding_dim", f.rotated),
                                            attribute("num_heads", int64_t{3})};
        for (const RuntimeValue& x : {four, three}) {
          expect_same_on_device({"RotaryEmbedding", {x, cosine, sine, positions}, how}, tolerance_for(type));
          expect_same_on_device({"RotaryEmbedding", {x, own_cosine, own_sine}, how}, tolerance_for(type));
        }
      }
    }
  }
}

TEST(ByteProductsOnDevice, MatricesAndConvolutions) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const RuntimeValue absent;
  for (DType ta : {DType::int8, DType::uint8}) {
    for (DType tb : {DType::int8, DType::uint8}) {
      const int64_t la = ta == DType::int8 ? -128 : 0, lb = tb == DType::int8 ? -128 : 0;
      const auto a = [&](const Dims& d, uint32_t seed = 1) { return whole(ta, d, la, la + 255, seed); };
      const auto b = [&](const Dims& d, uint32_t seed = 2) { return whole(tb, d, lb, lb + 255, seed); };
      for (const Dims& s : {Dims{1, 1, 1}, Dims{5, 7, 3}, Dims{64, 32, 64}, Dims{130, 100, 70}}) {
        expect_same_on_device({"MatMulInteger", {a({s[0], s[1]}), b({s[1], s[2]})}}, kEqual);
        expect_same_on_device({"MatMulInteger", {a({s[0], s[1]}), b({s[1], s[2]}), a({s[0]}, 3), b({s[2]}, 4)}}, kEqual);
        expect_same_on_device({"MatMulInteger", {a({2, 1, s[0], s[1]}), b({3, s[1], s[2]}), a({}, 3), b({}, 4)}}, kEqual);
        const RuntimeValue one = tensor<float>({}, {0.02f}), columns = numbers(DType::float32, {s[2]}, 0.01, 0.03);
        expect_same_on_device({"QLinearMatMul", {a({s[0], s[1]}), one, a({}, 3), b({s[1], s[2]}), columns, b({s[2]}, 4), one, a({}, 5)}},
                              kEqual);
      }
      const RuntimeValue x = a({2, 6, 9, 11}), w = b({4, 3, 3, 2});
      const std::vector<Attribute> how = {attribute("group", int64_t{2}), attribute("pads", std::vector<int64_t>{1, 0, 2, 1}),
                                          attribute("strides", std::vector<int64_t>{2, 1}),
                                          attribute("dilations", std::vector<int64_t>{1, 2})};
      expect_same_on_device({"ConvInteger", {x, w}, how}, kEqual);
      expect_same_on_device({"ConvInteger", {x, w, a({}, 3), b({4}, 4)}, how}, kEqual);
      const RuntimeValue scale = tensor<float>({}, {0.02f}), scales = numbers(DType::float32, {4}, 0.01, 0.03);
      const RuntimeValue bias = whole(DType::int32, {4}, -5000, 5000);
      expect_same_on_device({"QLinearConv", {x, scale, a({}, 3), w, scales, b({4}, 4), scale, a({}, 5), bias}, how}, kEqual);
      expect_same_on_device({"QLinearConv", {x, scale, a({}, 3), w, scale, b({}, 4), scale, a({}, 5)}, how}, kEqual);
    }
  }
  expect_same_on_device({"MatMulInteger", {whole(DType::uint8, {9}, 0, 255), whole(DType::uint8, {9, 4}, 0, 255)}}, kEqual);
}

TEST(UnpoolingOnDevice, LastOfEqualPlacesStays) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const std::vector<Attribute> how = {attribute("kernel_shape", std::vector<int64_t>{2, 2}),
                                      attribute("strides", std::vector<int64_t>{2, 2})};
  for (DType type : {DType::float32, DType::float16}) {
    const RuntimeValue x = numbers(type, {2, 3, 4, 5}), places = whole(DType::int64, {2, 3, 4, 5}, 0, 2 * 3 * 8 * 10 - 1);
    expect_same_on_device({"MaxUnpool", {x, places}, how}, kEqual);
    expect_same_on_device({"MaxUnpool", {x, places, int_list({2, 3, 9, 12})}, how}, kEqual);
  }
}

}  // namespace
}  // namespace fretsaw::testing
