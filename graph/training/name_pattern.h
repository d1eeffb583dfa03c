// Patterns of names, as --train, --freeze and weight decay groups take them.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace fretsaw {

// `*` stands for any characters (also none, also '.' and '/'), `?` for one; all others for themselves. The whole name must match.
//
//   "*.bias" matches "fc1.bias", not "fc1.bias_scale"        "h.?.ln*" matches "h.0.ln_1.weight"
bool matches_pattern(std::string_view pattern, std::string_view name);

// "A|B": the patterns between the bars. Throws Error of code usage when one is empty.
std::vector<std::string> split_patterns(const std::string& text);
bool matches_any(const std::vector<std::string>& patterns, std::string_view name);
// The three names that look most like the pattern, for an error: "'a', 'b', 'c'".
std::string similar_names(std::string_view pattern, const std::vector<std::string>& names);

}  // namespace fretsaw
