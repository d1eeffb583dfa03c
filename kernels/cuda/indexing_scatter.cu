// Operators that write where indexes say: ScatterElements (and the older Scatter), ScatterND, TensorScatter, MaxUnpool.
// Where several updates go to one place, the result is that of taking them in their order: no float atomics.
#include "kernels/cpu/pooling.h"
#include "kernels/cuda/indexing_rows.h"
#include "kernels/cuda/indexing_scatter.h"

namespace fretsaw::cuda {
namespace {

// The row that each item goes to, `rows` where there is none. With `last`: for each row 1 + the last item that goes to it (it was 0
// before); with `order`: the numbers of the items.
template <typename N, typename Places>
__global__ void __launch_bounds__(kThreads) find_targets(N* targets, N* last, N* order, N items, N rows, Places places) {
  using Atomic = std::conditional_t<sizeof(N) == 8, unsigned long long, unsigned>;
  const N step = static_cast<N>(gridDim.x) * blockDim.x;
  for (N item = static_cast<N>(blockIdx.x) * blockDim.x + threadIdx.x; item < items; item += step) {
    const int64_t place = places(item);
    targets[item] = place < 0 ? rows : static_cast<N>(place);
    if (order) order[item] = item;
    if (last && place >= 0) atomicMax(reinterpret_cast<Atomic*>(last + place), static_cast<Atomic>(item + 1));
  }
}

// y's rows = the last of the updates that go to them.
template <typename V, typename N>
__global__ void __launch_bounds__(kThreads)
    write_last(V* y, const V* updates, N count, Divider<N> row, N rows, const N* targets, const N* last) {
  const N step = static_cast<N>(gridDim.x) * blockDim.x, width = row.divisor;
  for (N at = static_cast<N>(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) {
    const N item = row.quotient(at), target = targets[item];
    if (target != rows && last[target] == item + 1) y[static_cast<uint64_t>(target) * width + (at - item * width)] = updates[at];
  }
}

template <typename N, typename Places>
void launch_find(RunContext& r, const Updates& u, N* targets, N* last, N* order, const Places& places) {
  find_targets<N><<<blocks_for(u.items, kThreads), kThreads, 0, stream_of(r)>>>(targets, last, order, static_cast<N>(u.items),
                                                                                static_cast<N>(u.rows), places);
  check_launch("find_targets");
}

template <typename N, typename Places>
void keep_last(RunContext& r, const Updates& u, const Places& places) {
  auto* targets = static_cast<N*>(r.scratch(static_cast<size_t>(u.items + u.rows) * sizeof(N)));
  N* last = targets + u.items;
  r.device().clear(last, static_cast<size_t>(u.rows) * sizeof(N));
  launch_find<N>(r, u, targets, last, static_cast<N*>(nullptr), places);
  const size_t row_bytes = u.updates.bytes() / static_cast<size_t>(u.items);
  with_widest(row_bytes, {u.y.data, u.updates.data}, [&]<typename V>() {
    const auto row = static_cast<int64_t>(row_bytes / sizeof(V)), count = u.items * row;
    write_last<V, N><<<blocks_for(count, kThreads), kThreads, 0, stream_of(r)>>>(
        u.y.as<V>(), u.updates.as<const V>(), static_cast<N>(count), Divider<N>(row), static_cast<N>(u.rows), targets, last);
  });
  check_launch("write_last");
}

// Writes `updates` [items, inner] to the rows of y that the places name; make.operator()<N>() gives them.
template <typename Make>
void scatter(RunContext& r, ScatterReduction reduction, const TensorView& y, const TensorView& updates, int64_t items, const Make& make) {
  if (updates.count() == 0) return;
  const int64_t inner = updates.count() / items;
  const Updates u{y, updates, items, inner, y.count() / inner};
  with_count_type(std::max(updates.count(), u.rows + 1), [&]<typename N>() {
    const auto places = make.template operator()<N>();
    if (reduction == ScatterReduction::none) return keep_last<N>(r, u, places);
    void* scratch = r.scratch(bytes_to_order<N>(u));
    auto* targets = static_cast<N*>(scratch);
    launch_find<N>(r, u, targets, static_cast<N*>(nullptr), targets + items, places);
    reduce_in_order<N>(r, reduction, u, scratch);
  });
}

// Output 0 with the elements of x, unless it lies on x already.
const TensorView& copied_output(RunContext& r, const TensorView& x) {
  const TensorView& y = sized_output(r, 0, x.dims, x.dtype);
  if (y.data != x.data) r.device().copy(y.data, x.data, x.bytes());
  return y;
}

// A kernel whose output had best lie on input 0, unless that is also what is written to it.
CompiledKernel overwriting(const CompileContext& c, std::function<void(RunContext&)> run) {
  CompiledKernel kernel;
  kernel.run = std::move(run);
  if (std::count(c.inputs.begin(), c.inputs.end(), c.inputs[0]) == 1) kernel.overwrites = 0;
  return kernel;
}

CompiledKernel make_scatter_elements(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", 0);
  return overwriting(c, [axis_attribute, reduction = scatter_reduction_of(c.node()), fault = gpu(c).fault_word(c.node())](RunContext& r) {
    const TensorView &x = r.input(0), &indexes = r.input(1), &updates = r.input(2);
    const Dims& dims = updates.dims;
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    require(updates.dtype == x.dtype, "data and updates must have one type");
    require(dims == indexes.dims, "indices and updates must have the same shape");
    require(dims.size() == x.rank() && x.rank() <= kMaxRank, "data and updates must have the same rank, of at most 16");
    for (size_t i = 0; i < dims.size(); ++i) {
      if (i != axis && dims[i] > x.dims[i]) {
        throw Error("updates of shape " + to_string(dims) + " reach outside data of shape " + to_string(x.dims));
      }
    }
    scatter(r, reduction, copied_output(r, x), updates, updates.count(),
            [&]<typename N>() { return ElementPlaces<N>(Indexes(indexes, fault.get()), dims, x.dims, axis); });
  });
}

CompiledKernel make_scatter_nd(const CompileContext& c) {
  return overwriting(c, [reduction = scatter_reduction_of(c.node()), fault = gpu(c).fault_word(c.node())](RunContext& r) {
    const TensorView &x = r.input(0), &indexes = r.input(1), &updates = r.input(2);
    const Dims& index_dims = indexes.dims;  // [..., K]
    require(updates.dtype == x.dtype, "data and updates must have one type");
    require(!index_dims.empty() && index_dims.back() >= 0 && index_dims.back() <= static_cast<int64_t>(x.rank()) && x.rank() <= kMaxRank,
            "the last dimension of indices must be at most the rank of data, and that at most 16");
    Dims expected(index_dims.begin(), index_dims.end() - 1);
    const int64_t items = count_of(expected);
    expected.insert(expected.end(), x.dims.begin() + index_dims.back(), x.dims.end());
    if (updates.dims != expected) {
      throw Error("updates have shape " + to_string(updates.dims) + " where " + to_string(expected) + " is expected");
    }
    scatter(r, reduction, copied_output(r, x), updates, items,
            [&]<typename N>() { return TuplePlaces<N>(Indexes(indexes, fault.get()), index_dims, x.dims, 0); });
  });
}

// Of an update [prefix, length, row] of a cache [prefix, extent, row]: item (p, i) goes to slot start + i of p, where each of the batch's
// samples (so many prefixes each) has a start of its own.
template <typename N>
struct CachePlaces {
  Indexes starts;  // no data: all start at 0
  Divider<N> length, in_sample;
  int64_t extent;
  bool circular;

  __device__ int64_t operator()(N item) const {
    const N prefix = length.quotient(item);
    const int64_t start = starts.data ? starts.at(in_sample.quotient(prefix)) : 0;
    if (start < 0 || (!circular && start > extent - static_cast<int64_t>(length.divisor))) {
      starts.report(start, extent);
      return -1;
    }
    const int64_t slot = start % extent + static_cast<int64_t>(item - prefix * length.divisor);
    return static_cast<int64_t>(prefix) * extent + (slot < extent ? slot : slot - extent);
  }
};

CompiledKernel make_tensor_scatter(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", -2);
  const std::string mode = c.node().get_string("mode", "linear");
  require(mode == "linear" || mode == "circular", "the mode must be linear or circular");
  return overwriting(c, [axis_attribute, circular = mode == "circular", fault = gpu(c).fault_word(c.node())](RunContext& r) {
    const TensorView &x = r.input(0), &update = r.input(1);  // [B, ..., extent, ...], [B, ..., length, ...]
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    require(axis > 0, "the axis can't be that of the batch");
    require(update.dtype == x.dtype && update.rank() == x.rank(), "the cache and its update must have one type and rank");
    for (size_t i = 0; i < x.rank(); ++i) require(i == axis || x.dims[i] == update.dims[i], "the cache and its update differ in shape");
    const int64_t extent = x.dims[axis], length = update.dims[axis], prefixes = product(x.dims, 0, axis);
    require(length <= extent, "the update is longer than the cache");
    Indexes starts;
    if (r.has_input(2)) {
      starts = Indexes(r.input(2), nullptr);
      require(r.input(2).count() == x.dims[0], "there must be one write index for each sample");
    }
    starts.fault = fault.get();
    launch_put(r, copied_output(r, x), update, prefixes * length, [&]<typename N>() {
      return CachePlaces<N>{starts, Divider<N>(length), Divider<N>(prefixes / x.dims[0]), extent, circular};
    });
  });
}

// Items go to where the index says in a tensor of shape `from`, which lies in one of shape `to`.
template <typename N>
struct UnpoolPlaces {
  Indexes indexes;
  int rank;
  int64_t count;
  int64_t from[kMaxRank], to[kMaxRank];

  __device__ int64_t operator()(N item) const {
    int64_t rest = indexes.at(item), place = 0, stride = 1;
    if (rest < 0 || rest >= count) {
      indexes.report(rest, count);
      return -1;
    }
    for (int k = rank - 1; k >= 0; --k) {
      const int64_t position = rest % from[k];
      if (position >= to[k]) {
        indexes.report(position, to[k]);
        return -1;
      }
      place += position * stride;
      rest /= from[k];
      stride *= to[k];
    }
    return place;
  }
};

void unpool(RunContext& r, const Node& node, DeviceFault* fault) {
  const TensorView &x = r.input(0), &indexes = r.input(1);
  const UnpoolShapes shapes = unpool_shapes(r, node, kMaxRank);
  const TensorView& y = sized_output(r, 0, shapes.out);
  r.device().clear(y.data, y.bytes());
  scatter(r, ScatterReduction::none, y, x, x.count(), [&]<typename N>() {
    UnpoolPlaces<N> places{Indexes(indexes, fault), static_cast<int>(x.rank()), count_of(shapes.pooled), {}, {}};
    std::copy(shapes.pooled.begin(), shapes.pooled.end(), places.from);
    std::copy(shapes.out.begin(), shapes.out.end(), places.to);
    return places;
  });
}

CompiledKernel make_unpool(const CompileContext& c) {
  CompiledKernel kernel;
  kernel.run = [node = Node(c.node()), fault = gpu(c).fault_word(c.node())](RunContext& r) { unpool(r, node, fault.get()); };
  return kernel;
}

std::string unsupported_scatter(const CompileContext& c) {
  const std::string reason = refuse_indexes(c, 0, 1);
  if (!reason.empty() || scatter_reduction_of(c.node()) == ScatterReduction::none) return reason;
  return refuse_other_types(c, 0,
                            {DType::boolean, DType::int8, DType::uint8, DType::int16, DType::uint16, DType::int32, DType::uint32,
                             DType::int64, DType::uint64, DType::float16, DType::bfloat16, DType::float32, DType::float64});
}

std::string unsupported_tensor_scatter(const CompileContext& c) {
  return refuse_indexes(c, 0, 2);
}

std::string unsupported_unpool(const CompileContext& c) {
  const std::string reason = refuse_to_move(c, 0);
  return reason.empty() ? refuse_other_types(c, 1, {DType::int64}) : reason;
}

}  // namespace

void register_scatters(KernelRegistry& registry) {
  registry.add({.op = "Scatter", .make = make_scatter_elements, .unsupported = unsupported_scatter});
  registry.add({.op = "ScatterElements", .make = make_scatter_elements, .unsupported = unsupported_scatter});
  registry.add({.op = "ScatterND", .make = make_scatter_nd, .unsupported = unsupported_scatter});
  registry.add({.op = "TensorScatter", .make = make_tensor_scatter, .unsupported = unsupported_tensor_scatter});
  registry.add({.op = "MaxUnpool", .make = make_unpool, .unsupported = unsupported_unpool, .host_inputs = {2}});
}

}  // namespace fretsaw::cuda
