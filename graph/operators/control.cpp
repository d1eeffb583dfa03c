// Operators that are given whole tensors: control flow, sequences, optionals, strings.
#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {

std::vector<OperatorRecord> control_operators() {
  std::vector<OperatorRecord> records;
  auto add = [&](const char* name, int since) { records.push_back({.name = name, .since = since}); };
  add("If", 25);
  add("Loop", 25);
  add("Scan", 25);
  add("SequenceAt", 11);
  add("SequenceConstruct", 11);
  add("SequenceEmpty", 11);
  add("SequenceErase", 11);
  add("SequenceInsert", 11);
  add("SequenceLength", 11);
  add("SequenceMap", 17);
  add("SplitToSequence", 24);
  add("ConcatFromSequence", 11);
  add("Optional", 28);
  add("OptionalGetElement", 28);
  add("OptionalHasElement", 28);
  add("StringSplit", 20);
  add("StringNormalizer", 10);
  add("TfIdfVectorizer", 9);
  records.push_back({.name = "StringConcat", .since = 20, .factors = elementwise_factors});
  records.push_back({.name = "RegexFullMatch", .since = 20, .factors = elementwise_factors});
  return with_gradients(std::move(records), no_float_gradient);
}

}  // namespace fretsaw
