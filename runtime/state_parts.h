// What of a state one rank keeps (PlanState::parts).
#pragma once
#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "graph/plan.h"
#include "kernels/tensor_view.h"

namespace fretsaw {

// A rank's place on the mesh: {"data": 1, "tensor": 0}; axes that are left out count as 0.
using Coordinates = std::map<std::string, int>;

// The part's elements among those of the whole.
class StatePart {
 public:
  StatePart(const PlanState& state, const Coordinates& place);

  Dims dims() const;
  size_t bytes() const;
  // From a whole tensor, plain, to the part of it, and the other way round; elements of the whole that are not of the part stay.
  void take(const std::byte* whole, std::byte* part) const;
  void put(const std::byte* part, std::byte* whole) const;

 private:
  template <typename Copy>
  void each_run(Copy copy) const;

  Dims whole_;
  std::vector<std::vector<int64_t>> indexes_;  // of each dimension: which ones are of the part
  size_t element_bytes_ = 0;
};

// A float tensor on the host in another float type, rounded as Cast does it.
RuntimeValue rounded(const RuntimeValue& value, DType type);

}  // namespace fretsaw
