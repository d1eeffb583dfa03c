// The built-in architectures: sizes against the published ones, types, settings, seeds, small ones run.
#include "models/models.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <set>

#include "graph/errors.h"
#include "graph/passes.h"
#include "graph/tensor.h"

namespace fretsaw {
namespace {

using Set = std::map<std::string, std::string>;
using ::testing::HasSubstr;

// Elements of all weights but the running statistics of batch normalisation, which are counted as no parameters.
int64_t parameters(const Model& model) {
  std::set<const Value*> statistics;
  for (const Node* node : model.graph->nodes) {
    if (node->is("BatchNormalization")) statistics.insert({node->input(3), node->input(4)});
  }
  int64_t count = 0;
  for (const Value* v : model.graph->initializers()) {
    if (is_float(v->constant->dtype) && !v->constant->dims.empty() && !statistics.count(v)) count += v->constant->count();
  }
  return count;
}

std::string error_of(const std::string& name, const Set& settings) {
  try {
    build_model(name, settings);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::usage);
    return e.what();
  }
  return "accepted";
}

struct Published {
  const char* name;
  int64_t parameters;
};
class Architectures : public ::testing::TestWithParam<Published> {};
TEST_P(Architectures, HaveThePublishedParameters) {
  EXPECT_EQ(parameters(build_model(GetParam().name, {})), GetParam().parameters);
}
// torchvision's models; BERT-base uncased with its pooler and GPT-2 with tied embeddings as Hugging Face has them; U-Net of 64 to 1024
// channels with transposed convolutions and two classes.
INSTANTIATE_TEST_SUITE_P(All, Architectures,
                         ::testing::Values(Published{"resnet18", 11689512}, Published{"resnet34", 21797672},
                                           Published{"resnet50", 25557032}, Published{"resnet101", 44549160},
                                           Published{"resnet152", 60192808}, Published{"vgg16", 138357544},
                                           Published{"mobilenet_v2", 3504872}, Published{"unet", 31037698}, Published{"bert", 109482240},
                                           Published{"gpt2", 124439808}, Published{"vit", 86567656}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Models, LlamaHasTheSizeOfItsSettings) {
  const int64_t hidden = 64, layers = 2, intermediate = 96, vocab = 50, kv = 2 * 16;  // 4 heads of 16, 2 for keys and values
  const Model model =
      build_model("llama", {{"hidden", "64"}, {"layers", "2"}, {"heads", "4"}, {"kv_heads", "2"}, {"intermediate", "96"}, {"vocab", "50"}});
  const int64_t layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate + 2 * hidden;
  const int64_t rotary = 16 / 2;  // the frequencies: a constant
  EXPECT_EQ(parameters(model), layers * layer + vocab * hidden + hidden + rotary) << "embedding and head are one";
}

TEST(Models, BatchAndSequenceAreSymbolicUnlessSet) {
  Model model = build_model("gpt2", {{"layers", "1"}, {"hidden", "32"}, {"heads", "2"}, {"vocab", "40"}});
  EXPECT_EQ(to_string(model.graph->inputs[0]->type), "int64[batch,sequence]");
  EXPECT_EQ(to_string(model.graph->outputs[0]->type), "float32[batch,sequence,40]");
  model = build_model("gpt2", {{"layers", "1"}, {"hidden", "32"}, {"heads", "2"}, {"vocab", "40"}, {"batch", "3"}, {"sequence", "7"}});
  infer_shapes(model);
  EXPECT_EQ(to_string(model.graph->outputs[0]->type), "float32[3,7,40]");
}

TEST(Models, EveryOneInfersTheOutputsItDeclares) {
  for (const ModelInfo& info : list_models()) {
    SCOPED_TRACE(info.name);
    Set sizes = {{"batch", "2"}};
    if (std::count(info.keys.begin(), info.keys.end(), "sequence")) sizes["sequence"] = "8";
    Model model = build_model(info.name, sizes);
    std::vector<std::string> declared;
    for (Value* v : model.graph->outputs) declared.push_back(to_string(v->type)), v->type = Type::tensor(v->type.dtype);
    infer_shapes(model);
    for (size_t i = 0; i < declared.size(); ++i) EXPECT_EQ(to_string(model.graph->outputs[i]->type), declared[i]);
  }
}

TEST(Models, SeedsDecideTheWeights) {
  const auto first_weight = [](const Set& settings) {
    const Model model = build_model("mlp", settings);
    for (const Value* v : model.graph->initializers()) {
      if (v->constant->count() < 16) continue;
      const Tensor& t = *v->constant;
      std::vector<std::byte> bytes(t.bytes());
      if (t.generate)
        t.generate(0, bytes);
      else
        std::copy_n(t.data, bytes.size(), bytes.data());
      return bytes;
    }
    return std::vector<std::byte>();
  };
  const Set small = {{"hidden", "8"}, {"layers", "1"}};
  Set other = small;
  other["seed"] = "5";
  ASSERT_FALSE(first_weight(small).empty());
  EXPECT_EQ(first_weight(small), first_weight(small));
  EXPECT_NE(first_weight(small), first_weight(other));
}

TEST(Models, SettingsAtFaultAreNamed) {
  EXPECT_THAT(error_of("resnet5", {}), HasSubstr("there is no model 'resnet5'; choose one of"));
  EXPECT_THAT(error_of("mlp", {{"heads", "2"}}), HasSubstr("heads"));
  EXPECT_THAT(error_of("bert", {{"layers", "0"}}), HasSubstr("layers"));
  EXPECT_THAT(error_of("bert", {{"layers", "many"}}), HasSubstr("layers"));
  EXPECT_THAT(error_of("bert", {{"hidden", "30"}, {"heads", "4"}}), HasSubstr("heads"));
  EXPECT_THAT(error_of("llama", {{"heads", "4"}, {"kv_heads", "3"}}), HasSubstr("kv_heads"));
  EXPECT_THAT(error_of("gpt2", {{"dtype", "int8"}}), HasSubstr("dtype"));
  EXPECT_THAT(error_of("mlp", {{"opset", "3"}}), HasSubstr("from 17 to "));
  EXPECT_THAT(error_of("resnet18", {{"dtype", "bfloat16"}, {"opset", "21"}}), HasSubstr("from 22 to "));
  EXPECT_EQ(build_model("resnet18", {{"dtype", "bfloat16"}}).opsets.at(""), 22);
}

}  // namespace
}  // namespace fretsaw
