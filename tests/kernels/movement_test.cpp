// Reshaping, movement and sequences: values, shapes without elements, negative indexes, and what is refused.
#include <gtest/gtest.h>

#include <complex>
#include <random>

#include "kernels/cpu/element_copy.h"
#include "tests/kernels/operator_case.h"

namespace fretsaw::testing {
namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int64_t>;
using Strings = std::vector<std::string>;

Attribute attr(const char* name, AttributeValue value) {
  return {.name = name, .value = std::move(value)};
}

RuntimeValue floats(const Dims& dims, const Floats& values) {
  return tensor_of(dims, values);
}
RuntimeValue empty(const Dims& dims) {
  return tensor_of(dims, Floats{});
}

const OperatorCase kCases[] = {
    {"reshape_zero_copies_a_dimension", "Reshape", {}, {counting({2, 3}), ints({0, -1, 1})}, {floats({2, 3, 1}, {0, 1, 2, 3, 4, 5})}},
    {"reshape_allowzero", "Reshape", {attr("allowzero", int64_t{1})}, {empty({2, 0}), ints({0, 5})}, {empty({0, 5})}},
    {"reshape_to_scalar", "Reshape", {}, {counting({1, 1}), ints({})}, {floats({}, {0})}},
    {"reshape_empty_with_unknown", "Reshape", {}, {empty({0, 3}), ints({-1, 3})}, {empty({0, 3})}},
    {"flatten_behind_last", "Flatten", {attr("axis", int64_t{2})}, {counting({2, 2})}, {floats({4, 1}, {0, 1, 2, 3})}},
    {"flatten_negative", "Flatten", {attr("axis", int64_t{-1})}, {counting({2, 1, 2})}, {floats({2, 2}, {0, 1, 2, 3})}},
    {"squeeze_all", "Squeeze", {}, {counting({1, 2, 1})}, {floats({2}, {0, 1})}},
    {"squeeze_negative", "Squeeze", {}, {counting({1, 2, 1}), ints({-1})}, {floats({1, 2}, {0, 1})}},
    {"unsqueeze_negative", "Unsqueeze", {}, {counting({2}), ints({-1, 0})}, {floats({1, 2, 1}, {0, 1})}},
    {"shape_slice", "Shape", {attr("start", int64_t{-2}), attr("end", int64_t{9})}, {counting({2, 3, 4})}, {ints({3, 4})}},
    {"shape_of_scalar", "Shape", {}, {number(1.0f)}, {ints({})}},
    {"size_of_empty", "Size", {}, {empty({3, 0})}, {number(int64_t{0})}},
    {"transpose_reverses", "Transpose", {}, {counting({2, 3})}, {floats({3, 2}, {0, 3, 1, 4, 2, 5})}},
    {"transpose_empty", "Transpose", {attr("perm", Ints{1, 0, 2})}, {empty({2, 0, 3})}, {empty({0, 2, 3})}},
    {"transpose_strings",
     "Transpose",
     {},
     {tensor_of({2, 2}, Strings{"a", "b", "c", "d"})},
     {tensor_of({2, 2}, Strings{"a", "c", "b", "d"})}},
    {"concat_with_empty",
     "Concat",
     {attr("axis", int64_t{-1})},
     {counting({1, 2}), empty({1, 0}), counting({1, 1})},
     {floats({1, 3}, {0, 1, 0})}},
    {"split_uneven",
     "Split",
     {attr("num_outputs", int64_t{3})},
     {counting({5})},
     {floats({2}, {0, 1}), floats({2}, {2, 3}), floats({1}, {4})}},
    {"split_sizes",
     "Split",
     {attr("axis", int64_t{1})},
     {counting({2, 3}), ints({0, 3})},
     {empty({2, 0}), floats({2, 3}, {0, 1, 2, 3, 4, 5})}},
    {"slice_backwards", "Slice", {}, {counting({5}), ints({-1}), ints({-100}), ints({0}), ints({-2})}, {floats({3}, {4, 2, 0})}},
    {"slice_far_ends",
     "Slice",
     {},
     {counting({2, 3}), ints({1, INT64_MIN}), ints({INT64_MAX, INT64_MAX}), ints({-2, -1})},
     {floats({1, 3}, {3, 4, 5})}},
    {"slice_longest_step", "Slice", {}, {counting({4}), ints({3}), ints({INT64_MIN}), ints({0}), ints({INT64_MIN})}, {floats({1}, {3})}},
    {"slice_nothing", "Slice", {}, {counting({4}), ints({3}), ints({1})}, {empty({0})}},
    {"expand_both_ways", "Expand", {}, {counting({2, 1}), ints({3, 1, 2})}, {floats({3, 2, 2}, {0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1})}},
    {"expand_to_empty", "Expand", {}, {counting({1}), ints({0})}, {empty({0})}},
    {"tile", "Tile", {}, {counting({1, 2}), ints({2, 2})}, {floats({2, 4}, {0, 1, 0, 1, 0, 1, 0, 1})}},
    {"tile_nothing", "Tile", {}, {counting({1, 2}), ints({2, 0})}, {empty({2, 0})}},
    {"depth_to_space",
     "DepthToSpace",
     {attr("blocksize", int64_t{2})},
     {counting({1, 4, 1, 2})},
     {floats({1, 1, 2, 4}, {0, 2, 1, 3, 4, 6, 5, 7})}},
    {"space_to_depth",
     "SpaceToDepth",
     {attr("blocksize", int64_t{2})},
     {floats({1, 1, 2, 4}, {0, 2, 1, 3, 4, 6, 5, 7})},
     {counting({1, 4, 1, 2})}},
    {"trilu_upper", "Trilu", {}, {counting({2, 3}), number(int64_t{1})}, {floats({2, 3}, {0, 1, 2, 0, 0, 5})}},
    {"trilu_lower_far", "Trilu", {attr("upper", int64_t{0})}, {counting({2, 2}), number(INT64_MIN)}, {floats({2, 2}, {0, 0, 0, 0})}},
    {"pad_constant", "Pad", {}, {counting({2}), ints({1, 2}), number(7.0f)}, {floats({5}, {7, 0, 1, 7, 7})}},
    {"pad_negative", "Pad", {}, {counting({4}), ints({-1, 1})}, {floats({4}, {1, 2, 3, 0})}},
    {"pad_reflect_twice",
     "Pad",
     {attr("mode", std::string("reflect"))},
     {counting({3}), ints({5, 0})},
     {floats({8}, {1, 0, 1, 2, 1, 0, 1, 2})}},
    {"pad_edge_axis",
     "Pad",
     {attr("mode", std::string("edge"))},
     {counting({2, 2}), ints({1, 0}), nothing(), ints({-1})},
     {floats({2, 3}, {0, 0, 1, 2, 2, 3})}},
    {"pad_wrap", "Pad", {attr("mode", std::string("wrap"))}, {counting({2}), ints({3, 1})}, {floats({6}, {1, 0, 1, 0, 1, 0})}},
    {"center_crop_pad", "CenterCropPad", {}, {counting({3, 1}), ints({2, 2})}, {floats({2, 2}, {0, 0, 1, 0})}},
    {"reverse_sequence",
     "ReverseSequence",
     {attr("time_axis", int64_t{1}), attr("batch_axis", int64_t{0})},
     {counting({2, 3}), ints({2, 0})},
     {floats({2, 3}, {1, 0, 2, 3, 4, 5})}},
};

class MovementCase : public ::testing::TestWithParam<OperatorCase> {};
TEST_P(MovementCase, GivesTheExpectedOutputs) {
  EXPECT_EQ(failure_of(GetParam()), "");
}
INSTANTIATE_TEST_SUITE_P(Movement, MovementCase, ::testing::ValuesIn(kCases), [](const auto& info) { return info.param.name; });

struct Refusal {
  OperatorCase c;
  std::string says;
};
const Refusal kRefusals[] = {
    {{"reshape_count", "Reshape", {}, {counting({2, 3}), ints({4})}, {}}, "[2,3] can't be reshaped to [4]"},
    {{"reshape_two_unknown", "Reshape", {}, {counting({4}), ints({-1, -1})}, {}}, "more than one -1"},
    {{"squeeze_not_one", "Squeeze", {}, {counting({2}), ints({0})}, {}}, "can't be squeezed"},
    {{"axis_out_of_range", "Concat", {attr("axis", int64_t{3})}, {counting({2})}, {}}, "axis 3"},
    {{"axis_twice", "Unsqueeze", {}, {counting({2}), ints({0, -3})}, {}}, "named twice"},
    {{"perm_twice", "Transpose", {attr("perm", Ints{0, 0})}, {counting({2, 2})}, {}}, "named twice"},
    {{"concat_shapes", "Concat", {attr("axis", int64_t{0})}, {counting({1, 2}), counting({1, 3})}, {}}, "can't be joined"},
    {{"slice_step", "Slice", {}, {counting({2}), ints({0}), ints({2}), ints({0}), ints({0})}, {}}, "step 0"},
    {{"expand_huge", "Expand", {}, {counting({1}), ints({int64_t{1} << 40, int64_t{1} << 40})}, {}}, "too large"},
    {{"tile_huge", "Tile", {}, {counting({2}), ints({INT64_MAX})}, {}}, "can't be repeated"},
    {{"tile_negative", "Tile", {}, {counting({2}), ints({-1})}, {}}, "can't be repeated -1"},
    {{"pad_huge", "Pad", {}, {counting({2}), ints({INT64_MAX, 1})}, {}}, "too large"},
    {{"constant_of_shape_negative", "ConstantOfShape", {}, {ints({-1})}, {}}, "negative"},
    {{"split_sum", "Split", {}, {counting({3}), ints({1})}, {}}, "add up to 1"},
    {{"sequence_at_range", "SequenceAt", {}, {counting({3}), number(int64_t{0})}, {}}, "must be a sequence"},
};
class MovementRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(MovementRefusal, NamesWhatIsWrong) {
  EXPECT_NE(error_of(GetParam().c).find(GetParam().says), std::string::npos) << error_of(GetParam().c);
}
INSTANTIATE_TEST_SUITE_P(Movement, MovementRefusal, ::testing::ValuesIn(kRefusals), [](const auto& info) { return info.param.c.name; });

// Every element of a transposed tensor, computed one by one.
template <typename T>
void expect_transposed(const Dims& dims, const std::vector<size_t>& perm, const std::vector<T>& x, DType dtype) {
  const Dims strides = strides_of(dims);
  Dims to(dims.size()), from_strides(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) to[i] = dims[perm[i]], from_strides[i] = strides[perm[i]];
  std::vector<T> wanted(x.size()), got(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    int64_t rest = static_cast<int64_t>(i), offset = 0;
    for (size_t k = dims.size(); k-- > 0; rest /= to[k]) offset += rest % to[k] * from_strides[k];
    wanted[i] = x[static_cast<size_t>(offset)];
  }
  copy_strided(dtype, to, got.data(), strides_of(to), x.data(), from_strides, 3);
  EXPECT_EQ(got, wanted) << to_string(dims);
}

TEST(StridedCopy, TransposesLikeALoop) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    Dims dims(1 + random() % 5);
    for (int64_t& d : dims) d = 1 + static_cast<int64_t>(random() % (dims.size() > 3 ? 9 : 70));
    std::vector<size_t> perm(dims.size());
    for (size_t i = 0; i < perm.size(); ++i) perm[i] = i;
    std::shuffle(perm.begin(), perm.end(), random);
    const auto count = static_cast<size_t>(count_of(dims));
    std::vector<uint8_t> bytes(count);
    std::vector<uint16_t> halves(count);
    std::vector<float> numbers(count);
    std::vector<std::complex<double>> wide(count);
    for (size_t i = 0; i < count; ++i) {
      bytes[i] = static_cast<uint8_t>(random());
      halves[i] = static_cast<uint16_t>(random());
      numbers[i] = static_cast<float>(i);
      wide[i] = {static_cast<double>(i), 1};
    }
    expect_transposed(dims, perm, bytes, DType::uint8);
    expect_transposed(dims, perm, halves, DType::float16);
    expect_transposed(dims, perm, numbers, DType::float32);
    expect_transposed(dims, perm, wide, DType::complex128);
  }
}

