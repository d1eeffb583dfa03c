// Operators that read at computed places: Gather, GatherElements, GatherND, Compress, NonZero, OneHot.
#include "kernels/cpu/indexing.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/movement.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/parallel.h"

namespace fretsaw {

std::vector<int64_t> normalised_indices(RunContext& r, size_t input, int64_t bound) {
  std::vector<int64_t> indices = r.input_ints(input);
  for (int64_t& index : indices) index = normalise_index(index, bound);
  return indices;
}

void gather_into(TensorView& y, const TensorView& x, size_t axis, const std::vector<int64_t>& indices, int threads) {
  const int64_t outer = product(x.dims, 0, axis), extent = x.dims[axis], inner = product(x.dims, axis + 1, x.rank());
  const auto picked = static_cast<int64_t>(indices.size());
  if (y.count() == 0) return;
  ElementReader from(x);
  ElementWriter to(y);
  with_element_type(x.dtype, [&]<typename T>(std::type_identity<T>) {
    const auto* source = static_cast<const T*>(from.data());
    auto* target = static_cast<T*>(to.data());
    parallel_for(outer * picked, kGrainElements / inner + 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t at = item / picked * extent + indices[static_cast<size_t>(item % picked)];
        if (inner == 1) {
          target[item] = source[at];
        } else {
          std::copy_n(source + at * inner, inner, target + item * inner);
        }
      }
    });
  });
  to.finish();
}

std::vector<int64_t> slice_offsets(RunContext& r, size_t indices_input, const Dims& dims, size_t batch) {
  const Dims& index_dims = r.input(indices_input).dims;
  const std::vector<int64_t> indices = r.input_ints(indices_input);
  const auto width = static_cast<size_t>(index_dims.back());
  const Dims strides = strides_of(dims);
  const int64_t slices = product(index_dims, 0, index_dims.size() - 1);
  const int64_t batches = product(dims, 0, batch), batch_stride = product(dims, batch, dims.size());
  std::vector<int64_t> offsets(static_cast<size_t>(slices));
  const int64_t per_batch = batches > 0 ? slices / batches : 0;
  for (int64_t i = 0; i < slices; ++i) {
    int64_t offset = per_batch > 0 ? i / per_batch * batch_stride : 0;
    for (size_t k = 0; k < width; ++k) {
      offset += normalise_index(indices[static_cast<size_t>(i) * width + k], dims[batch + k]) * strides[batch + k];
    }
    offsets[static_cast<size_t>(i)] = offset;
  }
  return offsets;
}

namespace {

CompiledKernel make_gather(const CompileContext& c) {
  const int64_t axis = c.node().get_int("axis", 0);
  return {[axis](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t front = normalise_axis(axis, x.rank());
    const std::vector<int64_t> indices = normalised_indices(r, 1, x.dims[front]);
    Dims dims(x.dims.begin(), x.dims.begin() + static_cast<ptrdiff_t>(front));
    dims.insert(dims.end(), r.input(1).dims.begin(), r.input(1).dims.end());
    dims.insert(dims.end(), x.dims.begin() + static_cast<ptrdiff_t>(front) + 1, x.dims.end());
    gather_into(sized_output(r, 0, dims, x.dtype), x, front, indices, r.threads());
  }};
}

CompiledKernel make_gather_elements(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", 0);
  return {[axis_attribute](RunContext& r) {
    const TensorView& x = r.input(0);
    const Dims dims = r.input(1).dims;
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    require(dims.size() == x.rank(), "data and indices must have the same rank");
    for (size_t i = 0; i < dims.size(); ++i) {
      if (i != axis && dims[i] > x.dims[i]) {
        throw Error("indices of shape " + to_string(dims) + " reach outside data of shape " + to_string(x.dims));
      }
    }
    const std::vector<int64_t> indices = normalised_indices(r, 1, x.dims[axis]);
    TensorView& y = sized_output(r, 0, dims, x.dtype);
    if (indices.empty()) return;
    const Dims strides = strides_of(x.dims);
    const size_t last = dims.size() - 1;
    const int64_t columns = dims[last];
    ElementReader from(x);
    ElementWriter to(y);
    with_element_type(x.dtype, [&]<typename T>(std::type_identity<T>) {
      const auto* source = static_cast<const T*>(from.data());
      auto* target = static_cast<T*>(to.data());
      parallel_for(y.count() / columns, kGrainElements / columns + 1, r.threads(), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          int64_t rest = row, base = 0;
          for (size_t i = last; i-- > 0; rest /= dims[i]) base += i == axis ? 0 : rest % dims[i] * strides[i];
          const int64_t along = axis == last ? 0 : 1;  // whether the column moves in x too
          for (int64_t j = 0; j < columns; ++j) {
            target[row * columns + j] = source[base + indices[static_cast<size_t>(row * columns + j)] * strides[axis] + j * along];
          }
        }
      });
    });
    to.finish();
  }};
}

