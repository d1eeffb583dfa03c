// The CUDA text that stands before every kernel that is made for a step.
#pragma once
#include <string>

namespace fretsaw::cuda {

// Element types, and the functions that the table's expressions call.
extern const char* const pointwise_functions;
// Wide memory accesses, divisions by sizes that are known when a kernel starts, and folds over the threads of a row.
extern const char* const pointwise_accesses;

}  // namespace fretsaw::cuda
