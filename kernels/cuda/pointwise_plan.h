// How the elements of a step and of its operands are walked, and what its kernel is told.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/pointwise_step.h"

namespace fretsaw::cuda {

using Strides = std::vector<int64_t>;  // in elements, for each dimension; 0 where the operand is broadcast

// The dimensions of a space, joined where every operand walks two in one go. Example: out [2, 3, 8, 8], x [2, 3, 8, 8], y [3, 1, 1]:
// x is linear; for y the sizes are [2, 3, 64] and its strides [0, 1, 0].
struct SpacePlan {
  enum class Access : uint8_t { linear, single, strided };  // as the space itself; one element; by its strides
  struct Operand {
    Access access;
    Strides strides;  // of strided ones, for each of `sizes`
  };
  int64_t count = 1;
  Dims sizes;
  std::vector<Operand> operands;
  bool wide() const { return count >= (int64_t{1} << 31) - (int64_t{1} << 16); }  // indexes need 64 bits
};
// `each`: a linear operand advances by that much for each element of the space.
SpacePlan plan_space(const Dims& sizes, const std::vector<Strides>& operands, const std::vector<int64_t>& each);

// Strides of an operand of shape `dims` in memory, for each dimension of `out`. Throws Error when it does not broadcast to `out`.
Strides broadcast_strides(const Dims& dims, Layout layout, const Dims& out);

// Everything about a step that is known before there is a device: its kernel as text and what it is started with.
struct PreparedStep {
  struct Output {
    size_t index;
    Dims dims;
    DType dtype;
  };
  std::string source, name;
  // Of steps that can be joined: what stands before the kernel, and the kernel's body, of the block `block` with the arguments `a`.
  std::string declarations, body;
  uint64_t blocks = 0;  // 0: there is nothing to do
  unsigned threads = 0;
  std::vector<uint64_t> arguments;  // addresses of inputs, then of outputs, then the rest; the last word is whether addresses are aligned
  std::vector<size_t> inputs;       // of the context: those whose addresses stand in the arguments
  std::vector<Output> outputs;
  std::vector<Layout> input_layouts, output_layouts;  // for each input and output of the context
  int overwrites = -1;
};
PreparedStep prepare_points(const PointStep& step, const std::vector<Layout>& offered, size_t outputs);
// The source of one kernel, `name`, for `members` steps with these declarations and this body. It is started with the arguments of all,
// and 32 bits for each: the first block that is not the member's any more.
std::string joined_source(const PreparedStep& step, size_t members);
PreparedStep prepare_rows(const PointStep& step, size_t inputs, size_t outputs);
// The reason why a step with reductions can't be done in rows; "" when it can.
std::string refuse_rows(const PointStep& step);

// Sets `overwrites`: the first of the operands, in the order of `made.inputs`, that has the shape and element size of output 0. Each thread
// reads what it needs of it before it writes there.
void choose_overwritten(const PointStep& step, const std::vector<int>& operands, PreparedStep& made);

// What a kernel is started with, in the order of the printed struct Arguments.
std::vector<uint64_t> pack_arguments(size_t addresses, const SpacePlan& space);

}  // namespace fretsaw::cuda
