// The user's own cuts: each boundary named by the values that a stage ends with.
#pragma once
#include <string>
#include <vector>

#include "partitioner/stages.h"

namespace fretsaw {

// Stage k runs what cut k's values depend on and no stage before does; the last stage runs the rest. Names are those of the source, which
// also has values that normalising removed: such a cut lies where the value was. Throws Error naming a value that there is not (with
// similar names) or a cut that leaves a stage empty. `copied`: nodes (by position) that belong to no stage.
StageAssignment user_assignment(const GraphIndex& index, const Graph& source, const std::vector<std::vector<std::string>>& cuts,
                                const std::vector<int>& order, std::vector<char> copied);

}  // namespace fretsaw
