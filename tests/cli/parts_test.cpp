// The parts of the command that need no process: options, tables, elements, comparing, value files.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "graph/errors.h"
#include "tools/compare.h"
#include "tools/elements.h"
#include "tools/options.h"
#include "tools/text.h"
#include "tools/train_progress.h"
#include "tools/value_files.h"

namespace fretsaw {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNaN = std::nan("");

RuntimeValue tensor(DType type, Dims dims, const std::vector<double>& numbers) {
  RuntimeValue value = make_value(type, dims);
  for (size_t i = 0; i < numbers.size(); ++i) set_element(type, value.tensor.data, static_cast<int64_t>(i), numbers[i]);
  return value;
}
RuntimeValue floats(const std::vector<double>& numbers) {
  return tensor(DType::float32, {static_cast<int64_t>(numbers.size())}, numbers);
}

TEST(Options, Sizes) {
  const std::vector<std::pair<const char*, int64_t>> good = {
      {"1024", 1024}, {"8GiB", int64_t{8} << 30}, {"500MB", 500000000}, {"1.5k", 1536}, {"2 gb", 2000000000}};
  for (const auto& [text, bytes] : good) EXPECT_EQ(parse_size_bytes("--memory", text), bytes) << text;
  for (const char* text : {"", "x", "-1", "0", "8XB", "1.2.3", "GiB", "99999999TiB"})
    EXPECT_THROW(parse_size_bytes("--memory", text), Error) << text;
}

TEST(Options, ShapesNamesMayHoldAnything) {
  const auto shapes = parse_shapes({"x=1,2", "a=b=3", "s=", "/l/x:0=0"});
  EXPECT_EQ(shapes.at("x"), (Dims{1, 2}));
  EXPECT_EQ(shapes.at("a=b"), (Dims{3}));
  EXPECT_EQ(shapes.at("s"), (Dims{}));
  EXPECT_EQ(shapes.at("/l/x:0"), (Dims{0}));
  for (const char* text : {"x", "=1", "x=-1", "x=1,", "x=1.5", "x=99999999999999999999"}) EXPECT_THROW(parse_shapes({text}), Error) << text;
}

TEST(Options, Mesh) {
  EXPECT_EQ(parse_mesh("pipeline=3").size(), 3);
  EXPECT_EQ(parse_mesh("data=1,pipeline=2,tensor=3").tensor, 3);
  EXPECT_EQ(parse_mesh("data=3,pipeline=2").data, 3);
  EXPECT_EQ(parse_mesh("").size(), 1);
  for (const char* text :
       {"pipeline", "pipeline=x", "pipeline=0", "rows=2", "tensor=0", "auto", "pipeline=2,pipeline=3", "data=1,data=1"}) {
    try {
      parse_mesh(text);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage) << text;
    }
  }
}

TEST(Options, CutNamesMayHoldCommas) {
  using Cuts = std::vector<std::vector<std::string>>;
  const std::set<std::string> known = {"a", "b", "c,d", "c"};
  EXPECT_EQ(parse_cuts({"a,b"}, known), (Cuts{{"a", "b"}}));
  EXPECT_EQ(parse_cuts({"a,c,d", "b"}, known), (Cuts{{"a", "c,d"}, {"b"}}));
  EXPECT_EQ(parse_cuts({"c,b"}, known), (Cuts{{"c", "b"}}));
  EXPECT_EQ(parse_cuts({"z,a"}, known), (Cuts{{"z", "a"}}));
}

TEST(Options, BatchAndMerge) {
  EXPECT_EQ(parse_batch_axes({"x=1", "mask=none"}), (std::map<std::string, int>{{"x", 1}, {"mask", -1}}));
  EXPECT_EQ(parse_merges({"y=concat:2"}).at("y").axis, 2);
  EXPECT_EQ(parse_merges({"y=mean"}).at("y").merge, "mean");
  for (const char* text : {"y", "y=max", "y=mean:1", "y=concat:x"}) EXPECT_THROW(parse_merges({text}), Error) << text;
}

