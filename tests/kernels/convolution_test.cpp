// Conv and ConvTranspose against simple loops: dimensions, groups, strides, padding, layouts, threads.
#include "kernels/cpu/window.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

struct ConvolutionCase {
  std::string name;
  Dims x, w;
  int64_t group = 1;
  Dims strides = {}, dilations = {}, pads = {}, output_padding = {};
  bool transposed = false;
};
std::ostream& operator<<(std::ostream& out, const ConvolutionCase& c) {
  return out << c.name;
}

bool step(Dims& index, const Dims& dims) {
  for (size_t i = dims.size(); i-- > 0;) {
    if (++index[i] < dims[i]) return true;
    index[i] = 0;
  }
  return false;
}

// Adds x * w to y for each pair of cells and tap; y as double.
std::vector<double> reference(const ConvolutionCase& c, const Dims& y_dims, const std::vector<double>& x, const std::vector<double>& w,
                              const std::vector<double>& bias) {
  const size_t rank = c.x.size() - 2;
  const auto at = [](const Dims& list, size_t i, int64_t absent) { return list.empty() ? absent : list[i]; };
  const Dims in = spatial_of(c.x), out = spatial_of(y_dims), kernel = spatial_of(c.w);
  const int64_t C = c.x[1], O = y_dims[1], in_cells = count_of(in), out_cells = count_of(out), taps = count_of(kernel),
                group_in = C / c.group, group_out = O / c.group;
  std::vector<double> y(static_cast<size_t>(count_of(y_dims)));
  for (size_t i = 0; i < y.size(); ++i) y[i] = bias[static_cast<size_t>(static_cast<int64_t>(i) / out_cells % O)];
  const Dims &small = c.transposed ? in : out, &large = c.transposed ? out : in;
  Dims cell(rank, 0);
  int64_t small_at = 0;
  do {
    Dims tap(rank, 0);
    int64_t t = 0;
    do {
      int64_t large_at = 0;
      bool inside = true;
      for (size_t i = 0; i < rank; ++i) {
        const int64_t p = cell[i] * at(c.strides, i, 1) - at(c.pads, i, 0) + tap[i] * at(c.dilations, i, 1);
        inside = inside && p >= 0 && p < large[i];
        large_at = large_at * large[i] + p;
      }
      const int64_t in_at = c.transposed ? small_at : large_at, out_at = c.transposed ? large_at : small_at;
      for (int64_t n = 0; inside && n < c.x[0]; ++n) {
        for (int64_t o = 0; o < O; ++o) {
          for (int64_t k = 0; k < group_in; ++k) {
            const int64_t channel = o / group_out * group_in + k;
            const int64_t weight = c.transposed ? (channel * group_out + o % group_out) * taps + t : (o * group_in + k) * taps + t;
            y[static_cast<size_t>((n * O + o) * out_cells + out_at)] +=
                x[static_cast<size_t>((n * C + channel) * in_cells + in_at)] * w[static_cast<size_t>(weight)];
          }
        }
      }
      ++t;
    } while (step(tap, kernel));
    ++small_at;
  } while (step(cell, small));
  return y;
}

class Convolution : public ::testing::TestWithParam<ConvolutionCase> {};

