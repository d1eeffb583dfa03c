// Operators that change a tensor's shape and keep its elements: Reshape and its kin, Identity, Shape, Size, Transpose.
#include "kernels/cpu/reshaping.h"

#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"

namespace fretsaw {

Dims reshaped_dims(const Dims& from, Dims to, bool allow_zero) {
  int64_t unknown = -1, known = 1;
  for (size_t i = 0; i < to.size(); ++i) {
    if (to[i] == -1) {
      require(unknown < 0, "a shape to reshape to holds more than one -1", "give all dimensions but one");
      unknown = static_cast<int64_t>(i);
      continue;
    }
    if (to[i] == 0 && !allow_zero) {
      if (i >= from.size())
        throw Error("dimension " + std::to_string(i) + " of the new shape copies one that " + to_string(from) + " lacks");
      to[i] = from[i];
    }
    if (to[i] < 0) throw Error("the new shape " + to_string(to) + " holds a negative dimension", "use -1 for the one to be computed");
    if (__builtin_mul_overflow(known, to[i], &known)) throw Error("the new shape " + to_string(to) + " is too large");
  }
  const int64_t count = count_of(from);
  if (unknown >= 0) {
    // Zero elements leave a -1 open: any number would do, 0 keeps the count.
    const bool fits = known != 0 ? count % known == 0 : count == 0;
    if (!fits) throw Error("a tensor of shape " + to_string(from) + " can't be reshaped to " + to_string(to));
    to[static_cast<size_t>(unknown)] = known != 0 ? count / known : 0;
  } else if (known != count) {
    throw Error("a tensor of shape " + to_string(from) + " can't be reshaped to " + to_string(to), "the element counts must be equal");
  }
  return to;
}

Dims flattened_dims(const Dims& dims, int64_t axis) {
  const auto rank = static_cast<int64_t>(dims.size());
  const auto cut = axis == rank ? dims.size() : normalise_axis(axis, dims.size());  // may stand behind the last dimension
  return {product(dims, 0, cut), product(dims, cut, dims.size())};
}

Dims squeezed_dims(RunContext& r) {
  const Dims& dims = r.input(0).dims;
  const bool all = !r.has_input(1);
  const std::vector<size_t> axes = all ? std::vector<size_t>{} : normalise_axes(r.input_ints(1), dims.size());
  Dims kept;
  for (size_t i = 0; i < dims.size(); ++i) {
    const bool named = std::find(axes.begin(), axes.end(), i) != axes.end();
    if (named && dims[i] != 1) throw Error("axis " + std::to_string(i) + " of " + to_string(dims) + " can't be squeezed", "it must be 1");
    if (!named && !(all && dims[i] == 1)) kept.push_back(dims[i]);
  }
  return kept;
}

Dims unsqueezed_dims(RunContext& r) {
  const Dims& dims = r.input(0).dims;
  const std::vector<int64_t> given = r.input_ints(1);
  const size_t rank = dims.size() + given.size();
  const std::vector<size_t> axes = normalise_axes(given, rank);
  Dims wider;
  size_t next = 0;
  for (size_t i = 0; i < rank; ++i) {
    const bool added = std::find(axes.begin(), axes.end(), i) != axes.end();
    wider.push_back(added ? 1 : dims[next++]);
  }
  return wider;
}

namespace {

// Output 0 with input 0's elements under another shape.
void write_view(RunContext& r, const Dims& dims) {
  const TensorView& x = r.input(0);
  copy_view(sized_output(r, 0, dims, x.dtype), x, r.threads());
}

CompiledKernel make_reshape(const CompileContext& c) {
  const bool allow_zero = c.node().get_int("allowzero", 0) != 0;
  return {[allow_zero](RunContext& r) { write_view(r, reshaped_dims(r.input(0).dims, r.input_ints(1), allow_zero)); }};
}

CompiledKernel make_flatten(const CompileContext& c) {
  const int64_t axis = c.node().get_int("axis", 1);
  return {[axis](RunContext& r) { write_view(r, flattened_dims(r.input(0).dims, axis)); }};
}

CompiledKernel make_squeeze(const CompileContext&) {
  return {[](RunContext& r) { write_view(r, squeezed_dims(r)); }};
}

CompiledKernel make_unsqueeze(const CompileContext&) {
  return {[](RunContext& r) { write_view(r, unsqueezed_dims(r)); }};
}

CompiledKernel make_identity(const CompileContext& c) {
  const bool plain_tensor = c.output_types.empty() || c.output_types[0].kind != Type::Kind::optional;
  return {[plain_tensor](RunContext& r) {
    const RuntimeValue* value = r.has_input(0) ? &r.value(0) : nullptr;
    if (value && value->kind == RuntimeValue::Kind::tensor && plain_tensor) return write_view(r, value->tensor.dims);
    r.output_value(0) = value ? owned_copy(*value) : RuntimeValue{};
  }};
}

CompiledKernel make_shape(const CompileContext& c) {
  const int64_t start = c.node().get_int("start", 0);
  const bool has_end = c.node().has("end");
  const int64_t end = c.node().get_int("end", 0);
  return {[=](RunContext& r) {
    const Dims& dims = r.input(0).dims;
    const auto rank = static_cast<int64_t>(dims.size());
    const auto clamp = [rank](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + rank : at, 0, rank); };
    const int64_t first = clamp(start), last = std::max(first, has_end ? clamp(end) : rank);
    TensorView& y = r.output(0, {last - first}, DType::int64);
    std::copy_n(dims.begin() + first, last - first, y.as<int64_t>());
  }};
}

CompiledKernel make_size(const CompileContext&) {
  return {[](RunContext& r) { *r.output(0, {}, DType::int64).as<int64_t>() = r.input(0).count(); }};
}

CompiledKernel make_transpose(const CompileContext& c) {
  const std::vector<int64_t> perm = c.node().get_ints("perm");
  return {[perm](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t rank = x.rank();
    std::vector<int64_t> order = perm;
    if (order.empty()) {
      for (size_t i = 0; i < rank; ++i) order.push_back(static_cast<int64_t>(rank - 1 - i));
    }
    if (order.size() != rank) {
      throw Error("perm names " + std::to_string(order.size()) + " axes, the input has " + std::to_string(rank));
    }
    const std::vector<size_t> axes = normalise_axes(order, rank);
    const Dims strides = strides_of(x.dims);
    Dims dims(rank), from_strides(rank);
    for (size_t i = 0; i < rank; ++i) {
      dims[i] = x.dims[axes[i]];
      from_strides[i] = strides[axes[i]];
    }
    TensorView& y = sized_output(r, 0, dims, x.dtype);
    ElementReader from(x);
    ElementWriter to(y);
    copy_strided(x.dtype, dims, to.data(), strides_of(dims), from.data(), from_strides, r.threads());
    to.finish();
  }};
}

}  // namespace

void register_reshaping(KernelRegistry& registry) {
  registry.add({.op = "Reshape", .make = make_reshape, .view = true});
  registry.add({.op = "Flatten", .make = make_flatten, .view = true});
  registry.add({.op = "Squeeze", .make = make_squeeze, .view = true});
  registry.add({.op = "Unsqueeze", .make = make_unsqueeze, .view = true});
  registry.add({.op = "Identity", .make = make_identity, .view = true});
  registry.add({.op = "Shape", .make = make_shape});
  registry.add({.op = "Size", .make = make_size});
  registry.add({.op = "Transpose", .make = make_transpose});
}

}  // namespace fretsaw
