// Runs the collectives of a graph by the communicator of their group: parts along an axis to blocks and back.
#include "runtime/collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/parallel.h"

namespace fretsaw {
namespace {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

std::byte* data_of(const TensorView& x) {
  return static_cast<std::byte*>(x.data);
}
ConstBytes bytes_in(const TensorView& x) {
  return {data_of(x), x.bytes()};
}
Bytes bytes_in(TensorView& x) {
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

void Mover::copy_rows(const Rows& rows) const {
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

  void all_reduce(ConstBytes in, Bytes out, DType dtype, Reduction reduction) const {
    if (devices_) return devices_->all_reduce(in.data(), out.data(), in.size(), dtype, reduction);
    host_.all_reduce(in, out, dtype, reduction);
  }
  void all_gather(ConstBytes in, Bytes out) const {
    if (devices_) return devices_->all_gather(in.data(), out.data(), in.size());
    host_.all_gather(in, out);
  }
  void reduce_scatter(ConstBytes in, Bytes out, DType dtype, Reduction reduction) const {
    if (devices_) return devices_->reduce_scatter(in.data(), out.data(), in.size(), dtype, reduction);
    host_.reduce_scatter(in, out, dtype, reduction);
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

// One node, as far as all ranks of its group see it alike.
struct Collective {
  Collective(const CompileContext& c, RankContext& rank);

  RankContext& rank;
  std::string op, axis;
  Reduction reduction = Reduction::sum;
  Layout layout = Layout::plain;
  std::vector<int64_t> sizes;  // of the parts; empty: even, or with `uneven` not known before it runs
  bool uneven = false;
  int64_t tensor_axis = 0, split_axis = 0, concat_axis = 0;
  int root = 0;

  void all_reduce(RunContext& r) const;
  void all_gather(RunContext& r) const;
  void reduce_scatter(RunContext& r) const;
  void all_to_all(RunContext& r) const;
  void broadcast(RunContext& r) const;
  void copy(RunContext& r) const;  // of a rank that is alone on the axis

 private:
  void check_group(const Node& node) const;
  RankContext::Group& group() const { return *rank.group(axis); }
  std::vector<int64_t> gathered_sizes(int64_t own) const;
  std::vector<int64_t> scattered_sizes(int64_t total) const;
};

Reduction reduction_named(const std::string& name) {
  if (name == "sum") return Reduction::sum;
  if (name == "max") return Reduction::max;
  if (name == "min") return Reduction::min;
  if (name == "product") return Reduction::product;
  if (name == "mean") return Reduction::mean;
  throw Error("there is no reduction '" + name + "'", "use sum, max, min, product or mean");
}

Collective::Collective(const CompileContext& c, RankContext& rank)
    : rank(rank),
      op(c.node().op),
      axis(c.node().get_string("axis", "")),
      reduction(reduction_named(c.node().get_string("reduction", "sum"))),
      sizes(c.node().get_ints("sizes")),
      uneven(c.node().get_int("uneven", 0) != 0),
      tensor_axis(c.node().get_int("tensor_axis", 0)),
      split_axis(c.node().get_int("split_axis", 0)),
      concat_axis(c.node().get_int("concat_axis", 0)),
      root(static_cast<int>(c.node().get_int("root", 0))) {
  check_group(c.node());
  if (c.input_dtype(0) == DType::string) throw Error("strings can't be exchanged between ranks", "cut the model elsewhere");
  // The node decides, not what the producer offers: the producers of ranks whose parts differ may choose differently.
  if (c.node().get_int("channels_last", 0) != 0) layout = Layout::nhwc;
}

void Collective::check_group(const Node& node) const {
  const RankContext::Group* found = rank.group(axis);
  const int size = found ? found->ranks->size() : 1, index = found ? found->ranks->rank() : 0;
  const std::string remedy = "partition the model again";
  int64_t expected = node.get_int("group_size", -1), own = node.get_int("index", -1);
  if (expected > 0 && expected != size) {
    throw Error("it is made for " + std::to_string(expected) + " ranks along '" + axis + "', and the mesh has " + std::to_string(size),
                remedy);
  }
  if (own >= 0 && own != index) {
    throw Error("it is made for rank " + std::to_string(own) + " along '" + axis + "', and this is rank " + std::to_string(index), remedy);
  }
  if (!sizes.empty() && (sizes.size() != static_cast<size_t>(size) || *std::min_element(sizes.begin(), sizes.end()) < 0)) {
    throw Error("its sizes are not those of " + std::to_string(size) + " ranks", remedy);
  }
  if (root < 0 || root >= size) {
    throw Error("the root " + std::to_string(root) + " is not one of " + std::to_string(size) + " ranks", remedy);
  }
}

void Collective::copy(RunContext& r) const {
  const TensorView& x = r.input(0);
  TensorView& y = r.output(0, x.dims);
  if (y.data != x.data) Mover(r).copy(y.data, x.data, x.bytes());
}

void Collective::all_reduce(RunContext& r) const {
  const TensorView& x = r.input(0);
  TensorView& y = r.output(0, x.dims, x.dtype, layout);
  CollectiveCall call(rank, group(), op, x.bytes());
  Exchange(r, group()).all_reduce(bytes_in(x), bytes_in(y), x.dtype, reduction);
}

// What each rank brings along the axis: as the node says, all as much as this rank, or as they tell each other.
std::vector<int64_t> Collective::gathered_sizes(int64_t own) const {
  Communicator& ranks = *group().ranks;
  std::vector<int64_t> found = sizes;
  if (found.empty()) found.assign(static_cast<size_t>(ranks.size()), own);
  if (sizes.empty() && uneven) ranks.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(found)));
  if (found[static_cast<size_t>(ranks.rank())] != own) {
    throw Error("this rank holds " + std::to_string(own) + " along axis " + std::to_string(tensor_axis) + " where " +
                    std::to_string(found[static_cast<size_t>(ranks.rank())]) + " are expected",
                "partition the model again");
  }
  return found;
}

void Collective::all_gather(RunContext& r) const {
  const TensorView& x = r.input(0);
  const size_t along = normalise_axis(tensor_axis, x.rank());
  const int64_t own = x.dims[along];
  const std::vector<int64_t> found = gathered_sizes(own);
  const Parts parts(Around(x, along), found);
  Dims dims = x.dims;
  dims[along] = parts.total;
  TensorView& y = r.output(0, dims, x.dtype, layout);
  const Exchange exchange(r, group());
  const Mover mover(r);
  if (parts.lie_in_blocks()) {
    CollectiveCall call(rank, group(), op, y.bytes());
    return exchange.all_gather(bytes_in(x), bytes_in(y));
  }
  const size_t block = parts.block_bytes;
  const bool padded = own < parts.largest;
  auto* blocks = static_cast<std::byte*>(r.scratch(parts.blocks_bytes() + (padded ? block : 0)));
  std::byte* sent = padded ? blocks + parts.blocks_bytes() : data_of(x);
  if (padded) {
    mover.copy(sent, x.data, x.bytes());
    mover.clear(sent + x.bytes(), block - x.bytes());
  }
  {
    CollectiveCall call(rank, group(), op, y.bytes());
    exchange.all_gather({sent, block}, {blocks, parts.blocks_bytes()});
  }
  parts.from_blocks(data_of(y), blocks, mover);
}

// The part of each rank: as the node says; uneven ones that it doesn't name are ceil(total / ranks) each and the rest.
std::vector<int64_t> Collective::scattered_sizes(int64_t total) const {
  const int64_t ranks = group().ranks->size();
  if (!sizes.empty()) {
    if (std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == total) return sizes;
  } else if (uneven || total % ranks == 0) {
    const int64_t part = (total + ranks - 1) / ranks;
    std::vector<int64_t> found;
    for (int64_t i = 0; i < ranks; ++i) found.push_back(std::clamp<int64_t>(total - i * part, 0, part));
    return found;
  }
  throw Error("the tensor's " + std::to_string(total) + " along axis " + std::to_string(tensor_axis) + " are not the parts of " +
                  std::to_string(ranks) + " ranks",
              "partition the model again");
}

void Collective::reduce_scatter(RunContext& r) const {
  const TensorView& x = r.input(0);
  const size_t along = normalise_axis(tensor_axis, x.rank());
  const std::vector<int64_t> found = scattered_sizes(x.dims[along]);
  const Parts parts(Around(x, along), found);
  const Exchange exchange(r, group());
  const Mover mover(r);
  const int64_t own = found[static_cast<size_t>(group().ranks->rank())];
  Dims dims = x.dims;
  dims[along] = own;
  TensorView& y = r.output(0, dims, x.dtype, layout);
  if (parts.lie_in_blocks()) {
    CollectiveCall call(rank, group(), op, x.bytes());
    return exchange.reduce_scatter(bytes_in(x), bytes_in(y), x.dtype, reduction);
  }
  const size_t block = parts.block_bytes;
  const bool padded = own < parts.largest;
  auto* blocks = static_cast<std::byte*>(r.scratch(parts.blocks_bytes() + (padded ? block : 0)));
  std::byte* received = padded ? blocks + parts.blocks_bytes() : data_of(y);
  parts.to_blocks(blocks, data_of(x), mover);
  {
    CollectiveCall call(rank, group(), op, x.bytes());
    exchange.reduce_scatter({blocks, parts.blocks_bytes()}, {received, block}, x.dtype, reduction);
  }
  if (padded) mover.copy(y.data, received, y.bytes());
}

void Collective::all_to_all(RunContext& r) const {
  const TensorView& x = r.input(0);
  Communicator& ranks = *group().ranks;
  const size_t split = normalise_axis(split_axis, x.rank()), joined = normalise_axis(concat_axis, x.rank());
  if (x.dims[split] % ranks.size()) {
    throw Error("the tensor's " + std::to_string(x.dims[split]) + " along axis " + std::to_string(split_axis) + " are not the parts of " +
                    std::to_string(ranks.size()) + " ranks",
                "partition the model again");
  }
  Dims dims = x.dims;
  dims[split] /= ranks.size();
  const std::vector<int64_t> sent_sizes(static_cast<size_t>(ranks.size()), dims[split]);
  const std::vector<int64_t> received_sizes(static_cast<size_t>(ranks.size()), dims[joined]);
  dims[joined] *= ranks.size();
  TensorView& y = r.output(0, dims);
  const Parts sent(Around(x, split), sent_sizes), received(Around(y, joined), received_sizes);
  const size_t bytes = x.bytes(), packed = sent.lie_in_blocks() ? 0 : bytes, unpacked = received.lie_in_blocks() ? 0 : bytes;
  auto* scratch = static_cast<std::byte*>(packed + unpacked ? r.scratch(packed + unpacked) : nullptr);
  std::byte* out = packed ? scratch : data_of(x);
  std::byte* in = unpacked ? scratch + packed : data_of(y);
  const Mover mover(r);
  if (packed) sent.to_blocks(out, data_of(x), mover);
  {
    CollectiveCall call(rank, group(), op, bytes);
    Exchange(r, group()).all_to_all({out, bytes}, {in, bytes});
  }
  if (unpacked) received.from_blocks(data_of(y), in, mover);
}

void Collective::broadcast(RunContext& r) const {
  const TensorView& x = r.input(0);
  TensorView& y = r.output(0, x.dims);
  if (group().ranks->rank() == root && y.data != x.data) Mover(r).copy(y.data, x.data, x.bytes());
  CollectiveCall call(rank, group(), op, x.bytes());
  Exchange(r, group()).broadcast(bytes_in(y), root);
}

using Method = void (Collective::*)(RunContext&) const;

Method method_of(const std::string& op) {
  if (op == "AllReduce") return &Collective::all_reduce;
  if (op == "AllGather") return &Collective::all_gather;
  if (op == "ReduceScatter") return &Collective::reduce_scatter;
  if (op == "AllToAll") return &Collective::all_to_all;
  if (op == "Broadcast") return &Collective::broadcast;
  return nullptr;
}

}  // namespace

bool is_collective(const Node& node) {
  return node.domain == kCommunicationDomain && method_of(node.op) != nullptr;
}

CompiledKernel make_collective(const CompileContext& c, RankContext& rank) {
  auto collective = std::make_shared<Collective>(c, rank);
  Method method = rank.group(collective->axis) ? method_of(collective->op) : &Collective::copy;
  CompiledKernel kernel;
  kernel.run = [collective, method](RunContext& r) { ((*collective).*method)(r); };
  const bool by_layout = method == &Collective::all_reduce || method == &Collective::all_gather || method == &Collective::reduce_scatter;
  if (by_layout && collective->layout != Layout::plain) {
    kernel.input_layouts = kernel.output_layouts = {collective->layout};
  }
  const bool in_place = method == &Collective::all_reduce || method == &Collective::broadcast || method == &Collective::copy;
  if (in_place) kernel.overwrites = 0;
  const RankContext::Group* group = rank.group(collective->axis);
  kernel.capturable = !group || (group->devices && group->devices->capturable() && !(collective->uneven && collective->sizes.empty()));
  return kernel;
}

CollectiveCounts::CollectiveCounts(const RankContext& rank) {
  for (size_t i = 0; i < rank.groups.size(); ++i) calls_[i] = rank.groups[i].calls;
  if (rank.counts_communication && !rank.groups.empty()) communication_ = rank.communication;
}

void CollectiveCounts::agree_to_repeat(RankContext& rank) const {
  struct Word {
    std::array<char, 16> what = {"fretsaw repeats"};  // a rank that does not repeat sends something else, or is in another collective
    int64_t calls = 0;
    bool operator==(const Word&) const = default;
  };
  if (rank.counts_communication && !rank.groups.empty()) rank.communication = communication_;
  for (size_t i = 0; i < rank.groups.size(); ++i) {
    RankContext::Group& group = rank.groups[i];
    Word own;
    own.calls = group.calls - calls_[i];
    if (own.calls == 0) continue;
    std::vector<Word> words(static_cast<size_t>(group.ranks->size()));
    group.ranks->all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(words)));
    if (std::count(words.begin(), words.end(), own) == static_cast<int64_t>(words.size())) continue;
    throw Error("a shape was inferred wrongly on this rank and not on others along '" + group.axis + "'",
                "partition the model without that axis");
  }
}

}  // namespace fretsaw
