// Programs of one graph, found by the signature of their inputs.
#include <algorithm>
#include <cstring>

#include "graph/errors.h"
#include "runtime/collectives.h"
#include "runtime/program.h"

namespace fretsaw {
namespace {

constexpr int64_t max_content_elements = 64;  // contents of larger tensors are data, not shapes
constexpr int changes_until_variable = 4;     // an input that changes this often is no longer compiled in

// A small tensor's elements as numbers for the key; floats by their bits.
void append_content(const TensorView& x, std::vector<int64_t>& key) {
  size_t bytes = x.bytes(), width = std::max<size_t>(bytes_of(x.dtype, 1), 1);
  const auto* data = static_cast<const std::byte*>(x.data);
  for (size_t at = 0; at + width <= bytes; at += width) {
    int64_t word = 0;
    std::memcpy(&word, data + at, std::min(width, sizeof word));
    key.push_back(word);
  }
}

bool may_decide(DType dtype) {
  return is_integer(dtype) || dtype == DType::boolean || dtype == DType::float32 || dtype == DType::float64 || dtype == DType::float16;
}

}  // namespace

ProgramCache::ProgramCache(std::shared_ptr<const Model> model, std::vector<Value*> inputs, bool generalise)
    : model_(std::move(model)), inputs_(std::move(inputs)), generalise_(generalise), facts_(inputs_.size()) {
  auto decides = inputs_that_decide_shapes(*model_->graph, inputs_);
  for (size_t i = 0; i < facts_.size(); ++i) facts_[i].decides_shapes = decides[i];
  last_contents_.resize(inputs_.size());
  last_dims_.resize(inputs_.size());
}

bool ProgramCache::content_counts(size_t i, const RuntimeValue& value) const {
  const Facts& facts = facts_[i];
  return facts.decides_shapes && facts.content_changes < changes_until_variable && value.kind == RuntimeValue::Kind::tensor &&
         value.tensor.memory == Memory::host && may_decide(value.tensor.dtype) && value.tensor.count() <= max_content_elements;
}

void ProgramCache::make_key(std::span<const RuntimeValue* const> inputs) {
  key_.clear();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const RuntimeValue* value = inputs[i];
    if (!value) {
      key_.push_back(-1);
      continue;
    }
    key_.push_back(static_cast<int64_t>(value->kind));
    if (value->kind != RuntimeValue::Kind::tensor) continue;
    key_.push_back(static_cast<int64_t>(value->tensor.dtype));
    if (binding_.binds) {
      key_.push_back(static_cast<int64_t>(value->tensor.memory));
      key_.push_back(static_cast<int64_t>(value->tensor.layout));
    }
    const Facts& facts = facts_[i];
    if (facts.rank_changes >= changes_until_variable) continue;
    const Dims& dims = value->tensor.dims;
    key_.push_back(static_cast<int64_t>(dims.size()));
    for (size_t d = 0; d < dims.size(); ++d) {
      key_.push_back(d < facts.dim_changes.size() && facts.dim_changes[d] >= changes_until_variable ? -1 : dims[d]);
    }
    if (content_counts(i, *value)) append_content(value->tensor, key_);
  }
}

// Counts what differs from the last compilation, so that what differs again and again is left open.
void ProgramCache::learn_from_miss(std::span<const RuntimeValue* const> inputs) {
  std::vector<int64_t> content;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const RuntimeValue* value = inputs[i];
    if (!value || value->kind != RuntimeValue::Kind::tensor) continue;
    Facts& facts = facts_[i];
    const Dims& dims = value->tensor.dims;
    bool same_shape = has_last_ && last_dims_[i] == dims;
    if (has_last_ && generalise_) {
      if (last_dims_[i].size() != dims.size()) ++facts.rank_changes;
      facts.dim_changes.resize(std::max(facts.dim_changes.size(), dims.size()));
      for (size_t d = 0; d < dims.size() && d < last_dims_[i].size(); ++d) facts.dim_changes[d] += dims[d] != last_dims_[i][d];
    }
    last_dims_[i] = dims;
    if (!facts.decides_shapes || !may_decide(value->tensor.dtype) || value->tensor.count() > max_content_elements) continue;
    if (value->tensor.memory != Memory::host) continue;
    content.clear();
    append_content(value->tensor, content);
    if (same_shape && content != last_contents_[i]) ++facts.content_changes;
    last_contents_[i] = content;
  }
  has_last_ = true;
}

std::vector<InputSpec> ProgramCache::specs(std::span<const RuntimeValue* const> inputs) const {
  std::vector<InputSpec> specs(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const RuntimeValue* value = inputs[i];
    InputSpec& spec = specs[i];
    spec.given = value != nullptr;
    spec.type = inputs_[i]->type;
    if (!value || value->kind != RuntimeValue::Kind::tensor) continue;
    spec.type = Type::tensor(value->tensor.dtype);
    spec.memory = value->tensor.memory;
    spec.layout = value->tensor.layout;
    const Facts& facts = facts_[i];
    if (facts.rank_changes < changes_until_variable) {
      Shape shape = shape_of(value->tensor.dims);
      for (size_t d = 0; d < shape.size(); ++d) {
        if (d < facts.dim_changes.size() && facts.dim_changes[d] >= changes_until_variable) shape[d] = Dim();
      }
      spec.type.shape = shape;
      if (is_static(shape) && content_counts(i, *value)) {
        auto copy = make_tensor(value->tensor.dtype, value->tensor.dims);
        if (size_t bytes = value->tensor.bytes()) std::memcpy(mutable_data(*copy), value->tensor.data, bytes);
        copy->name = inputs_[i]->name;
        spec.content = copy;
      }
    }
  }
  return specs;
}

Program& ProgramCache::get(std::span<const RuntimeValue* const> inputs, RankContext& rank, bool on_device) {
  make_key(inputs);
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (it->key != key_) continue;
    entries_.splice(entries_.begin(), entries_, it);
    return *entries_.front().program;
  }
  learn_from_miss(inputs);
  make_key(inputs);  // what was learnt may have opened it
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (it->key == key_) {
      entries_.splice(entries_.begin(), entries_, it);
      return *entries_.front().program;
    }
  }
  auto program = compile_program(*model_, inputs_, specs(inputs), distrusted_, rank, on_device ? rank.device : nullptr, binding_);
  if (entries_.size() >= kept_programs) entries_.pop_back();
  entries_.push_front({key_, std::move(program)});
  return *entries_.front().program;
}

void ProgramCache::forget_captured() {
  for (Entry& entry : entries_) fretsaw::forget_captured(*entry.program);
}

void ProgramCache::run(std::span<const RuntimeValue* const> inputs, std::span<RuntimeValue> outputs, RankContext& rank, size_t depth) {
  while (true) {
    const CollectiveCounts before(rank);
    Program& program = get(inputs, rank, /*on_device=*/depth == 0);
    try {
      run_program(program, inputs, outputs, rank, depth);
      return;
    } catch (const ShapeMismatch& mismatch) {
      // What is kept may have its new value already: that step can't be repeated.
      const bool keeps = std::any_of(program.kept.begin(), program.kept.end(), [](int input) { return input >= 0; });
      if (!distrusted_.insert(mismatch.node_name).second || keeps) throw;
      before.agree_to_repeat(rank);
    }
    entries_.clear();
  }
}

}  // namespace fretsaw
