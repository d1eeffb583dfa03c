// AttentionGrad: reads the node, and chooses between cuDNN's fused backward pass and our kernels.
#include "kernels/cuda/attention_gradient.h"

#include <optional>

#include "kernels/cpu/attention_settings.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cuda/gradients.h"

namespace fretsaw::cuda {
namespace {

// dY, Q, K, V and the mask; empty where it is left out.
struct InputDims {
  Dims dy, q, k, v, mask;
};

// Offsets into scratch memory.
struct Places {
  size_t bias = 0, hidden = 0, dy = 0, spare[3] = {}, work = 0, end = 0;
};

class AttentionGradKernel {
 public:
  explicit AttentionGradKernel(const CompileContext& c) : settings_(c.node()) {
    InputDims in;
    Dims* dims[] = {&in.dy, &in.q, &in.k, &in.v, &in.mask};
    for (size_t i = 0; i < std::size(dims); ++i) {
      const std::optional<Dims> known = c.input_dims(i);
      if (c.has_input(i) && !known) return;
      *dims[i] = known.value_or(Dims{});
    }
    const AttentionForm form = form_of(in, c.input_dtype(0), c.input_dtype(4));
    if (form.suits_fused) fused_ = make_fused_attention_gradient(gpu(c), form.p, form.masks);
  }

  void run(RunContext& r) const {
    const auto dims = [&](size_t i) { return r.has_input(i) ? r.input(i).dims : Dims{}; };
    const InputDims in{dims(0), dims(1), dims(2), dims(3), dims(4)};
    const AttentionForm form = form_of(in, r.input(0).dtype, r.has_input(4) ? r.input(4).dtype : DType::undefined);
    AttentionGradient a;
    a.p = form.p;
    a.dy = r.input(0).data, a.p.q = r.input(1).data, a.p.k = r.input(2).data, a.p.v = r.input(3).data;
    if (r.has_input(4)) a.p.mask = r.input(4).data;
    void** made[] = {&a.dq, &a.dk, &a.dv};
    for (size_t o = 0; o < 3; ++o) {
      if (!r.wants_output(o)) continue;
      TensorView& out = r.output(o, r.input(o + 1).dims);
      *made[o] = out.data;
      // No query says anything of keys, and no key of queries.
      const size_t bytes = bytes_of(out.dtype, out.count());
      if (bytes > 0 && (a.p.S == 0 || a.p.T == 0)) FRETSAW_CUDA_CHECK(cudaMemsetAsync(out.data, 0, bytes, stream_of(r)));
    }
    if (a.p.S == 0 || a.p.T == 0 || a.p.B == 0) return;
    if (fused_)
      run_fused(r, a, form);
    else
      run_rows_attention_gradient(a, r.scratch(rows_attention_gradient_bytes(a.p)), stream_of(r));
  }

 private:
  AttentionForm form_of(const InputDims& in, DType type, DType mask_type) const {
    AttentionForm form = attention_form(settings_, in.q, in.k, in.v, in.mask, type, mask_type);
    require(in.dy == form.y, "dY has another shape than Attention's result", "give it the result's shape");
    return form;
  }

  // What cuDNN is given beside the operands: the bias, gradients that nobody wants, and dY with zeros where a query sees no key.
  Places places_of(const AttentionGradient& a, const FusedAttentionMasks& masks, const InputDims& in) const {
    Places places;
    const auto place = [&](size_t& at, size_t bytes) { at = places.end, places.end += (bytes + 255) / 256 * 256; };
    const auto element = static_cast<size_t>(bits_of(a.p.type)) / 8;
    const size_t rows = static_cast<size_t>(masks.bias_batches) * static_cast<size_t>(masks.bias_heads) * static_cast<size_t>(a.p.S);
    if (rows > 0) {
      place(places.bias, rows * static_cast<size_t>(masks.bias_row) * element);
      place(places.hidden, rows * sizeof(int));
      place(places.dy, static_cast<size_t>(count_of(in.dy)) * element);
    }
    const Dims* like[] = {&in.q, &in.k, &in.v};
    const void* made[] = {a.dq, a.dk, a.dv};
    for (size_t o = 0; o < 3; ++o)
      if (!made[o]) place(places.spare[o], static_cast<size_t>(count_of(*like[o])) * element);
    place(places.work, fused_->workspace_bytes());
    return places;
  }

  void run_fused(RunContext& r, AttentionGradient& a, const AttentionForm& form) const {
    const InputDims in{r.input(0).dims, r.input(1).dims, r.input(2).dims, r.input(3).dims, {}};
    const Places places = places_of(a, form.masks, in);
    char* scratch = static_cast<char*>(r.scratch(places.end));
    void** made[] = {&a.dq, &a.dk, &a.dv};
    for (size_t o = 0; o < 3; ++o)
      if (!*made[o]) *made[o] = scratch + places.spare[o];
    const bool bias = form.masks.bias_batches > 0;
    if (bias) {
      auto* hidden = reinterpret_cast<int*>(scratch + places.hidden);
      run_attention_bias(a.p, form.masks, scratch + places.bias, hidden, stream_of(r));
      const size_t bytes = bytes_of(a.p.type, count_of(in.dy));
      FRETSAW_CUDA_CHECK(cudaMemcpyAsync(scratch + places.dy, a.dy, bytes, cudaMemcpyDeviceToDevice, stream_of(r)));
      AttentionProblem shown = a.p;
      shown.y = scratch + places.dy;
      clear_hidden(shown, form.masks, hidden, stream_of(r));
      a.dy = shown.y;
    }
    fused_->run(gpu(r), a, bias ? scratch + places.bias : nullptr, scratch + places.work);
  }

  AttentionSettings settings_;
  std::shared_ptr<FusedAttentionGradient> fused_;
};

std::string unsupported(const CompileContext& c) {
  if (std::string reason = refuse_other_types(c, 0, {DType::float32, DType::float16, DType::bfloat16}); !reason.empty()) return reason;
  for (size_t i : {1, 2, 3})
    if (c.input_dtype(i) != c.input_dtype(0)) return "inputs of different types";
  if (c.has_input(4) && c.input_dtype(4) != DType::boolean && c.input_dtype(4) != c.input_dtype(0)) return "a mask of another type";
  return "";
}

CompiledKernel make_attention_gradient(const CompileContext& c) {
  const auto kernel = std::make_shared<AttentionGradKernel>(c);
  return {[kernel](RunContext& r) { kernel->run(r); }};
}

}  // namespace

void register_attention_gradient(KernelRegistry& registry) {
  registry.add({.op = "AttentionGrad", .domain = kCommunicationDomain, .make = make_attention_gradient, .unsupported = unsupported});
}

}  // namespace fretsaw::cuda
