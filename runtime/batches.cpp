// Checking inputs, splitting them into micro-batches and merging outputs.
#include "runtime/batches.h"

#include <algorithm>
#include <cstring>

#include "graph/errors.h"
#include "kernels/cpu/parallel.h"
#include "runtime/reduce.h"

namespace fretsaw {
namespace {

using Kind = RuntimeValue::Kind;

std::string quoted(const std::string& name) {
  return "'" + name + "'";
}

void check_input(const PlanInput& input, const RuntimeValue& value) {
  const Type& type = input.type;
  if (type.kind == Type::Kind::sequence && value.kind != Kind::sequence) {
    throw Error("input " + quoted(input.name) + " must be a sequence", "give it as one");
  }
  if (!type.is_tensor()) return;
  if (value.kind != Kind::tensor) throw Error("input " + quoted(input.name) + " must be a tensor", "give it as one");
  if (type.dtype != DType::undefined && value.tensor.dtype != type.dtype) {
    throw Error("input " + quoted(input.name) + " has the type " + std::string(name_of(value.tensor.dtype)) + " where the model takes " +
                    std::string(name_of(type.dtype)),
                "convert it");
  }
  if (!type.shape) return;
  auto refuse = [&](const std::string& what) {
    throw Error("input " + quoted(input.name) + " has the shape " + to_string(value.tensor.dims) + ", " + what,
                "the model takes " + to_string(*type.shape));
  };
  if (type.shape->size() != value.tensor.dims.size()) refuse("which is of another rank");
  for (size_t d = 0; d < type.shape->size(); ++d) {
    const Dim& dim = (*type.shape)[d];
    if (dim.known() && dim.value != value.tensor.dims[d]) refuse("whose dimension " + std::to_string(d) + " differs");
  }
}

// [outer, n, inner] around an axis, and bytes of an inner block.
struct Blocks {
  int64_t outer = 1, n = 1;
  size_t inner_bytes = 0;
  int64_t inner = 1;
};
Blocks blocks_of(const TensorView& x, int axis) {
  Blocks b;
  for (int i = 0; i < static_cast<int>(x.dims.size()); ++i) {
    int64_t d = x.dims[static_cast<size_t>(i)];
    if (i < axis) b.outer *= d;
    if (i == axis) b.n = d;
    if (i > axis) b.inner *= d;
  }
  int64_t bits = x.dtype == DType::string ? 8 * static_cast<int64_t>(sizeof(std::string)) : bits_of(x.dtype);
  if (bits % 8 && bits * b.inner % 8) {
    throw Error("a tensor of packed " + std::string(name_of(x.dtype)) + " can't be divided along axis " + std::to_string(axis),
                "cast it to int8 first");
  }
  b.inner_bytes = static_cast<size_t>(bits * b.inner / 8);
  return b;
}

void copy_block(const TensorView& from, size_t from_block, TensorView& to, size_t to_block, size_t count, const Blocks& b,
                int threads = 1) {
  if (from.dtype == DType::string) {
    auto inner = static_cast<size_t>(b.inner);
    std::copy_n(from.as<std::string>() + from_block * inner, count * inner, to.as<std::string>() + to_block * inner);
  } else if (count * b.inner_bytes > 0) {
    copy_in_parallel(static_cast<std::byte*>(to.data) + to_block * b.inner_bytes,
                     static_cast<const std::byte*>(from.data) + from_block * b.inner_bytes, count * b.inner_bytes, threads);
  }
}

RuntimeValue concatenate(const PlanOutput& output, const std::vector<const RuntimeValue*>& parts, BufferPool& pool) {
  Dims dims = parts[0]->tensor.dims;
  auto axis = static_cast<size_t>(output.axis);
  auto refuse = [&](const Dims& other) {
    throw Error("output " + quoted(output.name) + " has the shapes " + to_string(dims) + " and " + to_string(other) +
                    " in two micro-batches, which can't be put together along axis " + std::to_string(output.axis),
                "say how it comes together with --merge");
  };
  if (axis >= dims.size()) refuse(dims);
  int64_t total = 0;
  for (const RuntimeValue* part : parts) {
    Dims own = part->tensor.dims;
    if (own.size() != dims.size() || part->tensor.dtype != parts[0]->tensor.dtype) refuse(own);
    total += own[axis];
    own[axis] = dims[axis];
    if (own != dims) refuse(part->tensor.dims);
  }
  dims[axis] = total;
  RuntimeValue whole;
  make_pooled(pool, whole, parts[0]->tensor.dtype, dims);
  Blocks to = blocks_of(whole.tensor, output.axis);
  int64_t begin = 0;
  for (const RuntimeValue* part : parts) {
    Blocks from = blocks_of(part->tensor, output.axis);
    for (int64_t o = 0; o < to.outer; ++o) {
      copy_block(part->tensor, static_cast<size_t>(o * from.n), whole.tensor, static_cast<size_t>(o * to.n + begin),
                 static_cast<size_t>(from.n), to, omp_get_max_threads());
    }
    begin += from.n;
  }
  return whole;
}

template <typename T>
void weigh(const std::vector<const RuntimeValue*>& parts, const std::vector<int64_t>& samples, TensorView& out) {
  double all = 0;
  for (int64_t n : samples) all += static_cast<double>(n);
  for (int64_t i = 0; i < out.count(); ++i) {
    double sum = 0;
    for (size_t p = 0; p < parts.size(); ++p) {
      sum += static_cast<double>(parts[p]->tensor.as<const T>()[i]) * static_cast<double>(samples[p]);
    }
    out.as<T>()[i] = static_cast<T>(sum / all);
  }
}

RuntimeValue reduce_outputs(const PlanOutput& output, const std::vector<const RuntimeValue*>& parts, const std::vector<int64_t>& samples,
                            BufferPool& pool) {
  RuntimeValue whole;
  make_pooled(pool, whole, parts[0]->tensor.dtype, parts[0]->tensor.dims);
  std::vector<const std::byte*> data;
  for (const RuntimeValue* part : parts) {
    if (part->tensor.dims != whole.tensor.dims) {
      throw Error("output " + quoted(output.name) + " has the shapes " + to_string(whole.tensor.dims) + " and " +
                      to_string(part->tensor.dims) + " in two micro-batches, where their " + output.merge + " is asked for",
                  "choose another --merge");
    }
    data.push_back(static_cast<const std::byte*>(part->tensor.data));
  }
  if (output.merge == "sum") {
    reduce_parts(data, static_cast<std::byte*>(whole.tensor.data), 0, static_cast<size_t>(whole.tensor.count()), whole.tensor.dtype,
                 Reduction::sum);
    return whole;
  }
  switch (whole.tensor.dtype) {
    case DType::float32:
      weigh<float>(parts, samples, whole.tensor);
      break;
    case DType::float64:
      weigh<double>(parts, samples, whole.tensor);
      break;
    case DType::float16:
      weigh<_Float16>(parts, samples, whole.tensor);
      break;
    default:
      throw Error(
          "output " + quoted(output.name) + " of type " + std::string(name_of(whole.tensor.dtype)) + " has no mean over micro-batches",
          "choose another --merge");
  }
  return whole;
}

}  // namespace

std::vector<BatchPart> split_evenly(BatchPart whole, int parts) {
  std::vector<BatchPart> made;
  int64_t begin = whole.begin;
  for (int p = 0; p < parts; ++p) {
    int64_t count = whole.count / parts + (p < whole.count % parts ? 1 : 0);
    made.push_back({begin, count});
    begin += count;
  }
  return made;
}

std::vector<const RuntimeValue*> check_inputs(const Plan& plan, const std::map<std::string, RuntimeValue>& given,
                                              const std::vector<bool>& has_default) {
  std::vector<const RuntimeValue*> found;
  std::string names;
  for (size_t i = 0; i < plan.inputs.size(); ++i) {
    const PlanInput& input = plan.inputs[i];
    names += (i ? ", " : "") + quoted(input.name);
    auto it = given.find(input.name);
    if (it == given.end()) {
      if (!has_default[i] && input.type.kind != Type::Kind::optional) {
        throw Error("input " + quoted(input.name) + " is missing", "give it a value of " + to_string(input.type));
      }
      found.push_back(nullptr);
      continue;
    }
    check_input(input, it->second);
    found.push_back(&it->second);
  }
  for (const auto& [name, value] : given) {
    bool known = std::any_of(plan.inputs.begin(), plan.inputs.end(), [&](const PlanInput& input) { return input.name == name; });
    if (!known) throw Error("the model has no input " + quoted(name), "its inputs are " + (names.empty() ? "none" : names));
  }
  return found;
}

StepBatches divide_batch(const Plan& plan, const std::vector<const RuntimeValue*>& inputs) {
  StepBatches batches;
  int data = plan.mesh.data, micro_batches = plan.micro_batches;
  const PlanInput* first = nullptr;
  for (size_t i = 0; i < inputs.size() && data * micro_batches > 1; ++i) {
    const PlanInput& input = plan.inputs[i];
    if (input.batch_axis < 0 || !inputs[i]) continue;
    if (inputs[i]->kind != Kind::tensor || input.batch_axis >= static_cast<int>(inputs[i]->tensor.dims.size())) {
      throw Error("input " + quoted(input.name) + " has no axis " + std::to_string(input.batch_axis) + " to divide",
                  "say --batch " + input.name + "=none");
    }
    int64_t batch = inputs[i]->tensor.dims[static_cast<size_t>(input.batch_axis)];
    if (first && batch != batches.batch) {
      throw Error("input " + quoted(input.name) + " has a batch of " + std::to_string(batch) + " where " + quoted(first->name) + " has " +
                      std::to_string(batches.batch),
                  "give inputs of one batch");
    }
    if (batch < micro_batches) {
      throw Error("input " + quoted(input.name) + " has a batch of " + std::to_string(batch) + ", which does not fill " +
                      std::to_string(micro_batches) + " micro-batches",
                  "use fewer micro-batches or a larger batch");
    }
    first = &input;
    batches.batch = batch;
  }
  for (BatchPart share : split_evenly({0, first ? batches.batch : int64_t{data} * micro_batches}, data)) {
    if (share.count > 0 && share.count < micro_batches) {
      throw Error("input " + quoted(first->name) + " has a batch of " + std::to_string(batches.batch) + ", which does not fill " +
                      std::to_string(micro_batches) + " micro-batches on each of " + std::to_string(data) + " data ranks",
                  "use fewer micro-batches or a larger batch");
    }
    batches.parts.push_back(share.count > 0 ? split_evenly(share, micro_batches) : std::vector<BatchPart>{});
  }
  return batches;
}

void take_part(const RuntimeValue& whole, int axis, BatchPart part, RuntimeValue& out, BufferPool& pool) {
  const TensorView& x = whole.tensor;
  Blocks b = blocks_of(x, axis);
  out.tensor.dims = x.dims;
  out.tensor.dims[static_cast<size_t>(axis)] = part.count;
  if (b.outer == 1) {
    out.kind = Kind::tensor;
    out.tensor.dtype = x.dtype;
    out.tensor.layout = Layout::plain;
    out.tensor.data = static_cast<std::byte*>(x.data) + static_cast<size_t>(part.begin) * b.inner_bytes;
    out.owner = whole.owner;
    return;
  }
  make_pooled(pool, out, x.dtype, out.tensor.dims);
  for (int64_t o = 0; o < b.outer; ++o) {
    copy_block(x, static_cast<size_t>(o * b.n + part.begin), out.tensor, static_cast<size_t>(o * part.count),
               static_cast<size_t>(part.count), b);
  }
}

RuntimeValue merge_parts(const PlanOutput& output, const std::vector<const RuntimeValue*>& parts, const std::vector<int64_t>& samples,
                         BufferPool& pool) {
  if (parts.size() == 1 || output.merge == "same") return *parts[0];
  for (const RuntimeValue* part : parts) {
    if (part->kind == Kind::tensor) continue;
    throw Error("output " + quoted(output.name) + " is no tensor, so its micro-batches can't be put together", "use one micro-batch");
  }
  if (output.merge == "concat") return concatenate(output, parts, pool);
  return reduce_outputs(output, parts, samples, pool);
}

}  // namespace fretsaw
