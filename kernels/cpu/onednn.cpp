// The engine, formats, primitives and packed weights of oneDNN.
#include "kernels/cpu/onednn.h"

#include <cstdio>
#include <cstdlib>
#include <new>
#include <string_view>

namespace fretsaw::onednn {

using dnnl::memory;

constexpr std::string_view kPointwiseAvx2 = "jit_1x1:avx2";

dnnl::engine& engine() {
  static dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

dnnl::stream& stream() {
  thread_local dnnl::stream mine(engine());
  return mine;
}

memory::desc strided(const Dims& dims, const Dims& strides) {
  return memory::desc(dims, memory::data_type::f32, strides);
}

memory::desc any_format(const Dims& dims) {
  return memory::desc(dims, memory::data_type::f32, memory::format_tag::any);
}

memory::desc description(const Dims& dims, Layout layout) {
  constexpr auto kFloat = memory::data_type::f32;
  switch (layout) {
    case Layout::nChw8c:
      return memory::desc(dims, kFloat, memory::format_tag::nChw8c);
    case Layout::nChw16c:
      return memory::desc(dims, kFloat, memory::format_tag::nChw16c);
    case Layout::nhwc:
      return memory::desc(dims, kFloat, memory::format_tag::nhwc);
    case Layout::plain:
      break;
  }
  Dims strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(dims[i], 1);
  return strided(dims, strides);
}

memory::desc description(const TensorView& view) {
  return description(view.dims, view.layout);
}

bool is_reference(const std::string& implementation) {
  return implementation.find("ref") != std::string::npos;
}

dnnl::convolution_forward::primitive_desc describe_convolution(const ConvolutionSetting& s, const dnnl::primitive_attr& attributes) {
  const auto describe = [&]() {
    return dnnl::convolution_forward::primitive_desc(engine(), dnnl::prop_kind::forward_inference, dnnl::algorithm::convolution_direct,
                                                     s.src, s.weights, s.bias, s.dst, s.strides, s.dilations, s.pads_begin, s.pads_end,
                                                     attributes);
  };
  dnnl::convolution_forward::primitive_desc desc = describe();
  if (std::string_view(desc.impl_info_str()) != "brgconv_1x1:avx2") return desc;
  while (desc.next_impl()) {
    if (std::string_view(desc.impl_info_str()) == kPointwiseAvx2) return desc;
  }
  return describe();
}

bool is_fast_pointwise(const std::string& implementation) {
  return implementation == kPointwiseAvx2 || implementation == "brgconv_1x1:avx512_core";
}

void report_choice(const char* what, const Dims& shape, const std::string& implementation) {
  static const bool wanted = std::getenv("FRETSAW_DNNL_INFO") != nullptr;
  if (wanted) std::fprintf(stderr, "oneDNN: %s %s: %s\n", what, to_string(shape).c_str(), implementation.c_str());
}

void rethrow(const dnnl::error& error, const char* what) {
  throw Error(std::string("oneDNN can't compute ") + what + ": " + error.what(), "check the shapes and attributes of the node");
}

void Call::add(int argument, const memory::desc& desc, void* data) {
  arguments_.insert_or_assign(argument, memory(desc, engine(), data ? data : DNNL_MEMORY_NONE));
}

void Call::run() {
  try {
    primitive_.execute(stream(), arguments_);
  } catch (const dnnl::error& error) {
    rethrow(error, "this node");
  }
}

Reordering::Reordering(const memory::desc& from, const memory::desc& to)
    : call_(dnnl::reorder(dnnl::reorder::primitive_desc(engine(), from, engine(), to))) {
  call_.add(DNNL_ARG_FROM, from);
  call_.add(DNNL_ARG_TO, to);
}

void Reordering::run(const void* from, void* to) {
  call_.set(DNNL_ARG_FROM, from);
  call_.set(DNNL_ARG_TO, to);
  call_.run();
}

std::shared_ptr<void> aligned_memory(size_t bytes) {
  constexpr std::align_val_t kAlignment{64};
  return std::shared_ptr<void>(::operator new(std::max<size_t>(bytes, 1), kAlignment), [](void* p) { ::operator delete(p, kAlignment); });
}

PackedWeights::PackedWeights(TensorPtr source, const memory::desc& plain, const memory::desc& packed)
    : source_(std::move(source)), format_(packed) {
  source_->check_readable(sizeof(float));
  if (plain == packed) return;
  packed_ = aligned_memory(packed.get_size());
  Reordering(plain, packed).run(source_->data, packed_.get());
  source_.reset();
}

namespace {

dnnl::algorithm algorithm_of(FusedStep::Kind kind) {
  switch (kind) {
    case FusedStep::Kind::linear:
      return dnnl::algorithm::eltwise_linear;
    case FusedStep::Kind::relu:
    case FusedStep::Kind::leaky_relu:
      return dnnl::algorithm::eltwise_relu;
    case FusedStep::Kind::clip:
      return dnnl::algorithm::eltwise_clip;
    case FusedStep::Kind::other:
      break;
    case FusedStep::Kind::add:
      return dnnl::algorithm::binary_add;
    case FusedStep::Kind::subtract:
      return dnnl::algorithm::binary_sub;
    case FusedStep::Kind::multiply:
      return dnnl::algorithm::binary_mul;
    case FusedStep::Kind::divide:
      return dnnl::algorithm::binary_div;
  }
  return dnnl::algorithm::undef;
}

}  // namespace

size_t append_steps(dnnl::post_ops& ops, const std::vector<FusedStep>& steps, size_t limit, const OperandFormat& operand) {
  size_t taken = 0;
  for (const FusedStep& step : steps) {
    if (taken == limit || !step.is_exact()) break;
    if (step.is_binary()) {
      const std::optional<memory::desc> format = operand(step);
      if (!format) break;
      ops.append_binary(algorithm_of(step.kind), *format);
    } else {
      ops.append_eltwise(algorithm_of(step.kind), step.alpha, step.beta);
    }
    ++taken;
  }
  return taken;
}

int operand_argument(size_t step) {
  return DNNL_ARG_ATTR_MULTIPLE_POST_OP(static_cast<int>(step)) | DNNL_ARG_SRC_1;
}

}  // namespace fretsaw::onednn
