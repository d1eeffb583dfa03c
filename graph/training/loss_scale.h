// The factor that keeps float16 gradients from vanishing.
#pragma once
#include <algorithm>
#include <cstdint>

namespace fretsaw {

// The loss is multiplied by a factor before it is differentiated, and gradients are divided by it before they are used. The factor is
// halved by a step whose gradients are not finite, which is left out, and doubled after 2000 others in a row: the rule and the numbers of
// torch.amp.GradScaler.
class LossScale {
 public:
  double factor() const { return factor_; }
  void set(double factor) { factor_ = factor, good_steps_ = 0; }
  void step(bool finite) {
    if (!finite) {
      set(std::max(factor_ * kBackoff, kLeast));
    } else if (++good_steps_ == kInterval) {
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
