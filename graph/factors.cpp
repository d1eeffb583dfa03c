// Finding an operator's factor rule, and printing rules.
#include "graph/factors.h"

#include "graph/catalogue.h"
#include "graph/errors.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

FactorRule no_rule(std::string why) {
  FactorRule rule;
  rule.unknown = std::move(why);
  return rule;
}

std::string text_of(const FactorRule& rule, const std::vector<std::vector<int>>& dims) {
  std::string s;
  for (const auto& factors : dims) {
    if (!s.empty()) s += ' ';
    if (factors.empty()) s += '1';
    if (factors.size() > 1) s += '(';
    for (size_t i = 0; i < factors.size(); ++i) s += (i ? " " : "") + rule.factors[factors[i]].name;
    if (factors.size() > 1) s += ')';
  }
  return s.empty() ? "." : s;
}

}  // namespace

FactorRule factor_rule(const Node& node) {
  const OperatorRecord* record = find_operator(node.op, node.domain);
  if (!record) return no_rule("the operator is not in the catalogue");
  if (!record->factors) return no_rule("the operator has no factor rule");
  try {
    return record->factors(node);
  } catch (const NoRule& reason) {
    return no_rule(reason.why);
  } catch (const std::exception& e) {  // an attribute of a wrong type, a rank that does not fit
    return no_rule(e.what());
  }
}

std::string to_string(const FactorRule& rule) {
  if (!rule.unknown.empty()) return "unknown: " + rule.unknown;
  std::string s;
  for (size_t i = 0; i < rule.inputs.size(); ++i) s += (i ? ", " : "") + text_of(rule, rule.inputs[i]);
  s += " -> ";
  for (size_t i = 0; i < rule.outputs.size(); ++i) s += (i ? ", " : "") + text_of(rule, rule.outputs[i]);
  auto list = [&](const char* label, auto wanted) {
    std::string names;
    for (const Factor& f : rule.factors)
      if (wanted(f)) names += " " + f.name;
    if (!names.empty()) s += std::string(" | ") + label + names;
  };
  list("sum", [](const Factor& f) { return f.kind == Factor::Kind::sum; });
  list("whole", [](const Factor& f) { return f.kind == Factor::Kind::whole; });
  list("halo", [](const Factor& f) { return f.kind == Factor::Kind::halo; });
  list("repeated", [](const Factor& f) { return f.repeated; });
  return s;
}

}  // namespace fretsaw
