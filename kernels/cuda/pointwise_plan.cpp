// Joining dimensions, strides, and arguments of kernels.
#include "kernels/cuda/pointwise_plan.h"

#include <algorithm>
#include <limits>

#include "graph/errors.h"

namespace fretsaw::cuda {
namespace {

Strides contiguous(const Dims& dims, Layout layout) {
  if (layout == Layout::nhwc) return {dims[1] * dims[2] * dims[3], 1, dims[1] * dims[3], dims[1]};
  Strides strides(dims.size());
  int64_t stride = 1;
  for (size_t i = dims.size(); i-- > 0; stride *= dims[i]) strides[i] = stride;
  return strides;
}

bool is_linear(const Dims& sizes, const Strides& strides, int64_t each) {
  int64_t wanted = each;
  for (size_t i = sizes.size(); i-- > 0; wanted *= sizes[i]) {
    if (sizes[i] != 1 && strides[i] != wanted) return false;
  }
  return true;
}

// n / size = (umulhi(n, magic) + n) >> shift for n below 2^31
void push_size(std::vector<uint32_t>& words, int64_t size) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < static_cast<uint64_t>(size)) ++shift;
  const uint64_t magic = ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - static_cast<uint64_t>(size))) / static_cast<uint64_t>(size) + 1;
  words.insert(words.end(), {static_cast<uint32_t>(size), static_cast<uint32_t>(magic), shift});
}

}  // namespace

SpacePlan plan_space(const Dims& sizes, const std::vector<Strides>& operands, const std::vector<int64_t>& each) {
  SpacePlan plan;
  plan.count = count_of(sizes);
  std::vector<size_t> strided;
  for (size_t k = 0; k < operands.size(); ++k) {
    const bool single = std::all_of(operands[k].begin(), operands[k].end(), [](int64_t s) { return s == 0; });
    const bool linear = is_linear(sizes, operands[k], each[k]);
    plan.operands.push_back({linear ? SpacePlan::Access::linear : single ? SpacePlan::Access::single : SpacePlan::Access::strided, {}});
    if (!linear && !single) strided.push_back(k);
  }
  if (strided.empty()) {
    plan.sizes = {plan.count};
    return plan;
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 1) continue;
    const bool joins = !plan.sizes.empty() && std::all_of(strided.begin(), strided.end(), [&](size_t k) {
      return plan.operands[k].strides.back() == operands[k][i] * sizes[i];
    });
    if (!joins) plan.sizes.push_back(1);
    plan.sizes.back() *= sizes[i];
    for (size_t k : strided) {
      if (!joins) plan.operands[k].strides.push_back(0);
      plan.operands[k].strides.back() = operands[k][i];
    }
  }
  return plan;
}

Strides broadcast_strides(const Dims& dims, Layout layout, const Dims& out) {
  const Strides own = contiguous(dims, layout);
  Strides strides(out.size(), 0);
  for (size_t back = 1; back <= dims.size(); ++back) {
    const int64_t size = dims[dims.size() - back];
    if (size == 1) continue;
    if (back > out.size() || out[out.size() - back] != size) {
      throw Error("an operand of shape " + to_string(dims) + " does not broadcast to " + to_string(out), "check the shapes in the model");
    }
    strides[out.size() - back] = own[dims.size() - back];
  }
  return strides;
}

void choose_overwritten(const PointStep& step, const std::vector<int>& operands, PreparedStep& made) {
  if (made.outputs.empty() || made.outputs[0].index != 0) return;
  for (size_t k = 0; k < operands.size() && made.overwrites < 0; ++k) {
    const PointValue& v = step.at(operands[k]);
    if (*v.dims == made.outputs[0].dims && bits_of(v.dtype) == bits_of(made.outputs[0].dtype))
      made.overwrites = static_cast<int>(made.inputs[k]);
  }
}

std::vector<uint64_t> pack_arguments(size_t addresses, const SpacePlan& space) {
  std::vector<uint64_t> words(addresses, 0);
  words.push_back(static_cast<uint64_t>(space.count));
  for (const SpacePlan::Operand& operand : space.operands) {
    for (int64_t stride : operand.strides) words.push_back(static_cast<uint64_t>(stride));
  }
  std::vector<uint32_t> sizes;
  // The outermost size divides nothing.
  for (size_t d = 1; d < space.sizes.size(); ++d) {
    if (space.sizes[d] > std::numeric_limits<uint32_t>::max()) throw Error("a dimension of more than 2^32 elements", "cut the tensor");
  }
  for (int64_t size : space.sizes) push_size(sizes, std::max<int64_t>(size, 1));
  if (sizes.size() % 2) sizes.push_back(0);
  for (size_t i = 0; i < sizes.size(); i += 2) words.push_back(sizes[i] | static_cast<uint64_t>(sizes[i + 1]) << 32);
  words.push_back(0);
  return words;
}

}  // namespace fretsaw::cuda
