// SumTo and GatherGrad.
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/gradients.h"
#include "kernels/cuda/indexing_scatter.h"
#include "kernels/cuda/reductions.h"

namespace fretsaw::cuda {
namespace {

// --- SumTo ---

// For each dimension of x whether a tensor of this shape was broadcast along it.
std::vector<bool> broadcast_flags(const Dims& x, const Dims& shape) {
  require(shape.size() <= x.size(), "the shape to sum to has more dimensions than the tensor", "give the operand's shape");
  std::vector<bool> flags(x.size(), true);
  const size_t added = x.size() - shape.size();
  for (size_t d = 0; d < shape.size(); ++d) {
    require(shape[d] == 1 || shape[d] == x[added + d], "the shape to sum to does not broadcast to the tensor's",
            "give the operand's shape");
    flags[added + d] = shape[d] != x[added + d];
  }
  return flags;
}

// Known when the step is made: what comes out is what goes in.
bool sums_nothing(const CompileContext& c) {
  const std::optional<Dims> x = c.input_dims(0);
  if (!x || c.output_types.empty() || !c.output_types[0].shape || !is_static(*c.output_types[0].shape)) return false;
  return count_of(dims_of(*c.output_types[0].shape)) == count_of(*x);
}

CompiledKernel make_sum_to(const CompileContext& c) {
  const auto run = [](RunContext& r) {
    const TensorView& x = r.input(0);
    const Dims shape = r.input_ints(1);
    const std::vector<bool> flags = broadcast_flags(x.dims, shape);
    TensorView& y = sized_output(r, 0, shape, x.dtype);
    if (x.count() == 0) return r.device().clear(y.data, y.bytes());
    if (x.count() != y.count()) return reduce_sum(r, plan_reduction(x.dims, flags), y, SumTerm::plain, SumFinish::none);
    if (y.data != x.data) r.device().copy(y.data, x.data, x.bytes());
  };
  return {.run = run, .overwrites = sums_nothing(c) ? 0 : -1};
}

std::string unsupported_sum_to(const CompileContext& c) {
  return refuse_mixed_floats(c, {0});
}

// --- GatherGrad: rows of dY are brought together by where they go, and added in their order ---

// The row of dX that each row of dY goes to, `rows` where there is none, and the numbers of the rows of dY.
template <typename N>
__global__ void __launch_bounds__(kThreads) name_rows(N* targets, N* order, N items, N rows, AxisPlaces<N> places) {
  const N step = static_cast<N>(gridDim.x) * blockDim.x;
  for (N item = static_cast<N>(blockIdx.x) * blockDim.x + threadIdx.x; item < items; item += step) {
    const int64_t place = places(item);
    targets[item] = place < 0 ? rows : static_cast<N>(place);
    order[item] = item;
  }
}

// A block takes the first of the rows that go to one place, and all that follow it, in packs of V: threadIdx.x of a row's packs,
// threadIdx.y of the rows. Long rows take the blocks of the grid's second dimension several times.
template <typename T, int V, typename N>
__global__ void __launch_bounds__(kThreads) sum_sorted_rows(T* y, const T* from, N items, N rows, int64_t width, Ordered<N> sorted) {
  using Wide = WideOf<T>;
  __shared__ Wide shared[kThreads];
  const N first = blockIdx.x, target = sorted.targets[first];
  if (target == rows || (first > 0 && sorted.targets[first - 1] == target)) return;
  const int64_t block = int64_t{blockDim.x} * V;
  for (int64_t begin = blockIdx.y * block; begin < width; begin += gridDim.y * block) {
    const int64_t column = begin + int64_t{threadIdx.x} * V;
    const bool real = column < width;
    Wide sums[V] = {};
    for (N k = first + threadIdx.y; real && k < items && sorted.targets[k] == target; k += blockDim.y) {
      const auto row = *reinterpret_cast<const Lanes<T, V>*>(from + static_cast<int64_t>(sorted.order[k]) * width + column);
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] += widen(row.at[v]);
    }
    Lanes<T, V> out;
#pragma unroll
    for (int v = 0; v < V; ++v) out.at[v] = narrow<T>(join_column(sums[v], shared, AddJoin{}));
    if (real && threadIdx.y == 0) *reinterpret_cast<Lanes<T, V>*>(y + static_cast<int64_t>(target) * width + column) = out;
  }
}

// The same for short rows: a thread takes one column of them.
template <typename T, typename N>
__global__ void __launch_bounds__(kThreads)
    sum_sorted_columns(T* y, const T* from, N count, Divider<N> row, N items, N rows, Ordered<N> sorted) {
  const N step = static_cast<N>(gridDim.x) * blockDim.x, width = row.divisor;
  for (N at = static_cast<N>(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) {
    const N first = row.quotient(at), column = at - first * width, target = sorted.targets[first];
    if (target == rows || (first > 0 && sorted.targets[first - 1] == target)) continue;
    WideOf<T> sum = 0;
    for (N k = first; k < items && sorted.targets[k] == target; ++k)
      sum += widen(from[static_cast<uint64_t>(sorted.order[k]) * width + column]);
    y[static_cast<uint64_t>(target) * width + column] = narrow<T>(sum);
  }
}

constexpr int64_t kShortRow = 64, kMostBlocksDown = 65535;

template <typename T, typename N>
void sum_sorted(RunContext& r, const Updates& u, const Ordered<N>& sorted) {
  const auto items = static_cast<N>(u.items), rows = static_cast<N>(u.rows);
  const cudaStream_t stream = stream_of(r);
  const auto* from = u.updates.as<const T>();
  auto* y = u.y.as<T>();
  if (u.inner < kShortRow || u.items >= int64_t{1} << 31) {
    const int64_t count = u.items * u.inner;
    sum_sorted_columns<T, N>
        <<<blocks_for(count, kThreads), kThreads, 0, stream>>>(y, from, static_cast<N>(count), Divider<N>(u.inner), items, rows, sorted);
    return check_launch("sum_sorted_columns");
  }
  const auto launch = [&]<int V>() {
    const dim3 threads(32, kThreads / 32);
    const int64_t pieces = (u.inner / V + 31) / 32;
    const dim3 grid(static_cast<unsigned>(u.items), static_cast<unsigned>(std::min<int64_t>(pieces, kMostBlocksDown)));
    sum_sorted_rows<T, V, N><<<grid, threads, 0, stream>>>(y, from, items, rows, u.inner, sorted);
  };
  if (u.inner % kPackOf16<T> == 0 && is_16_byte_aligned(from) && is_16_byte_aligned(y))
    launch.template operator()<kPackOf16<T>>();
  else
    launch.template operator()<1>();
  check_launch("sum_sorted_rows");
}

void run_gather_grad(RunContext& r, int64_t axis_attribute, DeviceFault* fault) {
  const TensorView &dy = r.input(0), &indexes = r.input(1);
  const Dims dims = r.input_ints(2);
  const size_t axis = normalise_axis(axis_attribute, dims.size());
  Dims wanted = dims;
  wanted.erase(wanted.begin() + static_cast<std::ptrdiff_t>(axis));
  wanted.insert(wanted.begin() + static_cast<std::ptrdiff_t>(axis), indexes.dims.begin(), indexes.dims.end());
  require(dy.dims == wanted, "the gradient has another shape than Gather's result", "give Gather's indices and the shape of its data");
  TensorView& dx = sized_output(r, 0, dims, dy.dtype);
  r.device().clear(dx.data, dx.bytes());
  if (dy.count() == 0) return;
  const int64_t outer = product(dims, 0, axis), inner = product(dims, axis + 1, dims.size());
  const Updates u{dx, dy, outer * indexes.count(), inner, outer * dims[axis]};
  with_count_type(std::max(dy.count(), u.rows + 1), [&]<typename N>() {
    void* scratch = r.scratch(bytes_to_order<N>(u));
    auto* targets = static_cast<N*>(scratch);
    const AxisPlaces<N> places{Indexes(indexes, fault), Divider<N>(indexes.count()), dims[axis]};
    name_rows<N><<<blocks_for(u.items, kThreads), kThreads, 0, stream_of(r)>>>(targets, targets + u.items, static_cast<N>(u.items),
                                                                               static_cast<N>(u.rows), places);
    check_launch("name_rows");
    const Ordered<N> sorted = bring_together<N>(r, u, scratch);
    with_float_type(dy.dtype, [&]<typename T>(TypeIs<T>) { sum_sorted<T, N>(r, u, sorted); });
  });
}

CompiledKernel make_gather_grad(const CompileContext& c) {
  return {
      [axis = c.node().get_int("axis", 0), fault = gpu(c).fault_word(c.node())](RunContext& r) { run_gather_grad(r, axis, fault.get()); }};
}

std::string unsupported_gather_grad(const CompileContext& c) {
  const std::string reason = refuse_mixed_floats(c, {0});
  return reason.empty() ? refuse_other_types(c, 1, {DType::int32, DType::int64}) : reason;
}

}  // namespace

void register_summing_gradients(KernelRegistry& registry) {
  const char* domain = kCommunicationDomain;
  registry.add({.op = "SumTo", .domain = domain, .make = make_sum_to, .unsupported = unsupported_sum_to, .host_inputs = {1}});
  registry.add(
      {.op = "GatherGrad", .domain = domain, .make = make_gather_grad, .unsupported = unsupported_gather_grad, .host_inputs = {2}});
}

}  // namespace fretsaw::cuda
