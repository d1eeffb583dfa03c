// Types and shapes that ONNX's own inference does not tell.
#pragma once
#include "graph/passes/shape_contents.h"

namespace fretsaw {

// Operators for which ONNX has no inference, though their first output is like their first input: a normalised tensor, or rows of it.
void infer_without_schema(Node& node);

// Where ONNX's inference gives up on symbols and arithmetic does not: the first output of Reshape, Flatten and Concat.
void refine_shape(Node& node, const ContentsLookup& contents);

}  // namespace fretsaw
