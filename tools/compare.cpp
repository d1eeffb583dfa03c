// Comparing values: how far a result is from its reference, and whether that is near enough.
#include "tools/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tools/elements.h"
#include "tools/value_files.h"

namespace fretsaw {
namespace {

struct Limits {
  double rtol, atol;
};

// Half-precision results of two correct programs differ by a few units in the last place after a sum.
Limits default_limits(DType type) {
  switch (type) {
    case DType::float16:
      return {1e-2, 1e-3};
    case DType::bfloat16:
      return {5e-2, 1e-2};
    default:
      return {1e-4, 1e-5};
  }
}

bool has_tolerance(DType type) {
  return is_float(type) || type == DType::complex64 || type == DType::complex128;
}

Difference failed(const std::string& why) {
  Difference difference;
  difference.ok = false;
  difference.why = why;
  return difference;
}

// Values that are not of one type and shape have no distance.
Difference incomparable(const std::string& why) {
  Difference difference = failed(why);
  difference.max_abs = difference.max_rel = difference.over_range = std::numeric_limits<double>::quiet_NaN();
  return difference;
}

double larger(double a, double b) {
  return std::isnan(a) || b < a ? a : b;
}

Difference compare_strings(const TensorView& got, const TensorView& want) {
  for (int64_t i = 0; i < got.count(); ++i)
    if (got.as<std::string>()[i] != want.as<std::string>()[i]) return failed(fmt::format("string {} differs", i));
  return {};
}

// Both of one type and shape.
Difference compare_numbers(const TensorView& got, const TensorView& want, const Tolerance& tolerance) {
  const DType type = want.dtype;
  const int64_t count = element_count(type, want.dims);
  if (count == 0) return {};
  double range = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double b = element_at(type, want.data, i);
    if (std::isfinite(b)) range = std::max(range, std::fabs(b));
  }
  Limits limits = has_tolerance(type) ? default_limits(type) : Limits{0, 0};
  limits = {tolerance.rtol.value_or(limits.rtol), tolerance.atol.value_or(limits.atol)};
  Difference difference;
  for (int64_t i = 0; i < count; ++i) {
    const double a = element_at(type, got.data, i), b = element_at(type, want.data, i);
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    if (!std::isfinite(a) || !std::isfinite(b)) {
      difference.ok = false;
      if (difference.why.empty()) difference.why = fmt::format("element {} is {} for {}", i, a, b);
      continue;
    }
    const double d = std::fabs(a - b);
    difference.max_abs = std::max(difference.max_abs, d);
    if (b != 0) difference.max_rel = std::max(difference.max_rel, d / std::fabs(b));
    const double bound = tolerance.range_tol ? *tolerance.range_tol * range : limits.atol + limits.rtol * std::fabs(b);
    if (d > bound) {
      difference.ok = false;
      if (difference.why.empty()) difference.why = fmt::format("element {} is {:.9g} for {:.9g}", i, a, b);
    }
  }
  // Beyond 2^53 a double can't tell neighbouring integers apart.
  const bool exact = !has_tolerance(type) && !tolerance.rtol && !tolerance.atol && !tolerance.range_tol;
  if (exact && difference.ok && bits_of(type) == 64 && std::memcmp(got.data, want.data, got.bytes()) != 0)
    return failed("large integers differ");
  difference.over_range = range > 0 ? difference.max_abs / range : difference.max_abs > 0 ? 1 : 0;
  return difference;
}

Difference compare_tensors(const TensorView& got, const TensorView& want, const Tolerance& tolerance) {
  if (got.dtype != want.dtype) return incomparable(fmt::format("type {} for {}", name_of(got.dtype), name_of(want.dtype)));
  if (got.dims != want.dims) return incomparable("shape " + to_string(got.dims) + " for " + to_string(want.dims));
  if (got.dtype == DType::string) return compare_strings(got, want);
  return compare_numbers(got, want, tolerance);
}

}  // namespace

Difference worse(const Difference& a, const Difference& b) {
  Difference out;
  out.ok = a.ok && b.ok;
  out.max_abs = larger(a.max_abs, b.max_abs);
  out.max_rel = larger(a.max_rel, b.max_rel);
  out.over_range = larger(a.over_range, b.over_range);
  out.why = a.why.empty() ? b.why : a.why;
  return out;
}

Difference compare(const RuntimeValue& got, const RuntimeValue& want, const Tolerance& tolerance) {
  using Kind = RuntimeValue::Kind;
  if (got.kind != want.kind) return incomparable(describe(got) + " for " + describe(want));
  if (got.kind == Kind::absent) return {};
  if (got.kind == Kind::tensor) return compare_tensors(got.tensor, want.tensor, tolerance);
  if (got.items.size() != want.items.size()) return incomparable(describe(got) + " for " + describe(want));
  Difference all;
  for (size_t i = 0; i < got.items.size(); ++i) {
    Difference one = compare(got.items[i], want.items[i], tolerance);
    if (!one.ok) one.why = fmt::format("item {}: {}", i, one.why);
    all = worse(all, one);
  }
  return all;
}

}  // namespace fretsaw
