// Learning rates: a pure function of the step.
//
//   --lr 3e-4                                       the same at every step; so is constant:lr=3e-4
//   --lr constant:lr=3e-4,warmup=100
//   --lr linear:lr=3e-4,warmup=100,total=1000,final=0
//   --lr cosine:peak=3e-4,warmup=100,total=1000,final=3e-5
//   --lr step:lr=0.1,every=30,factor=0.1            or milestones=30|60|80 in place of `every`
//
// `peak` is another name of `lr`; without it the optimizer's rate counts. `total` is the run's number of steps where it is left out,
// `warmup` and `final` are 0, `factor` is 0.1.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace fretsaw {

struct LrSchedule {
  enum class Kind : uint8_t { constant, linear, cosine, step };
  Kind kind = Kind::constant;
  double peak = 1e-3, final = 0;
  int64_t warmup = 0;               // steps
  int64_t total = 0;                // of linear and cosine: the step from which on the rate is `final`
  int64_t every = 0;                // of step: times `factor` each time so many steps are over
  std::vector<int64_t> milestones;  // of step, ascending: times `factor` from each of these steps on
  double factor = 0.1;

  // The rate of step `step`, counted from 0. With W = warmup, T = total:
  //   step < W   (step + 1) / (W + 1) of what the schedule has at W: the peak is reached at step W, and step 0 is not lost
  //   linear     peak + (final - peak) p,                        p = (step - W) / (T - W), at most 1
  //   cosine     final + (peak - final) (1 + cos(pi p)) / 2      as PyTorch's CosineAnnealingLR, once
  //   step       peak factor^(how many times), the steps counted from 0 as in PyTorch's StepLR and MultiStepLR
  double at(int64_t step) const;
};

// What a schedule takes from the rest of the command.
struct LrDefaults {
  double lr = 1e-3;   // the optimizer's
  int64_t steps = 0;  // of the run; 0: not known
};
// "" is constant. Throws Error of code usage that says what is allowed.
LrSchedule parse_lr_schedule(const std::string& text, const LrDefaults& defaults = {});

}  // namespace fretsaw
