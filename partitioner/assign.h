// Which stage runs which node: as annotations or the user say, else so that the slowest stage is as fast as it can be.
#pragma once
#include <optional>

#include "partitioner/from_annotations.h"
#include "partitioner/partition.h"
#include "partitioner/stages.h"
#include "partitioner/target.h"

namespace fretsaw {

std::optional<int64_t> memory_limit(const PartitionOptions& options, const Target& target);  // of each device

// `costed`: the graph of the index with sizes for costs, or that graph itself. `source`: for the names that --cut gives. `annotations`:
// null where the plan is not made from them. There may be fewer stages than asked for where annotated ones are empty.
StageAssignment assign(const GraphIndex& index, const Graph& costed, const Graph& source, const PartitionOptions& options,
                       const Annotations* annotations, const Target& target, int stages);

}  // namespace fretsaw
