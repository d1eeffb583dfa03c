// --detect-anomaly: which node was the first to make something that is not finite.
#pragma once
#include "runtime/program.h"

namespace fretsaw {

// After `step` ran. Throws Error at its node when an output holds NaN, or an infinity while nothing that the node read does: masks hold
// infinities on purpose, and hand them on. The error says whether the node belongs to the backward pass, and of which node.
void check_finite(const Step& step, RankContext& rank);

}  // namespace fretsaw
