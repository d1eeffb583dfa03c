// Gradients of GridSample, RoiAlign and DeformConv on the device: they must have kernels there, whose results are the CPU's.
#include "graph/communication_schemas.h"
#include "tests/kernels/device_case.h"

namespace fretsaw::testing {
namespace {

using Attributes = std::vector<Attribute>;
using Ints = std::vector<int64_t>;

DeviceCase gradient(const std::string& op, std::vector<RuntimeValue> inputs, Attributes attributes, size_t outputs) {
  DeviceCase c{op, std::move(inputs), std::move(attributes), outputs};
  c.domain = kCommunicationDomain;
  return c;
}

Attribute text(const std::string& name, const std::string& value) {
  return {name, value};
}

// Sums of `terms` numbers up to `size` that were added up in at least float32.
Tolerance sums_of(DType type, int64_t terms, double size = 1) {
  const double growth = std::sqrt(static_cast<double>(terms)) * size;
  return {2 * tolerance_for(type).relative, (type == DType::float64 ? 1e-13 : 1e-6) * growth};
}

// --- GridSample ---

struct Sampled {
  Dims x, grid;
  double reach = 1.4;  // of the points; those beyond 1 lie outside
};

// `terms`: how many points an element may be near.
void expect_sample_gradients(const Sampled& s, const Attributes& attributes, DType type, int64_t terms) {
  Dims y = {s.x[0], s.x[1]};
  y.insert(y.end(), s.grid.begin() + 1, s.grid.end() - 1);
  const std::vector<RuntimeValue> inputs = {numbers(type, y, -1, 1, 1), numbers(type, s.x, -1, 1, 2),
                                            numbers(type, s.grid, -s.reach, s.reach, 3)};
  const int64_t extent = *std::max_element(s.x.begin() + 2, s.x.end());
  const Tolerance tolerance = sums_of(type, std::max(terms, s.x[1]), static_cast<double>(extent));
  expect_same_on_device(gradient("GridSampleGrad", inputs, attributes, 2), tolerance, to_string(s.grid));
}

TEST(ImageGradientsOnDevice, OfSamplesInEveryMode) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kFloatTypes) {
    for (const char* mode : {"nearest", "linear", "cubic"}) {
      for (const char* outside : {"zeros", "border", "reflection"}) {
        for (int64_t corners : {0, 1}) {
          const Attributes at = {text("mode", mode), text("padding_mode", outside), attribute("align_corners", corners)};
          expect_sample_gradients({{2, 3, 9}, {2, 25, 1}}, at, type, 40);
          expect_sample_gradients({{2, 5, 6, 7}, {2, 8, 14, 2}}, at, type, 60);
          expect_sample_gradients({{2, 2, 3, 4, 5}, {2, 2, 6, 7, 3}}, at, type, 60);
        }
      }
    }
  }
}

TEST(ImageGradientsOnDevice, OfSamplesOfLargerImages) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : {DType::float32, DType::float16}) {
    for (const char* mode : {"linear", "cubic"}) {
      const Attributes zeros = {text("mode", mode)}, border = {text("mode", mode), text("padding_mode", "border")};
      expect_sample_gradients({{3, 37, 41, 29}, {3, 50, 33, 2}, 1.1}, zeros, type, 60);
      // All points of an image are near four elements, or of a border: more than one thread adds up.
      expect_sample_gradients({{2, 6, 8, 8}, {2, 60, 50, 2}, 0.05}, zeros, type, 3000);
      expect_sample_gradients({{1, 9, 5, 7}, {1, 40, 50, 2}, 8}, border, type, 2000);
      expect_sample_gradients({{1, 3, 6, 7, 8}, {1, 9, 10, 11, 3}}, border, type, 200);
    }
  }
}

TEST(ImageGradientsOnDevice, OfSamplesWithoutElements) {
  if (!any_device()) GTEST_SKIP() << "no device";
  expect_sample_gradients({{2, 3, 4, 5}, {2, 0, 3, 2}}, {}, DType::float32, 1);
  expect_sample_gradients({{0, 3, 4, 5}, {0, 2, 3, 2}}, {}, DType::float32, 1);
}

