// oneDNN for this project's kernels: the engine, descriptions of tensors, primitives with their arguments, packed weights.
#pragma once
#include <dnnl.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/cpu/fused_chain.h"
#include "kernels/kernel.h"

namespace fretsaw::onednn {

dnnl::engine& engine();
dnnl::stream& stream();  // of this thread

// A tensor of float32 in one of our layouts.
dnnl::memory::desc description(const Dims& dims, Layout layout = Layout::plain);
dnnl::memory::desc any_format(const Dims& dims);
dnnl::memory::desc description(const TensorView& view);
// With strides in elements.
dnnl::memory::desc strided(const Dims& dims, const Dims& strides);

// True for the slow reference code that oneDNN has for every case.
bool is_reference(const std::string& implementation);
// The descriptions of a convolution's tensors and its window; dilations count from 0.
struct ConvolutionSetting {
  dnnl::memory::desc src, weights, bias, dst;
  Dims strides, dilations, pads_begin, pads_end;
};
// A convolution by the code that is fastest here: oneDNN's first choice, but for windows of one element on AVX2, where its generator
// for them, second in its list, needs 10 to 25% less time. Throws dnnl::error.
dnnl::convolution_forward::primitive_desc describe_convolution(const ConvolutionSetting& setting, const dnnl::primitive_attr& attributes);
// Whether it is one of the codes for windows of one element that beat oneDNN's inner products: by 8% with AVX-512, by 20% with AVX2.
bool is_fast_pointwise(const std::string& implementation);
// With FRETSAW_DNNL_INFO=1, prints what oneDNN chose for `what`.
void report_choice(const char* what, const Dims& shape, const std::string& implementation);
// Runs `f`, turning oneDNN's exceptions into Error.
[[noreturn]] void rethrow(const dnnl::error& error, const char* what);

// A primitive and the memory objects of its arguments, whose addresses are set before each run.
class Call {
 public:
  Call() = default;
  explicit Call(dnnl::primitive primitive) : primitive_(std::move(primitive)) {}
  void add(int argument, const dnnl::memory::desc& desc, void* data = nullptr);
  void set(int argument, const void* data) { arguments_.at(argument).set_data_handle(const_cast<void*>(data)); }
  bool has(int argument) const { return arguments_.count(argument) != 0; }
  void run();

 private:
  dnnl::primitive primitive_;
  std::unordered_map<int, dnnl::memory> arguments_;
};

// A copy between two formats of the same tensor.
class Reordering {
 public:
  Reordering() = default;
  Reordering(const dnnl::memory::desc& from, const dnnl::memory::desc& to);
  void run(const void* from, void* to);

 private:
  Call call_;
};

// Weights in the format a primitive prefers. `plain` describes the bytes of the model.
class PackedWeights {
 public:
  // Keeps `source` itself where the formats are equal.
  PackedWeights(TensorPtr source, const dnnl::memory::desc& plain, const dnnl::memory::desc& packed);
  const void* data() const { return packed_ ? packed_.get() : source_->data; }
  const dnnl::memory::desc& format() const { return format_; }

 private:
  TensorPtr source_;
  std::shared_ptr<void> packed_;
  dnnl::memory::desc format_;
};

std::shared_ptr<void> aligned_memory(size_t bytes);

// The steps of a fused chain as post-operations. `operand(i)` describes the second operand of steps[i] (a binary one); nullopt says that
// oneDNN can't have it. It and the steps that follow are left to loops, as is one that isn't exact. Returns how many steps went in.
using OperandFormat = std::function<std::optional<dnnl::memory::desc>(const FusedStep&)>;
size_t append_steps(dnnl::post_ops& ops, const std::vector<FusedStep>& steps, size_t limit, const OperandFormat& operand);
int operand_argument(size_t step);  // the argument that is the second operand of a step

}  // namespace fretsaw::onednn
