// The source graph with ONNX's own multi-device annotations (IR 11): which pipeline stage each node runs in.
#pragma once
#include <memory>
#include <unordered_map>

#include "graph/plan.h"

namespace fretsaw {

// `stage_of_value`: the stage that makes a value, by source name. Nodes that the plan has no more take the stage of what uses them. Weights
// of more than 1 MB in all are left out: their tensors name a file that is not written.
std::shared_ptr<Model> annotate(Model source, const std::unordered_map<std::string, int>& stage_of_value, int stages);

}  // namespace fretsaw
