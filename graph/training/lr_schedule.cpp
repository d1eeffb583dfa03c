// Learning rates.
#include "graph/training/lr_schedule.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <numbers>

#include "graph/training/spec.h"

namespace fretsaw {
namespace {

using Kind = LrSchedule::Kind;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct KindRow {
  std::string_view name;
  Kind kind;
  std::vector<std::string_view> keys;
};
const std::vector<KindRow>& kinds() {
  static const std::vector<KindRow> rows = {{"constant", Kind::constant, {"lr", "peak", "warmup"}},
                                            {"linear", Kind::linear, {"lr", "peak", "warmup", "total", "final"}},
                                            {"cosine", Kind::cosine, {"lr", "peak", "warmup", "total", "final"}},
                                            {"step", Kind::step, {"lr", "peak", "warmup", "every", "milestones", "factor"}}};
  return rows;
}

// "30|60|80", ascending.
std::vector<int64_t> parse_milestones(const Spec& spec, const std::string& value) {
  std::vector<int64_t> steps;
  for (size_t from = 0; from <= value.size();) {
    const size_t end = std::min(value.find('|', from), value.size());
    steps.push_back(spec_integer(spec, "milestones", value.substr(from, end - from), 1));
    if (steps.size() > 1 && steps.back() <= steps[steps.size() - 2])
      spec.fail("the milestones do not ascend", "write them as milestones=30|60|80");
    from = end + 1;
  }
  return steps;
}

void take(LrSchedule& schedule, const Spec& spec, const std::string& key, const std::string& value) {
  if (key == "lr" || key == "peak") schedule.peak = spec_number(spec, key, value, 0, kInfinity);
  if (key == "final") schedule.final = spec_number(spec, key, value, 0, kInfinity);
  if (key == "factor") schedule.factor = spec_number(spec, key, value, 0, kInfinity);
  if (key == "warmup") schedule.warmup = spec_integer(spec, key, value, 0);
  if (key == "total") schedule.total = spec_integer(spec, key, value, 1);
  if (key == "every") schedule.every = spec_integer(spec, key, value, 1);
  if (key == "milestones") schedule.milestones = parse_milestones(spec, value);
}

void check(const LrSchedule& schedule, const Spec& spec) {
  if (schedule.kind == Kind::step && (schedule.every > 0) == !schedule.milestones.empty())
    spec.fail("a schedule of steps has one of 'every' and 'milestones'", "write step:every=30,factor=0.1");
  if (schedule.kind != Kind::linear && schedule.kind != Kind::cosine) return;
  if (schedule.total == 0) spec.fail("the number of steps is not known", "add total=N, or --steps");
  if (schedule.warmup >= schedule.total)
    spec.fail("the warm-up is as long as the schedule or longer", "choose warmup below " + std::to_string(schedule.total));
}

double decayed(const LrSchedule& s, int64_t step) {
  switch (s.kind) {
    case Kind::constant:
      return s.peak;
    case Kind::step: {
      const int64_t times =
          s.every > 0 ? step / s.every : std::upper_bound(s.milestones.begin(), s.milestones.end(), step) - s.milestones.begin();
      return s.peak * std::pow(s.factor, static_cast<double>(times));
    }
    case Kind::linear:
    case Kind::cosine:
      break;
  }
  if (step >= s.total) return s.final;
  const double p = static_cast<double>(step - s.warmup) / static_cast<double>(s.total - s.warmup);
  if (s.kind == Kind::linear) return s.peak + (s.final - s.peak) * p;
  return s.final + (s.peak - s.final) * (1 + std::cos(std::numbers::pi * p)) / 2;
}

}  // namespace

double LrSchedule::at(int64_t step) const {
  if (step >= warmup) return decayed(*this, step);
  return decayed(*this, warmup) * static_cast<double>(step + 1) / static_cast<double>(warmup + 1);
}

LrSchedule parse_lr_schedule(const std::string& text, const LrDefaults& defaults) {
  LrSchedule schedule;
  schedule.peak = defaults.lr;
  if (text.empty()) return schedule;
  Spec spec = Spec::parse("--lr", text);
  if (std::isdigit(static_cast<unsigned char>(text[0])) || text[0] == '.') {
    schedule.peak = spec_number(spec, "lr", text, 0, kInfinity);
    return schedule;
  }
  const auto row = std::find_if(kinds().begin(), kinds().end(), [&](const KindRow& r) { return r.name == spec.kind; });
  if (row == kinds().end()) spec.fail("there is no such schedule", "allowed: a number, constant, linear, cosine, step");
  schedule.kind = row->kind;
  spec.read_settings(row->keys);
  if (row->kind == Kind::linear || row->kind == Kind::cosine) schedule.total = defaults.steps;
  for (const auto& [key, value] : spec.settings) take(schedule, spec, key, value);
  check(schedule, spec);
  return schedule;
}

}  // namespace fretsaw
