// What the files of the pooling family share.
#pragma once
#include <string>

#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

enum class PoolKind { max, average, lp };

// The layout that a pooling takes: nhwc where its producer leaves that, else plain.
inline Layout offered_layout(const CompileContext& c) {
  return !c.offered.empty() && c.offered[0] == Layout::nhwc ? Layout::nhwc : Layout::plain;
}

void register_global_pooling(KernelRegistry& registry);  // GlobalAveragePool, GlobalMaxPool, GlobalLpPool

}  // namespace fretsaw::cuda
