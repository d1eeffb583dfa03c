// Strided copies, joining and splitting of rows, and filling.
#include <algorithm>
#include <cstring>

#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/index_math.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;
constexpr size_t kMaxRank = 10;
constexpr int64_t kSmall = (int64_t{1} << 31) - 1;  // counts up to here are handled with 32-bit indexes
constexpr size_t kWide = 16;                        // bytes of the widest access

// --- strided copy ---
// Output i comes from the sum of its coordinates times `strides`.
template <typename Index>
struct Gather {
  int rank = 0;
  Divider<Index> extents[kMaxRank];
  int64_t strides[kMaxRank] = {};

  FRETSAW_HOST_DEVICE int64_t offset(Index i) const {
    int64_t sum = 0;
    for (int k = rank - 1; k > 0; --k) {
      const Index outer = extents[k].quotient(i);
      sum += static_cast<int64_t>(i - outer * extents[k].divisor) * strides[k];
      i = outer;
    }
    return rank > 0 ? sum + static_cast<int64_t>(i) * strides[0] : sum;
  }
};

// Every thread writes packs of neighbouring outputs, whose inputs are `step` apart.
template <typename T, int kElements, typename Index>
__global__ void __launch_bounds__(kThreads) gather_packs(Gather<Index> gather, T* to, const T* from, int64_t step, Index packs) {
  constexpr int kUnroll = kElements == 1 ? 4 : 1;
  let_later_begin();
  wait_for_earlier();
  Lanes<T, kElements> read[kUnroll];
  const Index first = static_cast<Index>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Index i = first + u * kThreads;
    if (i >= packs) continue;
    const T* source = from + gather.offset(i);
#pragma unroll
    for (int e = 0; e < kElements; ++e) read[u].at[e] = source[e * step];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Index i = first + u * kThreads;
    if (i < packs) reinterpret_cast<Lanes<T, kElements>*>(to)[i] = read[u];
  }
}

template <typename T, int kElements, typename Index>
void launch_gather(const StridedCopy& copy, int64_t count, cudaStream_t stream) {
  Gather<Index> gather;
  gather.rank = static_cast<int>(copy.dims.size());
  for (size_t k = 0; k < copy.dims.size(); ++k) {
    const bool last = k + 1 == copy.dims.size();
    gather.extents[k] = Divider<Index>(last ? copy.dims[k] / kElements : copy.dims[k]);
    gather.strides[k] = last ? copy.from_strides[k] * kElements : copy.from_strides[k];
  }
  const int64_t packs = count / kElements, each = int64_t{kThreads} * (kElements == 1 ? 4 : 1);
  launch_dependent(gather_packs<T, kElements, Index>, static_cast<unsigned>((packs + each - 1) / each), kThreads, stream, gather,
                   static_cast<T*>(copy.to), static_cast<const T*>(copy.from), copy.from_strides.back(), static_cast<Index>(packs));
}

