// Operators that are one strided copy, or one for each part: Concat, Split, Slice, Expand, Tile, DepthToSpace, SpaceToDepth.
#include "kernels/cpu/movement.h"

#include <algorithm>
#include <numeric>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"

namespace fretsaw {

Dims concat_dims(const std::vector<const TensorView*>& parts, size_t axis) {
  Dims dims = parts.front()->dims;
  int64_t total = 0;
  for (const TensorView* part : parts) {
    if (part->dtype != parts.front()->dtype) {
      throw Error("tensors of types " + std::string(name_of(parts.front()->dtype)) + " and " + std::string(name_of(part->dtype)) +
                  " can't be joined");
    }
    bool fits = part->rank() == dims.size();
    for (size_t i = 0; fits && i < dims.size(); ++i) fits = i == axis || part->dims[i] == dims[i];
    if (!fits) {
      throw Error("tensors of shapes " + to_string(parts.front()->dims) + " and " + to_string(part->dims) + " can't be joined on axis " +
                  std::to_string(axis));
    }
    if (__builtin_add_overflow(total, part->dims[axis], &total)) throw Error("the joined tensor is too large");
  }
  dims[axis] = total;
  return dims;
}

void concat_into(TensorView& y, const std::vector<const TensorView*>& parts, size_t axis, int threads) {
  const Dims to_strides = strides_of(y.dims);
  ElementWriter to(y);
  int64_t position = 0;
  for (const TensorView* part : parts) {
    ElementReader from(*part);
    copy_strided(y.dtype, part->dims, offset_by(to.data(), position * to_strides[axis], y.dtype), to_strides, from.data(),
                 strides_of(part->dims), threads);
    position += part->dims[axis];
  }
  to.finish();
}

void split_into(TensorView& y, const TensorView& x, size_t axis, int64_t start, int64_t length, int threads) {
  const Dims from_strides = strides_of(x.dims);
  Dims dims = x.dims;
  dims[axis] = length;
  ElementReader from(x);
  ElementWriter to(y);
  copy_strided(x.dtype, dims, to.data(), strides_of(dims), offset_by(from.data(), start * from_strides[axis], x.dtype), from_strides,
               threads);
  to.finish();
}

void check_split(const std::vector<int64_t>& sizes, int64_t extent) {
  int64_t total = 0;
  for (int64_t size : sizes) {
    if (size < 0) throw Error("a split size of " + std::to_string(size) + " is negative");
    if (__builtin_add_overflow(total, size, &total)) throw Error("the split sizes are too large");
  }
  if (total != extent) {
    throw Error("the split sizes add up to " + std::to_string(total) + ", the dimension is " + std::to_string(extent));
  }
}

namespace {

// Sizes of `parts` equal parts, the last ones smaller where they do not divide.
std::vector<int64_t> equal_split(int64_t extent, int64_t parts) {
  if (parts <= 0) throw Error("a split into " + std::to_string(parts) + " parts is not possible");
  const int64_t each = (extent + parts - 1) / parts;
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < parts; ++i) {
    sizes.push_back(std::min(each, extent));
    extent -= sizes.back();
  }
  return sizes;
}

// Elements start, start + step, ... (`count` of them) of a dimension, as Python slices it; negative numbers count from the back.
struct SliceRange {
  int64_t start, step, count;
};
SliceRange slice_range(int64_t start, int64_t end, int64_t step, int64_t extent) {
  require(step != 0, "a slice has step 0", "use a positive or negative step");
  step = std::clamp(step, -extent - 1, extent + 1);  // a longer step takes the first element only, as this one does
  if (start < 0) start += extent;
  if (end < 0) end += extent;
  if (step > 0) {
    start = std::clamp<int64_t>(start, 0, extent);
    end = std::clamp<int64_t>(end, 0, extent);
    return {start, step, end > start ? (end - start + step - 1) / step : 0};
  }
  start = std::clamp<int64_t>(start, -1, extent - 1);
  end = std::clamp<int64_t>(end, -1, extent - 1);
  return {start, step, start > end ? (start - end - step - 1) / -step : 0};
}

}  // namespace

