// What the files of the pooling family share.
#pragma once
#include <cstdint>
#include <limits>
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

// Of a MaxUnpool node: the shape of the tensor whose elements its indices count, which the window was slid over, and that of its output.
struct UnpoolShapes {
  Dims pooled, out;
};
// Checks X [N, C, D...], of at most `max_rank` dimensions, the indices of the same shape and output_shape [rank].
UnpoolShapes unpool_shapes(RunContext& r, const Node& node, size_t max_rank = std::numeric_limits<size_t>::max());

void register_window_pooling(KernelRegistry& registry);  // MaxPool, AveragePool, LpPool
void register_global_pooling(KernelRegistry& registry);  // GlobalAveragePool, GlobalMaxPool, GlobalLpPool
void register_unpooling(KernelRegistry& registry);       // MaxUnpool

}  // namespace fretsaw
