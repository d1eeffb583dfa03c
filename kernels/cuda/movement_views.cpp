// Operators whose output has the input's bytes under another shape: Reshape and its kin, Identity.
#include "kernels/cpu/reshaping.h"
#include "kernels/cuda/movement.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

// Output 0 with input 0's bytes, copied unless the two share memory.
void write_view(RunContext& r, const Dims& dims, Layout layout = Layout::plain) {
  const TensorView& x = r.input(0);
  const TensorView& y = device_output(r, 0, dims, x.dtype, layout);
  if (y.data != x.data) r.device().copy(y.data, x.data, x.bytes());
}

// The layout to take input 0 in: an image of one pixel or one channel has the same bytes in both.
Layout flat_layout(const CompileContext& c) {
  if (offered_layout(c, 0) == Layout::plain) return Layout::plain;
  const std::optional<Dims> dims = c.input_dims(0);
  const bool same_bytes = dims && dims->size() == 4 && ((*dims)[1] == 1 || (*dims)[2] * (*dims)[3] == 1);
  return same_bytes ? Layout::nhwc : Layout::plain;
}

CompiledKernel view_kernel(const CompileContext& c, std::function<void(RunContext&)> run) {
  return {.run = std::move(run), .input_layouts = {flat_layout(c)}};
}

CompiledKernel make_reshape(const CompileContext& c) {
  const bool allow_zero = c.node().get_int("allowzero", 0) != 0;
  return view_kernel(c, [allow_zero](RunContext& r) { write_view(r, reshaped_dims(r.input(0).dims, r.input_ints(1), allow_zero)); });
}

CompiledKernel make_flatten(const CompileContext& c) {
  const int64_t axis = c.node().get_int("axis", 1);
  return view_kernel(c, [axis](RunContext& r) { write_view(r, flattened_dims(r.input(0).dims, axis)); });
}

CompiledKernel make_squeeze(const CompileContext& c) {
  return view_kernel(c, [](RunContext& r) { write_view(r, squeezed_dims(r)); });
}

CompiledKernel make_unsqueeze(const CompileContext& c) {
  return view_kernel(c, [](RunContext& r) { write_view(r, unsqueezed_dims(r)); });
}

CompiledKernel make_identity(const CompileContext& c) {
  const Layout layout = offered_layout(c, 0);
  return {
      .run = [layout](RunContext& r) { write_view(r, r.input(0).dims, layout); }, .input_layouts = {layout}, .output_layouts = {layout}};
}

// Views copy whole tensors, so that packed types are no matter.
std::string refuse_others(const CompileContext& c) {
  if (!c.has_input(0) || !c.input_types[0].is_tensor()) return "values that are no tensors";
  if (!c.output_types.empty() && c.output_types[0].kind == Type::Kind::optional) return "values that are no tensors";
  return c.input_dtype(0) == DType::string ? "elements of type string" : "";
}

}  // namespace

void register_views(KernelRegistry& registry) {
  registry.add({.op = "Reshape", .make = make_reshape, .unsupported = refuse_others, .view = true, .host_inputs = {1}});
  registry.add({.op = "Flatten", .make = make_flatten, .unsupported = refuse_others, .view = true});
  registry.add({.op = "Squeeze", .make = make_squeeze, .unsupported = refuse_others, .view = true, .host_inputs = {1}});
  registry.add({.op = "Unsqueeze", .make = make_unsqueeze, .unsupported = refuse_others, .view = true, .host_inputs = {1}});
  registry.add({.op = "Identity", .make = make_identity, .unsupported = refuse_others, .view = true});
}

}  // namespace fretsaw::cuda
