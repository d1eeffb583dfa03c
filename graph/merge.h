// The way back from a plan to one model: the structure from whole.onnx, the weights from the parts that the stages' files hold.
#pragma once
#include <memory>
#include <vector>

#include "graph/plan.h"

namespace fretsaw {

// The file of a plan's folder that holds the normalised model in one piece, without its weights.
inline constexpr const char* kWholeFile = "whole.onnx";

// What whole.onnx holds of a model: all but what no output needs, and no bytes of weights that the stages' files hold anyway.
std::shared_ptr<Model> without_weights(Model model);

// A part of a tensor as a rank holds it; `part.dim` -1: all of it.
struct TensorPiece {
  TensorPtr tensor;
  ValuePart part;
};
// The tensor that the pieces are parts of. `whole` gives its name, type and shape. Bytes are not copied: they are put together when they
// are written or loaded. Missing where pieces that it takes are missing. Throws Error naming the rows that no piece holds, or a piece that
// does not fit.
TensorPtr assemble(const Tensor& whole, const std::vector<TensorPiece>& pieces);

// One plain model with the plan's weights, from the plan's folder. Weights that the plan does not have either (--structure-only) stay
// missing. Throws Error when whole.onnx or a part of a weight is not there.
Model merge(const Plan& plan);

}  // namespace fretsaw
