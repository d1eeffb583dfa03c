// Gradients of every operator against central differences; the list of operators without a rule.
#include "graph/gradients.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "graph/catalogue.h"
#include "graph/communication_schemas.h"
#include "tests/kernels/gradient_case.h"
#include "tests/kernels/single_op.h"

namespace fretsaw::testing {

namespace {

using Table = std::vector<GradientCase> (*)();
constexpr std::pair<const char*, Table> kTables[] = {
    {"unary", unary_gradient_cases},         {"broadcasting", broadcasting_gradient_cases},   {"reduction", reduction_gradient_cases},
    {"products", product_gradient_cases},    {"contraction", contraction_gradient_cases},     {"convolution", convolution_gradient_cases},
    {"pooling", pooling_gradient_cases},     {"normalization", normalization_gradient_cases}, {"loss", loss_gradient_cases},
    {"movement", movement_gradient_cases},   {"indexing", indexing_gradient_cases},           {"images", image_gradient_cases},
    {"attention", attention_gradient_cases}, {"recurrent", recurrent_gradient_cases},
};

// Why a case fails: its operator, number and what is wrong; "" when none does.
std::string failures(const std::vector<GradientCase>& table) {
  std::map<std::string, int> seen;
  std::string text;
  for (const GradientCase& c : table) {
    const std::string failure = gradient_failure(c);
    const int number = seen[c.op]++;
    if (!failure.empty()) text += c.op + ", case " + std::to_string(number) + ": " + failure + "\n";
  }
  return text;
}

class GradientTable : public ::testing::TestWithParam<std::pair<const char*, Table>> {};

TEST_P(GradientTable, AgreesWithDifferences) {
  EXPECT_EQ(failures(GetParam().second()), "");
}

INSTANTIATE_TEST_SUITE_P(Rules, GradientTable, ::testing::ValuesIn(kTables), [](const auto& info) { return info.param.first; });

// Why an operator has no rule. A new operator needs a rule, `zero_gradient` or a line here.
const std::map<std::string, std::string> kWithoutRule = {
    {"BitCast", "a float's bits have no derivative"},
    {"DynamicQuantizeLinear", "quantised weights are not trained"},
    {"CausalConvWithState", "becomes ONNX's function: tests/kernels/gradients_exact_test.cpp"},
    {"Upsample", "older than the newest opset, which has Resize"},
    {"If", "the walk back goes through its branches: tests/runtime/control_flow_gradients_test.cpp"},
    {"Loop", "the walk back goes through its passes: tests/runtime/control_flow_gradients_test.cpp"},
    {"Scan", "becomes a Loop: tests/runtime/control_flow_gradients_test.cpp"},
    {"SequenceMap", "bodies are not differentiated"},
    {"SequenceAt", "sequences are not differentiated: those known by their places become tensors before"},
    {"SequenceConstruct", "sequences are not differentiated: those known by their places become tensors before"},
    {"SequenceErase", "sequences are not differentiated: those known by their places become tensors before"},
    {"SequenceInsert", "sequences are not differentiated: those known by their places become tensors before"},
    {"SplitToSequence", "sequences are not differentiated: those known by their places become tensors before"},
    {"ConcatFromSequence", "sequences are not differentiated: those known by their places become tensors before"},
    {"Optional", "optionals are not differentiated"},
    {"OptionalGetElement", "optionals are not differentiated"},
};

TEST(GradientRules, EveryOperatorHasOneOrAReason) {
  for (const OperatorRecord& record : all_operators()) {
    if (record.domain == kCommunicationDomain) continue;  // put into graphs after they were differentiated
    const bool listed = kWithoutRule.count(record.name) > 0;
    EXPECT_EQ(record.gradient == nullptr, listed) << record.name << (listed ? " has a rule now" : " has neither a rule nor a reason");
  }
}

TEST(ConvGradWeight, DoesNotDependOnTheNumberOfThreads) {
  Graph graph;
  const Node& node =
      *graph.add_node("ConvGradWeight", {graph.add_value("dy"), graph.add_value("x")}, {"dw"},
                      {{"kernel_shape", std::vector<int64_t>{3, 3}}, {"pads", std::vector<int64_t>{1, 1, 1, 1}}}, kCommunicationDomain);
  RuntimeValue dy = tensor_as(DType::float32, {7, 24, 9, 9}, spread_values(7 * 24 * 81, -1, 1, 1));
  RuntimeValue x = tensor_as(DType::float32, {7, 16, 9, 9}, spread_values(7 * 16 * 81, -1, 1, 2));
  const auto on = [&](int threads) { return values_of<float>(run_node(node, {&dy, &x}, {.threads = threads})[0]); };
  const std::vector<float> wanted = on(1);
  for (int threads : {2, 3, 8}) EXPECT_EQ(on(threads), wanted) << threads;
}

TEST(GradientRules, EveryRuleIsInATable) {
  std::set<std::string> covered;
  for (const auto& [name, table] : kTables)
    for (const GradientCase& c : table()) covered.insert(c.op);
  covered.insert("Scatter");  // is ScatterElements
  // These need ranks, or come in float32 only: tests/runtime/training_meshes_test.cpp.
  covered.insert({"AllReduce", "AllGather", "ReduceScatter", "CrossEntropy"});
  covered.insert({"QuantizeLinear", "DequantizeLinear"});  // not of float64: tests/kernels/gradients_exact_test.cpp
  for (const OperatorRecord& record : all_operators()) {
    const bool has_rule = record.gradient && record.gradient != zero_gradient;
    EXPECT_TRUE(!has_rule || covered.count(record.name)) << record.name << " has a gradient rule without a case";
  }
}

TEST(GradientRules, EveryGradientOperatorIsMade) {
  for (const auto& [name, table] : kTables)
    for (const GradientCase& c : table()) note_gradient_operators(c);
  for (const OperatorRecord& record : all_operators()) {
    if (record.name.find("Grad") == std::string::npos && record.name != "SumTo") continue;
    if (record.name == "CrossEntropyGrad") continue;  // of float32 only: tests/runtime/training_meshes_test.cpp
    EXPECT_TRUE(gradient_operators_made().count(record.name)) << "no case needs " << record.name;
  }
}

}  // namespace

}  // namespace fretsaw::testing