TEST(Text, TablesAlignAndStayOnTheirLines) {
  Table table({"name", ">size"});
  table.add({"a", "5"});
  table.add({"b\nb", "12"});
  EXPECT_EQ(table.text(), "name  size\na        5\nb\\nb    12\n");
  EXPECT_EQ(one_line("a\nb\x1b[2J"), "a\\nb\\x1b[2J");
}

TEST(Text, Units) {
  EXPECT_EQ(human_bytes(640), "640 B");
  EXPECT_EQ(human_bytes(1536), "1.50 KiB");
  EXPECT_EQ(human_count(4.1e9), "4.10 G");
  EXPECT_EQ(human_time(3250), "3.25 ms");
}

TEST(TrainProgress, ALineSaysAll) {
  RankReport one, other;
  one.peak_bytes = 3 << 20, one.busy_share = 0.5, other.peak_bytes = 5 << 20, other.busy_share = 0.75;
  TrainFigures figures{.done = 20, .steps = 100, .loss = 2.34567, .learning_rate = 3e-4, .per_second = 7411.6, .unit = "tokens"};
  EXPECT_EQ(progress_line(figures, {one, other}), "step 20/100   loss 2.3457   lr 0.0003   7412 tokens/s   5.00 MiB   idle 38%");
  figures.evaluation = 2.5;
  EXPECT_NE(progress_line(figures, {one, other}).find("loss 2.3457   eval 2.5000   lr"), std::string::npos);
  EXPECT_EQ(idle_share({}), 0);
}

TEST(Elements, SmallFloatsMeanWhatTheyShould) {
  struct Case {
    DType type;
    uint32_t bits;
    double value;
  };
  const std::vector<Case> cases = {
      {DType::float16, 0x3C00, 1},
      {DType::float16, 0xC000, -2},
      {DType::float16, 0x7BFF, 65504},
      {DType::float16, 0x0001, std::ldexp(1, -24)},
      {DType::float16, 0x7C00, kInfinity},
      {DType::bfloat16, 0x3F80, 1},
      {DType::bfloat16, 0xFF80, -kInfinity},
      {DType::float8e4m3fn, 0x7E, 448},
      {DType::float8e4m3fn, 0x01, std::ldexp(1, -9)},
      {DType::float8e5m2, 0x7B, 57344},
      {DType::float8e5m2, 0x7C, kInfinity},
      {DType::float8e4m3fnuz, 0x7F, 240},
      {DType::float8e5m2fnuz, 0x7F, 57344},
      {DType::float8e8m0, 127, 1},
      {DType::float4e2m1, 0x7, 6},
      {DType::float4e2m1, 0x9, -0.5},
      {DType::int4, 0xF, -1},
      {DType::uint4, 0xF, 15},
      {DType::int2, 0x3, -1},
  };
  for (const Case& c : cases) EXPECT_EQ(element_at(c.type, &c.bits, 0), c.value) << name_of(c.type) << " " << c.bits;
  const uint32_t nan = 0x7F, zero_nan = 0x80;
  EXPECT_TRUE(std::isnan(element_at(DType::float8e4m3fn, &nan, 0)));
  EXPECT_TRUE(std::isnan(element_at(DType::float8e4m3fnuz, &zero_nan, 0)));
}

TEST(Elements, PackedElementsHaveTheFirstInTheLowBits) {
  const uint8_t bytes[] = {0x21, 0x43};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(element_at(DType::uint4, bytes, i), i + 1);
}

TEST(Elements, HalvesRoundToNearest) {
  for (const double value : {0.0, 1.0, -1.5, 65504.0, 6.103515625e-05, 5.9604644775390625e-08, 0.333251953125, kInfinity}) {
    uint16_t bits = 0;
    set_element(DType::float16, &bits, 0, value);
    EXPECT_EQ(element_at(DType::float16, &bits, 0), value);
  }
  uint16_t bits = 0;
  set_element(DType::float16, &bits, 0, 1 + std::ldexp(1, -11));  // halfway: to even
  EXPECT_EQ(bits, 0x3C00);
  set_element(DType::bfloat16, &bits, 0, 1 + std::ldexp(3, -8));
  EXPECT_EQ(element_at(DType::bfloat16, &bits, 0), 1 + std::ldexp(1, -6));
}

