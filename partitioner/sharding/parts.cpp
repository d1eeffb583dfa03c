// A part of a tensor is runs of bytes at even distances: one for each interval of each outer block.
#include "partitioner/sharding/parts.h"

#include <algorithm>
#include <cstring>

#include "graph/tensor_bytes.h"

namespace fretsaw {
namespace {

constexpr size_t kCopiedBytes = 1 << 16;

class Part {
 public:
  Part(TensorPtr source, size_t dim, Intervals intervals) : source_(std::move(source)), intervals_(std::move(intervals)) {
    inner_bytes_ = static_cast<uint64_t>(bits_of(source_->dtype)) / 8;
    for (size_t d = dim + 1; d < source_->dims.size(); ++d) inner_bytes_ *= static_cast<uint64_t>(source_->dims[d]);
    block_bytes_ = inner_bytes_ * static_cast<uint64_t>(source_->dims[dim]);
    part_bytes_ = inner_bytes_ * static_cast<uint64_t>(size_of(intervals_));
  }

  bool in_one_piece() const { return intervals_.size() == 1 && (block_bytes_ == source_->bytes() || part_bytes_ == source_->bytes()); }
  uint64_t begin() const { return inner_bytes_ * static_cast<uint64_t>(intervals_[0].begin); }

  void read(uint64_t first, std::span<std::byte> out) const {
    if (part_bytes_ == 0) return;
    while (!out.empty()) {
      const uint64_t block = first / part_bytes_;
      uint64_t rest = first % part_bytes_;
      for (const Interval& i : intervals_) {
        const uint64_t run = inner_bytes_ * static_cast<uint64_t>(i.size());
        if (rest >= run) {
          rest -= run;
          continue;
        }
        const size_t count = std::min<uint64_t>(run - rest, out.size());
        read_bytes(*source_, block * block_bytes_ + inner_bytes_ * static_cast<uint64_t>(i.begin) + rest, out.first(count));
        out = out.subspan(count);
        first += count;
        break;
      }
    }
  }

 private:
  TensorPtr source_;
  Intervals intervals_;
  uint64_t inner_bytes_ = 0, block_bytes_ = 0, part_bytes_ = 0;  // of one index, of all of the dimension, of the part of it
};

}  // namespace

TensorPtr part_of(const TensorPtr& tensor, int dim, const Intervals& intervals) {
  auto part = std::make_shared<Tensor>();
  part->name = tensor->name;
  part->dtype = tensor->dtype;
  part->dims = tensor->dims;
  part->dims[static_cast<size_t>(dim)] = size_of(intervals);
  part->missing = tensor->missing;
  part->location = tensor->location;
  if (tensor->is_missing() || part->bytes() == 0) return part;
  const auto where = std::make_shared<Part>(tensor, static_cast<size_t>(dim), intervals);
  if (tensor->data && where->in_one_piece()) {
    part->data = tensor->data + where->begin();
    part->owner = tensor->owner;
    part->file = tensor->file;
    part->file_offset = tensor->file_offset + where->begin();
    return part;
  }
  if (part->bytes() <= kCopiedBytes) {
    auto copy = make_tensor(part->dtype, part->dims);
    copy->name = part->name;
    copy->location = part->location;
    where->read(0, {mutable_data(*copy), copy->bytes()});
    return copy;
  }
  part->generate = [where](uint64_t first, std::span<std::byte> bytes) { where->read(first, bytes); };
  return part;
}

TensorPtr zeros_like(const Tensor& tensor) {
  if (tensor.bytes() <= kCopiedBytes) {
    auto zeros = make_tensor(tensor.dtype, tensor.dims);
    zeros->name = tensor.name;
    return zeros;
  }
  auto zeros = std::make_shared<Tensor>();
  zeros->name = tensor.name;
  zeros->dtype = tensor.dtype;
  zeros->dims = tensor.dims;
  zeros->generate = [](uint64_t, std::span<std::byte> bytes) { std::memset(bytes.data(), 0, bytes.size()); };
  return zeros;
}

}  // namespace fretsaw
