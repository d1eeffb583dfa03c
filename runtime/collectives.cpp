// Runs the collectives of a graph by the communicator of their group: parts along an axis to blocks and back.
#include "runtime/collectives.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <numeric>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "runtime/collective_parts.h"

namespace fretsaw {
namespace {

using namespace collective;

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
  for (size_t i = 0; i < r.input_count(); ++i) {
    const TensorView& x = r.input(i);
    TensorView& y = r.output(i, x.dims, x.dtype);
    if (y.data != x.data) Mover(r).copy(y.data, x.data, x.bytes());
  }
}

// Tensors that are reduced in place and lie one behind the other in one piece of memory (Rank::place_together) are one. What aligns them
// between is nobody's.
std::vector<Exchanged> neighbours_joined(const RunContext& r, const std::vector<Exchanged>& each) {
  constexpr std::ptrdiff_t kMostBetween = 256;
  std::vector<Exchanged> joined;
  for (size_t i = 0; i < each.size(); ++i) {
    const auto* begin = static_cast<const std::byte*>(each[i].in);
    const bool in_place = begin == each[i].out;
    if (in_place && i > 0 && joined.back().in == joined.back().out) {
      const std::shared_ptr<void>&own = r.value(i).owner, &before = r.value(i - 1).owner;
      const bool one_memory = own && before && !own.owner_before(before) && !before.owner_before(own);
      const std::ptrdiff_t between = begin - (static_cast<const std::byte*>(joined.back().in) + joined.back().bytes);
      if (one_memory && between >= 0 && between < kMostBetween) {
        joined.back().bytes += static_cast<size_t>(between) + each[i].bytes;
        continue;
      }
    }
    joined.push_back(each[i]);
  }
  return joined;
}

void Collective::all_reduce(RunContext& r) const {
  std::vector<Exchanged> each;
  size_t bytes = 0;
  for (size_t i = 0; i < r.input_count(); ++i) {
    const TensorView& x = r.input(i);
    each.push_back({x.data, r.output(i, x.dims, x.dtype, layout).data, x.bytes()});
    bytes += x.bytes();
  }
  if (each.size() > 1) each = neighbours_joined(r, each);
  CollectiveCall call(rank, group(), op, bytes);
  Exchange(r, group()).all_reduce(each, r.input(0).dtype, reduction);
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

// One tensor of a ReduceScatter.
struct Scattered {
  const TensorView& x;
  TensorView& y;
  std::vector<int64_t> sizes;
  Parts parts;
  size_t part_bytes;  // of this rank
  std::byte *sent = nullptr, *received = nullptr;

  Scattered(const TensorView& x, TensorView& y, size_t along, std::vector<int64_t> found, int rank)
      : x(x),
        y(y),
        sizes(std::move(found)),
        parts(Around(x, along), sizes),
        part_bytes(parts.around.part_bytes(sizes[static_cast<size_t>(rank)])) {}
  // Blocks of all ranks, and this rank's where its part is smaller.
  bool padded() const { return part_bytes < parts.block_bytes; }
  size_t scratch_bytes() const {
    return parts.lie_in_blocks() ? 0
                                 : (parts.blocks_bytes() + (padded() ? parts.block_bytes : 0) + kAlignment - 1) / kAlignment * kAlignment;
  }
  void prepare(std::byte* scratch, const Mover& mover) {
    const bool as_it_lies = parts.lie_in_blocks();
    sent = as_it_lies ? data_of(x) : scratch;
    received = as_it_lies || !padded() ? data_of(y) : scratch + parts.blocks_bytes();
    if (!as_it_lies) parts.to_blocks(sent, data_of(x), mover);
  }
  void finish(const Mover& mover) const {
    if (received != data_of(y)) mover.copy(y.data, received, y.bytes());
  }
  static constexpr size_t kAlignment = 256;
};

void Collective::reduce_scatter(RunContext& r) const {
  std::list<Scattered> all;  // `parts` point to `sizes`
  size_t bytes = 0, scratch_bytes = 0;
  const int own = group().ranks->rank();
  for (size_t i = 0; i < r.input_count(); ++i) {
    const TensorView& x = r.input(i);
    const size_t along = normalise_axis(tensor_axis, x.rank());
    std::vector<int64_t> found = scattered_sizes(x.dims[along]);
    Dims dims = x.dims;
    dims[along] = found[static_cast<size_t>(own)];
    all.emplace_back(x, r.output(i, dims, x.dtype, layout), along, std::move(found), own);
    bytes += x.bytes(), scratch_bytes += all.back().scratch_bytes();
  }
  auto* scratch = static_cast<std::byte*>(scratch_bytes ? r.scratch(scratch_bytes) : nullptr);
  const Mover mover(r);
  std::vector<Exchanged> each;
  for (Scattered& one : all) {
    one.prepare(scratch, mover);
    scratch += one.scratch_bytes();
    each.push_back({one.sent, one.received, one.parts.blocks_bytes()});
  }
  {
    CollectiveCall call(rank, group(), op, bytes);
    Exchange(r, group()).reduce_scatter(each, r.input(0).dtype, reduction);
  }
  for (const Scattered& one : all) one.finish(mover);
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
    kernel.input_layouts = kernel.output_layouts = std::vector<Layout>(c.inputs.size(), collective->layout);
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
