// Axes, strides, sizes and the N-dimensional strided copy that movement kernels share.
#include "kernels/cpu/element_copy.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

namespace fretsaw {

size_t normalise_axis(int64_t axis, size_t rank) {
  const auto signed_rank = static_cast<int64_t>(rank);
  if (axis < -signed_rank || axis >= signed_rank) {
    throw Error("axis " + std::to_string(axis) + " is outside a tensor of rank " + std::to_string(rank),
                "use an axis from -" + std::to_string(rank) + " to " + std::to_string(signed_rank - 1));
  }
  return static_cast<size_t>(axis < 0 ? axis + signed_rank : axis);
}

std::vector<size_t> normalise_axes(const std::vector<int64_t>& axes, size_t rank) {
  std::vector<size_t> result;
  for (int64_t axis : axes) {
    const size_t front = normalise_axis(axis, rank);
    if (std::find(result.begin(), result.end(), front) != result.end()) {
      throw Error("axis " + std::to_string(axis) + " is named twice", "name every axis once");
    }
    result.push_back(front);
  }
  return result;
}

void throw_index_out_of_range(int64_t index, int64_t bound) {
  throw Error("index " + std::to_string(index) + " is outside a dimension of " + std::to_string(bound),
              "indexes run from -" + std::to_string(bound) + " to " + std::to_string(bound - 1));
}

Dims strides_of(const Dims& dims) {
  Dims strides(dims.size());
  int64_t stride = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    strides[i] = stride;
    if (__builtin_mul_overflow(stride, dims[i], &stride)) stride = 0;  // only a tensor without elements: nothing is read
  }
  return strides;
}

int64_t product(const Dims& dims, size_t from, size_t to) {
  int64_t result = 1;
  for (size_t i = from; i < to && i < dims.size(); ++i) {
    if (__builtin_mul_overflow(result, dims[i], &result)) throw Error("a shape of " + to_string(dims) + " is too large");
  }
  return result;
}

Dims broadcast_dims(const Dims& a, const Dims& b) {
  Dims result(std::max(a.size(), b.size()));
  for (size_t i = 0; i < result.size(); ++i) {  // i counts from the back
    const int64_t da = i < a.size() ? a[a.size() - 1 - i] : 1;
    const int64_t db = i < b.size() ? b[b.size() - 1 - i] : 1;
    if (da != db && da != 1 && db != 1) {
      throw Error("shapes " + to_string(a) + " and " + to_string(b) + " do not broadcast", "make the dimensions equal or 1");
    }
    result[result.size() - 1 - i] = da == 1 ? db : da;
  }
  return result;
}

namespace {

// Above this no output can be meant: half the machine's memory, or of the process's limit where that is smaller.
int64_t largest_output_bytes() {
  static const int64_t limit = [] {
    int64_t bytes = int64_t{16} << 30;
    const int64_t pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    if (pages > 0 && page_bytes > 0) bytes = std::min(bytes, pages * page_bytes / 2);
    rlimit address_space{};
    if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
      bytes = std::min(bytes, static_cast<int64_t>(address_space.rlim_cur / 2));
    }
    return bytes;
  }();
  return limit;
}

[[noreturn]] void throw_too_large(const Dims& dims) {
  throw Error("an output of shape " + to_string(dims) + " is too large for this machine's memory",
              "check the sizes that the shape comes from");
}

}  // namespace

TensorView& sized_output(RunContext& r, size_t i, const Dims& dims, DType dtype) {
  const DType type = dtype != DType::undefined ? dtype : r.input(0).dtype;
  const auto bytes_each = static_cast<int64_t>(element_bytes(type));
  int64_t bytes = bytes_each;
  bool empty = false;
  for (int64_t d : dims) {
    if (d < 0) throw Error("an output would have the negative dimension " + std::to_string(d), "check the sizes that the shape comes from");
    empty |= d == 0;
  }
  for (int64_t d : dims) {
    // An empty tensor still needs strides that do not overflow.
    if (d != 0 && bytes > (empty ? std::numeric_limits<int64_t>::max() / 2 : largest_output_bytes()) / d) throw_too_large(dims);
    if (d != 0) bytes *= d;
  }
  return r.output(i, dims, type);
}

