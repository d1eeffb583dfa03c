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

namespace {

// How many characters of the name have to be put in, left out or changed to make the pattern's own ones of it.
size_t distance(std::string_view pattern, std::string_view name) {
  std::vector<size_t> row(name.size() + 1);
  for (size_t n = 0; n <= name.size(); ++n) row[n] = n;
  for (size_t p = 0; p < pattern.size(); ++p) {
    size_t diagonal = row[0];
    row[0] = p + 1;
    for (size_t n = 0; n < name.size(); ++n) {
      const size_t changed = diagonal + (pattern[p] != name[n]);
      diagonal = row[n + 1];
      row[n + 1] = std::min({changed, diagonal + 1, row[n] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string similar_names(std::string_view pattern, const std::vector<std::string>& names) {
  std::string own(pattern);
  std::erase(own, '*');
  std::vector<std::pair<size_t, const std::string*>> found;
  for (const std::string& name : names) found.emplace_back(distance(own, name), &name);
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string text;
  constexpr size_t kShown = 3;
  for (size_t i = 0; i < std::min(found.size(), kShown); ++i) text += (i ? ", '" : "'") + *found[i].second + "'";
  return text;
}

bool matches_any(const std::vector<std::string>& patterns, std::string_view name) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& p) { return matches_pattern(p, name); });
}

}  // namespace fretsaw
