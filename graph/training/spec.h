// What --loss, --optimizer and --lr are written in: "KIND" or "KIND:KEY=VALUE,KEY=VALUE".
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fretsaw {

// All of these throw Error of code usage that names the option and what is allowed.
struct Spec {
  std::string option;                                           // "--loss"
  std::string text;                                             // as it was given
  std::string kind;                                             // before the first ':'
  std::string rest;                                             // after it
  std::vector<std::pair<std::string, std::string>> settings{};  // of `rest`, in order; each key once unless it `may_repeat`

  // Cuts at the first ':'. `settings` are empty until read_settings.
  static Spec parse(std::string option, const std::string& text);
  // Fills `settings` from `rest`: keys that are in none of the lists, keys without a value and keys given twice are errors.
  // A key of `patterned` may be followed by "@PATTERN" and may repeat: "weight_decay@*.bias=0".
  void read_settings(const std::vector<std::string_view>& keys, const std::vector<std::string_view>& patterned = {});

  [[noreturn]] void fail(const std::string& problem, const std::string& remedy = "") const;
};

// Numbers of one setting, within [least, most]. "nan" and "inf" are no numbers here.
double spec_number(const Spec& spec, const std::string& key, const std::string& value, double least, double most);
int64_t spec_integer(const Spec& spec, const std::string& key, const std::string& value, int64_t least = INT64_MIN);
bool spec_flag(const Spec& spec, const std::string& key, const std::string& value);  // 0, 1, true, false

}  // namespace fretsaw
