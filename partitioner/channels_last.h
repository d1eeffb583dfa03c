// Which values are exchanged channels-last, as convolutions leave them.
#pragma once
#include <unordered_set>

#include "graph/ir.h"

namespace fretsaw {

// Four-dimensional values that come from convolutions and pooling, directly, through elementwise operators or collectives. Exchanged as
// they lie, they need not be reordered before and after. The same for every rank, as it follows from the nodes alone.
std::unordered_set<const Value*> channels_last_values(const Graph& graph);
// Sets `channels_last` on the collectives that make such values.
void mark_channels_last(Graph& graph);

}  // namespace fretsaw
