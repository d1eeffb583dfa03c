// The factor that keeps float16 gradients from vanishing.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

namespace fretsaw {

// The loss is multiplied by a factor before it is differentiated, and gradients are divided by it before they are used. The factor is
// halved by a step whose gradients are not finite, which is left out, and doubled after 2000 others in a row: the rule and the numbers of
// torch.amp.GradScaler, and so the factor is that of the loss which a step is about: of a mean, although its sum is differentiated.
class LossScale {
 public:
  double factor() const { return factor_; }
  // What the sum of so many losses is multiplied by where the loss is their mean: the factor divided by their number, to a power of two,
  // so that nothing is rounded.
  double seed(int64_t losses) const {
    return factor_ / static_cast<double>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(losses, 1))));
  }
  int64_t good_steps() const { return good_steps_; }  // in a row, since the factor changed
  void set(double factor, int64_t good_steps = 0) { factor_ = factor, good_steps_ = good_steps; }
  void step(bool finite) {
    if (!finite) {
      set(std::max(factor_ * kBackoff, kLeast));
    } else if (++good_steps_ >= kInterval) {
      set(factor_ * kGrowth);
    }
  }

 private:
  static constexpr double kGrowth = 2, kBackoff = 0.5, kLeast = 0x1p-24;
  static constexpr int64_t kInterval = 2000;
  double factor_ = 65536;
  int64_t good_steps_ = 0;
};

}  // namespace fretsaw