bool aligned(const void* address, size_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// Drops dimensions of 1 and merges those that lie behind each other in `from` as they do in `to`.
void merge_dims(StridedCopy& copy) {
  Dims dims, strides;
  for (size_t k = 0; k < copy.dims.size(); ++k) {
    if (copy.dims[k] == 1) continue;
    if (!dims.empty() && strides.back() == copy.from_strides[k] * copy.dims[k]) {
      dims.back() *= copy.dims[k];
      strides.back() = copy.from_strides[k];
    } else {
      dims.push_back(copy.dims[k]);
      strides.push_back(copy.from_strides[k]);
    }
  }
  copy.dims = std::move(dims);
  copy.from_strides = std::move(strides);
}

// Takes pairs of neighbouring elements as one, as often as possible.
void widen_elements(StridedCopy& copy) {
  const auto even = [](int64_t v) { return v % 2 == 0; };
  while (copy.element_bytes < kWide && !copy.dims.empty() && copy.from_strides.back() == 1 && even(copy.dims.back()) &&
         std::all_of(copy.from_strides.begin(), copy.from_strides.end() - 1, even) && aligned(copy.to, 2 * copy.element_bytes) &&
         aligned(copy.from, 2 * copy.element_bytes)) {
    copy.element_bytes *= 2;
    copy.dims.back() /= 2;
    for (size_t k = 0; k + 1 < copy.dims.size(); ++k) copy.from_strides[k] /= 2;
    if (copy.dims.back() == 1) merge_dims(copy);
  }
}

// The dimension whose neighbours are neighbours in `from`, where going along it is worth a transpose; the rank when there is none.
size_t transposed_along(const StridedCopy& copy) {
  constexpr int64_t kWorth = 16;
  const size_t rank = copy.dims.size();
  if (copy.from_strides.back() == 1 || copy.from_strides.back() == 0 || copy.dims.back() < kWorth) return rank;
  for (size_t k = 0; k + 1 < rank; ++k) {
    if (copy.from_strides[k] == 1 && copy.dims[k] >= kWorth) return k;
  }
  return rank;
}

// --- rows and parts ---

constexpr size_t kMaxParts = 16;

template <typename Index>
struct PartTable {
  void* memory[kMaxParts] = {};
  Index offset[kMaxParts] = {}, units[kMaxParts] = {};  // of one row; of all rows
  Divider<Index> length[kMaxParts];
  unsigned first_block[kMaxParts] = {};
  int parts = 0;
};

constexpr int kPartUnroll = 4;

template <typename T, bool kJoin, typename Index>
__global__ void __launch_bounds__(kThreads) move_parts(PartTable<Index> table, T* rows, Index pitch) {
  let_later_begin();
  wait_for_earlier();
  int part = 0;
  while (part + 1 < table.parts && blockIdx.x >= table.first_block[part + 1]) ++part;
  T* memory = static_cast<T*>(table.memory[part]);
  const Index first = static_cast<Index>(blockIdx.x - table.first_block[part]) * (kThreads * kPartUnroll) + threadIdx.x;
  T read[kPartUnroll];
  Index place[kPartUnroll];
#pragma unroll
  for (int u = 0; u < kPartUnroll; ++u) {
    const Index i = first + u * kThreads;
    if (i >= table.units[part]) continue;
    const Index row = table.length[part].quotient(i);
    place[u] = row * pitch + table.offset[part] + (i - row * table.length[part].divisor);
    read[u] = kJoin ? memory[i] : rows[place[u]];
  }
#pragma unroll
  for (int u = 0; u < kPartUnroll; ++u) {
    const Index i = first + u * kThreads;
    if (i >= table.units[part]) continue;
    if (kJoin) {
      rows[place[u]] = read[u];
    } else {
      memory[i] = read[u];
    }
  }
}

template <typename T, bool kJoin, typename Index>
void launch_parts(void* rows, int64_t pitch, int64_t outer, const std::vector<RowPart>& parts, cudaStream_t stream) {
  constexpr int64_t kUnit = sizeof(T), kBlock = kThreads * kPartUnroll;
  for (size_t begin = 0; begin < parts.size(); begin += kMaxParts) {
    PartTable<Index> table;
    table.parts = static_cast<int>(std::min(kMaxParts, parts.size() - begin));
    int64_t blocks = 0;
    for (int i = 0; i < table.parts; ++i) {
      const RowPart& part = parts[begin + static_cast<size_t>(i)];
      table.memory[i] = part.memory;
      table.offset[i] = static_cast<Index>(part.offset / kUnit);
      table.units[i] = static_cast<Index>(outer * part.length / kUnit);
      table.length[i] = Divider<Index>(part.length / kUnit);
      table.first_block[i] = static_cast<unsigned>(blocks);
      blocks += (outer * part.length / kUnit + kBlock - 1) / kBlock;
    }
    launch_dependent(move_parts<T, kJoin, Index>, static_cast<unsigned>(blocks), kThreads, stream, table, static_cast<T*>(rows),
                     static_cast<Index>(pitch / kUnit));
  }
}

template <bool kJoin>
void move_rows(void* rows, int64_t pitch, int64_t outer, const std::vector<RowPart>& given, cudaStream_t stream) {
  std::vector<RowPart> parts;
  for (const RowPart& part : given) {
    if (part.length > 0) parts.push_back(part);
  }
  if (outer == 0 || parts.empty()) return;
  // The widest unit that all lengths, places and addresses are multiples of.
  uint64_t all = kWide | static_cast<uint64_t>(pitch) | reinterpret_cast<uintptr_t>(rows);
  for (const RowPart& part : parts) all |= static_cast<uint64_t>(part.offset | part.length) | reinterpret_cast<uintptr_t>(part.memory);
  const size_t unit = static_cast<size_t>(all & ~(all - 1));
  with_unit(unit, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    if (outer * pitch / static_cast<int64_t>(unit) <= kSmall) {
      launch_parts<T, kJoin, uint32_t>(rows, pitch, outer, parts, stream);
    } else {
      launch_parts<T, kJoin, int64_t>(rows, pitch, outer, parts, stream);
    }
  });
}

