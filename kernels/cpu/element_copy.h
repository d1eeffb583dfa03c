// What every kernel that moves elements without looking at them needs: axes, strides, sizes and one N-dimensional strided copy.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "graph/errors.h"
#include "kernels/kernel.h"

namespace fretsaw {

// --- axes, indexes, shapes ---
// `axis` counted from the front; throws Error naming the axis and the rank when it is outside [-rank, rank).
size_t normalise_axis(int64_t axis, size_t rank);
// The axes counted from the front; throws Error when one is named twice.
std::vector<size_t> normalise_axes(const std::vector<int64_t>& axes, size_t rank);

[[noreturn]] void throw_index_out_of_range(int64_t index, int64_t bound);
// `index` counted from the front; throws Error naming it and its bound when it is outside [-bound, bound).
inline int64_t normalise_index(int64_t index, int64_t bound) {
  const int64_t from_front = index < 0 ? index + bound : index;
  if (from_front < 0 || from_front >= bound) throw_index_out_of_range(index, bound);
  return from_front;
}

// Throws Error unless `condition`: for attributes and input shapes that a file may get wrong.
inline void require(bool condition, const char* problem, const char* remedy = "") {
  if (!condition) throw Error(problem, remedy);
}

Dims strides_of(const Dims& dims);                          // in elements, row-major
int64_t product(const Dims& dims, size_t from, size_t to);  // of dims[from, to); 1 when empty
Dims broadcast_dims(const Dims& a, const Dims& b);          // throws Error when they do not go together

// Asks for output `i` after checking that no dimension is negative and that the whole fits in this machine's memory.
TensorView& sized_output(RunContext& r, size_t i, const Dims& dims, DType dtype = DType::undefined);

// The only element of a scalar or one-element tensor of integers.
int64_t input_int(RunContext& r, size_t i);

// --- elements as opaque bytes ---
// Bytes of one element as the copies below see it; elements smaller than a byte count one (ElementReader unpacks them).
size_t element_bytes(DType dtype);

struct alignas(8) Element16 {
  uint64_t halves[2];
};

// Calls f(std::type_identity<T>{}) with the type that moves elements of this type.
template <typename F>
decltype(auto) with_element_type(DType dtype, F&& f) {
  if (dtype == DType::string) return f(std::type_identity<std::string>{});
  switch (element_bytes(dtype)) {
    case 1:
      return f(std::type_identity<uint8_t>{});
    case 2:
      return f(std::type_identity<uint16_t>{});
    case 4:
      return f(std::type_identity<uint32_t>{});
    case 8:
      return f(std::type_identity<uint64_t>{});
    default:
      return f(std::type_identity<Element16>{});
  }
}

// A tensor's elements with at least a byte each: its own memory, or an unpacked copy for 4-bit and 2-bit types.
class ElementReader {
 public:
  explicit ElementReader(const TensorView& view);
  const void* data() const { return data_; }

 private:
  std::vector<uint8_t> unpacked_;
  const void* data_;
};

// Likewise for an output. `finish` packs what was written.
class ElementWriter {
 public:
  explicit ElementWriter(TensorView& view);
  void* data() const { return data_; }
  void finish();

 private:
  TensorView& view_;
  std::vector<uint8_t> unpacked_;
  void* data_;
};

inline const void* offset_by(const void* base, int64_t elements, DType dtype) {
  return static_cast<const char*>(base) + elements * static_cast<int64_t>(element_bytes(dtype));
}
inline void* offset_by(void* base, int64_t elements, DType dtype) {
  return static_cast<char*>(base) + elements * static_cast<int64_t>(element_bytes(dtype));
}

// Copies `count` neighbouring elements.
void copy_elements(DType dtype, void* to, const void* from, int64_t count);
void copy_elements_threaded(DType dtype, void* to, const void* from, int64_t count, int threads);
// Writes `count` times the element at `value`.
void fill_elements(DType dtype, void* to, const void* value, int64_t count);

// to[sum i_k * to_strides_k] = from[sum i_k * from_strides_k] for every index i below `dims`. Strides are in elements; those of
// `from` may be zero or negative. Merges dimensions, copies runs whole and transposes in blocks.
void copy_strided(DType dtype, const Dims& dims, void* to, const Dims& to_strides, const void* from, const Dims& from_strides, int threads);

// The whole of `from` into `to`, of the same type and element count; nothing when they share memory.
void copy_view(TensorView& to, const TensorView& from, int threads);

// An owned copy of a tensor, or the value itself where its memory is already owned.
RuntimeValue owned_copy(const RuntimeValue& value);
RuntimeValue owned_copy(const TensorView& view);

}  // namespace fretsaw