std::vector<int64_t> split_sizes(RunContext& r, int64_t named_parts, int64_t extent) {
  const auto outputs = static_cast<int64_t>(r.output_count());
  if (named_parts > 0 && named_parts != outputs) {
    throw Error("num_outputs is " + std::to_string(named_parts) + ", the node has " + std::to_string(outputs) + " outputs");
  }
  const std::vector<int64_t> sizes = r.has_input(1) ? r.input_ints(1) : equal_split(extent, outputs);
  check_split(sizes, extent);
  if (static_cast<int64_t>(sizes.size()) != outputs) {
    throw Error("split has " + std::to_string(sizes.size()) + " sizes, the node has " + std::to_string(outputs) + " outputs");
  }
  return sizes;
}

SlicedPart sliced_part(RunContext& r, Dims strides) {
  const Dims& dims = r.input(0).dims;
  const std::vector<int64_t> starts = r.input_ints(1), ends = r.input_ints(2);
  std::vector<int64_t> axes(starts.size()), steps(starts.size(), 1);
  std::iota(axes.begin(), axes.end(), 0);
  if (r.has_input(3)) axes = r.input_ints(3);
  if (r.has_input(4)) steps = r.input_ints(4);
  require(ends.size() == starts.size() && axes.size() == starts.size() && steps.size() == starts.size(),
          "starts, ends, axes and steps are of unequal lengths");
  const std::vector<size_t> front = normalise_axes(axes, dims.size());
  SlicedPart part{dims, std::move(strides)};
  for (size_t i = 0; i < front.size(); ++i) {
    const SliceRange range = slice_range(starts[i], ends[i], steps[i], dims[front[i]]);
    part.offset += range.start * part.strides[front[i]];
    part.dims[front[i]] = range.count;
    part.strides[front[i]] *= range.step;
  }
  return part;
}

namespace {

CompiledKernel make_concat(const CompileContext& c) {
  const int64_t axis = c.node().get_int("axis", 0);
  return {[axis](RunContext& r) {
    std::vector<const TensorView*> parts;
    for (size_t i = 0; i < r.input_count(); ++i) parts.push_back(&r.input(i));
    require(!parts.empty(), "Concat needs at least one input");
    const size_t front = normalise_axis(axis, parts[0]->rank());
    concat_into(sized_output(r, 0, concat_dims(parts, front)), parts, front, r.threads());
  }};
}

CompiledKernel make_split(const CompileContext& c) {
  const int64_t axis = c.node().get_int("axis", 0);
  const int64_t named_parts = c.node().get_int("num_outputs", 0);
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t front = normalise_axis(axis, x.rank());
    const std::vector<int64_t> sizes = split_sizes(r, named_parts, x.dims[front]);
    int64_t start = 0;
    for (size_t i = 0; i < sizes.size(); start += sizes[i++]) {
      if (!r.wants_output(i)) continue;
      Dims dims = x.dims;
      dims[front] = sizes[i];
      split_into(sized_output(r, i, dims), x, front, start, sizes[i], r.threads());
    }
  }};
}

CompiledKernel make_slice(const CompileContext&) {
  return {[](RunContext& r) {
    const TensorView& x = r.input(0);
    const SlicedPart part = sliced_part(r, strides_of(x.dims));
    TensorView& y = sized_output(r, 0, part.dims, x.dtype);
    if (y.count() == 0) return;
    ElementReader from(x);
    ElementWriter to(y);
    copy_strided(x.dtype, part.dims, to.data(), strides_of(part.dims), offset_by(from.data(), part.offset, x.dtype), part.strides,
                 r.threads());
    to.finish();
  }};
}

CompiledKernel make_expand(const CompileContext&) {
  return {[](RunContext& r) {
    const TensorView& x = r.input(0);
    const Dims dims = broadcast_dims(x.dims, r.input_ints(1));
    TensorView& y = sized_output(r, 0, dims, x.dtype);
    const Dims strides = strides_of(x.dims);
    Dims from_strides(dims.size(), 0);
    for (size_t i = 0; i < x.rank(); ++i) {
      if (x.dims[i] != 1) from_strides[dims.size() - x.rank() + i] = strides[i];
    }
    ElementReader from(x);
    ElementWriter to(y);
    copy_strided(x.dtype, dims, to.data(), strides_of(dims), from.data(), from_strides, r.threads());
    to.finish();
  }};
}

