// Taking tensors apart along an axis and stacking them, for Loop and Scan.
#include <cstring>

#include "graph/errors.h"
#include "runtime/control_flow.h"

namespace fretsaw {
namespace {

// A tensor as [outer, n, inner] around an axis.
struct Around {
  int64_t outer = 1, inner = 1;
};
Around around(const Dims& dims, size_t axis) {
  Around a;
  for (size_t i = 0; i < dims.size(); ++i) (i < axis ? a.outer : i > axis ? a.inner : a.outer) *= i == axis ? 1 : dims[i];
  return a;
}

// Copies `count` elements between tensors of one type; strings by assignment.
void copy_elements(const TensorView& from, int64_t from_at, TensorView& to, int64_t to_at, int64_t count) {
  if (count == 0) return;
  if (from.dtype == DType::string) {
    std::copy_n(from.as<std::string>() + from_at, count, to.as<std::string>() + to_at);
    return;
  }
  int64_t bits = bits_of(from.dtype);
  if (bits * from_at % 8 || bits * to_at % 8 || bits * count % 8) {
    throw Error("packed elements can't be taken apart here", "cast the tensor to int8 before the loop");
  }
  std::memcpy(static_cast<std::byte*>(to.data) + to_at * bits / 8, static_cast<const std::byte*>(from.data) + from_at * bits / 8,
              static_cast<size_t>(count * bits / 8));
}

}  // namespace

void stack_parts(const std::vector<RuntimeValue>& parts, int64_t axis, bool reversed, const Type& part_type, RuntimeValue& out,
                 RankContext& rank) {
  DType dtype = part_type.dtype;
  Dims part = part_type.shape ? dims_of(*part_type.shape, 0) : Dims{};
  if (!parts.empty()) dtype = parts[0].tensor.dtype, part = parts[0].tensor.dims;
  if (dtype == DType::undefined) dtype = DType::float32;
  auto count = static_cast<int64_t>(parts.size()), rank_out = static_cast<int64_t>(part.size()) + 1;
  if (axis < 0) axis += rank_out;
  if (axis < 0 || axis >= rank_out) throw Error("the axis of a scan output lies outside its shape", "check scan_output_axes");
  Dims dims = part;
  dims.insert(dims.begin() + axis, count);
  RuntimeValue made;
  make_pooled(rank.memory.pool, made, dtype, dims);
  Around a = around(dims, static_cast<size_t>(axis));
  for (int64_t i = 0; i < count; ++i) {
    const RuntimeValue& value = parts[static_cast<size_t>(reversed ? count - 1 - i : i)];
    if (value.kind != RuntimeValue::Kind::tensor || value.tensor.dims != part || value.tensor.dtype != dtype) {
      throw Error("the body's output changes between " + to_string(part) + " and " + to_string(value.tensor.dims),
                  "what is stacked over iterations must keep its shape");
    }
    for (int64_t o = 0; o < a.outer; ++o) copy_elements(value.tensor, o * a.inner, made.tensor, (o * count + i) * a.inner, a.inner);
  }
  out = std::move(made);
}

void take_slice(const RuntimeValue& whole, int64_t axis, int64_t at, RuntimeValue& out, RankContext& rank) {
  const TensorView& x = whole.tensor;
  Dims dims = x.dims;
  int64_t n = dims[static_cast<size_t>(axis)];
  dims.erase(dims.begin() + axis);
  Around a = around(x.dims, static_cast<size_t>(axis));
  int64_t bits = x.dtype == DType::string ? 8 * static_cast<int64_t>(sizeof(std::string)) : bits_of(x.dtype);
  if (a.outer == 1 && bits * at * a.inner % 8 == 0) {
    out.kind = RuntimeValue::Kind::tensor;
    out.tensor = {x.dtype, dims, static_cast<std::byte*>(x.data) + bits * at * a.inner / 8, Layout::plain};
    out.owner = whole.owner;
    return;
  }
  RuntimeValue made;
  make_pooled(rank.memory.pool, made, x.dtype, dims);
  for (int64_t o = 0; o < a.outer; ++o) copy_elements(x, (o * n + at) * a.inner, made.tensor, o * a.inner, a.inner);
  out = std::move(made);
}

}  // namespace fretsaw
