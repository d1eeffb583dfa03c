// What the files of the attention family share.
#pragma once
#include "kernels/kernel.h"

namespace fretsaw {

void register_rotary_embedding(KernelRegistry& registry);
void register_linear_attention(KernelRegistry& registry);

}  // namespace fretsaw
