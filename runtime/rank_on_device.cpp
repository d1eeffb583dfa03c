// What a rank does because it runs on a device: parcels to and from other devices, outputs on their way to the host, and times.
#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "kernels/cpu/parallel.h"
#include "runtime/rank.h"

namespace fretsaw {

void Rank::receive_parcel(Receiving& state, const Crossing& from, RuntimeValue& value, int tag) {
  Parcel parcel = on_device_.mailbox->take(from.peer_rank, context_.rank, tag);
  make_pooled(context_.device_memory->pool, value, state.header.dtype, state.header.dims, from.layout, state.place);
  state.place = value.tensor.data;
  state.arrived = context_.device->copy_from_peer(value.tensor.data, parcel.data, parcel.device, parcel.bytes, *parcel.ready);
  reading_.push_back({state.arrived, std::move(parcel)});
}

std::shared_ptr<std::atomic<bool>> Rank::send_parcel(const RuntimeValue& value, int to, int tag) {
  auto read = std::make_shared<std::atomic<bool>>(false);
  Device& device = *context_.device;
  on_device_.mailbox->put({value.tensor.data, value.tensor.bytes(), device.index(), device.record(), value.owner, read}, context_.rank, to,
                          tag);
  return read;
}

void Rank::let_go_of_parcels(bool wait) {
  std::erase_if(reading_, [&](const Reading& reading) {
    if (wait) reading.end->wait();
    if (!reading.end->done()) return false;
    *reading.parcel.read = true;
    return true;
  });
}

// Brings the plan's outputs to the host and to their places in the wholes, while a device goes on with the next micro-batch.
void Rank::place_outputs(Stage& done, int micro_batch, const StepInputs& step) {
  if (tensor_ != 0) return;  // all tensor ranks make the outputs; the first one's count
  const BatchPart samples = step.batches.parts[static_cast<size_t>(data_)][static_cast<size_t>(micro_batch)];
  for (size_t i = 0; i < output_places_.size(); ++i) {
    const OutputPlace& place = output_places_[i];
    if (place.stage < 0 || stages_[static_cast<size_t>(place.stage)].get() != &done) continue;
    const RuntimeValue& value = done.micro_batches[static_cast<size_t>(micro_batch)].outputs[place.place];
    if (value.kind != RuntimeValue::Kind::tensor) continue;
    Fetched& fetched = fetched_[i][static_cast<size_t>(micro_batch)];
    std::shared_ptr<void> in_whole = step.wholes ? step.wholes->place(i, samples, value.tensor) : nullptr;
    const bool on_device = value.tensor.memory == Memory::device;
    if (in_whole) {
      fetched.value.kind = RuntimeValue::Kind::tensor;
      fetched.value.tensor = value.tensor;
      fetched.value.tensor.memory = Memory::host;
      fetched.value.tensor.data = in_whole.get();
      fetched.value.owner = std::move(in_whole);
    } else if (on_device) {
      make_pooled(*context_.pinned, fetched.value, value.tensor.dtype, value.tensor.dims, value.tensor.layout);
    } else {
      continue;
    }
    if (on_device)
      fetch(fetched, value);
    else
      copy_in_parallel(fetched.value.tensor.data, value.tensor.data, value.tensor.bytes(), context_.threads);
  }
}

// Starts the copy of an output to the host.
void Rank::fetch(Fetched& fetched, const RuntimeValue& value) {
  fetched.end = context_.device->fetch(fetched.value.tensor.data, value.tensor.data, value.tensor.bytes());
  fetched.source = value.owner;
}

// The rank's samples of each input that its stages read, where they lie in one piece. The driver takes small ones from the host at once.
void Rank::stage_inputs(const StepInputs& step) {
  constexpr size_t kLeast = size_t{64} << 10;  // bytes
  constexpr int kStepsBefore = 2;              // programs are compiled in the first; most are captured in the second
  const std::vector<BatchPart>& parts = step.batches.parts[static_cast<size_t>(data_)];
  if (!context_.staged || parts.empty() || steps_run_ < kStepsBefore) return;
  std::set<int> numbers;
  for (const auto& stage : stages_) numbers.insert(stage->plan_inputs.begin(), stage->plan_inputs.end());
  std::vector<StagedInputs::Piece> pieces;
  for (const int number : numbers) {
    const RuntimeValue* whole = number < 0 ? nullptr : step.inputs[static_cast<size_t>(number)];
    if (!whole || whole->kind != RuntimeValue::Kind::tensor || !whole->owner || whole->tensor.memory != Memory::host) continue;
    if (whole->tensor.dtype == DType::string) continue;
    StagedInputs::Piece piece{static_cast<const std::byte*>(whole->tensor.data), whole->tensor.bytes(), whole->owner};
    const int axis = plan_->inputs[static_cast<size_t>(number)].batch_axis;
    if (axis >= 0 && step.batches.batch > 0) {
      const Dims& dims = whole->tensor.dims;
      if (std::any_of(dims.begin(), dims.begin() + axis, [](int64_t d) { return d != 1; })) continue;
      const size_t sample = piece.bytes / static_cast<size_t>(step.batches.batch);
      const int64_t begin = parts.front().begin, end = parts.back().begin + parts.back().count;
      piece.data += sample * static_cast<size_t>(begin), piece.bytes = sample * static_cast<size_t>(end - begin);
    }
    if (piece.bytes >= kLeast) pieces.push_back(std::move(piece));
  }
  if (!pieces.empty()) context_.staged->stage(pieces);
}

void Rank::align_clocks() {
  context_.device->synchronize();
  context_.device_origin = context_.device->record(/*timed=*/true);
  context_.device_origin->wait();
  context_.device_origin_us = context_.now_us();
}

// Waits for the outputs that are fetched from the device, and for all else that it does, or for what it did before `results`; takes its
// times.
void Rank::finish_on_device(DeviceEvent* results) {
  if (results)
    context_.device->synchronize(*results);
  else
    context_.device->synchronize();
  if (context_.staged) context_.staged->forget();
  for (auto& of_output : fetched_) {
    for (Fetched& fetched : of_output) {
      if (fetched.end) fetched.end->wait();
      fetched.end.reset(), fetched.source.reset();
    }
  }
  if (!context_.trace) {
    for (auto* runs : {&updated_, &context_.device_runs}) std::move(runs->begin(), runs->end(), std::back_inserter(timed_));
    updated_.clear(), context_.device_runs.clear(), context_.device_steps.clear();
    return;
  }
  for (const DeviceSpan& run : context_.device_runs) busy_us_ += run.end->us_since(*run.begin);
  for (std::vector<DeviceSpan>* spans : {&context_.device_runs, &context_.device_steps}) {
    for (DeviceSpan& span : *spans) {
      span.event.start_us = context_.device_origin_us + span.begin->us_since(*context_.device_origin);
      span.event.duration_us = span.end->us_since(*span.begin);
      context_.events.push_back(std::move(span.event));
    }
    spans->clear();
  }
}

}  // namespace fretsaw