TEST_P(Convolution, EqualsLoops) {
  const ConvolutionCase& c = GetParam();
  const int64_t outputs = c.transposed ? c.w[1] * c.group : c.w[0];
  const auto xs = spread_values(count_of(c.x), -1, 1, 1), ws = spread_values(count_of(c.w), -1, 1, 2),
             bs = spread_values(outputs, -1, 1, 3);
  std::vector<Attribute> attributes = {attribute("group", c.group)};
  if (!c.strides.empty()) attributes.push_back(attribute("strides", c.strides));
  if (!c.dilations.empty()) attributes.push_back(attribute("dilations", c.dilations));
  if (!c.pads.empty()) attributes.push_back(attribute("pads", c.pads));
  if (!c.output_padding.empty()) attributes.push_back(attribute("output_padding", c.output_padding));
  for (DType type : {DType::float32, DType::float64, DType::float16}) {
    const std::vector<RuntimeValue> inputs = {tensor_as(type, c.x, xs), tensor_as(type, c.w, ws), tensor_as(type, {outputs}, bs)};
    const std::vector<double> x = doubles_of(inputs[0]), w = doubles_of(inputs[1]), bias = doubles_of(inputs[2]);
    for (int threads : {1, 2}) {
      for (bool hide : {false, true}) {
        for (Layout layout : {Layout::plain, Layout::nhwc}) {
          if (layout == Layout::nhwc && (c.x.size() != 4 || type != DType::float32)) continue;
          std::vector<RuntimeValue> given = inputs;
          given[0] = reordered(inputs[0], layout);
          const RuntimeValue y =
              run_op(c.transposed ? "ConvTranspose" : "Conv", given, attributes, 1, {.threads = threads, .hide_shapes = hide})[0];
          const std::vector<double> wanted = reference(c, y.tensor.dims, x, w, bias), got = doubles_of(y);
          ASSERT_EQ(got.size(), wanted.size());
          const double tolerance = type == DType::float64 ? 1e-12 : type == DType::float32 ? 2e-5 : 2e-2;
          for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], wanted[i], tolerance * (1 + std::abs(wanted[i]))) << "element " << i;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, Convolution,
    ::testing::Values(ConvolutionCase{"plain_3x3", {2, 8, 9, 7}, {16, 8, 3, 3}, 1, {}, {}, {1, 1, 1, 1}},
                      ConvolutionCase{"three_channels", {1, 3, 17, 15}, {8, 3, 7, 7}, 1, {2, 2}, {}, {3, 3, 3, 3}},
                      ConvolutionCase{"odd_channels", {1, 5, 6, 6}, {7, 5, 1, 1}},
                      ConvolutionCase{"asymmetric", {1, 4, 8, 9}, {6, 4, 3, 2}, 1, {2, 1}, {}, {0, 1, 2, 0}},
                      ConvolutionCase{"dilated", {1, 4, 11, 11}, {4, 4, 3, 3}, 1, {1, 1}, {2, 3}, {2, 2, 2, 2}},
                      ConvolutionCase{"grouped", {2, 8, 6, 6}, {12, 2, 3, 3}, 4, {}, {}, {1, 1, 1, 1}},
                      ConvolutionCase{"grouped_by_eight", {1, 16, 6, 6}, {16, 8, 3, 3}, 2, {}, {}, {1, 1, 1, 1}},
                      ConvolutionCase{"depthwise", {1, 12, 8, 8}, {12, 1, 3, 3}, 12, {2, 2}, {}, {1, 1, 1, 1}},
                      ConvolutionCase{"depthwise_twice", {1, 4, 8, 8}, {8, 1, 3, 3}, 4},
                      ConvolutionCase{"one_dimension", {2, 6, 20}, {5, 6, 4}, 1, {3}, {}, {2, 1}},
                      ConvolutionCase{"three_dimensions", {1, 3, 5, 6, 4}, {4, 3, 2, 3, 2}, 1, {1, 2, 1}, {}, {1, 0, 1, 0, 1, 0}},
                      ConvolutionCase{"one_pixel", {1, 16, 1, 1}, {8, 16, 1, 1}},
                      ConvolutionCase{"transposed", {1, 6, 5, 4}, {6, 4, 3, 3}, 1, {2, 2}, {}, {1, 1, 1, 1}, {1, 1}, true},
                      ConvolutionCase{"transposed_grouped", {1, 6, 4, 4}, {6, 2, 2, 2}, 3, {2, 2}, {}, {}, {}, true},
                      ConvolutionCase{"transposed_dilated", {2, 3, 4, 5}, {3, 2, 3, 3}, 1, {1, 2}, {2, 1}, {1, 0, 0, 1}, {}, true},
                      ConvolutionCase{"transposed_line", {1, 4, 7}, {4, 3, 4}, 1, {3}, {}, {1, 2}, {}, true}),
    [](const auto& info) { return info.param.name; });

TEST(Convolution, LayoutDoesNotChangeTheBits) {
  const RuntimeValue x = tensor_as(DType::float32, {1, 16, 9, 9}, spread_values(16 * 81, -1, 1)),
                     w = tensor_as(DType::float32, {24, 16, 3, 3}, spread_values(24 * 144, -1, 1, 5));
  const std::vector<double> plain = doubles_of(run_op("Conv", {x, w})[0]),
                            last = doubles_of(run_op("Conv", {reordered(x, Layout::nhwc), w})[0]);
  EXPECT_EQ(plain, last);
}

TEST(Convolution, AutoPadKeepsTheExtent) {
  const RuntimeValue x = tensor_as(DType::float32, {1, 1, 5, 5}, spread_values(25, -1, 1)),
                     w = tensor_as(DType::float32, {1, 1, 2, 2}, {1, 0, 0, 0});
  const std::vector<double> values = doubles_of(x);
  // SAME_UPPER pads after: the first tap reads the cell itself. SAME_LOWER pads before: it reads the one up and left.
  EXPECT_EQ(doubles_of(run_op("Conv", {x, w}, {attribute("auto_pad", std::string("SAME_UPPER"))})[0]), values);
  const std::vector<double> lower = doubles_of(run_op("Conv", {x, w}, {attribute("auto_pad", std::string("SAME_LOWER"))})[0]);
  EXPECT_EQ(lower[0], 0);
  EXPECT_EQ(lower[6], values[0]);
}

TEST(Convolution, EmptyBatch) {
  const RuntimeValue x = make_value(DType::float32, {0, 3, 8, 8}), w = make_value(DType::float32, {4, 3, 3, 3});
  EXPECT_EQ(run_op("Conv", {x, w})[0].tensor.dims, (Dims{0, 4, 6, 6}));
}

TEST(Convolution, WrongShapesAreErrors) {
  const auto zeros = [](Dims dims) { return make_value(DType::float32, std::move(dims)); };
  EXPECT_THROW(run_op("Conv", {zeros({1, 3, 8, 8}), zeros({4, 2, 3, 3})}), Error);
  EXPECT_THROW(run_op("Conv", {zeros({1, 3, 2, 2}), zeros({4, 3, 3, 3})}), Error);
  EXPECT_THROW(run_op("Conv", {zeros({1, 3, 8, 8}), zeros({4, 3, 3, 3}), zeros({5})}), Error);
  EXPECT_THROW(run_op("Conv", {zeros({1, 3, 8, 8}), zeros({4, 3, 3, 3})}, {attribute("strides", Dims{0, 1})}), Error);
  EXPECT_THROW(run_op("Conv", {zeros({1, 4, 8, 8}), zeros({4, 1, 3, 3})}, {attribute("group", int64_t{0})}), Error);
  EXPECT_THROW(run_op("Conv", {zeros({3}), zeros({4})}), Error);
}

}  // namespace
}  // namespace fretsaw::testing
