// Reductions over axes: the rows of elementwise.inc, ArgMax and ArgMin.
#include <algorithm>
#include <unordered_map>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

using Kind = Factor::Kind;

// `axes` holds each axis once.
FactorRule reduce(const Node& node, const std::vector<size_t>& axes, bool keep, Kind kind) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  auto reduced = [&](size_t d) { return std::find(axes.begin(), axes.end(), d) != axes.end(); };
  rule.out_rank(0, keep ? rank : rank - axes.size());
  size_t o = 0;
  for (size_t d = 0; d < rank; ++d) {
    if (reduced(d)) {
      rule.from(0, d, kind, "r" + std::to_string(d));
      if (keep) ++o;
      continue;
    }
    int f = rule.from(0, d, Kind::parallel, "i" + std::to_string(d));
    if (f >= 0) rule.out(0, o, f);
    ++o;
  }
  return rule.done();
}

FactorRule reduction_factors(const Node& node) {
  RuleBuilder rule(node);
  size_t rank = rule.rank(0);
  auto axes = axes_of(node, 1, "axes", rank);
  std::vector<size_t> over;
  if (axes && !axes->empty()) {
    over = *axes;
    std::sort(over.begin(), over.end());
    over.erase(std::unique(over.begin(), over.end()), over.end());
  } else if (node.get_int("noop_with_empty_axes", 0) == 0) {
    for (size_t d = 0; d < rank; ++d) over.push_back(d);
  }
  // Only sums of partial results are the result; a mean, a maximum and the others need all of the axis.
  bool additive = node.op == "ReduceSum" || node.op == "ReduceSumSquare" || node.op == "ReduceL1";
  FactorRule reduced = reduce(node, over, node.get_int("keepdims", 1) != 0, additive ? Kind::sum : Kind::whole);
  for (Factor& f : reduced.factors) {
    if (f.kind != Kind::whole) continue;
    if (node.op == "ReduceMean") f.when_cut = Factor::WhenCut::averaged;
    if (node.op == "ReduceMax" || node.op == "ReduceMin") f.when_cut = Factor::WhenCut::combined;
  }
  reduced.exchanges = 1;
  return reduced;
}

FactorRule arg_factors(const Node& node) {
  RuleBuilder rule(node);
  FactorRule reduced = reduce(node, {axis_of(node.get_int("axis", 0), rule.rank(0))}, node.get_int("keepdims", 1) != 0, Kind::whole);
  for (Factor& f : reduced.factors)
    if (f.kind == Kind::whole) f.when_cut = Factor::WhenCut::combined;
  reduced.exchanges = 2;
  return reduced;
}

}  // namespace

std::vector<OperatorRecord> reduction_operators() {
  static const std::unordered_map<std::string, int> since = {
      {"ReduceSum", 13}, {"ReduceMin", 20}, {"ReduceMax", 20}, {"ReduceLogSum", 28}, {"ReduceLogSumExp", 28}};
  std::vector<OperatorRecord> records;
  auto row = [&](const char* name, int version, FactorRule (*factors)(const Node&)) {
    auto it = since.find(name);
    records.push_back({.name = name,
                       .since = it == since.end() ? version : it->second,
                       .role = Role::reduction,
                       .factors = factors,
                       .flops = input_elements});
  };
#define FRETSAW_REDUCTION(name, ...) row(#name, 18, reduction_factors);
#define FRETSAW_REDUCTION_SHIFTED(name, ...) row(#name, 18, reduction_factors);
#include "graph/operators/elementwise.inc"
  for (OperatorRecord& r : records)
    if (r.name == "ReduceSum" || r.name == "ReduceMean") r.linear = Linear::first;
  row("ArgMax", 13, arg_factors);
  row("ArgMin", 13, arg_factors);
  return with_gradients(std::move(records), reduction_gradient);
}

}  // namespace fretsaw
