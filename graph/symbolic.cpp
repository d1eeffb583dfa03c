// Polynomials over symbols as canonical text.
#include "graph/symbolic.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <vector>

namespace fretsaw {
namespace {

using Monomial = std::vector<std::string>;       // sorted atoms: {"batch", "heads"}
using Polynomial = std::map<Monomial, int64_t>;  // coefficients, none of them zero

bool identifier(const std::string& s) {
  return !s.empty() && !std::isdigit(static_cast<unsigned char>(s[0])) &&
         std::all_of(s.begin(), s.end(), [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '.' || c == ':'; });
}

void add_term(Polynomial& p, const Monomial& m, int64_t coefficient) {
  int64_t& c = p[m];
  if (__builtin_add_overflow(c, coefficient, &c)) c = 0;
  if (c == 0) p.erase(m);
}

// One product such as "2*batch*heads"; false when it is not of that form.
bool parse_product(const std::string& text, Polynomial& p, int64_t sign) {
  Monomial atoms;
  int64_t coefficient = sign;
  size_t at = 0;
  while (at <= text.size()) {
    size_t star = std::min(text.find('*', at), text.size());
    std::string piece = text.substr(at, star - at);
    if (piece.empty()) return false;
    if (std::all_of(piece.begin(), piece.end(), [](unsigned char c) { return std::isdigit(c); }) && piece.size() < 18) {
      if (__builtin_mul_overflow(coefficient, std::stoll(piece), &coefficient)) return false;
    } else if (identifier(piece)) {
      atoms.push_back(piece);
    } else {
      return false;
    }
    at = star + 1;
  }
  std::sort(atoms.begin(), atoms.end());
  add_term(p, atoms, coefficient);
  return true;
}

Polynomial parse(const std::string& text) {
  Polynomial p;
  size_t at = 0;
  int64_t sign = 1;
  if (!text.empty() && text[0] == '-') {
    sign = -1;
    at = 1;
  }
  while (true) {
    size_t end = std::min(text.find_first_of("+-", at), text.size());
    if (!parse_product(text.substr(at, end - at), p, sign)) return {{{text}, 1}};  // one opaque atom
    if (end == text.size()) return p;
    sign = text[end] == '-' ? -1 : 1;
    at = end + 1;
  }
}

std::string print(const Polynomial& p) {
  if (p.empty()) return "0";
  std::string text;
  auto put = [&](const Monomial& m, int64_t c) {
    if (c < 0) text += '-';
    if (c > 0 && !text.empty()) text += '+';
    std::string digits = std::to_string(c);
    if (c < 0) digits.erase(0, 1);
    bool number = m.empty() || digits != "1";
    if (number) text += digits;
    for (size_t i = 0; i < m.size(); ++i) text += (i || number ? "*" : "") + m[i];
  };
  for (const auto& [m, c] : p)
    if (!m.empty()) put(m, c);
  if (auto it = p.find({}); it != p.end()) put({}, it->second);
  return text;
}

std::string text_of(const Dim& d) {
  return d.known() ? std::to_string(d.value) : d.symbol;
}

Dim dim_of(const std::string& text) {
  if (text.empty()) return {};
  if (auto n = symbolic_number(text)) return *n >= 0 ? Dim(*n) : Dim();
  return Dim(text);
}

}  // namespace

std::optional<int64_t> symbolic_number(const std::string& text) {
  if (text.empty() || text.size() > 18) return std::nullopt;
  size_t start = text[0] == '-' ? 1 : 0;
  if (start == text.size() ||
      !std::all_of(text.begin() + static_cast<long>(start), text.end(), [](unsigned char c) { return std::isdigit(c); }))
    return std::nullopt;
  return std::stoll(text);
}

std::string symbolic_add(const std::string& a, const std::string& b, int64_t sign) {
  if (a.empty() || b.empty()) return "";
  Polynomial p = parse(a);
  for (const auto& [m, c] : parse(b)) add_term(p, m, c * sign);
  return print(p);
}

std::string symbolic_mul(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return "";
  Polynomial p, pa = parse(a), pb = parse(b);
  if (pa.size() * pb.size() > 64) return "";
  for (const auto& [ma, ca] : pa)
    for (const auto& [mb, cb] : pb) {
      Monomial m = ma;
      m.insert(m.end(), mb.begin(), mb.end());
      std::sort(m.begin(), m.end());
      int64_t c;
      if (__builtin_mul_overflow(ca, cb, &c)) return "";
      add_term(p, m, c);
    }
  return print(p);
}

std::string symbolic_divide(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return "";
  Polynomial pa = parse(a), pb = parse(b), result;
  if (pb.empty()) return "";
  if (pa.empty()) return "0";
  if (pa == pb) return "1";
  if (pb.size() != 1) return "";  // dividing by a sum is left alone
  const auto& [divisor, coefficient] = *pb.begin();
  for (const auto& [m, c] : pa) {
    if (c % coefficient != 0 || !std::includes(m.begin(), m.end(), divisor.begin(), divisor.end())) return "";
    Monomial rest;
    std::set_difference(m.begin(), m.end(), divisor.begin(), divisor.end(), std::back_inserter(rest));
    add_term(result, rest, c / coefficient);
  }
  return print(result);
}

Dim dim_add(const Dim& a, const Dim& b) {
  if (a.known() && b.known()) return a.value + b.value;
  return dim_of(symbolic_add(text_of(a), text_of(b), 1));
}

Dim dim_sub(const Dim& a, const Dim& b) {
  return dim_of(symbolic_add(text_of(a), text_of(b), -1));
}

Dim dim_mul(const Dim& a, const Dim& b) {
  if (a.known() && b.known()) {
    int64_t product;
    return __builtin_mul_overflow(a.value, b.value, &product) ? Dim() : Dim(product);
  }
  if ((a.known() && a.value == 0) || (b.known() && b.value == 0)) return 0;
  return dim_of(symbolic_mul(text_of(a), text_of(b)));
}

std::optional<Dim> dim_divide(const Dim& a, const Dim& b) {
  if (a.known() && b.known()) {
    if (b.value == 0 || a.value % b.value != 0) return std::nullopt;
    return Dim(a.value / b.value);
  }
  Dim d = dim_of(symbolic_divide(text_of(a), text_of(b)));
  if (!d.known() && d.symbol.empty()) return std::nullopt;
  return d;
}

Dim dim_product(const Shape& shape, size_t first, size_t last) {
  Dim product = 1;
  for (size_t i = first; i < std::min(last, shape.size()); ++i) product = dim_mul(product, shape[i]);
  return product;
}

}  // namespace fretsaw