TEST(Compare, Tolerances) {
  struct Case {
    std::vector<double> got, want;
    Tolerance tolerance;
    bool ok;
  };
  const std::vector<Case> cases = {
      {{1}, {1}, {}, true},
      {{1 + 5e-5}, {1}, {}, true},
      {{1 + 5e-4}, {1}, {}, false},
      {{5e-6}, {0}, {}, true},
      {{1 + 5e-5}, {1}, {.rtol = 0, .atol = 0}, false},
      {{1e-3, 1000}, {0, 1000}, {.range_tol = 1e-5}, true},
      {{1e-1, 1000}, {0, 1000}, {.range_tol = 1e-5}, false},
      {{kNaN}, {kNaN}, {}, true},
      {{kNaN}, {1}, {}, false},
      {{1}, {kNaN}, {}, false},
      {{kInfinity}, {kInfinity}, {}, true},
      {{-kInfinity}, {kInfinity}, {}, false},
      {{kInfinity}, {1}, {.range_tol = 1e9}, false},
  };
  for (size_t i = 0; i < cases.size(); ++i)
    EXPECT_EQ(compare(floats(cases[i].got), floats(cases[i].want), cases[i].tolerance).ok, cases[i].ok) << i;
}

TEST(Compare, Measures) {
  const Difference d = compare(floats({1, 3}), floats({2, 4}), {});
  EXPECT_EQ(d.max_abs, 1);
  EXPECT_EQ(d.max_rel, 0.5);
  EXPECT_EQ(d.over_range, 0.25);
}

TEST(Compare, TypesShapesAndKindsMustAgree) {
  EXPECT_FALSE(compare(floats({1}), tensor(DType::float64, {1}, {1}), {}).ok);
  EXPECT_FALSE(compare(floats({1, 2}), tensor(DType::float32, {2, 1}, {1, 2}), {}).ok);
  EXPECT_FALSE(compare(floats({1}), RuntimeValue{}, {}).ok);
  const Difference none = compare(floats({1, 2}), floats({1}), {});
  EXPECT_TRUE(std::isnan(none.max_abs) && std::isnan(none.max_rel) && std::isnan(none.over_range));
  EXPECT_TRUE(std::isnan(worse(Difference{}, none).max_abs) && std::isnan(worse(none, Difference{}).max_abs));
  EXPECT_TRUE(compare(RuntimeValue{}, RuntimeValue{}, {}).ok);
  EXPECT_FALSE(compare(tensor(DType::int64, {1}, {100000}), tensor(DType::int64, {1}, {100001}), {}).ok);
  RuntimeValue large = tensor(DType::int64, {1}, {0}), next = tensor(DType::int64, {1}, {0});
  *large.tensor.as<int64_t>() = int64_t{1} << 60;
  *next.tensor.as<int64_t>() = (int64_t{1} << 60) + 1;
  EXPECT_FALSE(compare(large, next, {}).ok);
}

TEST(ValueFiles, SequencesAndOptionalsSurvive) {
  const std::string path = (std::filesystem::temp_directory_path() / ("fretsaw-value-" + std::to_string(getpid()) + ".pb")).string();
  RuntimeValue sequence;
  sequence.kind = RuntimeValue::Kind::sequence;
  sequence.element = DType::float32;
  sequence.items = {floats({1, 2}), floats({3})};
  RuntimeValue strings = make_value(DType::string, {2});
  strings.tensor.as<std::string>()[0] = "a";
  strings.tensor.as<std::string>()[1] = "longer than a short string's buffer";
  const Type element = Type::tensor(DType::float32);
  const std::vector<std::pair<RuntimeValue, Type>> cases = {
      {sequence, Type::sequence(element)},
      {RuntimeValue{}, Type::optional(element)},
      {floats({1}), Type::optional(element)},
      {floats({1, 2}), element},
      {strings, Type::tensor(DType::string)},
      {sequence, Type::optional(Type::sequence(element))},
      {tensor(DType::int64, {}, {5}), Type::tensor(DType::int64)},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    write_value_file(cases[i].first, cases[i].second, "v", path);
    const Difference d = compare(read_value_file(path, cases[i].second), cases[i].first, {.rtol = 0, .atol = 0});
    EXPECT_TRUE(d.ok) << i << " " << d.why;
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace fretsaw
