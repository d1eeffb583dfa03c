// Images on the device: resizing by every rule, sampling, regions; and quantisation.
#include "tests/kernels/device_case.h"

namespace fretsaw::testing {
namespace {

using Ints = std::vector<int64_t>;

const Tolerance kEqual{0, 0};
constexpr Layout kBothLayouts[] = {Layout::plain, Layout::nhwc};

Attribute text(const char* name, const char* value) {
  return attribute(name, std::string(value));
}
Attribute number_of(const char* name, int64_t value) {
  return attribute(name, value);
}
RuntimeValue floats(const std::vector<float>& values) {
  return tensor<float>({static_cast<int64_t>(values.size())}, values);
}

constexpr const char* kCoordinates[] = {"half_pixel",    "half_pixel_symmetric", "pytorch_half_pixel",
                                        "align_corners", "asymmetric",           "tf_crop_and_resize"};

// Resizes x by scales, and to sizes.
void expect_resized(const RuntimeValue& x, const std::vector<float>& scales, const Ints& sizes, const std::vector<Attribute>& attributes,
                    Tolerance tolerance) {
  const RuntimeValue absent, roi = floats({0, 0, 0.2f, -0.3f, 1, 1, 0.9f, 1.2f});
  expect_same_on_device({"Resize", {x, roi, floats(scales)}, attributes, 1, {1, 2}}, tolerance, "by scales");
  expect_same_on_device({"Resize", {x, roi, absent, int_list(sizes)}, attributes, 1, {1, 3}}, tolerance, "to sizes");
}

TEST(ImagesOnDevice, ResizesToTheNearest) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : {DType::uint8, DType::float16, DType::float32, DType::int64}) {
    for (Layout layout : kBothLayouts) {
      for (int64_t channels : {3, 16}) {
        const RuntimeValue x = reordered(numbers(type, {2, channels, 7, 9}, 0, 100), layout);
        for (const char* coordinates : kCoordinates) {
          for (const char* rule : {"round_prefer_floor", "round_prefer_ceil", "floor", "ceil"}) {
            const std::vector<Attribute> attributes = {text("coordinate_transformation_mode", coordinates), text("nearest_mode", rule),
                                                       attribute("extrapolation_value", 3.0f)};
            expect_resized(x, {1, 1, 2, 1.7f}, {2, channels, 5, 16}, attributes, kEqual);
          }
        }
      }
    }
  }
}

TEST(ImagesOnDevice, ResizesSmoothly) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kFloatTypes) {
    for (Layout layout : kBothLayouts) {
      for (int64_t channels : {3, 16}) {
        const RuntimeValue x = reordered(numbers(type, {2, channels, 7, 12}), layout);
        for (const char* mode : {"linear", "cubic"}) {
          for (const char* coordinates : kCoordinates) {
            const std::vector<Attribute> attributes = {text("coordinate_transformation_mode", coordinates), text("mode", mode)};
            expect_resized(x, {1, 1, 2, 0.6f}, {2, channels, 5, 25}, attributes, tolerance_for(type));
          }
          for (int64_t outside : {0, 1}) {
            const std::vector<Attribute> attributes = {text("mode", mode), number_of("antialias", 1),
                                                       number_of("exclude_outside", outside)};
            expect_resized(x, {1, 1, 0.4f, 0.5f}, {2, channels, 3, 24}, attributes, tolerance_for(type));
          }
        }
      }
    }
  }
  const RuntimeValue absent, line = numbers(DType::float32, {9}), block = numbers(DType::float32, {1, 2, 4, 5, 6});
  const RuntimeValue image = numbers(DType::float32, {1, 2, 4, 5});
  expect_same_on_device({"Resize", {line, absent, floats({2.5f})}, {text("mode", "linear")}, 1, {2}}, {1e-5, 1e-5});
  expect_same_on_device({"Resize", {block, absent, floats({1, 1, 2, 2, 2})}, {text("mode", "cubic")}, 1, {2}}, {1e-5, 1e-5});
  expect_same_on_device({"Resize", {image, absent, floats({2, 2, 2, 2})}, {text("mode", "linear")}, 1, {2}}, {1e-5, 1e-5});
  const std::vector<Attribute> larger = {text("mode", "linear"), attribute("axes", Ints{2, 3}),
                                         text("keep_aspect_ratio_policy", "not_smaller")};
  expect_same_on_device({"Resize", {image, absent, absent, int_list({9, 7})}, larger, 1, {3}, true}, {1e-5, 1e-5});
}

