// Attention and rotary embeddings.
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

void register_attention(KernelRegistry&) {}

}  // namespace fretsaw::cuda