// --- fill ---

__global__ void __launch_bounds__(kThreads) fill_bytes(uint4* to, Pattern pattern, int64_t bytes) {
  const int64_t whole = bytes / 16, stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = first; i < whole; i += stride) to[i] = reinterpret_cast<const uint4&>(pattern);
  if (first < bytes % 16) reinterpret_cast<unsigned char*>(to + whole)[first] = pattern.bytes[first];
}

}  // namespace

Pattern::Pattern(const void* element, size_t element_bytes) {
  for (size_t i = 0; i < sizeof(bytes); i += element_bytes) std::memcpy(bytes + i, element, element_bytes);
}

void copy_strided(StridedCopy copy, cudaStream_t stream) {
  const int64_t bytes = count_of(copy.dims) * static_cast<int64_t>(copy.element_bytes);
  if (bytes == 0) return;
  merge_dims(copy);
  if (copy.dims.empty() || (copy.dims.size() == 1 && copy.from_strides[0] == 1)) {
    FRETSAW_CUDA_CHECK(cudaMemcpyAsync(copy.to, copy.from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream));
    return;
  }
  if (copy.dims.size() > kMaxRank) {  // one copy for each index of the first dimension
    StridedCopy part = copy;
    part.dims.erase(part.dims.begin());
    part.from_strides.erase(part.from_strides.begin());
    for (int64_t i = 0; i < copy.dims[0]; ++i) {
      part.to = static_cast<char*>(copy.to) + i * (bytes / copy.dims[0]);
      part.from = static_cast<const char*>(copy.from) + i * copy.from_strides[0] * static_cast<int64_t>(copy.element_bytes);
      copy_strided(part, stream);
    }
    return;
  }
  widen_elements(copy);
  if (const size_t along = transposed_along(copy); along < copy.dims.size()) return copy_transposed(copy, along, stream);
  const int64_t count = bytes / static_cast<int64_t>(copy.element_bytes);
  with_unit(copy.element_bytes, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    constexpr int kElements = static_cast<int>(kWide / sizeof(T));
    if (count > kSmall) return launch_gather<T, 1, int64_t>(copy, count, stream);
    if (copy.dims.back() % kElements == 0 && aligned(copy.to, kWide)) return launch_gather<T, kElements, uint32_t>(copy, count, stream);
    launch_gather<T, 1, uint32_t>(copy, count, stream);
  });
}

void join_rows(void* rows, int64_t pitch, int64_t outer, const std::vector<RowPart>& parts, cudaStream_t stream) {
  move_rows<true>(rows, pitch, outer, parts, stream);
}

void split_rows(const void* rows, int64_t pitch, int64_t outer, const std::vector<RowPart>& parts, cudaStream_t stream) {
  move_rows<false>(const_cast<void*>(rows), pitch, outer, parts, stream);
}

void fill(void* to, int64_t count, const Pattern& element, size_t element_bytes, cudaStream_t stream) {
  const int64_t bytes = count * static_cast<int64_t>(element_bytes);
  if (bytes == 0) return;
  if (std::all_of(element.bytes, element.bytes + sizeof(element.bytes), [&](unsigned char b) { return b == element.bytes[0]; })) {
    FRETSAW_CUDA_CHECK(cudaMemsetAsync(to, element.bytes[0], static_cast<size_t>(bytes), stream));
    return;
  }
  fill_bytes<<<blocks_for(bytes / 16 + 16, kThreads, 4), kThreads, 0, stream>>>(static_cast<uint4*>(to), element, bytes);
  check_launch("fill");
}

std::string refuse_unmovable(DType dtype) {
  const bool whole_bytes = dtype != DType::string && dtype != DType::undefined && bits_of(dtype) >= 8;
  return whole_bytes ? "" : "elements of type " + std::string(name_of(dtype));
}

std::string refuse_unmovable_input(const CompileContext& c) {
  return refuse_unmovable(c.input_dtype(0));
}

TensorView& device_output(RunContext& r, size_t i, const Dims& dims, DType dtype, Layout layout) {
  for (int64_t d : dims) {
    if (d < 0) throw Error("an output would have the negative dimension " + std::to_string(d), "check the sizes that the shape comes from");
  }
  count_of(dims);  // throws where it overflows
  return r.output(i, dims, dtype, layout);
}

}  // namespace fretsaw::cuda