TEST(ImagesOnDevice, Samples) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kFloatTypes) {
    const Tolerance one = tolerance_for(type), sums{4 * one.relative, 4 * one.absolute};
    for (const char* mode : {"nearest", "linear", "cubic"}) {
      for (const char* outside : {"zeros", "border", "reflection"}) {
        for (int64_t corners : {0, 1}) {
          const std::vector<Attribute> attributes = {text("mode", mode), text("padding_mode", outside),
                                                     number_of("align_corners", corners)};
          expect_same_on_device({"GridSample", {numbers(type, {2, 3, 9}), numbers(type, {2, 5, 1}, -1.5, 1.5)}, attributes}, sums, mode);
          expect_same_on_device({"GridSample", {numbers(type, {2, 5, 6, 7}), numbers(type, {2, 8, 4, 2}, -1.5, 1.5)}, attributes}, sums,
                                mode);
          expect_same_on_device({"GridSample", {numbers(type, {1, 2, 3, 4, 5}), numbers(type, {1, 2, 6, 3, 3}, -1.5, 1.5)}, attributes},
                                sums, mode);
        }
      }
    }
    for (int64_t corners : {0, 1}) {
      for (const Ints& size : {Ints{2, 3, 4, 5}, Ints{2, 1, 3, 4, 5}}) {
        const auto rank = static_cast<int64_t>(size.size()) - 2;
        const RuntimeValue theta = numbers(type, {2, rank, rank + 1});
        expect_same_on_device({"AffineGrid", {theta, int_list(size)}, {number_of("align_corners", corners)}, 1, {1}}, tolerance_for(type));
      }
    }
  }
}

TEST(ImagesOnDevice, Regions) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const std::vector<double> corners = {0, 0, 5, 4, 1.5, 2.25, 8, 7.5, -1, -2, 3, 3};
  const std::vector<double> numbered = {0, 0, 0, 5, 4, 1, 1.5, 2.25, 8, 7.5, 0, 3, 3, 3, 2};
  for (DType type : kFloatTypes) {
    const RuntimeValue x = numbers(type, {2, 5, 8, 10}, -2, 2), batch = int_list({0, 1, 1});
    for (const char* mode : {"avg", "max"}) {
      for (const char* coordinates : {"half_pixel", "output_half_pixel"}) {
        for (int64_t points : {0, 2}) {
          const std::vector<Attribute> attributes = {text("mode", mode),
                                                     text("coordinate_transformation_mode", coordinates),
                                                     number_of("output_height", 3),
                                                     number_of("output_width", 2),
                                                     attribute("spatial_scale", 0.7f),
                                                     number_of("sampling_ratio", points)};
          expect_same_on_device({"RoiAlign", {x, tensor_as(type, {3, 4}, corners), batch}, attributes}, tolerance_for(type), mode);
        }
      }
    }
    const std::vector<Attribute> pooled = {attribute("pooled_shape", Ints{2, 3}), attribute("spatial_scale", 0.7f)};
    expect_same_on_device({"MaxRoiPool", {x, tensor_as(type, {3, 5}, numbered)}, pooled}, kEqual);
    const std::vector<Attribute> steps = {attribute("strides", Ints{2, 1}), attribute("dilations", Ints{1, 2}),
                                          attribute("pads", Ints{1, 0, 1, 0})};
    expect_same_on_device({"Col2Im", {numbers(type, {2, 18, 12}), int_list({5, 6}), int_list({3, 2})}, steps, 1, {1, 2}},
                          tolerance_for(type));
  }
}

TEST(QuantizationOnDevice, EveryGranularityAndType) {
  if (!any_device()) GTEST_SKIP() << "no device";
  struct Granularity {
    Dims scales;
    int64_t axis, block;
  };
  const Dims dims = {2, 7, 24};
  const Granularity granularities[] = {{{}, 1, 0}, {{7}, 1, 0}, {{24}, -1, 0}, {{2, 4, 24}, 1, 2}, {{2, 7, 3}, 2, 8}, {{2, 7, 5}, 2, 5}};
  for (const Granularity& g : granularities) {
    const std::vector<Attribute> attributes = {number_of("axis", g.axis), number_of("block_size", g.block)};
    for (DType type : {DType::float32, DType::float16, DType::bfloat16}) {
      for (DType to :
           {DType::int8, DType::uint8, DType::int16, DType::uint16, DType::int4, DType::uint4, DType::float8e4m3fn, DType::float8e5m2}) {
        const RuntimeValue x = numbers(type, dims, -9, 9), scale = numbers(type, g.scales, 0.1, 0.5, 7);
        const RuntimeValue zero =
            tensor_as(to, g.scales, std::vector<double>(static_cast<size_t>(count_of(g.scales)), is_float(to) ? 0 : 3));
        expect_same_on_device({"QuantizeLinear", {x, scale, zero}, attributes}, kEqual, std::string(name_of(to)));
        const RuntimeValue q = numbers(to, dims, 0, 7);
        expect_same_on_device({"DequantizeLinear", {q, scale, zero}, attributes}, kEqual, std::string(name_of(to)));
      }
    }
  }
  for (const Dims& shape : {Dims{5}, Dims{3, 1001}, Dims{100003}, Dims{0}}) {
    expect_same_on_device({"DynamicQuantizeLinear", {numbers(DType::float32, shape, -3, 5)}, {}, 3}, kEqual);
  }
}

}  // namespace
}  // namespace fretsaw::testing
