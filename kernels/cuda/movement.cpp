// Operators that move elements: Transpose, Concat, Split, Slice, Expand, Tile, DepthToSpace, SpaceToDepth.
#include "kernels/cpu/movement.h"

#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/index_math.h"
#include "kernels/cuda/movement.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

// The distances between neighbours along each logical dimension.
Dims strides_in(const Dims& dims, Layout layout) {
  return logical_dims(strides_of(physical_dims(dims, layout)), layout);
}

// `dims` and `from_strides` are in the order of y's memory; `offset` is where x is first read, in elements.
void copy_to_output(RunContext& r, const TensorView& x, TensorView& y, const Dims& dims, const Dims& from_strides, int64_t offset = 0) {
  copy_strided({element_bytes(x.dtype), dims, from_strides, y.data, offset_by(x.as<const void>(), offset, x.dtype)}, stream_of(r));
}

// An operator on one tensor that takes and leaves it in the layout that it is offered in.
CompiledKernel keeping_layout(const CompileContext& c, void (*run)(RunContext&, Layout)) {
  const Layout layout = offered_layout(c, 0);
  return {.run = [=](RunContext& r) { run(r, layout); }, .input_layouts = {layout}, .output_layouts = {layout}};
}

// --- Transpose ---

std::vector<size_t> checked_perm(const std::vector<int64_t>& perm, size_t rank) {
  std::vector<int64_t> order = perm;
  if (order.empty()) {
    for (size_t i = 0; i < rank; ++i) order.push_back(static_cast<int64_t>(rank - 1 - i));
  }
  if (order.size() != rank) throw Error("perm names " + std::to_string(order.size()) + " axes, the input has " + std::to_string(rank));
  return normalise_axes(order, rank);
}

CompiledKernel make_transpose(const CompileContext& c) {
  const std::vector<int64_t> perm = c.node().get_ints("perm");
  const Layout from = offered_layout(c, 0);
  // A model's own step from [N, H, W, C] to [N, C, H, W] is none when its result is left in the order nhwc.
  const bool to_channels_first = perm == std::vector<int64_t>{0, 3, 1, 2} && from == Layout::plain;
  const Layout to = to_channels_first ? Layout::nhwc : Layout::plain;
  return {.run =
              [=](RunContext& r) {
                const TensorView& x = r.input(0);
                const std::vector<size_t> axes = checked_perm(perm, x.rank());
                const Dims strides = strides_in(x.dims, from);
                Dims dims(axes.size()), from_strides(axes.size());
                for (size_t i = 0; i < axes.size(); ++i) {
                  dims[i] = x.dims[axes[i]];
                  from_strides[i] = strides[axes[i]];
                }
                copy_to_output(r, x, device_output(r, 0, dims, x.dtype, to), physical_dims(dims, to), physical_dims(from_strides, to));
              },
          .input_layouts = {from},
          .output_layouts = {to}};
}

// --- Concat and Split ---

// The parts of `whole` along `axis` as rows of bytes.
struct PartRows {
  int64_t outer = 1, pitch = 1, inner = 1;  // `inner`: bytes of one index of the axis

  PartRows(const Dims& whole, size_t axis, Layout layout, DType dtype) {
    const Dims dims = physical_dims(whole, layout);
    const size_t at = physical_axis(axis, layout);
    outer = product(dims, 0, at);
    inner = product(dims, at + 1, dims.size()) * static_cast<int64_t>(element_bytes(dtype));
    pitch = dims[at] * inner;
  }
};

CompiledKernel make_concat(const CompileContext& c) {
  const int64_t axis = c.node().get_int("axis", 0);
  size_t images = 0;
  for (size_t i = 0; i < c.inputs.size(); ++i) images += offered_layout(c, i) == Layout::nhwc;
  const Layout layout = 2 * images > c.inputs.size() ? Layout::nhwc : Layout::plain;
  return {.run =
              [=](RunContext& r) {
                std::vector<const TensorView*> inputs;
                for (size_t i = 0; i < r.input_count(); ++i) inputs.push_back(&r.input(i));
                require(!inputs.empty(), "Concat needs at least one input");
                const size_t front = normalise_axis(axis, inputs[0]->rank());
                const TensorView& y = device_output(r, 0, concat_dims(inputs, front), inputs[0]->dtype, layout);
                const PartRows rows(y.dims, front, layout, y.dtype);
                std::vector<RowPart> parts;
                int64_t offset = 0;
                for (const TensorView* x : inputs) {
                  parts.push_back({x->data, offset, x->dims[front] * rows.inner});
                  offset += parts.back().length;
                }
                join_rows(y.data, rows.pitch, rows.outer, parts, stream_of(r));
              },
          .input_layouts = std::vector<Layout>(c.inputs.size(), layout),
          .output_layouts = {layout}};
}

