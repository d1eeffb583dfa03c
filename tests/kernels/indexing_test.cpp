// Indexing, sorting, generators, text, images and signals: values, ties, negative indexes, and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <limits>
#include <numbers>

#include "graph/errors.h"
#include "kernels/cpu/fourier.h"
#include "kernels/cpu/random.h"
#include "kernels/cpu/regex.h"
#include "tests/kernels/operator_case.h"

namespace fretsaw::testing {
namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int64_t>;
using Strings = std::vector<std::string>;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Attribute attr(const char* name, AttributeValue value) {
  return {.name = name, .value = std::move(value)};
}
RuntimeValue floats(const Dims& dims, const Floats& values) {
  return tensor_of(dims, values);
}
RuntimeValue longs(const Dims& dims, const Ints& values) {
  return tensor_of(dims, values);
}
RuntimeValue bools(const std::vector<bool>& values) {
  return tensor_of({static_cast<int64_t>(values.size())}, values);
}
RuntimeValue words(const Strings& values) {
  return tensor_of({static_cast<int64_t>(values.size())}, values);
}

const OperatorCase kCases[] = {
    {"gather_negative", "Gather", {}, {counting({3, 2}), ints({-1, 0})}, {floats({2, 2}, {4, 5, 0, 1})}},
    {"gather_scalar_index", "Gather", {attr("axis", int64_t{1})}, {counting({2, 3}), number(int64_t{-2})}, {floats({2}, {1, 4})}},
    {"gather_nothing", "Gather", {}, {counting({3, 2}), ints({})}, {floats({0, 2}, {})}},
    {"gather_int32", "Gather", {}, {counting({3}), tensor_of({1}, std::vector<int32_t>{-3})}, {floats({1}, {0})}},
    {"gather_elements", "GatherElements", {attr("axis", int64_t{0})}, {counting({3, 2}), longs({1, 2}, {-1, 1})}, {floats({1, 2}, {4, 3})}},
    {"gather_nd_batch",
     "GatherND",
     {attr("batch_dims", int64_t{1})},
     {counting({2, 2, 2}), longs({2, 1}, {1, -2})},
     {floats({2, 2}, {2, 3, 4, 5})}},
    {"compress_flat", "Compress", {}, {counting({2, 2}), bools({false, true, true})}, {floats({2}, {1, 2})}},
    {"non_zero", "NonZero", {}, {floats({2, 2}, {1, 0, -0.0f, kNan})}, {longs({2, 2}, {0, 1, 0, 1})}},
    {"one_hot_negative", "OneHot", {}, {ints({-1, 5, 0}), number(int64_t{2}), ints({3, 4})}, {longs({3, 2}, {3, 4, 3, 3, 4, 3})}},
    {"scatter_elements_add",
     "ScatterElements",
     {attr("reduction", std::string("add"))},
     {counting({3}), ints({-1, 2, 0}), floats({3}, {10, 20, 30})},
     {floats({3}, {30, 1, 32})}},
    {"scatter_elements_last_wins", "ScatterElements", {}, {counting({2}), ints({0, 0}), floats({2}, {7, 8})}, {floats({2}, {8, 1})}},
    {"scatter_nd_max",
     "ScatterND",
     {attr("reduction", std::string("max"))},
     {counting({2, 2}), longs({2, 1}, {-1, -1}), floats({2, 2}, {9, 0, 0, 5})},
     {floats({2, 2}, {0, 1, 9, 5})}},
    {"scatter_nd_multiplies_bytes",
     "ScatterND",
     {attr("reduction", std::string("mul"))},
     {tensor_of({2}, std::vector<uint8_t>{200, 2}), longs({2, 1}, {0, 0}), tensor_of({2}, std::vector<uint8_t>{2, 3})},
     {tensor_of({2}, std::vector<uint8_t>{176, 2})}},
    {"tensor_scatter_circular",
     "TensorScatter",
     {attr("mode", std::string("circular")), attr("axis", int64_t{1})},
     {counting({1, 3}), floats({1, 2}, {7, 8}), ints({2})},
     {floats({1, 3}, {8, 1, 7})}},
    {"top_k_ties", "TopK", {}, {floats({8}, {1, 5, 5, 2, 5, 5, 0, 5}), ints({5})}, {floats({5}, {5, 5, 5, 5, 5}), ints({1, 2, 4, 5, 7})}},
    {"top_k_smallest_of_columns",
     "TopK",
     {attr("axis", int64_t{0}), attr("largest", int64_t{0})},
     {floats({3, 2}, {3, 1, 1, 2, 2, 0}), ints({2})},
     {floats({2, 2}, {1, 0, 2, 1}), longs({2, 2}, {1, 2, 2, 0})}},
    {"top_k_nan_is_greatest", "TopK", {}, {floats({3}, {1, kNan, 2}), ints({2})}, {floats({2}, {kNan, 2}), ints({1, 2})}},
    {"top_k_none", "TopK", {}, {counting({2}), ints({0})}, {floats({0}, {}), ints({})}},
    {"unique_unsorted",
     "Unique",
     {attr("sorted", int64_t{0})},
     {ints({2, 1, 1, 3, 4, 3})},
     {ints({2, 1, 3, 4}), ints({0, 1, 3, 4}), ints({0, 1, 1, 2, 3, 2}), ints({1, 2, 2, 1})}},
    {"unique_rows", "Unique", {attr("axis", int64_t{0})}, {longs({3, 2}, {2, 0, 1, 5, 2, 0})}, {longs({2, 2}, {1, 5, 2, 0}), ints({1, 0})}},
    {"unique_nothing", "Unique", {}, {ints({})}, {ints({}), ints({})}},
    {"non_max_suppression",
     "NonMaxSuppression",
     {},
     {floats({1, 3, 4}, {0, 0, 1, 1, 0, 0.1f, 1, 1.1f, 0, 2, 1, 3}), floats({1, 1, 3}, {0.5f, 0.9f, 0.2f}), ints({3}), number(0.5f)},
     {longs({2, 3}, {0, 0, 1, 0, 0, 2})}},
    {"constant_of_shape", "ConstantOfShape", {attr("value", make_int64s({7}))}, {ints({2, 1})}, {longs({2, 1}, {7, 7})}},
    {"range_down", "Range", {}, {number(int64_t{5}), number(int64_t{0}), number(int64_t{-2})}, {ints({5, 3, 1})}},
    {"range_empty", "Range", {}, {number(1.0f), number(0.0f), number(0.5f)}, {floats({0}, {})}},
    {"range_extremes", "Range", {}, {number(INT64_MIN), number(INT64_MAX), number(INT64_MAX)}, {ints({INT64_MIN, -1, INT64_MAX - 1})}},
    {"eye_like", "EyeLike", {attr("k", int64_t{-1})}, {counting({2, 3})}, {floats({2, 3}, {0, 0, 0, 1, 0, 0})}},
    {"string_split",
     "StringSplit",
     {attr("maxsplit", int64_t{1})},
     {words({" a b  c ", ""})},
     {tensor_of({2, 2}, Strings{"a", "b  c", "", ""}), ints({2, 0})}},
    {"string_concat", "StringConcat", {}, {words({"a", "b"}), tensor_of({}, Strings{"-"})}, {words({"a-", "b-"})}},
    {"string_normalizer",
     "StringNormalizer",
     {attr("case_change_action", std::string("UPPER")), attr("stopwords", Strings{"THE"})},
     {words({"the", "Größe"})},
     {words({"GRÖßE"})}},
    {"resize_linear",
     "Resize",
     {attr("mode", std::string("linear"))},
     {floats({1, 1, 1, 2}, {0, 4}), nothing(), floats({4}, {1, 1, 1, 2})},
     {floats({1, 1, 1, 4}, {0, 1, 3, 4})}},
    {"resize_both_axes",
     "Resize",
     {attr("mode", std::string("linear")), attr("coordinate_transformation_mode", std::string("align_corners"))},
     {counting({1, 1, 2, 2}), nothing(), nothing(), ints({1, 1, 3, 3})},
     {floats({1, 1, 3, 3}, {0, 0.5f, 1, 1, 1.5f, 2, 2, 2.5f, 3})}},
    {"resize_nearest_named_axes",
     "Resize",
     {attr("axes", Ints{0}), attr("nearest_mode", std::string("floor")), attr("coordinate_transformation_mode", std::string("asymmetric"))},
     {counting({2, 2}), nothing(), floats({1}, {2})},
     {floats({4, 2}, {0, 1, 0, 1, 2, 3, 2, 3})}},
    {"grid_sample_corner",
     "GridSample",
     {attr("align_corners", int64_t{1})},
     {counting({1, 1, 2, 2}), floats({1, 1, 3, 2}, {-1, -1, 0, 0, 5, 5})},
     {floats({1, 1, 1, 3}, {0, 1.5f, 0})}},
    {"dft_constant", "DFT", {attr("onesided", int64_t{1})}, {floats({1, 3, 1}, {1, 1, 1})}, {floats({1, 2, 2}, {3, 0, 0, 0})}},
    {"dft_real_inverse",
     "DFT",
     {attr("onesided", int64_t{1}), attr("inverse", int64_t{1})},
     {floats({1, 3, 2}, {10, 0, -2, 2, -2, 0})},
     {floats({1, 4, 1}, {1, 2, 3, 4})}},
};

class IndexingCase : public ::testing::TestWithParam<OperatorCase> {};
TEST_P(IndexingCase, GivesTheExpectedOutputs) {
  EXPECT_EQ(failure_of(GetParam()), "");
}
INSTANTIATE_TEST_SUITE_P(Indexing, IndexingCase, ::testing::ValuesIn(kCases), [](const auto& info) { return info.param.name; });

struct Refusal {
  OperatorCase c;
  std::string says;
};
const Refusal kRefusals[] = {
    {{"gather_range", "Gather", {}, {counting({3}), ints({3})}, {}}, "index 3 is outside a dimension of 3"},
    {{"gather_range_negative", "Gather", {}, {counting({3}), ints({-4})}, {}}, "index -4 is outside"},
    {{"gather_from_nothing", "Gather", {}, {floats({0}, {}), ints({0})}, {}}, "index 0 is outside a dimension of 0"},
    {{"gather_elements_range", "GatherElements", {}, {counting({3}), ints({9})}, {}}, "index 9"},
    {{"gather_nd_range", "GatherND", {}, {counting({3}), longs({1, 1}, {3})}, {}}, "index 3"},
    {{"scatter_range", "ScatterElements", {}, {counting({3}), ints({-9}), counting({1})}, {}}, "index -9"},
    {{"scatter_nd_updates", "ScatterND", {}, {counting({3}), longs({1, 1}, {0}), counting({2})}, {}}, "[1] is expected"},
    {{"top_k_range", "TopK", {}, {counting({3}), ints({4})}, {}}, "K is 4"},
    {{"range_no_delta", "Range", {}, {number(int64_t{0}), number(int64_t{1}), number(int64_t{0})}, {}}, "delta"},
    {{"range_huge", "Range", {}, {number(0.0f), number(1e30f), number(1e-30f)}, {}}, "too long"},
    {{"constant_of_shape_huge", "ConstantOfShape", {}, {ints({INT64_MAX, INT64_MAX})}, {}}, "too large"},
    {{"one_hot_depth", "OneHot", {}, {ints({0}), number(int64_t{-1}), ints({0, 1})}, {}}, "depth"},
    {{"regex", "RegexFullMatch", {attr("pattern", std::string("(a"))}, {words({"a"})}, {}}, "parenthesis"},
    {{"resize_scale", "Resize", {}, {counting({2}), nothing(), floats({1}, {kNan})}, {}}, "scale"},
    {{"tree_node", "TreeEnsemble", {attr("nodes_featureids", Ints{0})}, {counting({1, 1})}, {}, "ai.onnx.ml"}, "unequal lengths"},
};
class IndexingRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(IndexingRefusal, NamesWhatIsWrong) {
  EXPECT_NE(error_of(GetParam().c).find(GetParam().says), std::string::npos) << error_of(GetParam().c);
}
INSTANTIATE_TEST_SUITE_P(Indexing, IndexingRefusal, ::testing::ValuesIn(kRefusals), [](const auto& info) { return info.param.c.name; });

struct Match {
  const char *pattern, *text;
  bool matches;
};
TEST(Regex, MatchesWholeTexts) {
  const Match kMatches[] = {{"a*", "", true},
                            {"a*", "aab", false},
                            {"(a|bc)+", "abca", true},
                            {"(a|bc|d)+", "dbcb", false},
                            {"[^a-c]{2,3}", "xyz", true},
                            {"[^a-c]{2,3}", "x", false},
                            {"x{2}", "xxx", false},
                            {"(ab?){0,2}c", "abac", true},
                            {"\\d+\\.\\w", "12.x", true},
                            {"(?i)ABC", "aBc", true},
                            {".", "é", true},
                            {".", "\n", false},
                            {"(?s).", "\n", true},
                            {"^a$", "a", true},
                            {"a\\b.b", "a b", true},
                            {"[[:digit:]]-[]x]", "4-]", true},
                            {"(a*)*(a*)*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", false},  // takes ages when tried one way after another
                            {"(|a)+", "aa", true},
                            {"a|b|", "", true},
                            {"(?P<name>a)\\x41", "aA", true}};
  for (const Match& m : kMatches) EXPECT_EQ(Regex(m.pattern).full_match(m.text), m.matches) << m.pattern << " on " << m.text;
}

TEST(Regex, RefusesWhatIsNoPattern) {
  for (const char* pattern : {"(", ")", "[a", "*", "a{3,2}", "(?=a)", "\\", "[b-a]", "((((a{1000}){1000}){1000}){1000})"}) {
    EXPECT_THROW(Regex{pattern}, Error) << pattern;
  }
}

TEST(Fourier, AgreesWithTheDefinition) {
  for (int64_t n : {1, 2, 3, 5, 8, 12, 31, 64, 97}) {
    std::vector<std::complex<double>> x(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i)
      x[static_cast<size_t>(i)] = {std::sin(static_cast<double>(i * i)), std::cos(static_cast<double>(3 * i))};
    for (bool inverse : {false, true}) {
      std::vector<std::complex<double>> y = x;
      Fourier(n, inverse).transform(y.data());
      for (int64_t k = 0; k < n; ++k) {
        std::complex<double> sum = 0;
        for (int64_t i = 0; i < n; ++i) {
          const double angle = (inverse ? 2 : -2) * std::numbers::pi * static_cast<double>(i * k) / static_cast<double>(n);
          sum += x[static_cast<size_t>(i)] * std::polar(1.0, angle);
        }
        if (inverse) sum /= static_cast<double>(n);
        EXPECT_LT(std::abs(y[static_cast<size_t>(k)] - sum), 1e-10) << n << " " << k;
      }
    }
  }
}

// The known answers that the generator's authors publish.
TEST(Philox, GivesTheKnownAnswers) {
  using Block = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox(0).block(0), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox(~uint64_t{0}).block(~uint64_t{0}, ~uint64_t{0}), (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox(0x299f31d0a4093822).block(0x85a308d3243f6a88, 0x0370734413198a2e),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, DependsOnTheSeedAloneAndHasTheRightMoments) {
  const OperatorCase normal{
      "", "RandomNormal", {attr("shape", Ints{100000}), attr("seed", 3.0f), attr("mean", 2.0f), attr("scale", 0.5f)}, {}, {}};
  const std::vector<RuntimeValue> one = run_operator(normal, 1, 1), three = run_operator(normal, 1, 3);
  const auto a = one[0].tensor.span<float>(), b = three[0].tensor.span<float>();
  EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin()));
  double sum = 0, squares = 0;
  for (float v : a) sum += v, squares += static_cast<double>(v) * v;
  EXPECT_NEAR(sum / 100000, 2, 0.01);
  EXPECT_NEAR(squares / 100000 - 4, 0.25, 0.02);
}

TEST(Dropout, KeepsTheRightShareAndScalesIt) {
  const OperatorCase dropout{"",
                             "Dropout",
                             {attr("seed", int64_t{1})},
                             {floats({10000}, Floats(10000, 1.0f)), number(0.25f), tensor_of({}, std::vector<bool>{true})},
                             {}};
  const std::vector<RuntimeValue> result = run_operator(dropout, 2);
  int kept = 0;
  for (int64_t i = 0; i < 10000; ++i) {
    const bool stays = result[1].tensor.as<bool>()[i];
    kept += stays;
    EXPECT_FLOAT_EQ(result[0].tensor.as<float>()[i], stays ? 1 / 0.75f : 0.0f);
  }
  EXPECT_NEAR(kept, 7500, 200);
}

}  // namespace
}  // namespace fretsaw::testing
