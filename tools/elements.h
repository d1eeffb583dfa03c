// Elements of tensors of any numeric type as doubles, for comparing, printing and filling.
#pragma once
#include <cstdint>
#include <vector>

#include "graph/types.h"

namespace fretsaw {

// Element `index` of packed data of this type, as a double. Complex numbers count as two elements each. Not for strings.
double element_at(DType type, const void* data, int64_t index);
// Rounds to the nearest value of a float32, float64, float16, bfloat16, integer or boolean type and stores it.
void set_element(DType type, void* data, int64_t index, double value);
// Elements in the sense above: two for each complex number.
int64_t element_count(DType type, const Dims& dims);

}  // namespace fretsaw
