// Device memory on its way between ranks of one process: the sender leaves an address and an event, the receiver copies from there.
//
//   sender    compute -> [ready]                      lets the memory go when the receiver says that it has been read
//   receiver           wait for ready, copy -> [read] -> compute
//
// Headers (runtime/communicator.h) say that a parcel is there: it is put before its header is sent.
#pragma once
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "kernels/device.h"
#include "runtime/communicator.h"

namespace fretsaw {

struct Parcel {
  const void* data = nullptr;
  size_t bytes = 0;
  int device = 0;
  std::shared_ptr<DeviceEvent> ready;
  std::shared_ptr<void> owner;              // keeps the memory
  std::shared_ptr<std::atomic<bool>> read;  // set by the receiver
};

class DeviceMailbox {
 public:
  void put(Parcel parcel, int from, int to, int tag) {
    std::unique_lock lock(mutex_);
    parcels_[{from, to, tag}].push_back(std::move(parcel));
  }
  // The next parcel; one must be there.
  Parcel take(int from, int to, int tag) {
    std::unique_lock lock(mutex_);
    auto& waiting = parcels_.at({from, to, tag});
    Parcel parcel = std::move(waiting.front());
    waiting.pop_front();
    return parcel;
  }
  void clear() {
    std::unique_lock lock(mutex_);
    parcels_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<int, int, int>, std::deque<Parcel>> parcels_;
};

}  // namespace fretsaw
