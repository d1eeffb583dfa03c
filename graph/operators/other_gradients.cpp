// Gradients of operators of which few have one: what makes values, rotary embeddings, and results without floats.
#include <algorithm>
#include <unordered_set>

#include "graph/communication_schemas.h"
#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"

namespace fretsaw {
namespace {

// Turned back by the same angles.
std::vector<Value*> rotary_gradient(GradientContext& c) {
  if (c.wants(1) || c.wants(2)) c.refuse("there is no gradient for the tables of cosines and sines", "freeze them");
  std::vector<Value*> found = c.none();
  std::vector<Value*> operands = {c.of_output(), c.input(1), c.add("Neg", {c.input(2)})};
  if (c.input(3)) operands.push_back(c.input(3));
  found[0] = c.add("RotaryEmbedding", operands, c.attributes({"interleaved", "num_heads", "rotary_embedding_dim"}));
  return found;
}

// From the operands alone: what is kept between forward and backward pass are they, and no probabilities.
std::vector<Value*> attention_rule(GradientContext& c) {
  std::vector<Value*> operands = {c.of_output(), c.input(0), c.input(1), c.input(2)};
  if (c.input(3)) operands.push_back(c.input(3));
  const std::vector<Value*> made =
      c.add_several("AttentionGrad", operands, {c.wants(0), c.wants(1), c.wants(2)},
                    c.attributes({"scale", "softcap", "is_causal", "q_num_heads", "kv_num_heads", "left_window_size", "right_window_size"}),
                    kCommunicationDomain);
  std::vector<Value*> found = c.none();
  std::copy(made.begin(), made.end(), found.begin());
  return found;
}

// start + i delta, as many as come before the limit
std::vector<Value*> range_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Term g(c, c.of_output());
  auto sum = [](const Term& x) { return x.made("ReduceSum", {x}, {{"keepdims", int64_t{0}}}); };
  if (c.wants(0)) found[0] = sum(g);
  if (c.wants(2)) {
    Value* count = c.add("Size", {g}, {}, DType::int64);
    Value* index = c.add("Range", {c.integer(0), count, c.integer(1)}, {}, DType::int64);
    found[2] = sum(g * as_number({&c, index}, g));
  }
  return found;
}

}  // namespace

GradientRule attention_gradient(const std::string& name) {
  if (name == "Attention") return attention_rule;
  return name == "RotaryEmbedding" ? rotary_gradient : nullptr;
}

// What the others make depends on sizes and settings alone.
GradientRule generation_gradient(const std::string& name) {
  return name == "Range" ? range_gradient : zero_gradient;
}

GradientRule signal_gradient(const std::string& name) {
  static const std::unordered_set<std::string> windows = {"MelWeightMatrix", "HannWindow", "HammingWindow", "BlackmanWindow"};
  return windows.count(name) ? zero_gradient : nullptr;
}

GradientRule no_float_gradient(const std::string& name) {
  static const std::unordered_set<std::string> names = {"QuantizeLinear",     "SequenceEmpty", "SequenceLength",
                                                        "OptionalHasElement", "StringSplit",   "StringNormalizer",
                                                        "TfIdfVectorizer",    "StringConcat",  "RegexFullMatch"};
  return names.count(name) ? zero_gradient : nullptr;
}

std::vector<OperatorRecord> with_gradients(std::vector<OperatorRecord> records, GradientRule (*rule)(const std::string&)) {
  for (OperatorRecord& record : records) record.gradient = rule(record.name);
  return records;
}

}  // namespace fretsaw
