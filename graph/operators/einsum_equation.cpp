// Takes the equation of an Einsum apart.
#include "graph/operators/einsum_equation.h"

#include <algorithm>
#include <map>

namespace fretsaw {
namespace {

EinsumTerm parse_term(const std::string& text) {
  EinsumTerm t;
  size_t dots = text.find("...");
  t.ellipsis = dots != std::string::npos;
  t.before = text.substr(0, dots);
  if (t.ellipsis) t.after = text.substr(dots + 3);
  return t;
}

std::vector<std::string> split_text(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == separator)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

}  // namespace

EinsumEquation parse_einsum(std::string text) {
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  size_t arrow = text.find("->");
  EinsumEquation e;
  bool ellipsis = false;
  std::map<char, int> uses;
  for (const std::string& part : split_text(text.substr(0, arrow), ',')) {
    e.terms.push_back(parse_term(part));
    ellipsis |= e.terms.back().ellipsis;
    for (char c : e.terms.back().before + e.terms.back().after) ++uses[c];
  }
  if (arrow != std::string::npos) {
    e.result = parse_term(text.substr(arrow + 2));
  } else {
    e.result.ellipsis = ellipsis;
    for (auto [label, n] : uses)
      if (n == 1) (ellipsis ? e.result.after : e.result.before) += label;
  }
  return e;
}

}  // namespace fretsaw
