// What the files of the pooling family share.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/cpu/window.h"
#include "kernels/kernel.h"

namespace fretsaw {

// For each output cell of a pooling (spatial, row-major) the input cells under its window, in the order of the window's taps:
// cells[starts[i]] ... cells[starts[i + 1] - 1]. `counts[i]` is their number with the cells that lie in the padding.
struct PoolCells {
  Dims out;
  std::vector<int64_t> starts;
  std::vector<int32_t> cells;
  std::vector<int32_t> counts;
};
PoolCells pool_cells(const Window& window, const Dims& spatial, bool ceil_mode);

void register_window_pooling(KernelRegistry& registry);  // MaxPool, AveragePool, LpPool
void register_global_pooling(KernelRegistry& registry);  // GlobalAveragePool, GlobalMaxPool, GlobalLpPool
void register_unpooling(KernelRegistry& registry);       // MaxUnpool

}  // namespace fretsaw
