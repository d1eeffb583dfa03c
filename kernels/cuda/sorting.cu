// TopK: the k first elements of each slice in order. Unsorted results may come in any order: they come sorted.
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/indexing.h"
#include "kernels/cuda/sorting.h"

namespace fretsaw::cuda {
namespace {

CompiledKernel make_top_k(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", -1);
  const bool largest = c.node().get_int("largest", 1) != 0;
  CompiledKernel kernel;
  kernel.run = [axis_attribute, largest](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    const Slices s{x.data, x.dtype, x.dims[axis], product(x.dims, axis + 1, x.rank()), input_int(r, 1), largest};
    if (s.k < 0 || s.k > s.extent) {
      throw Error("K is " + std::to_string(s.k) + ", the dimension has " + std::to_string(s.extent) + " elements");
    }
    require(s.extent < int64_t{1} << 31, "the dimension has more than 2^31 elements", "run the node on the CPU");
    Dims dims = x.dims;
    dims[axis] = s.k;
    TopKOutputs out;
    if (r.wants_output(0)) out.values = sized_output(r, 0, dims, x.dtype).data;
    if (r.wants_output(1)) out.indexes = sized_output(r, 1, dims, DType::int64).as<int64_t>();
    if (count_of(dims) == 0) return;
    const int64_t slices = product(x.dims, 0, axis) * s.inner;
    if (fits_warp(s)) return top_k_by_warps(r, s, slices, out);
    if (fits_block(s, slices)) return top_k_by_blocks(r, s, slices, out);
    top_k_by_sorting(r, s, slices, out);
  };
  return kernel;
}

std::string unsupported_top_k(const CompileContext& c) {
  return refuse_other_types(c, 0,
                            {DType::int8, DType::uint8, DType::int16, DType::uint16, DType::int32, DType::uint32, DType::int64,
                             DType::uint64, DType::float16, DType::bfloat16, DType::float32, DType::float64});
}

}  // namespace

void register_sorting(KernelRegistry& registry) {
  registry.add({.op = "TopK", .make = make_top_k, .unsupported = unsupported_top_k, .host_inputs = {1}});
}

}  // namespace fretsaw::cuda
