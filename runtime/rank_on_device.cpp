// What a rank does because it runs on a device: parcels to and from other devices, outputs on their way to the host, and times.
#include <utility>

#include "runtime/rank.h"

namespace fretsaw {

void Rank::receive_parcel(Receiving& state, const Crossing& from, RuntimeValue& value, int tag) {
  Parcel parcel = on_device_.mailbox->take(from.peer_rank, context_.rank, tag);
  make_pooled(context_.device_memory->pool, value, state.header.dtype, state.header.dims, from.layout);
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

// Starts the copy of an output to the host.
void Rank::fetch(Fetched& fetched, const RuntimeValue& value) {
  fetched.end = context_.device->fetch(fetched.value.tensor.data, value.tensor.data, value.tensor.bytes());
  fetched.source = value.owner;
}

void Rank::align_clocks() {
  context_.device->synchronize();
  context_.device_origin = context_.device->record(/*timed=*/true);
  context_.device_origin->wait();
  context_.device_origin_us = context_.now_us();
}

// Waits for the device and the outputs that are fetched from it, and takes its times.
void Rank::finish_on_device() {
  context_.device->synchronize();
  for (auto& of_output : fetched_) {
    for (Fetched& fetched : of_output) fetched.end.reset(), fetched.source.reset();
  }
  for (const DeviceSpan& run : context_.device_runs) busy_us_ += run.end->us_since(*run.begin);
  for (std::vector<DeviceSpan>* spans : {&context_.device_runs, &context_.device_steps}) {
    for (DeviceSpan& span : *spans) {
      if (!context_.trace) break;
      span.event.start_us = context_.device_origin_us + span.begin->us_since(*context_.device_origin);
      span.event.duration_us = span.end->us_since(*span.begin);
      context_.events.push_back(std::move(span.event));
    }
    spans->clear();
  }
}

}  // namespace fretsaw
