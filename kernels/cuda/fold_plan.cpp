// Spreading a reduction over threads, blocks and parts.
#include "kernels/cuda/fold_plan.h"

#include <algorithm>

#include "graph/errors.h"

namespace fretsaw::cuda {

Walk::Walk(const Dims& dims, const Dims& dim_strides) : count(static_cast<int>(dims.size())) {
  if (dims.size() > static_cast<size_t>(kMost)) {
    throw Error("a reduction whose axes lie in more than " + std::to_string(kMost) + " separate groups",
                "merge dimensions with a Reshape, or transpose first");
  }
  for (size_t i = 0; i < dims.size(); ++i) {
    sizes[i] = WideDivider(dims[i]);
    strides[i] = dim_strides[i];
  }
}

namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kMostParts = 512;

bool all_multiples(const Dims& strides, int64_t of) {
  return std::all_of(strides.begin(), strides.end(), [&](int64_t stride) { return stride % of == 0; });
}

// Cuts each result's elements into parts where there are too few blocks to fill the device; a part has `least` elements or more and
// begins at a multiple of `unit`.
void split(FoldLaunch& launch, const FoldTraits& traits, int64_t least, int64_t unit) {
  FoldPlan& plan = launch.plan;
  const int64_t wanted = int64_t{8} * traits.multiprocessors;
  int64_t parts = launch.blocks * 4 > wanted ? 1 : (wanted + launch.blocks - 1) / launch.blocks;
  parts = std::clamp<int64_t>(std::min(parts, plan.each / least), 1, kMostParts);
  const int64_t even = (plan.each + parts - 1) / parts;
  plan.part = std::max<int64_t>((even + unit - 1) / unit * unit, unit);
  plan.parts = static_cast<int>(std::max<int64_t>((plan.each + plan.part - 1) / plan.part, 1));
  if (plan.parts > 1) launch.scratch_bytes = static_cast<size_t>(plan.parts * plan.results) * traits.state_bytes;
}

// Groups of threads_x threads fold a result each; a block has threads_y of them.
void spread_rows(FoldLaunch& launch, const ReductionPlan& shape, const FoldTraits& traits) {
  const FoldPlan& plan = launch.plan;
  const bool packed = traits.aligned && shape.reduced.empty() && all_multiples(shape.kept_strides, traits.row_pack);
  launch.pack = packed ? traits.row_pack : 1;
  const int64_t filled = int64_t{1024} * traits.multiprocessors;  // threads that keep the device busy
  int64_t x = 1;
  const auto more_help = [&] { return x < 32 || plan.results * x < filled || plan.each / (x * launch.pack) > 8; };
  while (x < kBlock && x * launch.pack < plan.each && more_help()) x *= 2;
  launch.threads_x = static_cast<int>(x);
  launch.threads_y = static_cast<int>(kBlock / x);
  launch.blocks = std::min<int64_t>((plan.results + launch.threads_y - 1) / launch.threads_y, int64_t{1} << 24);
  split(launch, traits, x * launch.pack * 8, x * launch.pack);
}

// Each thread folds `pack` neighbouring results; the threads_y threads of a column share its elements.
void spread_columns(FoldLaunch& launch, const ReductionPlan& shape, const FoldTraits& traits) {
  const FoldPlan& plan = launch.plan;
  const int pack = traits.column_pack;
  const bool packed =
      traits.aligned && shape.width % pack == 0 && all_multiples(shape.kept_strides, pack) && all_multiples(shape.reduced_strides, pack);
  launch.pack = packed ? pack : 1;
  const int64_t units = plan.results / launch.pack, most_x = power_of_two_from(units);
  int64_t x = std::min<int64_t>(32, most_x);
  int64_t y = std::min(kBlock / x, power_of_two_from(plan.each / 4));
  while (y > 1 && units * y / 2 >= int64_t{2048} * traits.multiprocessors) y /= 2;
  x = std::min(kBlock / y, most_x);
  launch.threads_x = static_cast<int>(x);
  launch.threads_y = static_cast<int>(y);
  launch.blocks = (units + x - 1) / x;
  split(launch, traits, y * 8, y);
}

}  // namespace

FoldLaunch plan_fold(const ReductionPlan& shape, const FoldTraits& traits) {
  FoldLaunch launch;
  FoldPlan& plan = launch.plan;
  plan.kept = Walk(shape.kept, shape.kept_strides);
  plan.reduced = Walk(shape.reduced, shape.reduced_strides);
  plan.width = WideDivider(shape.width);
  plan.run = WideDivider(shape.run);
  plan.results = shape.results;
  plan.each = shape.each;
  launch.columns = shape.width > 1;
  if (launch.columns)
    spread_columns(launch, shape, traits);
  else
    spread_rows(launch, shape, traits);
  return launch;
}

}  // namespace fretsaw::cuda
