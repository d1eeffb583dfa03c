// Places of parts in whole outputs.
#include "runtime/whole_outputs.h"

#include <algorithm>
#include <utility>

#include "graph/errors.h"

namespace fretsaw {
namespace {

using Kind = RuntimeValue::Kind;

bool has_rows(const TensorView& x) {
  return x.rank() > 0 && x.layout == Layout::plain && x.dtype != DType::string && bits_of(x.dtype) > 0 && bits_of(x.dtype) % 8 == 0;
}

}  // namespace

WholeOutputs::WholeOutputs(std::shared_ptr<const Plan> plan, const std::shared_ptr<Device>& pins) {
  for (const PlanOutput& output : plan->outputs) {
    outputs_.push_back(std::make_unique<Output>(BufferPool(count_, pins)));
    outputs_.back()->fits = output.merge == "concat" && output.axis == 0;
  }
}

void WholeOutputs::begin(const StepBatches& batches) {
  forget();
  for (auto& output : outputs_) {
    if (!output->fits) output->pool.trim();
  }
  parts_ = 0, samples_ = 0;
  for (const auto& of_rank : batches.parts) {
    parts_ += of_rank.size();
    for (const BatchPart& part : of_rank) samples_ = std::max(samples_, part.begin + part.count);
  }
}

void WholeOutputs::forget() {
  for (auto& output : outputs_) {
    std::unique_lock lock(output->mutex);
    clear(output->whole);
    output->placed = 0;
  }
}

bool WholeOutputs::make_whole(Output& output, BatchPart samples, const TensorView& part) const {
  if (!has_rows(part) || samples.count <= 0 || part.dims[0] % samples.count != 0) return false;
  Dims dims = part.dims;
  if (__builtin_mul_overflow(part.dims[0] / samples.count, samples_, &dims[0])) return false;
  try {
    make_pooled(output.pool, output.whole, part.dtype, dims);
  } catch (const Error&) {  // the first part may promise more than the others make
    clear(output.whole);
    return false;
  }
  return true;
}

bool WholeOutputs::fits(const TensorView& whole, BatchPart samples, const TensorView& part) const {
  return part.dtype == whole.dtype && part.layout == whole.layout && part.rank() == whole.rank() &&
         part.dims[0] == whole.dims[0] / samples_ * samples.count &&
         std::equal(part.dims.begin() + 1, part.dims.end(), whole.dims.begin() + 1);
}

std::shared_ptr<void> WholeOutputs::place(size_t index, BatchPart samples, const TensorView& made) {
  if (parts_ < 2) return nullptr;  // handed over as it is
  Output& output = *outputs_[index];
  std::unique_lock lock(output.mutex);
  if (!output.fits) return nullptr;
  output.fits = output.whole.kind == Kind::absent ? make_whole(output, samples, made) : fits(output.whole.tensor, samples, made);
  if (!output.fits) return nullptr;
  ++output.placed;
  const size_t sample_bytes = made.bytes() / static_cast<size_t>(samples.count);
  return {output.whole.owner, static_cast<std::byte*>(output.whole.tensor.data) + static_cast<size_t>(samples.begin) * sample_bytes};
}

RuntimeValue WholeOutputs::take(size_t index) {
  Output& output = *outputs_[index];
  std::unique_lock lock(output.mutex);
  RuntimeValue whole = std::exchange(output.whole, {});
  if (!output.fits || output.placed != parts_) return {};
  return whole;
}

}  // namespace fretsaw
