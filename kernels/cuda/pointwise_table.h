// The rows of graph/operators/elementwise.inc as text, for printing.
#pragma once
#include <span>
#include <string_view>

#include "kernels/cpu/scalar_types.h"

namespace fretsaw::cuda {

// Unused members are "" or 0.
struct PointRow {
  enum class Kind : uint8_t { unary, test, binary, comparison, mixed, variadic, ternary };
  Kind kind;
  const char* op;
  TypeSet types;
  const char *expression, *second;  // second: where the attribute `choice` has its second value; a variadic row's `finish`
  const char *a_name = "", *b_name = "";
  double a = 0, b = 0;  // where the attributes are left out
  const char *choice = "", *choice1 = "", *choice2 = "";
};
const PointRow* point_row(std::string_view op);  // null for other operators
std::span<const PointRow> point_rows();

// A reduction: `term` of each x is folded by Add, Multiply, Smaller or Larger into z, then `finish`.
struct ReductionRow {
  const char *op, *fold, *term, *finish;
  bool shifted;  // the maximum is subtracted first and added to the result
};
const ReductionRow* reduction_row(std::string_view op);
std::span<const ReductionRow> reduction_rows();

}  // namespace fretsaw::cuda
