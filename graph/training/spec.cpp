// "KIND:KEY=VALUE,KEY=VALUE".
#include "graph/training/spec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "graph/errors.h"

namespace fretsaw {
namespace {

bool holds(const std::vector<std::string_view>& keys, std::string_view key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

// The whole text as a number of type T.
template <typename T>
bool parse_number(const std::string& text, T& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

Spec Spec::parse(std::string option, const std::string& text) {
  Spec spec{.option = std::move(option), .text = text, .kind = {}, .rest = {}};
  const size_t colon = text.find(':');
  spec.kind = text.substr(0, colon);
  if (colon == std::string::npos) return spec;
  spec.rest = text.substr(colon + 1);
  if (spec.rest.empty()) spec.fail("nothing follows the ':'", "write '" + spec.kind + "' or '" + spec.kind + ":KEY=VALUE'");
  return spec;
}

void Spec::read_settings(const std::vector<std::string_view>& keys, const std::vector<std::string_view>& patterned) {
  for (size_t from = 0; !rest.empty() && from <= rest.size();) {
    const size_t end = std::min(rest.find(',', from), rest.size());
    const std::string setting = rest.substr(from, end - from);
    from = end + 1;
    const size_t at = setting.rfind('=');  // a pattern may hold one
    const std::string key = setting.substr(0, at);
    const size_t sign = key.find('@');
    const bool with_pattern = sign != std::string::npos && holds(patterned, key.substr(0, sign));
    if (!with_pattern && !holds(keys, key))
      fail("there is no setting '" + key + "' of '" + kind + "'",
           keys.empty() ? "it takes none" : fmt::format("allowed: {}", fmt::join(keys, ", ")));
    if (at == std::string::npos || at + 1 == setting.size()) fail("the setting '" + key + "' has no value", "write " + key + "=VALUE");
    for (const auto& [other, value] : settings)
      if (!with_pattern && other == key) fail("the setting '" + key + "' is given twice");
    settings.emplace_back(key, setting.substr(at + 1));
  }
}

void Spec::fail(const std::string& problem, const std::string& remedy) const {
  throw Error(option + " " + text + ": " + problem, remedy, ErrorCode::usage);
}

double spec_number(const Spec& spec, const std::string& key, const std::string& value, double least, double most) {
  double number = 0;
  if (!parse_number(value, number) || !std::isfinite(number)) spec.fail("'" + value + "' is not a number for '" + key + "'");
  if (number < least || number > most)
    spec.fail(fmt::format("{}={} is out of range", key, value),
              std::isinf(most) ? fmt::format("it must be at least {}", least) : fmt::format("it lies between {} and {}", least, most));
  return number;
}

int64_t spec_integer(const Spec& spec, const std::string& key, const std::string& value, int64_t least) {
  int64_t number = 0;
  if (!parse_number(value, number)) spec.fail("'" + value + "' is not a whole number for '" + key + "'");
  if (number < least) spec.fail(fmt::format("{}={} is out of range", key, value), fmt::format("it must be at least {}", least));
  return number;
}

bool spec_flag(const Spec& spec, const std::string& key, const std::string& value) {
  if (value == "1" || value == "true") return true;
  if (value == "0" || value == "false") return false;
  spec.fail("'" + value + "' is neither yes nor no for '" + key + "'", "write " + key + "=1 or " + key + "=0");
}

}  // namespace fretsaw
