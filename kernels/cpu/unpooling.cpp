// MaxUnpool: puts values back where MaxPool found them.
#include <cstring>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/pooling.h"

namespace fretsaw {

UnpoolShapes unpool_shapes(RunContext& r, const Node& node, size_t max_rank) {
  const TensorView &x = r.input(0), &indices = r.input(1);
  if (x.rank() < 3 || x.rank() > max_rank || indices.dims != x.dims)
    throw Error("MaxUnpool of shapes " + to_string(x.dims) + " and " + to_string(indices.dims), "make them equal, [N,C,D1,...]");
  const Window window = read_window(node, x.rank() - 2);
  UnpoolShapes shapes{.pooled = {x.dims[0], x.dims[1]}};
  for (size_t i = 0; i < window.rank(); ++i) {
    shapes.pooled.push_back((x.dims[i + 2] - 1) * window.strides[i] + window.kernel[i] - window.pads_begin[i] - window.pads_end[i]);
    require(shapes.pooled.back() >= 0, "MaxUnpool of a window with more padding than cells", "use less padding");
  }
  shapes.out = r.has_input(2) ? r.input_ints(2) : shapes.pooled;
  if (shapes.out.size() != x.rank())
    throw Error("MaxUnpool to the shape " + to_string(shapes.out), "give output_shape one entry for each dimension");
  return shapes;
}

namespace {

void unpool(RunContext& r, const Node& node) {
  const TensorView &x = r.input(0), &indices = r.input(1);
  const UnpoolShapes shapes = unpool_shapes(r, node);
  const Dims &pooled = shapes.pooled, &y_dims = shapes.out;
  TensorView& y = sized_output(r, 0, y_dims);
  std::memset(y.data, 0, y.bytes());
  const Dims from_strides = strides_of(pooled);
  with_element_type(x.dtype, [&](auto identity) {
    using T = typename decltype(identity)::type;
    for (int64_t i = 0; i < x.count(); ++i) {
      const int64_t index = indices.as<int64_t>()[i];
      if (index < 0 || index >= count_of(pooled)) throw_index_out_of_range(index, count_of(pooled));
      // The cell's place in the tensor that was pooled, then in the output.
      int64_t rest = index, at = 0;
      for (size_t d = 0; d < y_dims.size(); ++d) {
        const int64_t position = rest / from_strides[d];
        rest %= from_strides[d];
        if (position >= y_dims[d]) throw_index_out_of_range(position, y_dims[d]);
        at = at * y_dims[d] + position;
      }
      y.as<T>()[at] = x.as<T>()[i];
    }
  });
}

CompiledKernel make_unpool(const CompileContext& c) {
  return {[node = Node(c.node())](RunContext& r) { unpool(r, node); }};
}

}  // namespace

void register_unpooling(KernelRegistry& registry) {
  registry.add({.op = "MaxUnpool", .make = make_unpool});
}

}  // namespace fretsaw
