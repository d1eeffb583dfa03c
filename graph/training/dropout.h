// Dropout while a model is trained.
#pragma once
#include <string>

#include "graph/ir.h"

namespace fretsaw {

// The graph input, int64 [2], by which masks find their elements in the whole batch: the first sample at hand, and how many there are.
// Whoever runs the graph on a part of the batch fills it in.
inline constexpr const char* kSamplesAtHand = "samples_at_hand";

// Every Dropout of the main graph that is in training mode, with a constant ratio above 0, becomes x * mask / (1 - ratio) with a mask of
// ai.fretsaw's DropoutMask: another in every step, by `counter` (int64 []), and the same however the batch and the tensor are divided. The
// graph gets the input kSamplesAtHand where there is such a node. Returns whether there is. Types must be known, and are known afterwards.
bool count_dropouts(Model& model, const std::string& counter);

}  // namespace fretsaw
