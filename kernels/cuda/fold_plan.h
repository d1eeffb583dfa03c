// How a reduction is spread over the device: where its elements lie, and the blocks that fold them.
#pragma once
#include "kernels/cpu/reductions.h"
#include "kernels/cuda/index_math.h"

namespace fretsaw::cuda {

// Divides by any positive number; by a multiplication where both fit 31 bits.
struct WideDivider {
  Divider<uint32_t> narrow;
  int64_t divisor = 1;

  WideDivider() = default;
  explicit WideDivider(int64_t d) : narrow(d > 0 && d >> 31 == 0 ? d : 1), divisor(d > 0 ? d : 1) {}
  FRETSAW_HOST_DEVICE int64_t quotient(int64_t n) const {
    return (n | divisor) >> 31 == 0 ? static_cast<int64_t>(narrow.quotient(static_cast<uint32_t>(n))) : n / divisor;
  }
};
// n / d, and n becomes the remainder.
FRETSAW_HOST_DEVICE int64_t split_off(const WideDivider& d, int64_t& n) {
  const int64_t q = d.quotient(n);
  n -= q * d.divisor;
  return q;
}

// Where the `index`-th of the combinations of some dimensions lies.
struct Walk {
  static constexpr int kMost = 8;
  int count = 0;
  WideDivider sizes[kMost];
  int64_t strides[kMost] = {};

  Walk() = default;
  Walk(const Dims& dims, const Dims& dim_strides);  // throws Error for more than kMost
  FRETSAW_HOST_DEVICE int64_t offset(int64_t index) const {
    if (count == 0) return 0;
    int64_t offset = 0;
    for (int i = count - 1; i > 0; --i) {
      const int64_t outer = split_off(sizes[i], index);
      offset += index * strides[i];
      index = outer;
    }
    return offset + index * strides[0];
  }
};

// ReductionPlan as kernels read it. Element e of result i lies at base(i) + element(e).
struct FoldPlan {
  Walk kept, reduced;
  WideDivider width, run;  // neighbouring results; neighbouring elements of one result (one of the two is 1)
  int64_t results = 1, each = 1;
  int64_t part = 1;  // elements of a result that one block folds
  int parts = 1;

  FRETSAW_HOST_DEVICE int64_t base(int64_t result) const {
    const int64_t position = split_off(width, result);
    return kept.offset(position) + result;
  }
  FRETSAW_HOST_DEVICE int64_t element(int64_t e) const {
    const int64_t position = split_off(run, e);
    return reduced.offset(position) + e;
  }
};

// What a launch depends on besides the shape.
struct FoldTraits {
  int row_pack = 1, column_pack = 1;  // elements that are read as one
  bool aligned = false;               // the input begins at a multiple of 16 bytes
  size_t state_bytes = 0;
  int multiprocessors = 1;
};

struct FoldLaunch {
  FoldPlan plan;
  bool columns = false;  // neighbouring threads fold neighbouring results, not neighbouring elements of one
  int pack = 1;
  int threads_x = 1, threads_y = 1;
  int64_t blocks = 1;        // for each part
  size_t scratch_bytes = 0;  // for the states of parts; 0 where there is one
};
FoldLaunch plan_fold(const ReductionPlan& plan, const FoldTraits& traits);

// The smallest power of two that is not below n.
inline int64_t power_of_two_from(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

}  // namespace fretsaw::cuda
