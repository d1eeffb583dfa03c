// Which collectives exchange images channels-last, as convolutions leave them.
#pragma once
#include "graph/ir.h"

namespace fretsaw {

// Sets `channels_last` on collectives of four-dimensional values that come from convolutions and pooling, directly or through elementwise
// operators: exchanged as they lie, they need not be reordered before and after. The same for every rank, as it follows from the nodes.
void mark_channels_last(Graph& graph);

}  // namespace fretsaw
