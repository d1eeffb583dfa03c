// Dropout and random numbers while a model is trained.
#pragma once
#include <string>
#include <unordered_map>

#include "graph/ir.h"

namespace fretsaw {

// The graph input, int64 [2], by which masks find their elements in the whole batch: the first sample at hand, and how many there are.
// Whoever runs the graph on a part of the batch fills it in.
inline constexpr const char* kSamplesAtHand = "samples:at_hand";

// The dimension of a value that holds the samples, -1: none does. Of a value that is not there nothing is known: it is dimension 0.
using SampleDims = std::unordered_map<const Value*, int>;

// Every node of the main graph that draws random numbers draws others in every step, by `counter` (int64 []), and the same however the
// batch and the tensor are divided: Dropout in training mode becomes x * mask / (1 - ratio) with a mask of ai.fretsaw's DropoutMask, or of
// RandomAt where ratio or mode are computed; RandomNormal, RandomUniform, their Like forms and Bernoulli become RandomAt. What has no
// samples is drawn once for all of them. The graph gets the inputs `counter` and kSamplesAtHand where there is such a node. Returns whether
// there is. Types must be known, and are known afterwards.
bool count_draws(Model& model, const std::string& counter, const SampleDims& dims = {});
// Whether count_draws would find something.
bool has_draws(const Graph& graph);
// Throws Error naming a node, in bodies too, that draws and would draw the same numbers in every step: of another kind, or in a body.
void refuse_uncounted_draws(const Graph& graph);

}  // namespace fretsaw
