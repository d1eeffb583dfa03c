// Patterns of names.
#include "graph/training/name_pattern.h"

#include <algorithm>

#include "graph/errors.h"

namespace fretsaw {

bool matches_pattern(std::string_view pattern, std::string_view name) {
  size_t p = 0, n = 0;
  size_t star = std::string_view::npos, resume = 0;  // after a '*': where it stands, and where what follows it was tried last
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

std::vector<std::string> split_patterns(const std::string& text) {
  std::vector<std::string> patterns;
  for (size_t from = 0; from <= text.size();) {
    const size_t end = std::min(text.find('|', from), text.size());
    patterns.push_back(text.substr(from, end - from));
    if (patterns.back().empty())
      throw Error("the name pattern '" + text + "' has an empty part", "write patterns as '*.bias|*.norm.*'", ErrorCode::usage);
    from = end + 1;
  }
  return patterns;
}

bool matches_any(const std::vector<std::string>& patterns, std::string_view name) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& p) { return matches_pattern(p, name); });
}

}  // namespace fretsaw
