// Comparing values: how far a result is from its reference, and whether that is near enough.
#pragma once
#include <optional>
#include <string>

#include "kernels/tensor_view.h"

namespace fretsaw {

// A difference is fine when |a - b| <= atol + rtol * |b| everywhere or, when range_tol is given, when |a - b| <= range_tol * max|b|.
// NaN only where the reference has NaN, infinities only where it has the same. Integers and booleans must be equal unless a tolerance
// is given, strings always.
struct Tolerance {
  std::optional<double> rtol, atol;  // unset: by type; 1e-4 and 1e-5 in float32, wider in half precision
  std::optional<double> range_tol;
};
struct Difference {
  bool ok = true;
  double max_abs = 0, max_rel = 0, over_range = 0;  // over_range: max|a - b| / max|b|. NaN: types or shapes differ
  std::string why;                                  // when not ok: "shape [2] for [3]", "values differ"
};
Difference compare(const RuntimeValue& got, const RuntimeValue& want, const Tolerance& tolerance);
// The worse of two, for an output compared with two references.
Difference worse(const Difference& a, const Difference& b);

}  // namespace fretsaw