RuntimeValue sequence_of(std::vector<RuntimeValue> items) {
  RuntimeValue value;
  value.kind = RuntimeValue::Kind::sequence;
  value.element = items.empty() ? DType::float32 : items[0].tensor.dtype;
  value.items = std::move(items);
  return value;
}

const OperatorCase kSequenceCases[] = {
    {"construct", "SequenceConstruct", {}, {counting({1}), counting({2})}, {sequence_of({counting({1}), counting({2})})}},
    {"at_negative", "SequenceAt", {}, {sequence_of({counting({1}), counting({2})}), number(int64_t{-1})}, {counting({2})}},
    {"insert_at_end", "SequenceInsert", {}, {sequence_of({}), counting({2})}, {sequence_of({counting({2})})}},
    {"insert_front",
     "SequenceInsert",
     {},
     {sequence_of({counting({1})}), counting({2}), number(int64_t{-1})},
     {sequence_of({counting({2}), counting({1})})}},
    {"erase_last", "SequenceErase", {}, {sequence_of({counting({1}), counting({2})})}, {sequence_of({counting({1})})}},
    {"length", "SequenceLength", {}, {sequence_of({counting({1}), counting({2})})}, {number(int64_t{2})}},
    {"split_scalar", "SplitToSequence", {}, {counting({3}), number(int64_t{2})}, {sequence_of({floats({2}, {0, 1}), floats({1}, {2})})}},
    {"split_without_axis",
     "SplitToSequence",
     {attr("keepdims", int64_t{0})},
     {counting({2, 1})},
     {sequence_of({floats({1}, {0}), floats({1}, {1})})}},
    {"join_new_axis",
     "ConcatFromSequence",
     {attr("axis", int64_t{-1}), attr("new_axis", int64_t{1})},
     {sequence_of({counting({2}), counting({2})})},
     {floats({2, 2}, {0, 0, 1, 1})}},
    {"has_no_element", "OptionalHasElement", {}, {nothing()}, {tensor_of({}, std::vector<bool>{false})}},
};
INSTANTIATE_TEST_SUITE_P(Sequences, MovementCase, ::testing::ValuesIn(kSequenceCases), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fretsaw::testing
