// Operators that read or write where indexes say.
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

void register_indexing(KernelRegistry&) {}

}  // namespace fretsaw::cuda
