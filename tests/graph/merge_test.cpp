// Parts of tensors put together again.
#include "graph/merge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>

#include "graph/errors.h"
#include "graph/io.h"
#include "graph/value_parts.h"

namespace fretsaw {
namespace {

using testing::HasSubstr;

std::shared_ptr<Tensor> counting(Dims dims) {
  auto tensor = make_tensor(DType::int32, std::move(dims));
  tensor->name = "w";
  auto* out = reinterpret_cast<int32_t*>(mutable_data(*tensor));
  std::iota(out, out + tensor->count(), 0);
  return tensor;
}

// Element by element, by the indexes' definition.
TensorPiece piece_of(const Tensor& whole, int dim, const Intervals& intervals) {
  const auto d = static_cast<size_t>(dim);
  Dims dims = whole.dims;
  dims[d] = size_of(intervals);
  auto part = make_tensor(whole.dtype, dims);
  auto* out = reinterpret_cast<int32_t*>(mutable_data(*part));
  int64_t inner = 1;
  for (size_t k = d + 1; k < dims.size(); ++k) inner *= dims[k];
  for (int64_t i = 0; i < whole.count(); ++i) {
    const int64_t row = i / inner % whole.dims[d];
    for (const Interval& part_rows : intervals)
      if (row >= part_rows.begin && row < part_rows.end) *out++ = whole.as<int32_t>()[static_cast<size_t>(i)];
  }
  return {part, {"w", dim, whole.dims[d], intervals}};
}

std::vector<int32_t> elements_of(const Tensor& tensor) {
  std::vector<int32_t> elements(static_cast<size_t>(tensor.count()));
  if (tensor.generate) {
    tensor.generate(0, std::as_writable_bytes(std::span(elements)));
  } else {
    const auto there = tensor.as<int32_t>();
    elements.assign(there.begin(), there.end());
  }
  return elements;
}

void expect_whole(const Dims& dims, int dim, const std::vector<Intervals>& parts) {
  const auto whole = counting(dims);
  std::vector<TensorPiece> pieces;
  for (const Intervals& part : parts) pieces.push_back(piece_of(*whole, dim, part));
  const TensorPtr merged = assemble(*whole, pieces);
  EXPECT_EQ(merged->name, "w");
  EXPECT_EQ(merged->dims, dims);
  EXPECT_EQ(merged->data, nullptr);  // nothing is copied until it is written
  EXPECT_EQ(elements_of(*merged), elements_of(*whole)) << to_string(dims) << " dimension " << dim;
}

std::string error_of(const Tensor& whole, const std::vector<TensorPiece>& pieces) {
  try {
    assemble(whole, pieces);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Assemble, PutsContiguousPartsTogether) {
  expect_whole({8, 3}, 0, {{{0, 4}}, {{4, 8}}});
  expect_whole({8, 3}, 0, {{{4, 8}}, {{0, 4}}});
  expect_whole({5}, 0, {{{0, 3}}, {{3, 5}}});
  expect_whole({3, 2, 2}, 0, {{{0, 1}}, {{1, 2}}, {{2, 3}}, {}});  // the last rank holds nothing
}

TEST(Assemble, PutsStridedPartsTogether) {
  expect_whole({4, 6}, 1, {{{0, 3}}, {{3, 6}}});
  expect_whole({2, 5, 3}, 1, {{{0, 3}}, {{3, 5}}});
  expect_whole({3, 12}, 1, {{{0, 2}, {4, 6}, {8, 10}}, {{2, 4}, {6, 8}, {10, 12}}});  // q, k and v by heads
  expect_whole({12, 3}, 0, {{{0, 2}, {4, 6}, {8, 10}}, {{2, 4}, {6, 8}, {10, 12}}});
}

TEST(Assemble, TakesRowsThatSeveralRanksHoldOnce) {
  expect_whole({2, 6}, 1, {{{0, 3}}, {{0, 3}}, {{3, 6}}, {{3, 6}}});
  expect_whole({6, 2}, 0, {{{0, 4}}, {{2, 6}}});
  expect_whole({6, 2}, 0, {{{0, 6}}, {{2, 3}}});
  expect_whole({6, 2}, 0, {{{1, 3}, {5, 6}}, {{0, 2}, {3, 5}}});
}

TEST(Assemble, ReadsFromAnyByteOn) {
  const auto whole = counting({7, 10, 3});
  const TensorPtr merged =
      assemble(*whole, {piece_of(*whole, 1, {{0, 3}, {7, 9}}), piece_of(*whole, 1, {{3, 5}}), piece_of(*whole, 1, {{5, 7}, {9, 10}})});
  std::mt19937 random(1);
  for (int k = 0; k < 500; ++k) {
    const size_t first = random() % whole->bytes(), count = random() % (whole->bytes() - first + 1);
    std::vector<std::byte> bytes(count);
    merged->generate(first, bytes);
    EXPECT_EQ(std::memcmp(bytes.data(), whole->data + first, count), 0) << first << " " << count;
  }
}

TEST(Assemble, TakesAWholePieceAsItIs) {
  const auto whole = counting({4, 6}), copy = counting({4, 6});
  const TensorPtr merged = assemble(*whole, {piece_of(*whole, 1, {{0, 3}}), {copy, {"w", -1, 0, {}}}});
  EXPECT_EQ(merged->data, copy->data);
}

TEST(Assemble, TakesTheDimensionThatIsComplete) {
  const auto whole = counting({4, 6});
  const TensorPtr merged = assemble(*whole, {piece_of(*whole, 0, {{0, 2}}), piece_of(*whole, 1, {{3, 6}}), piece_of(*whole, 1, {{0, 3}})});
  EXPECT_EQ(elements_of(*merged), elements_of(*whole));
}

TEST(Assemble, NamesWhatIsMissing) {
  const auto whole = counting({4, 6});
  EXPECT_THAT(error_of(*whole, {}), HasSubstr("tensor 'w' is in no file of the plan"));
  EXPECT_THAT(error_of(*whole, {piece_of(*whole, 1, {{0, 3}})}), HasSubstr("rows [3, 6) of dimension 1 of tensor 'w'"));
  EXPECT_THAT(error_of(*whole, {piece_of(*whole, 1, {{3, 6}})}), HasSubstr("rows [0, 3) of dimension 1 of tensor 'w'"));
  EXPECT_THAT(error_of(*whole, {piece_of(*whole, 0, {{0, 1}}), piece_of(*whole, 0, {{3, 4}})}), HasSubstr("rows [1, 3) of dimension 0"));
}

TEST(Assemble, RefusesPartsThatDoNotFit) {
  const auto whole = counting({4, 6});
  const TensorPiece good = piece_of(*whole, 1, {{0, 3}});
  auto with = [&](const ValuePart& part) { return error_of(*whole, {{good.tensor, part}}); };
  EXPECT_THAT(with({"w", 1, 7, {{0, 3}}}), HasSubstr("of a dimension 1 of size 7"));
  EXPECT_THAT(with({"w", 2, 6, {{0, 3}}}), HasSubstr("of a dimension 2 of size 6"));
  EXPECT_THAT(with({"w", 1, 6, {{4, 7}}}), HasSubstr("the rows [4, 7)"));
  EXPECT_THAT(with({"w", 1, 6, {{2, 3}, {0, 2}}}), HasSubstr("the rows [0, 2)"));
  EXPECT_THAT(with({"w", 1, 6, {{0, 2}}}), HasSubstr("is int32[4,3]"));
  EXPECT_THAT(with({"w", -1, 0, {}}), HasSubstr("is int32[4,3]"));
}

TEST(Assemble, OfMissingPartsIsMissing) {
  const auto whole = counting({4, 6});
  TensorPiece first = piece_of(*whole, 1, {{0, 3}}), second = piece_of(*whole, 1, {{3, 6}});
  auto lost = std::make_shared<Tensor>(*second.tensor);
  lost->data = nullptr, lost->owner = nullptr, lost->missing = "weights.bin is not there";
  second.tensor = lost;
  EXPECT_EQ(assemble(*whole, {first, second})->missing, "weights.bin is not there");
}

TEST(WithoutWeights, KeepsSmallTensorsAndDropsWhatNobodyNeeds) {
  Model model;
  model.ir_version = 7;
  model.graph = std::make_shared<Graph>();
  Graph& g = *model.graph;
  Value* x = g.add_value("x");
  g.inputs = {x};
  Value* y = g.add_node("Add", {x, g.add_constant("large", counting({256}))}, {"y"})->out(0);
  g.add_node("Mul", {x, g.add_constant("unused", counting({256}))}, {"z"});
  g.outputs = {g.add_node("Add", {y, g.add_constant("small", counting({255}))}, {"out"})->out(0)};
  const auto whole = without_weights(std::move(model));
  std::map<std::string, bool> missing;
  for (const Value* v : whole->graph->initializers()) missing[v->name] = v->constant->is_missing();
  EXPECT_EQ(missing, (std::map<std::string, bool>{{"large", true}, {"small", false}}));
  EXPECT_EQ(whole->graph->nodes.size(), 2U);
  EXPECT_EQ(whole->ir_version, 10);
}

// A folder with a whole.onnx in which y is the sum of the initializers, and in memory the rank's graphs that are said to go with it.
class MergeTest : public testing::Test {
 protected:
  MergeTest() {
    std::string name = (std::filesystem::temp_directory_path() / "fretsaw-merge-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
    plan_.folder = name;
  }
  ~MergeTest() override {
    std::error_code ignored;
    std::filesystem::remove_all(plan_.folder, ignored);
  }
  static Model model_of(const std::vector<std::pair<std::string, TensorPtr>>& tensors) {
    Model model;
    model.ir_version = 10;
    model.opsets[""] = 20;
    model.graph = std::make_shared<Graph>();
    Graph& g = *model.graph;
    std::vector<Value*> all;
    for (const auto& [name, tensor] : tensors) all.push_back(g.add_constant(name, tensor));
    g.outputs = g.add_node("Sum", all, {"y"})->outputs;
    return model;
  }
  void write_whole(Model model) { write_model(*without_weights(std::move(model)), plan_.folder + "/" + kWholeFile); }
  struct Held {
    std::string name;
    TensorPiece piece;
  };
  void add_rank(const std::vector<Held>& held) {
    std::vector<std::pair<std::string, TensorPtr>> tensors;
    for (const Held& h : held) tensors.push_back({h.name, h.piece.tensor});
    auto model = std::make_shared<Model>(model_of(tensors));
    for (Value* v : model->graph->initializers())
      for (const Held& h : held)
        if (h.name == v->name && h.piece.part.size > 0) v->part = std::make_shared<ValuePart>(h.piece.part);
    record_parts(*model);
    plan_.graphs.push_back({0, "forward", {}, "stage0.onnx", model});
  }
  std::map<std::string, TensorPtr> merged() const {
    std::map<std::string, TensorPtr> tensors;
    const Model model = merge(plan_);
    for (const Value* v : model.graph->initializers()) tensors[v->name] = v->constant;
    return tensors;
  }
  Plan plan_;
};

std::shared_ptr<Tensor> counting_from(int32_t first, Dims dims) {
  auto tensor = counting(std::move(dims));
  auto* out = reinterpret_cast<int32_t*>(mutable_data(*tensor));
  for (int64_t i = 0; i < tensor->count(); ++i) out[i] += first;
  return tensor;
}

TensorPiece piece_of(const Tensor& whole, int dim, const Intervals& intervals, const std::string& of) {
  TensorPiece piece = piece_of(whole, dim, intervals);
  piece.part.of = of;
  return piece;
}

TEST_F(MergeTest, TellsTensorsApartThatCameFromOne) {
  const auto w = counting({16, 32}), folded = counting_from(1000, {16, 32}), other = counting_from(2000, {16, 32});
  write_whole(model_of({{"w", w}, {"w_folded", folded}, {"w_folded_1", other}}));
  for (const Intervals& rows : {Intervals{{0, 8}}, Intervals{{8, 16}}})
    add_rank(
        {{"w", piece_of(*w, 0, rows, "w")}, {"w_folded", piece_of(*folded, 0, rows, "w")}, {"w_folded_1", piece_of(*other, 0, rows, "w")}});
  auto tensors = merged();
  EXPECT_EQ(elements_of(*tensors["w"]), elements_of(*w));
  EXPECT_EQ(elements_of(*tensors["w_folded"]), elements_of(*folded));
  EXPECT_EQ(elements_of(*tensors["w_folded_1"]), elements_of(*other));
}

TEST_F(MergeTest, FindsFormsUnderNumberedNamesAndLeavesSmallTensorsAlone) {
  const auto w = counting({16, 32}), small = counting_from(1000, {4, 2});
  write_whole(model_of({{"w", w}, {"w_1", small}}));
  add_rank(
      {{"w", piece_of(*w, 1, {{0, 16}}, "w")}, {"w_1", piece_of(*small, 0, {{0, 2}}, "w_1")}, {"w_2", piece_of(*w, 0, {{0, 8}}, "w")}});
  add_rank({{"w", {make_tensor(DType::int32, {16, 32}), {"", -1, 1, {}}}},  // zeros
            {"w_1", piece_of(*small, 0, {{2, 4}}, "w_1")},
            {"w_2", piece_of(*w, 0, {{8, 16}}, "w")}});
  auto tensors = merged();
  EXPECT_EQ(elements_of(*tensors["w"]), elements_of(*w));
  EXPECT_EQ(elements_of(*tensors["w_1"]), elements_of(*small));
}

TEST_F(MergeTest, NamesTheFolderAndWhatIsMissing) {
  const auto w = counting({16, 32});
  auto error = [&]() -> std::string {
    try {
      merge(plan_);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_THAT(error(), HasSubstr(plan_.folder + ": the plan has no whole.onnx"));
  write_whole(model_of({{"w", w}}));
  EXPECT_THAT(error(), HasSubstr(plan_.folder + ": tensor 'w' is in no file of the plan"));
  add_rank({{"w", piece_of(*w, 0, {{0, 8}}, "w")}});
  EXPECT_THAT(error(), HasSubstr("rows [8, 16) of dimension 0 of tensor 'w'"));
}

TEST_F(MergeTest, DefaultsThatNobodyReadsNeedNoPart) {
  const auto w = counting({16, 32});
  Model model = model_of({{"w", w}});
  model.graph->inputs = {model.graph->add_constant("unread", counting({300}))};
  write_whole(std::move(model));
  add_rank({{"w", {w, {}}}});
  EXPECT_EQ(elements_of(*merged()["unread"]), std::vector<int32_t>(300, 0));
}

}  // namespace
}  // namespace fretsaw
