// Reading and writing runs of elements of any numeric type as one wide type.
#pragma once
#include <cstdint>

#include "kernels/cpu/scalar_types.h"

namespace fretsaw {

// What a conversion to a float of 8 bits does; other types take no notice.
struct CastRules {
  bool saturate = true;
  ScaleRounding rounding = ScaleRounding::up;
};

// The type that holds every number of `type`: float32 for small floats, float64, uint64, int64 for the rest (also booleans).
DType wide_type(DType type);

// W is float, double, int64_t or uint64_t. Elements [offset, offset + n) of an array of `type`, packed or not, as W. Numbers that
// W lacks are converted as ONNX's Cast does.
template <typename W>
void load_as(DType type, const void* data, int64_t offset, int64_t n, W* out);
// The reverse. Neighbouring packed elements share a byte: writers in several threads must start at a multiple of 8.
template <typename W>
void store_from(DType type, void* data, int64_t offset, int64_t n, const W* in, const CastRules& rules = {});

}  // namespace fretsaw