CompiledKernel make_split(const CompileContext& c) {
  const int64_t axis = c.node().get_int("axis", 0);
  const int64_t named_parts = c.node().get_int("num_outputs", 0);
  const Layout layout = offered_layout(c, 0);
  const auto run = [=](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t front = normalise_axis(axis, x.rank());
    const std::vector<int64_t> sizes = split_sizes(r, named_parts, x.dims[front]);
    const PartRows rows(x.dims, front, layout, x.dtype);
    std::vector<RowPart> parts;
    int64_t offset = 0;
    for (size_t i = 0; i < sizes.size(); offset += sizes[i++] * rows.inner) {
      if (!r.wants_output(i)) continue;
      Dims dims = x.dims;
      dims[front] = sizes[i];
      parts.push_back({device_output(r, i, dims, x.dtype, layout).data, offset, sizes[i] * rows.inner});
    }
    split_rows(x.data, rows.pitch, rows.outer, parts, stream_of(r));
  };
  return {.run = run, .input_layouts = {layout}, .output_layouts = std::vector<Layout>(c.outputs.size(), layout)};
}

// --- Slice, Expand, Tile ---

void run_slice(RunContext& r, Layout layout) {
  const TensorView& x = r.input(0);
  const SlicedPart part = sliced_part(r, strides_in(x.dims, layout));
  TensorView& y = device_output(r, 0, part.dims, x.dtype, layout);
  copy_to_output(r, x, y, physical_dims(part.dims, layout), physical_dims(part.strides, layout), y.count() > 0 ? part.offset : 0);
}

CompiledKernel make_slice(const CompileContext& c) {
  return keeping_layout(c, run_slice);
}

CompiledKernel make_expand(const CompileContext&) {
  return {[](RunContext& r) {
    const TensorView& x = r.input(0);
    const Dims dims = broadcast_dims(x.dims, r.input_ints(1)), strides = strides_of(x.dims);
    Dims from_strides(dims.size(), 0);
    for (size_t i = 0; i < x.rank(); ++i) {
      if (x.dims[i] != 1) from_strides[dims.size() - x.rank() + i] = strides[i];
    }
    copy_to_output(r, x, device_output(r, 0, dims, x.dtype), dims, from_strides);
  }};
}

CompiledKernel make_tile(const CompileContext&) {
  return {[](RunContext& r) {
    const TensorView& x = r.input(0);
    const std::vector<int64_t> repeats = r.input_ints(1);
    if (repeats.size() != x.rank()) {
      throw Error("repeats has " + std::to_string(repeats.size()) + " numbers, the input has rank " + std::to_string(x.rank()));
    }
    const Dims strides = strides_of(x.dims);
    Dims dims = x.dims, walk, from_strides;  // the walk has each dimension twice: its repeats, then itself
    for (size_t i = 0; i < dims.size(); ++i) {
      if (repeats[i] < 0 || __builtin_mul_overflow(dims[i], repeats[i], &dims[i])) {
        throw Error("a dimension of " + std::to_string(x.dims[i]) + " can't be repeated " + std::to_string(repeats[i]) + " times");
      }
      walk.insert(walk.end(), {repeats[i], x.dims[i]});
      from_strides.insert(from_strides.end(), {0, strides[i]});
    }
    copy_to_output(r, x, device_output(r, 0, dims, x.dtype), walk, from_strides);
  }};
}

// --- DepthToSpace, SpaceToDepth ---

int64_t checked_block_size(const CompileContext& c) {
  const int64_t block = c.node().get_int("blocksize", 0);
  if (block <= 0 || block > 1 << 20) throw Error("blocksize is " + std::to_string(block), "it must be positive");
  return block;
}

// A part of a dimension: how many, and how far apart in memory.
struct Factor {
  int64_t extent, stride;
};