CompiledKernel make_gather_nd(const CompileContext& c) {
  const int64_t batch_dims = c.node().get_int("batch_dims", 0);
  return {[batch_dims](RunContext& r) {
    const TensorView& x = r.input(0);
    const Dims index_dims = r.input(1).dims;  // [..., K]
    require(!index_dims.empty() && x.rank() > 0, "data and indices must have at least one dimension");
    const int64_t width = index_dims.back();
    require(batch_dims >= 0 && batch_dims < static_cast<int64_t>(std::min(index_dims.size(), x.rank())), "batch_dims is out of range");
    const auto batch = static_cast<size_t>(batch_dims);
    if (width < 1 || width + batch_dims > static_cast<int64_t>(x.rank())) {
      throw Error("indices of shape " + to_string(index_dims) + " do not fit data of shape " + to_string(x.dims));
    }
    for (size_t i = 0; i < batch; ++i) require(index_dims[i] == x.dims[i], "the batch dimensions of data and indices differ");
    const std::vector<int64_t> offsets = slice_offsets(r, 1, x.dims, batch);
    Dims dims(index_dims.begin(), index_dims.end() - 1);
    const size_t tail = batch + static_cast<size_t>(width);
    dims.insert(dims.end(), x.dims.begin() + static_cast<ptrdiff_t>(tail), x.dims.end());
    const int64_t inner = product(x.dims, tail, x.rank());
    TensorView& y = sized_output(r, 0, dims, x.dtype);
    if (y.count() == 0) return;
    ElementReader from(x);
    ElementWriter to(y);
    const auto count = static_cast<int64_t>(offsets.size());
    parallel_for(count, kGrainElements / inner + 1, r.threads(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        copy_elements(x.dtype, offset_by(to.data(), i * inner, x.dtype), offset_by(from.data(), offsets[static_cast<size_t>(i)], x.dtype),
                      inner);
      }
    });
    to.finish();
  }};
}

CompiledKernel make_compress(const CompileContext& c) {
  const bool flat = !c.node().has("axis");
  const int64_t axis = c.node().get_int("axis", 0);
  return {[=](RunContext& r) {
    TensorView x = r.input(0);
    if (flat) x.dims = {x.count()};
    const size_t front = normalise_axis(axis, x.rank());
    const TensorView& condition = r.input(1);
    require(condition.dtype == DType::boolean && condition.rank() == 1, "the condition must be a vector of booleans");
    std::vector<int64_t> kept;
    for (int64_t i = 0; i < condition.count(); ++i) {
      if (condition.as<const uint8_t>()[i] != 0) kept.push_back(normalise_index(i, x.dims[front]));
    }
    Dims dims = x.dims;
    dims[front] = static_cast<int64_t>(kept.size());
    gather_into(sized_output(r, 0, dims, x.dtype), x, front, kept, r.threads());
  }};
}

CompiledKernel make_non_zero(const CompileContext&) {
  return {[](RunContext& r) {
    const TensorView& x = r.input(0);
    const std::vector<uint8_t> flags = non_zero_flags(x);
    const auto found = static_cast<int64_t>(std::count(flags.begin(), flags.end(), uint8_t{1}));
    const Dims dims = x.rank() == 0 ? Dims{1} : x.dims;  // a scalar counts as a vector of one
    TensorView& y = sized_output(r, 0, {static_cast<int64_t>(dims.size()), found}, DType::int64);
    if (found == 0) return;
    auto* out = y.as<int64_t>();
    Dims index(dims.size(), 0);
    int64_t column = 0;
    for (uint8_t flag : flags) {
      if (flag) {
        for (size_t i = 0; i < index.size(); ++i) out[static_cast<int64_t>(i) * found + column] = index[i];
        ++column;
      }
      for (size_t i = index.size(); i-- > 0;) {
        if (++index[i] < dims[i]) break;
        index[i] = 0;
      }
    }
  }};
}

CompiledKernel make_one_hot(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", -1);
  return {[axis_attribute](RunContext& r) {
    const TensorView& indices = r.input(0);
    const std::vector<int64_t> classes = as_ints(indices), depths = as_ints(r.input(1));
    const TensorView& values = r.input(2);  // [off, on]
    require(depths.size() == 1 && depths[0] >= 0, "the depth must be one number, not negative");
    require(values.count() == 2, "the values must be two: off and on");
    const int64_t depth = depths[0];
    const size_t axis = normalise_axis(axis_attribute, indices.rank() + 1);
    Dims dims = indices.dims;
    dims.insert(dims.begin() + static_cast<ptrdiff_t>(axis), depth);
    TensorView& y = sized_output(r, 0, dims, values.dtype);
    const int64_t inner = product(indices.dims, axis, indices.rank());
    ElementReader from(values);
    ElementWriter to(y);
    with_element_type(values.dtype, [&]<typename T>(std::type_identity<T>) {
      const auto* off_on = static_cast<const T*>(from.data());
      auto* target = static_cast<T*>(to.data());
      std::fill_n(target, y.count(), off_on[0]);
      for (size_t i = 0; i < classes.size(); ++i) {
        const int64_t at = classes[i] < 0 ? classes[i] + depth : classes[i];
        if (at < 0 || at >= depth) continue;  // ONNX: an index outside the depth leaves its row off
        const auto position = static_cast<int64_t>(i);
        target[(position / inner * depth + at) * inner + position % inner] = off_on[1];
      }
    });
    to.finish();
  }};
}

}  // namespace

void register_indexing(KernelRegistry& registry) {
  registry.add({.op = "Gather", .make = make_gather});
  registry.add({.op = "GatherElements", .make = make_gather_elements});
  registry.add({.op = "GatherND", .make = make_gather_nd});
  registry.add({.op = "Compress", .make = make_compress});
  registry.add({.op = "NonZero", .make = make_non_zero});
  registry.add({.op = "OneHot", .make = make_one_hot});
  register_scatter(registry);
}

}  // namespace fretsaw
