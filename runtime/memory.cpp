// Counted memory: blocks, pools and arenas.
#include "runtime/memory.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "graph/errors.h"
#include "kernels/device.h"

namespace fretsaw {
namespace {

constexpr std::align_val_t alignment{64};

size_t physical_memory_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
  return bytes;
}

}  // namespace

void AllocationCount::add(size_t size) {
  ++allocations;
  int64_t now = bytes += static_cast<int64_t>(size);
  int64_t most = peak_bytes;
  while (now > most && !peak_bytes.compare_exchange_weak(most, now)) {
  }
}

std::string gibibytes(int64_t bytes) {
  const double tenths = static_cast<double>(bytes) / (1 << 30) * 10;
  return std::to_string(static_cast<int64_t>(tenths) / 10) + "." + std::to_string(static_cast<int64_t>(tenths) % 10) + " GiB";
}

Block::Block(size_t bytes, std::shared_ptr<AllocationCount> count, Device* device, std::shared_ptr<Device> pins)
    : bytes_(bytes), count_(std::move(count)), device_(device), pins_(std::move(pins)) {
  if (device_ || pins_) {
    data_ = device_ ? device_->allocate(bytes) : pins_->allocate_pinned(bytes);
    count_->add(bytes_);
    return;
  }
  // The system may promise more than it has; a process that then uses it is killed without a word.
  data_ = bytes <= physical_memory_bytes() ? ::operator new(std::max<size_t>(bytes, 1), alignment, std::nothrow) : nullptr;
  if (!data_) {
    throw Error("no memory for " + std::to_string(bytes) + " bytes", "use smaller inputs, more micro-batches or more stages",
                ErrorCode::device);
  }
  count_->add(bytes_);
}

Block::~Block() {
  if (device_) {
    device_->release(data_);
  } else if (pins_) {
    pins_->release_pinned(data_);
  } else {
    ::operator delete(data_, alignment);
  }
  count_->remove(bytes_);
}

// Four classes between powers of two, where at most a quarter is wasted; of large buffers, which are what memory is full of, 32.
size_t BufferPool::size_class(size_t bytes) {
  if (bytes <= 256) return 256;
  if (bytes > (size_t{1} << 62)) return bytes;
  constexpr size_t kLarge = size_t{1} << 20;
  size_t step = std::bit_floor(bytes - 1) / (bytes > kLarge ? 32 : 4);
  return (bytes + step - 1) / step * step;
}

// The wanted one, or, where none is, the first; null: there is none.
const std::shared_ptr<Block>* BufferPool::find_free(size_t bytes, const void* wanted) const {
  const auto list = free_lists_.find(size_class(bytes));
  if (list == free_lists_.end()) return nullptr;
  for (const auto& block : list->second)
    if (block.use_count() == 1 && (!wanted || block->data() == wanted)) return &block;
  return nullptr;
}

bool BufferPool::is_free(size_t bytes, const void* address) const {
  return find_free(bytes, address) != nullptr;
}

std::shared_ptr<void> BufferPool::take(size_t bytes, const void* wanted) {
  const std::shared_ptr<Block>* found = wanted ? find_free(bytes, wanted) : nullptr;
  if (!found) found = find_free(bytes, nullptr);
  if (found) {
    std::atomic_thread_fence(std::memory_order_acquire);  // what another thread did with the buffer is over
    return {*found, (*found)->data()};
  }
  auto& list = free_lists_[size_class(bytes)];
  const auto add = [&] { list.push_back(std::make_shared<Block>(size_class(bytes), count_, device_, pins_)); };
  try {
    add();
  } catch (const Error&) {  // what nobody holds may be enough
    trim();
    add();
  }
  return {list.back(), list.back()->data()};
}

void BufferPool::trim() {
  for (auto& [size, list] : free_lists_) {
    std::erase_if(list, [](const auto& block) { return block.use_count() == 1; });
  }
}

void make_pooled(BufferPool& pool, RuntimeValue& value, DType dtype, const Dims& dims, Layout layout, const void* wanted) {
  value.kind = RuntimeValue::Kind::tensor;
  value.items.clear();
  value.tensor.dtype = dtype;
  if (&value.tensor.dims != &dims) value.tensor.dims = dims;
  value.tensor.layout = layout;
  value.tensor.memory = pool.device() ? Memory::device : Memory::host;
  if (dtype == DType::string) {
    auto strings = std::make_shared<std::vector<std::string>>(std::max<size_t>(static_cast<size_t>(count_of(dims)), 1));
    value.tensor.data = strings->data();
    value.owner = std::move(strings);
    return;
  }
  value.owner = pool.take(bytes_of(dtype, dims, layout), wanted);
  value.tensor.data = value.owner.get();
}

void copy_bytes(const TensorView& to, const TensorView& from, size_t bytes, Device* device) {
  const bool up = to.memory == Memory::device, down = from.memory == Memory::device;
  if (!up && !down) {
    std::memcpy(to.data, from.data, bytes);
  } else if (up && down) {
    device->copy(to.data, from.data, bytes);
  } else if (up) {
    device->upload(to.data, from.data, bytes);
  } else {
    device->download(to.data, from.data, bytes);
  }
}

void copy_pooled(BufferPool& pool, const RuntimeValue& from, RuntimeValue& to, Device* device) {
  if (from.kind != RuntimeValue::Kind::tensor) {
    std::vector<RuntimeValue> items(from.items.size());
    for (size_t i = 0; i < items.size(); ++i) copy_pooled(pool, from.items[i], items[i], device);
    to.kind = from.kind;
    to.element = from.element;
    to.items = std::move(items);
    to.owner.reset();
    return;
  }
  const TensorView source = from.tensor;  // `from` and `to` may be the same value
  make_pooled(pool, to, source.dtype, source.dims, source.layout);
  if (source.dtype == DType::string) {
    std::copy_n(source.as<std::string>(), source.count(), to.tensor.as<std::string>());
  } else if (size_t bytes = source.bytes()) {
    copy_bytes(to.tensor, source, bytes, pool.device() ? pool.device() : device);
  }
}

bool owns_memory(const RuntimeValue& value) {
  if (value.kind == RuntimeValue::Kind::tensor) return value.owner.use_count() > 0;
  return std::all_of(value.items.begin(), value.items.end(), owns_memory);
}

void clear(RuntimeValue& value) {
  value.kind = RuntimeValue::Kind::absent;
  value.owner.reset();
  value.items.clear();
  value.tensor.data = nullptr;
}

std::byte* Arena::reserve(size_t bytes) {
  if (!block_ || block_->bytes() < bytes) {
    block_.reset();
    block_ = std::make_unique<Block>(bytes, count_, device_);
  }
  return static_cast<std::byte*>(block_->data());
}

Arena& RankMemory::arena(size_t depth) {
  while (arenas_.size() <= depth) arenas_.push_back(std::make_unique<Arena>(count, device_));
  return *arenas_[depth];
}

}  // namespace fretsaw