// Writes y from its dimensions' factors [N, C..., H..., W...], in the order of its memory.
void copy_factors(RunContext& r, const TensorView& x, TensorView& y, std::vector<std::vector<Factor>> dims) {
  if (y.layout == Layout::nhwc) std::rotate(dims.begin() + 1, dims.begin() + 2, dims.end());
  Dims walk, strides;
  for (const std::vector<Factor>& dim : dims) {
    for (const Factor& factor : dim) {
      walk.push_back(factor.extent);
      strides.push_back(factor.stride);
    }
  }
  copy_to_output(r, x, y, walk, strides);
}

CompiledKernel make_depth_to_space(const CompileContext& c) {
  const int64_t b = checked_block_size(c);
  const bool column_first = c.node().get_string("mode", "DCR") == "CRD";
  const Layout layout = offered_layout(c, 0);
  const auto run = [=](RunContext& r) {
    const TensorView& x = r.input(0);
    const Dims& d = x.dims;  // [N, C, H, W]
    require(d.size() == 4 && d[1] % (b * b) == 0, "the input must be [N, C, H, W] with C a multiple of blocksize squared");
    const int64_t depth = d[1] / (b * b);
    const Dims s = strides_in(d, layout);
    TensorView& y = device_output(r, 0, {d[0], depth, product({d[2], b}, 0, 2), product({d[3], b}, 0, 2)}, x.dtype, layout);
    // C is [depth, b, b] or [b, b, depth].
    const int64_t row = column_first ? b * s[1] : b * depth * s[1], column = column_first ? s[1] : depth * s[1];
    const int64_t channel = column_first ? b * b * s[1] : s[1];
    copy_factors(r, x, y, {{{d[0], s[0]}}, {{depth, channel}}, {{d[2], s[2]}, {b, row}}, {{d[3], s[3]}, {b, column}}});
  };
  return {.run = run, .input_layouts = {layout}, .output_layouts = {layout}};
}

CompiledKernel make_space_to_depth(const CompileContext& c) {
  const int64_t b = checked_block_size(c);
  const bool column_first = c.node().get_string("mode", "DCR") == "CRD";
  const Layout layout = offered_layout(c, 0);
  const auto run = [=](RunContext& r) {
    const TensorView& x = r.input(0);
    const Dims& d = x.dims;  // [N, C, H, W]
    require(d.size() == 4 && d[2] % b == 0 && d[3] % b == 0, "the input must be [N, C, H, W] with H and W multiples of blocksize");
    const Dims s = strides_in(d, layout);
    TensorView& y = device_output(r, 0, {d[0], product({d[1], b, b}, 0, 3), d[2] / b, d[3] / b}, x.dtype, layout);
    const Factor channel{d[1], s[1]}, row{b, s[2]}, column{b, s[3]};
    const auto channels = column_first ? std::vector<Factor>{channel, row, column} : std::vector<Factor>{row, column, channel};
    copy_factors(r, x, y, {{{d[0], s[0]}}, channels, {{d[2] / b, b * s[2]}}, {{d[3] / b, b * s[3]}}});
  };
  return {.run = run, .input_layouts = {layout}, .output_layouts = {layout}};
}

}  // namespace

void register_movement(KernelRegistry& registry) {
  const auto movable = refuse_unmovable_input;
  registry.add({.op = "Transpose", .make = make_transpose, .unsupported = movable});
  registry.add({.op = "Concat", .make = make_concat, .unsupported = movable});
  registry.add({.op = "Split", .make = make_split, .unsupported = movable, .host_inputs = {1}});
  registry.add({.op = "Slice", .make = make_slice, .unsupported = movable, .host_inputs = {1, 2, 3, 4}});
  registry.add({.op = "Expand", .make = make_expand, .unsupported = movable, .host_inputs = {1}});
  registry.add({.op = "Tile", .make = make_tile, .unsupported = movable, .host_inputs = {1}});
  registry.add({.op = "DepthToSpace", .make = make_depth_to_space, .unsupported = movable});
  registry.add({.op = "SpaceToDepth", .make = make_space_to_depth, .unsupported = movable});
  register_views(registry);
  cuda::register_padding(registry);
  register_constants(registry);
}

}  // namespace fretsaw::cuda
