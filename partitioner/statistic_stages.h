// Where running statistics are moved.
#pragma once
#include <vector>

#include "partitioner/units.h"

namespace fretsaw {

// The graph's first two outputs are the loss and its count, the others next values of running statistics. What leads to these alone goes to
// the last stage of the nodes whose numbers it takes: there they are read, and the rank that reads them is the one that keeps them. What is
// made of constants alone (parts of a statistic) goes to the first stage that uses it.
void keep_statistics_together(const GraphIndex& index, std::vector<int>& stage_of);

}  // namespace fretsaw
