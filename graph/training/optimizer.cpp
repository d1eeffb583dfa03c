// The option --optimizer.
#include "graph/training/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "graph/training/name_pattern.h"
#include "graph/training/spec.h"

namespace fretsaw {
namespace {

using Kind = OptimizerSpec::Kind;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr char kVectors[] = "1d";

struct KindRow {
  std::string_view name;
  OptimizerSpec absent;  // what a spec without settings is
  std::vector<std::string_view> keys;
};
const std::vector<KindRow>& kinds() {
  static const std::vector<std::string_view> adaptive = {"lr", "beta1", "beta2", "eps", "weight_decay", "no_decay"};
  static const std::vector<KindRow> rows = {
      {"sgd", {.kind = Kind::sgd}, {"lr", "momentum", "dampening", "nesterov", "weight_decay", "no_decay"}},
      {"adam", {.kind = Kind::adam}, adaptive},
      {"adamw", {.kind = Kind::adamw, .weight_decay = 0.01}, adaptive},
      {"lamb", {.kind = Kind::lamb, .eps = 1e-6, .weight_decay = 0.01}, adaptive}};
  return rows;
}

void take(OptimizerSpec& optimizer, const Spec& spec, const std::string& key, const std::string& value) {
  const auto number = [&](double most) { return spec_number(spec, key, value, 0, most); };
  const auto below_one = [&] {
    const double x = number(1);
    if (x == 1) spec.fail(key + "=1 is out of range", "it must be below 1");
    return x;
  };
  if (key == "lr") optimizer.lr = number(kInfinity);
  if (key == "momentum") optimizer.momentum = number(kInfinity);
  if (key == "dampening") optimizer.dampening = number(kInfinity);
  if (key == "nesterov") optimizer.nesterov = spec_flag(spec, key, value);
  if (key == "beta1") optimizer.beta1 = below_one();
  if (key == "beta2") optimizer.beta2 = below_one();
  if (key == "eps") optimizer.eps = number(kInfinity);
  if (key == "weight_decay") optimizer.weight_decay = number(kInfinity);
  if (key.starts_with("weight_decay@")) optimizer.decay_rules.push_back({key.substr(key.find('@') + 1), number(kInfinity)});
  if (key == "no_decay")
    for (const std::string& pattern : split_patterns(value)) optimizer.decay_rules.push_back({pattern, 0});
}

}  // namespace

double OptimizerSpec::weight_decay_of(const std::string& parameter, size_t rank) const {
  double found = weight_decay;
  for (const DecayRule& rule : decay_rules)
    if (rule.pattern == kVectors ? rank <= 1 : matches_pattern(rule.pattern, parameter)) found = rule.weight_decay;
  return found;
}

std::vector<std::string> OptimizerSpec::states() const {
  if (kind != Kind::sgd) return {"exp_avg", "exp_avg_sq"};
  return momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
}

OptimizerSpec parse_optimizer(const std::string& text) {
  Spec spec = Spec::parse("--optimizer", text);
  const auto row = std::find_if(kinds().begin(), kinds().end(), [&](const KindRow& r) { return r.name == spec.kind; });
  if (row == kinds().end())
    spec.fail("there is no such optimizer", "allowed: sgd, adam, adamw, lamb, as in adamw:lr=1e-3,weight_decay=0.01");
  OptimizerSpec optimizer = row->absent;
  spec.read_settings(row->keys, {"weight_decay"});
  for (const auto& [key, value] : spec.settings) take(optimizer, spec, key, value);
  if (optimizer.nesterov && (optimizer.momentum == 0 || optimizer.dampening != 0))
    spec.fail("nesterov needs a momentum and no dampening", "add momentum=0.9");
  return optimizer;
}

double gradient_scale(double squared_sum, double divisor, double clip) {
  const double norm = std::sqrt(squared_sum) / divisor;
  return (clip > 0 ? std::min(1.0, clip / (norm + 1e-6)) : 1.0) / divisor;
}

}  // namespace fretsaw
