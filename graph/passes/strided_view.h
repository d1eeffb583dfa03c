// Which elements of an earlier value a value holds, where only views, permutations and repetitions lie between. Private to graph/passes.
//
//   q [B, H, S, D] = Transpose(Reshape(x [B, S, H * D]))
//   StridedView view = whole_view(q);   // base q, axes of strides S*H*D.. in q itself
//   while (step_back(view)) ...         // base becomes Reshape's result, then x
//
// An axis says: a step of `at` elements in the value asked about is a step of `stride` elements in the base, `size` times. All strides
// count elements of row-major order. Repeated elements have the stride 0.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

struct StridedView {
  struct Axis {
    int64_t size = 1, at = 1, stride = 1;
  };
  Value* base = nullptr;
  int64_t offset = 0;
  std::vector<Axis> axes;
  double scale = 1;  // the value is the base's elements times this
  int copies = 0;    // nodes between that a device does not do by handing memory through
};

// The dimensions of a tensor when all are known.
std::optional<Dims> static_dims(const Value* value);
// The dimensions as a constant of the graph, as Reshape takes them.
Value* dims_constant(Graph& graph, const Dims& dims);
// The value as a view of itself, broadcast to `dims` (aligned from the right). Nullopt when its dimensions are not known or do not fit.
std::optional<StridedView> whole_view(Value* value, const Dims& dims);
// Goes one node back. False, and nothing changes, when the base's producer does anything else than view, permute, cut out or repeat.
// `scaled`: a product with a constant scalar is passed too.
bool step_back(StridedView& view, bool scaled);

}  // namespace fretsaw