int64_t input_int(RunContext& r, size_t i) {
  const std::vector<int64_t> values = r.input_ints(i);
  if (values.size() != 1) throw Error("input " + std::to_string(i) + " must hold one number, it holds " + std::to_string(values.size()));
  return values[0];
}

size_t element_bytes(DType dtype) {
  if (dtype == DType::string) return sizeof(std::string);
  const int bits = bits_of(dtype);
  if (bits <= 0) throw Error("elements of type " + std::string(name_of(dtype)) + " can't be moved", "convert them first");
  return static_cast<size_t>((bits + 7) / 8);
}

namespace {
bool is_packed(DType dtype) {
  return dtype != DType::string && bits_of(dtype) > 0 && bits_of(dtype) < 8;
}
}  // namespace

ElementReader::ElementReader(const TensorView& view) : data_(view.data) {
  if (!is_packed(view.dtype)) return;
  const int bits = bits_of(view.dtype), per_byte = 8 / bits;
  const auto* packed = view.as<const uint8_t>();
  unpacked_.resize(static_cast<size_t>(view.count()));
  for (size_t i = 0; i < unpacked_.size(); ++i) {
    unpacked_[i] = static_cast<uint8_t>((packed[i / per_byte] >> (bits * (i % per_byte))) & ((1 << bits) - 1));
  }
  data_ = unpacked_.data();
}

ElementWriter::ElementWriter(TensorView& view) : view_(view), data_(view.data) {
  if (!is_packed(view.dtype)) return;
  unpacked_.resize(static_cast<size_t>(view.count()));
  data_ = unpacked_.data();
}

void ElementWriter::finish() {
  if (unpacked_.empty()) return;
  const int bits = bits_of(view_.dtype), per_byte = 8 / bits;
  auto* packed = view_.as<uint8_t>();
  std::memset(packed, 0, bytes_of(view_.dtype, static_cast<int64_t>(unpacked_.size())));
  for (size_t i = 0; i < unpacked_.size(); ++i) {
    packed[i / per_byte] |= static_cast<uint8_t>((unpacked_[i] & ((1 << bits) - 1)) << (bits * (i % per_byte)));
  }
}

void copy_elements(DType dtype, void* to, const void* from, int64_t count) {
  if (count <= 0) return;
  if (dtype == DType::string) {
    std::copy_n(static_cast<const std::string*>(from), count, static_cast<std::string*>(to));
  } else {
    std::memcpy(to, from, static_cast<size_t>(count) * element_bytes(dtype));
  }
}

void fill_elements(DType dtype, void* to, const void* value, int64_t count) {
  with_element_type(dtype, [&]<typename T>(std::type_identity<T>) {
    const T element = *static_cast<const T*>(value);
    std::fill_n(static_cast<T*>(to), std::max<int64_t>(count, 0), element);
  });
}

void copy_view(TensorView& to, const TensorView& from, int threads) {
  if (to.data == from.data) return;
  if (from.dtype == DType::string) {
    copy_elements(DType::string, to.data, from.data, from.count());
  } else {
    copy_elements_threaded(DType::uint8, to.data, from.data, static_cast<int64_t>(from.bytes()), threads);
  }
}

RuntimeValue owned_copy(const TensorView& view) {
  RuntimeValue copy = make_value(view.dtype, view.dims);
  copy_view(copy.tensor, view, 1);
  return copy;
}

RuntimeValue owned_copy(const RuntimeValue& value) {
  if (value.kind == RuntimeValue::Kind::tensor && value.owner == nullptr) return owned_copy(value.tensor);
  if (value.kind != RuntimeValue::Kind::sequence) return value;
  RuntimeValue copy;
  copy.kind = RuntimeValue::Kind::sequence;
  copy.element = value.element;
  copy.items.reserve(value.items.size());
  for (const RuntimeValue& item : value.items) copy.items.push_back(owned_copy(item));
  return copy;
}

}  // namespace fretsaw