// --- RoiAlign ---

// Regions of images of this extent, over one another, some partly and one wholly outside, one empty, one turned round.
std::vector<double> region_corners(int64_t count, double extent) {
  std::vector<double> corners = {-3 * extent, -3 * extent, -2 * extent, -2 * extent, 1, 1, 1, 1, extent - 1, extent - 2, 1, 2};
  const std::vector<double> spread = spread_values(4 * count, 0, 1, 5);
  for (int64_t i = 0; i < count; ++i) {
    const double x = (1.2 * spread[4 * i] - 0.2) * extent, y = (1.2 * spread[4 * i + 1] - 0.2) * extent;
    corners.insert(corners.end(), {x, y, x + spread[4 * i + 2] * extent, y + spread[4 * i + 3] * extent});
  }
  return corners;
}

void expect_region_gradients(const Dims& x, int64_t regions, const Attributes& attributes, DType type, int64_t terms) {
  const std::vector<double> corners = region_corners(regions, static_cast<double>(std::max(x[2], x[3])));
  const auto count = static_cast<int64_t>(corners.size()) / 4;
  Ints batch;
  for (int64_t i = 0; i < count; ++i) batch.push_back(i * 7 % x[0]);
  Dims bins = {1, 1};
  for (const Attribute& a : attributes) {
    if (a.name == "output_height") bins[0] = std::get<int64_t>(a.value);
    if (a.name == "output_width") bins[1] = std::get<int64_t>(a.value);
  }
  const std::vector<RuntimeValue> inputs = {numbers(type, {count, x[1], bins[0], bins[1]}, -1, 1, 1), numbers(type, x, -2, 2, 2),
                                            tensor_as(type, {count, 4}, corners), int_list(batch)};
  expect_same_on_device(gradient("RoiAlignGrad", inputs, attributes, 1), sums_of(type, terms), to_string(x));
}

TEST(ImageGradientsOnDevice, OfRegionsInEveryMode) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : kFloatTypes) {
    for (const char* mode : {"avg", "max"}) {
      for (const char* coordinates : {"half_pixel", "output_half_pixel"}) {
        for (int64_t points : {0, 1, 3}) {
          const Attributes at = {text("mode", mode),
                                 text("coordinate_transformation_mode", coordinates),
                                 attribute("sampling_ratio", points),
                                 attribute("output_height", int64_t{2}),
                                 attribute("output_width", int64_t{3}),
                                 attribute("spatial_scale", 0.7f)};
          expect_region_gradients({2, 5, 8, 10}, 5, at, type, 20);
          expect_region_gradients({1, 1, 1, 1}, 3, at, type, 20);
        }
      }
    }
  }
}

// More regions than a block looks at together, images of several tiles, channels that are no multiple of what a thread takes.
TEST(ImageGradientsOnDevice, OfManyRegions) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (DType type : {DType::float32, DType::float16}) {
    for (const char* mode : {"avg", "max"}) {
      for (int64_t points : {0, 2}) {
        const Attributes at = {text("mode", mode), attribute("sampling_ratio", points), attribute("output_height", int64_t{7}),
                               attribute("output_width", int64_t{5}), attribute("spatial_scale", 0.8f)};
        expect_region_gradients({3, 19, 45, 70}, 300, at, type, 400);
      }
    }
  }
}

// Of elements that are equal the first takes it all.
TEST(ImageGradientsOnDevice, OfRegionsOfEqualElements) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const Attributes at = {text("mode", "max"), attribute("sampling_ratio", int64_t{2}), attribute("output_height", int64_t{2}),
                         attribute("output_width", int64_t{2})};
  for (DType type : kFloatTypes) {
    const RuntimeValue dy = numbers(type, {2, 3, 2, 2}), x = numbers(type, {1, 3, 6, 6}, 1, 1),
                       regions = tensor_as(type, {2, 4}, {0, 0, 4, 4, 1, 1, 5, 3});
    expect_same_on_device(gradient("RoiAlignGrad", {dy, x, regions, int_list({0, 0})}, at, 1), tolerance_for(type));
  }
}

