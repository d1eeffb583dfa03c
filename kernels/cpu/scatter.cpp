// Operators that write at computed places: ScatterElements (and the older Scatter), ScatterND, TensorScatter.
// Elements that are written twice are combined in the order of the updates.
#include "kernels/cpu/scatter.h"

#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/indexing.h"
#include "kernels/cpu/movement.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scalar_types.h"

namespace fretsaw {

ScatterReduction scatter_reduction_of(const Node& node) {
  const std::string name = node.get_string("reduction", "none");
  if (name == "none") return ScatterReduction::none;
  if (name == "add") return ScatterReduction::add;
  if (name == "mul") return ScatterReduction::mul;
  if (name == "min") return ScatterReduction::min;
  if (name == "max") return ScatterReduction::max;
  throw Error("there is no reduction '" + name + "'", "use none, add, mul, min or max");
}

namespace {

template <typename T>
T combined(ScatterReduction reduction, T old, T update) {
  if constexpr (std::is_same_v<T, bool>) {
    return reduction == ScatterReduction::add || reduction == ScatterReduction::max ? old || update : old && update;
  } else if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
    return T(combined(reduction, static_cast<float>(old), static_cast<float>(update)));
  } else {
    return scattered(reduction, old, update);
  }
}

// For every place(i) = the offset of update i: target[place] = reduced with update i.
template <typename Place>
void scatter(ScatterReduction reduction, DType dtype, void* to, const void* from, int64_t begin, int64_t end, const Place& place) {
  if (reduction == ScatterReduction::none) {
    with_element_type(dtype, [&]<typename T>(std::type_identity<T>) {
      auto* target = static_cast<T*>(to);
      const auto* updates = static_cast<const T*>(from);
      for (int64_t i = begin; i < end; ++i) target[place(i)] = updates[i];
    });
    return;
  }
  dispatch<types::numbers | types::booleans>(dtype, [&]<typename T>() {
    auto* target = static_cast<T*>(to);
    const auto* updates = static_cast<const T*>(from);
    for (int64_t i = begin; i < end; ++i) {
      T& element = target[place(i)];
      element = combined(reduction, element, updates[i]);
    }
  });
}

CompiledKernel make_scatter_elements(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", 0);
  const ScatterReduction reduction = scatter_reduction_of(c.node());
  return {[=](RunContext& r) {
    const TensorView &x = r.input(0), &updates = r.input(2);
    const Dims& dims = updates.dims;
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    require(updates.dtype == x.dtype, "data and updates must have one type");
    require(dims == r.input(1).dims, "indices and updates must have the same shape");
    require(dims.size() == x.rank(), "data and updates must have the same rank");
    for (size_t i = 0; i < dims.size(); ++i) {
      if (i != axis && dims[i] > x.dims[i]) {
        throw Error("updates of shape " + to_string(dims) + " reach outside data of shape " + to_string(x.dims));
      }
    }
    const std::vector<int64_t> indices = normalised_indices(r, 1, x.dims[axis]);
    TensorView& y = sized_output(r, 0, x.dims, x.dtype);
    copy_view(y, x, r.threads());
    if (indices.empty()) return;
    const Dims strides = strides_of(x.dims);
    ElementReader from(updates), old(y);
    ElementWriter to(y);
    if (to.data() != y.data) copy_elements(DType::uint8, to.data(), old.data(), y.count());  // packed: its elements one a byte
    const auto place = [&](int64_t i) {
      int64_t rest = i, offset = 0;
      for (size_t k = dims.size(); k-- > 0; rest /= dims[k]) {
        offset += (k == axis ? indices[static_cast<size_t>(i)] : rest % dims[k]) * strides[k];
      }
      return offset;
    };
    // Slices that differ before the axis write apart from each other.
    const int64_t outer = product(dims, 0, axis), each = updates.count() / outer;
    parallel_for(outer, kGrainElements / each + 1, r.threads(),
                 [&](int64_t begin, int64_t end) { scatter(reduction, x.dtype, to.data(), from.data(), begin * each, end * each, place); });
    to.finish();
  }};
}

CompiledKernel make_scatter_nd(const CompileContext& c) {
  const ScatterReduction reduction = scatter_reduction_of(c.node());
  return {[reduction](RunContext& r) {
    const TensorView &x = r.input(0), &updates = r.input(2);
    const Dims index_dims = r.input(1).dims;  // [..., K]
    require(updates.dtype == x.dtype, "data and updates must have one type");
    require(!index_dims.empty() && index_dims.back() >= 0 && index_dims.back() <= static_cast<int64_t>(x.rank()),
            "the last dimension of indices must be at most the rank of data");
    const auto width = static_cast<ptrdiff_t>(index_dims.back());
    Dims expected(index_dims.begin(), index_dims.end() - 1);
    expected.insert(expected.end(), x.dims.begin() + width, x.dims.end());
    if (updates.dims != expected) {
      throw Error("updates have shape " + to_string(updates.dims) + " where " + to_string(expected) + " is expected");
    }
    const int64_t inner = product(x.dims, static_cast<size_t>(width), x.rank());
    TensorView& y = sized_output(r, 0, x.dims, x.dtype);
    copy_view(y, x, r.threads());
    if (updates.count() == 0) return;
    const std::vector<int64_t> offsets = slice_offsets(r, 1, x.dims, 0);
    ElementReader from(updates), old(y);
    ElementWriter to(y);
    if (to.data() != y.data) copy_elements(DType::uint8, to.data(), old.data(), y.count());
    if (reduction == ScatterReduction::none) {
      for (size_t i = 0; i < offsets.size(); ++i) {
        copy_elements(x.dtype, offset_by(to.data(), offsets[i], x.dtype), offset_by(from.data(), static_cast<int64_t>(i) * inner, x.dtype),
                      inner);
      }
    } else {
      scatter(reduction, x.dtype, to.data(), from.data(), 0, updates.count(),
              [&](int64_t i) { return offsets[static_cast<size_t>(i / inner)] + i % inner; });
    }
    to.finish();
  }};
}

CompiledKernel make_tensor_scatter(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", -2);
  const std::string mode = c.node().get_string("mode", "linear");
  require(mode == "linear" || mode == "circular", "the mode must be linear or circular");
  const bool circular = mode == "circular";
  return {[=](RunContext& r) {
    const TensorView &x = r.input(0), &update = r.input(1);  // [B, ..., extent, ...], [B, ..., length, ...]
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    require(axis > 0, "the axis can't be that of the batch");
    require(update.dtype == x.dtype && update.rank() == x.rank(), "the cache and its update must have one type and rank");
    for (size_t i = 0; i < x.rank(); ++i) require(i == axis || x.dims[i] == update.dims[i], "the cache and its update differ in shape");
    const int64_t batch = x.dims[0], extent = x.dims[axis], length = update.dims[axis];
    require(length <= extent, "the update is longer than the cache");
    std::vector<int64_t> starts(static_cast<size_t>(batch), 0);
    if (r.has_input(2)) starts = r.input_ints(2);
    require(static_cast<int64_t>(starts.size()) == batch, "there must be one write index for each sample");
    for (int64_t start : starts) {
      if (start < 0 || (!circular && start > extent - length)) {
        throw Error("write index " + std::to_string(start) + " is outside a cache of " + std::to_string(extent));
      }
    }
    TensorView& y = sized_output(r, 0, x.dims, x.dtype);
    copy_view(y, x, r.threads());
    if (update.count() == 0) return;
    const int64_t inner = product(x.dims, axis + 1, x.rank()), prefixes = product(x.dims, 0, axis);
    ElementReader from(update), old(y);
    ElementWriter to(y);
    if (to.data() != y.data) copy_elements(DType::uint8, to.data(), old.data(), y.count());
    parallel_for(prefixes, kGrainElements / (length * inner) + 1, r.threads(), [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t start = starts[static_cast<size_t>(p / (prefixes / batch))] % extent, first = std::min(length, extent - start);
        const void* source = offset_by(from.data(), p * length * inner, x.dtype);
        copy_elements(x.dtype, offset_by(to.data(), (p * extent + start) * inner, x.dtype), source, first * inner);
        copy_elements(x.dtype, offset_by(to.data(), p * extent * inner, x.dtype), offset_by(source, first * inner, x.dtype),
                      (length - first) * inner);
      }
    });
    to.finish();
  }};
}

}  // namespace

void register_scatter(KernelRegistry& registry) {
  registry.add({.op = "Scatter", .make = make_scatter_elements});
  registry.add({.op = "ScatterElements", .make = make_scatter_elements});
  registry.add({.op = "ScatterND", .make = make_scatter_nd});
  registry.add({.op = "TensorScatter", .make = make_tensor_scatter});
}

}  // namespace fretsaw
