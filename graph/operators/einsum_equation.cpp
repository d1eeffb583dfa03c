// Takes the equation of an Einsum apart.
#include "graph/operators/einsum_equation.h"

#include <algorithm>
#include <map>

#include "graph/operators/rule_builder.h"

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

namespace {

// The size that dimensions broadcast to.
class Broadcast {
 public:
  void add(const Dim& d) {
    if (d.value == 1) return;
    if (!dim_ || (!dim_->known() && d.known()))
      dim_ = d;
    else if (!dim_->known() && !same_known(*dim_, d))
      dim_ = Dim();
  }
  void add_unknown() { add(Dim()); }
  Dim size() const { return dim_.value_or(Dim(1)); }

 private:
  std::optional<Dim> dim_;
};

}  // namespace

std::optional<Shape> einsum_shape(const EinsumEquation& e, const std::vector<const Shape*>& operands) {
  if (operands.size() != e.terms.size()) return std::nullopt;
  std::map<char, Broadcast> labels;
  std::vector<Broadcast> dots;  // from the last on
  for (size_t i = 0; i < operands.size(); ++i) {
    const EinsumTerm& t = e.terms[i];
    const std::string named = t.before + t.after;
    if (!operands[i]) {
      if (t.ellipsis && e.result.ellipsis) return std::nullopt;
      for (char label : named) labels[label].add_unknown();
      continue;
    }
    const Shape& shape = *operands[i];
    if (shape.size() < named.size() || (!t.ellipsis && shape.size() != named.size())) return std::nullopt;
    const size_t own_dots = shape.size() - named.size();
    dots.resize(std::max(dots.size(), own_dots));
    for (size_t d = 0; d < own_dots; ++d) dots[own_dots - 1 - d].add(shape[t.before.size() + d]);
    for (size_t k = 0; k < named.size(); ++k) labels[named[k]].add(shape[k < t.before.size() ? k : k + own_dots]);
  }
  Shape result;
  for (char label : e.result.before) result.push_back(labels[label].size());
  if (e.result.ellipsis)
    for (size_t d = dots.size(); d-- > 0;) result.push_back(dots[d].size());
  for (char label : e.result.after) result.push_back(labels[label].size());
  return result;
}

}  // namespace fretsaw
