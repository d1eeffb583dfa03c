// Numeric tensors of any type as vectors of one type.
#include "kernels/cpu/numbers.h"

#include <algorithm>
#include <string>

namespace fretsaw {

namespace {

void require_numbers(const TensorView& view) {
  if (view.dtype == DType::string || view.dtype == DType::undefined) {
    throw Error(not_supported(view.dtype) + " where numbers are expected", "cast the tensor to a number");
  }
}

template <typename T>
std::vector<T> loaded(const TensorView& view) {
  require_numbers(view);
  std::vector<T> values(static_cast<size_t>(view.count()));
  load_as<T>(view.dtype, view.data, 0, view.count(), values.data());
  return values;
}

}  // namespace

std::vector<int64_t> as_ints(const TensorView& view) {
  return loaded<int64_t>(view);
}
std::vector<double> as_doubles(const TensorView& view) {
  return loaded<double>(view);
}

std::vector<uint8_t> non_zero_flags(const TensorView& view) {
  std::vector<uint8_t> flags(static_cast<size_t>(view.count()));
  if (view.dtype == DType::string) {
    std::transform(view.as<std::string>(), view.as<std::string>() + view.count(), flags.begin(),
                   [](const std::string& s) { return !s.empty(); });
  } else if (view.dtype == DType::int64 || view.dtype == DType::uint64) {  // a double would round them, but not to zero
    std::transform(view.as<int64_t>(), view.as<int64_t>() + view.count(), flags.begin(), [](int64_t v) { return v != 0; });
  } else if (view.dtype == DType::boolean) {
    std::transform(view.as<uint8_t>(), view.as<uint8_t>() + view.count(), flags.begin(), [](uint8_t v) { return v != 0; });
  } else {
    const std::vector<double> values = as_doubles(view);
    std::transform(values.begin(), values.end(), flags.begin(), [](double v) { return v != 0; });
  }
  return flags;
}

double input_number(RunContext& r, size_t i) {
  const std::vector<double> values = as_doubles(r.input(i));
  if (values.size() != 1) throw Error("input " + std::to_string(i) + " must hold one number, it holds " + std::to_string(values.size()));
  return values[0];
}

}  // namespace fretsaw
