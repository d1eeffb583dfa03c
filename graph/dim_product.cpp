// Products of a number and symbols: parsing, multiplication, exact division.
#include "graph/dim_product.h"

#include <algorithm>
#include <numeric>

namespace fretsaw {
namespace {

bool is_number(const std::string& s) {
  return !s.empty() && s.size() < 18 && std::all_of(s.begin(), s.end(), [](char c) { return c >= '0' && c <= '9'; });
}

constexpr const char* kArithmetic = "+-/% ,*";

// The parts of "a*4*(b+c)"; just the text itself where it is anything but a plain product.
std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (char c : text) {
    if (c == '(') ++depth;
    if (c == ')') --depth;
    if (depth == 0 && c == '*') {
      parts.emplace_back();
      continue;
    }
    if (depth < 0 || (depth == 0 && std::string("+-/% ,").find(c) != std::string::npos)) return {text};
    parts.back() += c;
  }
  if (depth != 0) return {text};
  for (std::string& part : parts) {
    if (part.empty()) return {text};
    bool wrapped = part.size() > 2 && part.front() == '(' && part.find(')') == part.size() - 1;
    if (wrapped) part = part.substr(1, part.size() - 2);
  }
  return parts;
}

}  // namespace

DimProduct::DimProduct(const std::string& symbol) {
  for (std::string& part : parts_of(symbol)) {
    if (::fretsaw::is_number(part))
      number *= std::stoll(part);
    else
      symbols.push_back(std::move(part));
  }
  std::sort(symbols.begin(), symbols.end());
}

std::optional<DimProduct> product_of(const Dim& dim) {
  if (dim.known()) return DimProduct(dim.value);
  if (dim.symbol.empty()) return std::nullopt;
  return DimProduct(dim.symbol);
}

std::string to_string(const DimProduct& product) {
  if (product.symbols.empty()) return std::to_string(product.number);
  std::string s = product.number == 1 ? "" : std::to_string(product.number);
  bool alone = product.number == 1 && product.symbols.size() == 1;
  for (const std::string& symbol : product.symbols) {
    bool wrap = !alone && symbol.find_first_of(kArithmetic) != std::string::npos;
    s += (s.empty() ? "" : "*") + (wrap ? "(" + symbol + ")" : symbol);
  }
  return s;
}

Dim dim_of(const DimProduct& product) {
  if (product.symbols.empty() || product.number == 0) return Dim(product.number);
  return Dim(to_string(product));
}

DimProduct operator*(const DimProduct& a, const DimProduct& b) {
  DimProduct result;
  if (__builtin_mul_overflow(a.number, b.number, &result.number)) return DimProduct(std::string("overflow"));
  std::merge(a.symbols.begin(), a.symbols.end(), b.symbols.begin(), b.symbols.end(), std::back_inserter(result.symbols));
  return result;
}

std::optional<DimProduct> quotient(const DimProduct& a, const DimProduct& b) {
  if (b.number == 0 || a.number % b.number != 0) return std::nullopt;
  if (!std::includes(a.symbols.begin(), a.symbols.end(), b.symbols.begin(), b.symbols.end())) return std::nullopt;
  DimProduct result(a.number / b.number);
  std::set_difference(a.symbols.begin(), a.symbols.end(), b.symbols.begin(), b.symbols.end(), std::back_inserter(result.symbols));
  return result;
}

DimProduct common_divisor(const DimProduct& a, const DimProduct& b) {
  DimProduct result(std::gcd(a.number, b.number));
  std::set_intersection(a.symbols.begin(), a.symbols.end(), b.symbols.begin(), b.symbols.end(), std::back_inserter(result.symbols));
  return result;
}

}  // namespace fretsaw
