// Arithmetic on symbolic dimensions: polynomials over symbols, kept as canonical text ("2*batch*heads", "past+seq").
#pragma once
#include <optional>
#include <string>

#include "graph/types.h"

namespace fretsaw {

// Known numbers and symbols combine; anything with an unknown dimension is unknown. A symbol that is no expression of
// identifiers, numbers, + - and * is one opaque atom.
Dim dim_add(const Dim& a, const Dim& b);
Dim dim_sub(const Dim& a, const Dim& b);  // unknown when the result would be a negative number
Dim dim_mul(const Dim& a, const Dim& b);
std::optional<Dim> dim_divide(const Dim& a, const Dim& b);  // exact quotients only: 2*batch / batch = 2
// The number of elements of a shape; unknown when a dimension is.
Dim dim_product(const Shape& shape, size_t first = 0, size_t last = SIZE_MAX);

// The same on texts, for elements that may be negative: "" means unknown.
std::string symbolic_add(const std::string& a, const std::string& b, int64_t sign);
std::string symbolic_mul(const std::string& a, const std::string& b);
std::string symbolic_divide(const std::string& a, const std::string& b);  // "" when not exact
// The number that a canonical text is, if it is one.
std::optional<int64_t> symbolic_number(const std::string& text);

}  // namespace fretsaw
