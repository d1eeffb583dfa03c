// The memory of one rank, on the host or on its device: a pool of buffers used again and again, arenas that programs share, and scratch for
// kernels. Everything that is asked of the system is counted, so that a test can see that a warm step asks for nothing.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/tensor_view.h"

namespace fretsaw {

class Device;

struct AllocationCount {
  std::atomic<int64_t> allocations{0};  // since the beginning
  std::atomic<int64_t> bytes{0}, peak_bytes{0};
  void add(size_t size);
  void remove(size_t size) { bytes -= static_cast<int64_t>(size); }
};

std::string gibibytes(int64_t bytes);  // "12.3 GiB"

// 64-byte aligned memory from the system, the device's memory, or memory of the host that the device `pins`, counted. Throws Error (code
// device) when there is none.
class Block {
 public:
  Block(size_t bytes, std::shared_ptr<AllocationCount> count, Device* device = nullptr, std::shared_ptr<Device> pins = nullptr);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_;
  size_t bytes_;
  std::shared_ptr<AllocationCount> count_;
  Device* device_;
  std::shared_ptr<Device> pins_;
};

// Buffers that come back by themselves: one is free again when nobody but the pool holds it. Taking a warm one allocates nothing.
// Of a device: whoever lets go of a buffer has put all work that uses it on the device's stream, or waited for it.
class BufferPool {
 public:
  explicit BufferPool(std::shared_ptr<AllocationCount> count, Device* device = nullptr) : count_(std::move(count)), device_(device) {}
  // Of pinned memory of the host.
  BufferPool(std::shared_ptr<AllocationCount> count, std::shared_ptr<Device> pins) : count_(std::move(count)), pins_(std::move(pins)) {}
  Device* device() const { return device_; }  // whose memory it is; null: the host's
  // At least `bytes`, 64-byte aligned; the address is get() of what is returned, never null. `wanted`: the address of the buffer that is
  // taken if it is free and of this size; null: any.
  std::shared_ptr<void> take(size_t bytes, const void* wanted = nullptr);
  bool is_free(size_t bytes, const void* address) const;
  // Lets go of buffers that nobody holds.
  void trim();

 private:
  static size_t size_class(size_t bytes);
  const std::shared_ptr<Block>* find_free(size_t bytes, const void* wanted) const;
  std::shared_ptr<AllocationCount> count_;
  Device* device_ = nullptr;
  std::shared_ptr<Device> pins_;
  std::map<size_t, std::vector<std::shared_ptr<Block>>> free_lists_;  // by size class; also those in use
};

// A tensor of the pool (strings: constructed strings of its own). Keeps `value`'s room for dimensions. `wanted` as for BufferPool::take.
void make_pooled(BufferPool& pool, RuntimeValue& value, DType dtype, const Dims& dims, Layout layout = Layout::plain,
                 const void* wanted = nullptr);
// Copies within and between the memories of the host and of `device`.
void copy_bytes(const TensorView& to, const TensorView& from, size_t bytes, Device* device);
// A copy in the pool's memory that owns all of its memory; between host and device where the pool's memory is another than the value's
// (`device` is then the one whose memory it is). A copy to the host is complete when it returns.
void copy_pooled(BufferPool& pool, const RuntimeValue& from, RuntimeValue& to, Device* device = nullptr);
// Whether something else than arenas and callers keeps the bytes alive, at any depth.
bool owns_memory(const RuntimeValue& value);
void clear(RuntimeValue& value);  // absent; keeps the room for dimensions

// Memory of a fixed place that grows between programs. The address may change when it grows.
class Arena {
 public:
  explicit Arena(std::shared_ptr<AllocationCount> count, Device* device = nullptr) : count_(std::move(count)), device_(device) {}
  std::byte* reserve(size_t bytes);
  size_t bytes() const { return block_ ? block_->bytes() : 0; }
  std::byte* data() const { return block_ ? static_cast<std::byte*>(block_->data()) : nullptr; }

 private:
  std::shared_ptr<AllocationCount> count_;
  Device* device_;
  std::unique_ptr<Block> block_;
};

// Scratch: one block at a time.
class RankMemory {
 public:
  explicit RankMemory(Device* device = nullptr)
      : count(std::make_shared<AllocationCount>()), pool(count, device), scratch(count, device), device_(device) {}
  Arena& arena(size_t depth);  // control-flow bodies run while the program around them does: one arena a depth

  std::shared_ptr<AllocationCount> count;
  BufferPool pool;
  Arena scratch;

 private:
  Device* device_;
  std::vector<std::unique_ptr<Arena>> arenas_;
};

}  // namespace fretsaw