CompiledKernel make_tile(const CompileContext&) {
  return {[](RunContext& r) {
    const TensorView& x = r.input(0);
    const std::vector<int64_t> repeats = r.input_ints(1);
    if (repeats.size() != x.rank()) {
      throw Error("repeats has " + std::to_string(repeats.size()) + " numbers, the input has rank " + std::to_string(x.rank()));
    }
    Dims dims = x.dims;
    for (size_t i = 0; i < dims.size(); ++i) {
      if (repeats[i] < 0 || __builtin_mul_overflow(dims[i], repeats[i], &dims[i])) {
        throw Error("a dimension of " + std::to_string(x.dims[i]) + " can't be repeated " + std::to_string(repeats[i]) + " times");
      }
    }
    TensorView& y = sized_output(r, 0, dims, x.dtype);
    const Dims to_strides = strides_of(dims), from_strides = strides_of(x.dims);
    Dims walk, walk_to, walk_from;  // each dimension twice: its repeats, then itself
    for (size_t i = 0; i < dims.size(); ++i) {
      walk.insert(walk.end(), {repeats[i], x.dims[i]});
      walk_to.insert(walk_to.end(), {to_strides[i] * x.dims[i], to_strides[i]});
      walk_from.insert(walk_from.end(), {0, from_strides[i]});
    }
    ElementReader from(x);
    ElementWriter to(y);
    copy_strided(x.dtype, walk, to.data(), walk_to, from.data(), walk_from, r.threads());
    to.finish();
  }};
}

// Copies `x`, seen as `split` dims, in the order `perm`, to an output of shape `dims`.
void copy_rearranged(RunContext& r, const Dims& split, const std::vector<size_t>& perm, const Dims& dims) {
  const TensorView& x = r.input(0);
  TensorView& y = sized_output(r, 0, dims, x.dtype);
  const Dims strides = strides_of(split);
  Dims walk(perm.size()), from_strides(perm.size());
  for (size_t i = 0; i < perm.size(); ++i) {
    walk[i] = split[perm[i]];
    from_strides[i] = strides[perm[i]];
  }
  ElementReader from(x);
  ElementWriter to(y);
  copy_strided(x.dtype, walk, to.data(), strides_of(walk), from.data(), from_strides, r.threads());
  to.finish();
}

int64_t checked_block_size(const CompileContext& c) {
  const int64_t block = c.node().get_int("blocksize", 0);
  if (block <= 0 || block > 1 << 20) throw Error("blocksize is " + std::to_string(block), "it must be positive");
  return block;
}

CompiledKernel make_depth_to_space(const CompileContext& c) {
  const int64_t b = checked_block_size(c);
  const bool column_first = c.node().get_string("mode", "DCR") == "CRD";
  return {[=](RunContext& r) {
    const Dims& d = r.input(0).dims;  // [N, C, H, W]
    require(d.size() == 4 && d[1] % (b * b) == 0, "the input must be [N, C, H, W] with C a multiple of blocksize squared");
    const int64_t depth = d[1] / (b * b);
    const Dims dims = {d[0], depth, product({d[2], b}, 0, 2), product({d[3], b}, 0, 2)};
    if (column_first) return copy_rearranged(r, {d[0], depth, b, b, d[2], d[3]}, {0, 1, 4, 2, 5, 3}, dims);
    copy_rearranged(r, {d[0], b, b, depth, d[2], d[3]}, {0, 3, 4, 1, 5, 2}, dims);
  }};
}

CompiledKernel make_space_to_depth(const CompileContext& c) {
  const int64_t b = checked_block_size(c);
  const bool column_first = c.node().get_string("mode", "DCR") == "CRD";
  return {[=](RunContext& r) {
    const Dims& d = r.input(0).dims;  // [N, C, H, W]
    require(d.size() == 4 && d[2] % b == 0 && d[3] % b == 0, "the input must be [N, C, H, W] with H and W multiples of blocksize");
    const Dims split = {d[0], d[1], d[2] / b, b, d[3] / b, b}, dims = {d[0], product({d[1], b, b}, 0, 3), d[2] / b, d[3] / b};
    if (column_first) return copy_rearranged(r, split, {0, 1, 3, 5, 2, 4}, dims);
    copy_rearranged(r, split, {0, 3, 5, 1, 2, 4}, dims);
  }};
}

}  // namespace

void register_movement(KernelRegistry& registry) {
  registry.add({.op = "Concat", .make = make_concat});
  registry.add({.op = "Split", .make = make_split});
  registry.add({.op = "Slice", .make = make_slice});
  registry.add({.op = "Expand", .make = make_expand});
  registry.add({.op = "Tile", .make = make_tile});
  registry.add({.op = "DepthToSpace", .make = make_depth_to_space});
  registry.add({.op = "SpaceToDepth", .make = make_space_to_depth});
  register_padding(registry);
}

}  // namespace fretsaw
