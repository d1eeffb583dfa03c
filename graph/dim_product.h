// Dimensions as products of a number and symbols, so that "batch*16" over "batch" is 16.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "graph/types.h"

namespace fretsaw {

struct DimProduct {
  int64_t number = 1;
  std::vector<std::string> symbols;  // sorted; one that occurs twice stands twice

  DimProduct() = default;
  DimProduct(int64_t n) : number(n) {}             // NOLINT: a number is a product
  explicit DimProduct(const std::string& symbol);  // "batch", "4*batch*seq"; sums and quotients stay one symbol
  bool operator==(const DimProduct&) const = default;
  bool is_number() const { return symbols.empty(); }
  bool is_one() const { return number == 1 && symbols.empty(); }
};

// nullopt for a dimension of which nothing is known.
std::optional<DimProduct> product_of(const Dim& dim);
Dim dim_of(const DimProduct& product);
DimProduct operator*(const DimProduct& a, const DimProduct& b);
// a / b when b divides a for every value of the symbols; nullopt otherwise, and where b is 0.
std::optional<DimProduct> quotient(const DimProduct& a, const DimProduct& b);
DimProduct common_divisor(const DimProduct& a, const DimProduct& b);  // the greatest
std::string to_string(const DimProduct& product);

}  // namespace fretsaw
