#include "graph/passes/loops.h"

namespace fretsaw {

GraphPtr fitting_body(const Node& loop) {
  GraphPtr body = loop.get_graph("body");
  const bool fits =
      body && loop.inputs.size() >= 2 && body->inputs.size() == loop.inputs.size() && body->outputs.size() + 1 >= body->inputs.size();
  return fits ? body : nullptr;
}

std::vector<int64_t> first_moved_to(int64_t axis, int64_t rank) {
  std::vector<int64_t> order;
  for (int64_t d = 0; d < rank; ++d) order.push_back(d < axis ? d + 1 : d == axis ? 0 : d);
  return order;
}

TensorPtr make_true() {
  auto tensor = make_tensor(DType::boolean, {});
  *mutable_data(*tensor) = std::byte{1};
  return tensor;
}

}  // namespace fretsaw
