// What collectives are written with: a tensor's parts along an axis, copies of rows, and the exchange among the ranks.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <span>

#include "graph/errors.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/parallel.h"
#include "runtime/program.h"

namespace fretsaw::collective {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

inline std::byte* data_of(const TensorView& x) {
  return static_cast<std::byte*>(x.data);
}
inline ConstBytes bytes_in(const TensorView& x) {
  return {data_of(x), x.bytes()};
}
inline Bytes bytes_in(TensorView& x) {
  return {data_of(x), x.bytes()};
}

// A tensor [outer, axis, inner] around one of its axes.
struct Around {
  int64_t outer = 1;
  int64_t index_bits = 0;  // of one index along the axis: `inner` elements

  // As the elements lie in memory: channels last, the channels are the innermost axis.
  Around(const TensorView& x, size_t axis) {
    Dims dims = x.dims;
    if (x.layout == Layout::nhwc) {
      dims = {x.dims[0], x.dims[2], x.dims[3], x.dims[1]};
      axis = std::array<size_t, 4>{0, 3, 1, 2}[axis];
    }
    outer = product(dims, 0, axis);
    index_bits = bits_of(x.dtype) * product(dims, axis + 1, dims.size());
  }
  // Of `size` indexes that lie side by side.
  size_t row_bytes(int64_t size) const {
    if (size * index_bits % 8) {
      throw Error("parts of packed elements do not begin at whole bytes", "cast the tensor to int8 before it is exchanged");
    }
    return static_cast<size_t>(size * index_bits / 8);
  }
  size_t part_bytes(int64_t size) const { return static_cast<size_t>(outer) * row_bytes(size); }
};

struct Rows {
  std::byte* to;
  size_t to_stride;
  const std::byte* from;
  size_t from_stride, row_bytes;
  int64_t count;
};

// Copies where the tensors are: on the host, or on the device's stream.
class Mover {
 public:
  explicit Mover(const RunContext& r) : device_(r.on_device() ? &r.device() : nullptr), threads_(r.threads()) {}

  void copy(void* to, const void* from, size_t bytes) const {
    if (device_) {
      device_->copy(to, from, bytes);
    } else {
      std::memcpy(to, from, bytes);
    }
  }
  void clear(void* to, size_t bytes) const {
    if (device_) {
      device_->clear(to, bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  }
  void copy_rows(const Rows& rows) const;

 private:
  Device* device_;
  int threads_;
};

inline void Mover::copy_rows(const Rows& rows) const {
  if (rows.row_bytes == 0) return;
  if (device_) {
    return device_->copy_rows(rows.to, rows.to_stride, rows.from, rows.from_stride, rows.row_bytes, static_cast<size_t>(rows.count));
  }
  const int64_t grain = kGrainElements * static_cast<int64_t>(sizeof(float)) / static_cast<int64_t>(rows.row_bytes) + 1;
  parallel_for(rows.count, grain, threads_, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      std::memcpy(rows.to + i * rows.to_stride, rows.from + i * rows.from_stride, rows.row_bytes);
    }
  });
}

// The exchange itself, among the hosts' memories or the devices'.
class Exchange {
 public:
  Exchange(const RunContext& r, const RankContext::Group& group)
      : host_(*group.ranks), devices_(r.on_device() ? group.devices.get() : nullptr) {}

  void all_reduce(std::span<const Exchanged> each, DType dtype, Reduction reduction) const {
    if (each.size() > 1)
      return devices_ ? devices_->all_reduce_each(each, dtype, reduction) : host_.all_reduce_each(each, dtype, reduction);
    const auto& [in, out, bytes] = each[0];
    if (devices_) return devices_->all_reduce(in, out, bytes, dtype, reduction);
    host_.all_reduce({static_cast<const std::byte*>(in), bytes}, {static_cast<std::byte*>(out), bytes}, dtype, reduction);
  }
  void reduce_scatter(std::span<const Exchanged> each, DType dtype, Reduction reduction) const {
    if (each.size() > 1)
      return devices_ ? devices_->reduce_scatter_each(each, dtype, reduction) : host_.reduce_scatter_each(each, dtype, reduction);
    const auto& [in, out, bytes] = each[0];
    if (devices_) return devices_->reduce_scatter(in, out, bytes, dtype, reduction);
    const size_t part = bytes / static_cast<size_t>(host_.size());
    host_.reduce_scatter({static_cast<const std::byte*>(in), bytes}, {static_cast<std::byte*>(out), part}, dtype, reduction);
  }
  void all_gather(ConstBytes in, Bytes out) const {
    if (devices_) return devices_->all_gather(in.data(), out.data(), in.size());
    host_.all_gather(in, out);
  }
  void all_to_all(ConstBytes in, Bytes out) const {
    if (devices_) return devices_->all_to_all(in.data(), out.data(), in.size());
    host_.all_to_all(in, out);
  }
  void broadcast(Bytes data, int root) const {
    if (devices_) return devices_->broadcast(data.data(), data.size(), root);
    host_.broadcast(data, root);
  }

 private:
  Communicator& host_;
  DeviceCommunicator* devices_;
};

// The ranks' parts of an axis, and blocks that hold one each: part `r` in rows, from the beginning of block `r`.
struct Parts {
  Around around;
  std::span<const int64_t> sizes;
  int64_t total, largest;
  size_t block_bytes;

  Parts(const Around& around, std::span<const int64_t> sizes)
      : around(around),
        sizes(sizes),
        total(std::accumulate(sizes.begin(), sizes.end(), int64_t{0})),
        largest(*std::max_element(sizes.begin(), sizes.end())),
        block_bytes(around.part_bytes(largest)) {}
  size_t blocks_bytes() const { return sizes.size() * block_bytes; }
  // Whether the tensor's own bytes are such blocks.
  bool lie_in_blocks() const {
    return around.outer == 1 && std::all_of(sizes.begin(), sizes.end(), [&](int64_t size) { return size == largest; });
  }
  void from_blocks(std::byte* tensor, const std::byte* blocks, const Mover& mover) const {
    const size_t whole_row = around.row_bytes(total);
    for (size_t r = 0, at = 0; r < sizes.size(); ++r) {
      const size_t row = around.row_bytes(sizes[r]);
      mover.copy_rows({tensor + at, whole_row, blocks + r * block_bytes, row, row, around.outer});
      at += row;
    }
  }
  void to_blocks(std::byte* blocks, const std::byte* tensor, const Mover& mover) const {
    const size_t whole_row = around.row_bytes(total);
    for (size_t r = 0, at = 0; r < sizes.size(); ++r) {
      const size_t row = around.row_bytes(sizes[r]), used = around.part_bytes(sizes[r]);
      mover.copy_rows({blocks + r * block_bytes, row, tensor + at, whole_row, row, around.outer});
      mover.clear(blocks + r * block_bytes + used, block_bytes - used);  // it is reduced too
      at += row;
    }
  }
};

}  // namespace fretsaw::collective
