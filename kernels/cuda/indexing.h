// What the kernels that read or write where indexes say have in common: the places that indexes name, and copying rows between them.
//
// A "place" is the number of a row in a tensor that is seen as [rows, row]: Gather of x [outer, extent, row] names row
// o * extent + index, GatherElements rows of one element. Functors compute them, on the device, from the number of the item.
#pragma once
#include <initializer_list>

#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/index_math.h"

namespace fretsaw::cuda {

constexpr size_t kMaxRank = 16;
constexpr int kThreads = 256;

// Calls f.operator()<N>() with the type to count up to `most` in.
template <typename F>
decltype(auto) with_count_type(int64_t most, F&& f) {
  if (most < int64_t{1} << 31) return f.template operator()<uint32_t>();
  return f.template operator()<uint64_t>();
}

// Calls f.operator()<V>() with the widest type, up to 16 bytes, in which rows of so many bytes at these addresses can be moved.
template <typename F>
decltype(auto) with_widest(size_t row_bytes, std::initializer_list<const void*> addresses, F&& f) {
  size_t bits = row_bytes;
  for (const void* address : addresses) bits |= reinterpret_cast<uintptr_t>(address);
  if (bits % 16 == 0) return f.template operator()<uint4>();
  if (bits % 8 == 0) return f.template operator()<uint2>();
  if (bits % 4 == 0) return f.template operator()<uint32_t>();
  if (bits % 2 == 0) return f.template operator()<uint16_t>();
  return f.template operator()<uint8_t>();
}

// Indexes in device memory, int32 or int64.
struct Indexes {
  const void* data = nullptr;
  bool wide = true;
  DeviceFault* fault = nullptr;

  Indexes() = default;
  Indexes(const TensorView& view, DeviceFault* fault) : data(view.data), wide(view.dtype == DType::int64), fault(fault) {}

  __device__ int64_t at(int64_t i) const { return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i]; }
  // Index i counted from the front; -1, and a fault, where it lies outside the dimension.
  __device__ int64_t within(int64_t i, int64_t extent) const {
    const int64_t index = at(i), from_front = index < 0 ? index + extent : index;
    if (from_front >= 0 && from_front < extent) return from_front;
    report(index, extent);
    return -1;
  }
  __device__ void report(int64_t index, int64_t extent) const { *reinterpret_cast<longlong2*>(fault) = make_longlong2(index, extent + 1); }
};

// Of x [outer, extent, row]: item (o, p) of [outer, picked] is row index(p) of slice o.
template <typename N>
struct AxisPlaces {
  Indexes indexes;
  Divider<N> picked;
  int64_t extent;

  __device__ int64_t operator()(N item) const {
    const N outer = picked.quotient(item);
    const int64_t index = indexes.within(item - outer * static_cast<N>(picked.divisor), extent);
    return index < 0 ? -1 : static_cast<int64_t>(outer) * extent + index;
  }
};

// For items of shape `dims` (that of the indexes): the element of x at the item's own position, but for the index along the axis.
template <typename N>
struct ElementPlaces {
  Indexes indexes;
  int rank, axis;
  int64_t extent;
  Divider<N> dims[kMaxRank];
  int64_t strides[kMaxRank];  // of x

  ElementPlaces(const Indexes& indexes, const Dims& items, const Dims& x, size_t axis)
      : indexes(indexes), rank(static_cast<int>(x.size())), axis(static_cast<int>(axis)), extent(x[axis]) {
    const Dims of_x = strides_of(x);
    for (size_t k = 0; k < x.size(); ++k) dims[k] = Divider<N>(items[k]), strides[k] = of_x[k];
  }
  __device__ int64_t operator()(N item) const {
    const int64_t index = indexes.within(item, extent);
    if (index < 0) return -1;
    int64_t place = index * strides[axis];
    N rest = item;
    for (int k = rank - 1; k >= 0; --k) {
      const N above = dims[k].quotient(rest);
      if (k != axis) place += static_cast<int64_t>(rest - above * static_cast<N>(dims[k].divisor)) * strides[k];
      rest = above;
    }
    return place;
  }
};

// Indexes [..., width] of x [batch..., d_1, ..., d_width, row...], with the batch dimensions in common.
template <typename N>
struct TuplePlaces {
  Indexes indexes;
  int width;
  Divider<N> in_batch;  // items that one batch has
  int64_t batch_rows;   // rows that one batch has
  int64_t dims[kMaxRank], strides[kMaxRank];

  TuplePlaces(const Indexes& indexes, const Dims& index_dims, const Dims& x, size_t batch)
      : indexes(indexes), width(static_cast<int>(index_dims.back())) {
    const auto end = batch + static_cast<size_t>(width);
    in_batch = Divider<N>(product(index_dims, batch, index_dims.size() - 1));
    batch_rows = product(x, batch, end);
    for (size_t k = batch; k < end; ++k) dims[k - batch] = x[k], strides[k - batch] = product(x, k + 1, end);
  }
  __device__ int64_t operator()(N item) const {
    int64_t place = static_cast<int64_t>(in_batch.quotient(item)) * batch_rows;
    for (int k = 0; k < width; ++k) {
      const int64_t index = indexes.within(static_cast<int64_t>(item) * width + k, dims[k]);
      if (index < 0) return -1;
      place += index * strides[k];
    }
    return place;
  }
};

// The reason to refuse a node that moves elements of input `i`'s type by indexes that input `indexes` holds; "" when it can be done.
std::string refuse_to_move(const CompileContext& c, size_t i);
std::string refuse_indexes(const CompileContext& c, size_t i, size_t indexes);

// Parts of the family, each in the file of its name.
void register_gathers(KernelRegistry& registry);           // indexing.cu: Gather, GatherElements, GatherND, OneHot
void register_selections(KernelRegistry& registry);        // indexing_select.cu: Compress, NonZero
void register_scatters(KernelRegistry& registry);          // indexing_scatter.cu: ScatterElements, ScatterND, TensorScatter, MaxUnpool
void register_sorting(KernelRegistry& registry);           // sorting.cu: TopK
void register_generators(KernelRegistry& registry);        // generators.cu: Range, windows
void register_random(KernelRegistry& registry);            // generators_random.cu
void register_rotary(KernelRegistry& registry);            // rotary.cu
void register_integer_products(KernelRegistry& registry);  // integer_products.cu

}  // namespace fretsaw::cuda
