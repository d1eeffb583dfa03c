// Lets a kernel written for float32 serve float16 and bfloat16: inputs are widened before it and outputs rounded after it.
#pragma once
#include <functional>

#include "kernels/kernel.h"

namespace fretsaw {

using KernelMaker = CompiledKernel (*)(const CompileContext&);

// True when input `i` (0: the first) is of a 16-bit float.
bool is_half_float(DType type);
// The kernel that `make` gives for the same node with float32 in place of 16-bit floats, with conversions around it.
CompiledKernel through_float(const CompileContext& c, KernelMaker make);
// `make` itself, or through_float where an input or output is of a 16-bit float.
CompiledKernel make_any_float(const CompileContext& c, KernelMaker make);
// The same as a maker, for records.
template <KernelMaker make>
CompiledKernel any_float(const CompileContext& c) {
  return make_any_float(c, make);
}

}  // namespace fretsaw
