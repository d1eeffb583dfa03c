// --detect-anomaly: which node was the first to make something that is not finite.
#include "runtime/anomaly.h"

#include <cmath>

#include "graph/errors.h"
#include "graph/gradients.h"

namespace fretsaw {
namespace {

struct Found {
  bool nan = false, infinity = false;
};

// A 16-bit float with this mask of the exponent's bits.
Found look_at_halves(const uint16_t* bits, size_t count, uint16_t exponent) {
  Found found;
  const auto mantissa = static_cast<uint16_t>(0x7fff & ~exponent);
  for (size_t i = 0; i < count; ++i) {
    if ((bits[i] & exponent) != exponent) continue;
    ((bits[i] & mantissa) != 0 ? found.nan : found.infinity) = true;
  }
  return found;
}

template <typename T>
Found look_at(const T* numbers, size_t count) {
  Found found;
  for (size_t i = 0; i < count; ++i) {
    found.nan |= std::isnan(numbers[i]);
    found.infinity |= std::isinf(numbers[i]);
  }
  return found;
}

// Padding of blocked layouts is zero, so all bytes are looked at.
Found look_at(const TensorView& view, const void* data) {
  const size_t bytes = view.bytes();
  switch (view.dtype) {
    case DType::float32:
      return look_at(static_cast<const float*>(data), bytes / sizeof(float));
    case DType::float64:
      return look_at(static_cast<const double*>(data), bytes / sizeof(double));
    case DType::float16:
      return look_at_halves(static_cast<const uint16_t*>(data), bytes / sizeof(uint16_t), 0x7c00);
    case DType::bfloat16:
      return look_at_halves(static_cast<const uint16_t*>(data), bytes / sizeof(uint16_t), 0x7f80);
    default:
      return {};
  }
}

Found look_at(const RuntimeValue& value, RankContext& rank) {
  if (value.kind != RuntimeValue::Kind::tensor || !is_float(value.tensor.dtype)) return {};
  if (value.tensor.memory == Memory::host) return look_at(value.tensor, value.tensor.data);
  std::vector<std::byte> copy(value.tensor.bytes());
  rank.device->download(copy.data(), value.tensor.data, copy.size());
  return look_at(value.tensor, copy.data());
}

bool overlap(const TensorView& a, const TensorView& b) {
  const auto *first = static_cast<const std::byte*>(a.data), *second = static_cast<const std::byte*>(b.data);
  return a.memory == b.memory && first < second + b.bytes() && second < first + a.bytes();
}

// Constants may have gone into the kernel. An input whose memory became the output's can't be asked any more.
bool read_infinity(const Step& step, const RuntimeValue& output, RankContext& rank) {
  for (const Value* v : step.node->inputs) {
    if (!v || !v->constant || !v->constant->data || !is_float(v->constant->dtype)) continue;
    RuntimeValue constant;
    from_constant(v->constant, constant, nullptr);
    const Found found = look_at(constant, rank);
    if (found.infinity || found.nan) return true;
  }
  for (const RuntimeValue* input : step.input_values) {
    if (!input || input->kind != RuntimeValue::Kind::tensor || overlap(input->tensor, output.tensor)) continue;
    const Found found = look_at(*input, rank);
    if (found.infinity || found.nan) return true;
  }
  return false;
}

}  // namespace

void check_finite(const Step& step, RankContext& rank) {
  if (!step.node) return;
  for (size_t i = 0; i < step.output_values.size(); ++i) {
    if (!step.output_values[i]) continue;
    const RuntimeValue& output = *step.output_values[i];
    const Found found = look_at(output, rank);
    if (!found.nan && !(found.infinity && !read_infinity(step, output, rank))) continue;
    const auto of = step.node->metadata.find(kBackwardOf);
    const std::string where = of == step.node->metadata.end()
                                  ? ""
                                  : std::string(", in the backward pass") + (of->second.empty() ? "" : " of node '" + of->second + "'");
    throw Error(std::string("makes ") + (found.nan ? "NaN" : "an infinity") + where,
                "look at what it reads: a learning rate that is too high, a division by 0, data that is not finite")
        .at_node(step.node->name, step.node->op);
  }
}

}  // namespace fretsaw