TEST(ImageGradientsOnDevice, OfNoRegions) {
  if (!any_device()) GTEST_SKIP() << "no device";
  for (const char* mode : {"avg", "max"})
    expect_same_on_device(gradient("RoiAlignGrad",
                                   {numbers(DType::float32, {0, 3, 1, 1}), numbers(DType::float32, {2, 3, 4, 5}),
                                    numbers(DType::float32, {0, 4}), int_list({})},
                                   {text("mode", mode)}, 1),
                          tolerance_for(DType::float32), mode);
}

// --- DeformConv ---

struct Deformed {
  Dims x, w, y;
  int64_t group = 1, offset_group = 1;
  Dims strides = {1, 1}, dilations = {1, 1}, pads = {0, 0, 0, 0};
};

void expect_deformed_gradients(const Deformed& d, DType type, bool has_mask) {
  const int64_t taps = d.offset_group * d.w[2] * d.w[3];
  std::vector<RuntimeValue> inputs = {numbers(type, d.y, -1, 1, 1), numbers(type, d.x, -1, 1, 2), numbers(type, d.w, -1, 1, 3),
                                      numbers(type, {d.x[0], 2 * taps, d.y[2], d.y[3]}, -2.5, 2.5, 4)};
  if (has_mask) inputs.push_back(numbers(type, {d.x[0], taps, d.y[2], d.y[3]}, 0.1, 1, 5));
  const Attributes at = {attribute("group", d.group),     attribute("offset_group", d.offset_group),
                         attribute("strides", d.strides), attribute("dilations", d.dilations),
                         attribute("pads", d.pads),       attribute("kernel_shape", Dims{d.w[2], d.w[3]})};
  // Each number of the samples is such a sum of products, and the results are sums of many of them.
  const int64_t terms = std::max({d.y[0] * d.y[2] * d.y[3], d.x[1] / d.offset_group, 4 * taps});
  const double size = std::sqrt(static_cast<double>(d.w[0] / d.group));
  Tolerance tolerance = sums_of(type, terms, size);
  // Halves are sampled in halves, for the product that gives dW.
  if (bits_of(type) == 16) tolerance.absolute += tolerance_for(type).relative * std::sqrt(static_cast<double>(terms)) / 8;
  expect_same_on_device(gradient("DeformConvGrad", inputs, at, has_mask ? 4 : 3), tolerance, to_string(d.x));
}

TEST(ImageGradientsOnDevice, OfDeformableConvolutions) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const std::vector<Deformed> cases = {
      {{2, 3, 5, 4}, {2, 3, 2, 2}, {2, 2, 4, 3}},
      {{2, 4, 7, 6}, {6, 2, 3, 3}, {2, 6, 7, 6}, 2, 2, {1, 1}, {1, 1}, {1, 1, 1, 1}},
      {{3, 4, 9, 7}, {4, 1, 3, 2}, {3, 4, 4, 6}, 4, 2, {2, 1}, {1, 2}, {0, 1, 0, 0}},
      {{1, 6, 5, 5}, {5, 6, 1, 1}, {1, 5, 5, 5}, 1, 6},
  };
  for (const Deformed& d : cases)
    for (DType type : kFloatTypes)
      for (bool has_mask : {false, true}) expect_deformed_gradients(d, type, has_mask);
}

TEST(ImageGradientsOnDevice, OfLargerDeformableConvolutions) {
  if (!any_device()) GTEST_SKIP() << "no device";
  const Deformed d{{3, 48, 20, 23}, {32, 24, 3, 3}, {3, 32, 20, 23}, 2, 4, {1, 1}, {1, 1}, {1, 1, 1, 1}};
  for (DType type : {DType::float32, DType::float16}) expect_deformed_gradients(d, type, true);
}

TEST(ImageGradientsOnDevice, OfDeformableConvolutionsWithoutElements) {
  if (!any_device()) GTEST_SKIP() << "no device";
  expect_deformed_gradients({{0, 3, 5, 4}, {2, 3, 2, 2}, {0, 2, 4, 3}}, DType::float32, true);
}

}  // namespace
}  // namespace fretsaw::testing
