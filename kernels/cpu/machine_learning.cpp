// Operators of ai.onnx.ml on features: ArrayFeatureExtractor, Binarizer, LabelEncoder.
#include "kernels/cpu/machine_learning.h"

#include <cmath>
#include <memory>
#include <unordered_map>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/indexing.h"
#include "kernels/cpu/numbers.h"

namespace fretsaw {
namespace {

CompiledKernel make_array_feature_extractor(const CompileContext&) {
  return {[](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t axis = normalise_axis(-1, x.rank());
    const std::vector<int64_t> picked = normalised_indices(r, 1, x.dims[axis]);
    Dims dims = x.dims;
    dims[axis] = static_cast<int64_t>(picked.size());
    if (dims.size() == 1) dims.insert(dims.begin(), 1);  // a vector counts as one row
    gather_into(sized_output(r, 0, dims, x.dtype), x, axis, picked, r.threads());
  }};
}

CompiledKernel make_binarizer(const CompileContext& c) {
  const double threshold = c.node().get_float("threshold", 0);
  return {[threshold](RunContext& r) {
    const TensorView& x = r.input(0);
    std::vector<double> values = as_doubles(x);
    for (double& value : values) value = value > threshold ? 1 : 0;
    TensorView& y = sized_output(r, 0, x.dims, x.dtype);
    store_from<double>(y.dtype, y.data, 0, y.count(), values.data());
  }};
}

// A list attribute in any of its forms (`prefix`_tensor, _strings, _int64s, _floats) as an owned vector.
std::optional<RuntimeValue> list_attribute(const Node& node, const std::string& prefix) {
  if (const TensorPtr tensor = node.has(prefix + "_tensor") ? node.get_tensor(prefix + "_tensor") : nullptr) {
    RuntimeValue value = make_value(tensor->dtype, {tensor->count()});
    if (tensor->is_missing()) throw Error("the bytes of " + prefix + "_tensor are missing: " + tensor->missing);
    const bool strings = tensor->dtype == DType::string;
    const bool complete = strings ? static_cast<int64_t>(tensor->strings.size()) == tensor->count() : tensor->data || tensor->count() == 0;
    require(complete, "the tensor of keys or values has fewer elements than its shape says");
    if (strings) std::copy(tensor->strings.begin(), tensor->strings.end(), value.tensor.as<std::string>());
    if (!strings && tensor->bytes() > 0) std::memcpy(value.tensor.data, tensor->data, tensor->bytes());
    return value;
  }
  const auto copied = [](const auto& list, DType dtype) {
    using T = typename std::decay_t<decltype(list)>::value_type;
    RuntimeValue value = make_value(dtype, {static_cast<int64_t>(list.size())});
    std::copy(list.begin(), list.end(), value.tensor.as<T>());
    return value;
  };
  if (node.has(prefix + "_strings")) return copied(node.get_strings(prefix + "_strings"), DType::string);
  if (node.has(prefix + "_int64s")) return copied(node.get_ints(prefix + "_int64s"), DType::int64);
  if (node.has(prefix + "_floats")) return copied(node.get_floats(prefix + "_floats"), DType::float32);
  return std::nullopt;
}

// The one element that stands for unknown keys.
RuntimeValue default_label(const Node& node, DType dtype) {
  if (node.has("default_tensor")) {
    RuntimeValue value = *list_attribute(node, "default");
    require(value.tensor.dtype == dtype && value.tensor.count() == 1, "default_tensor must be one element of the values' type");
    return value;
  }
  RuntimeValue value = make_value(dtype, {1});
  if (dtype == DType::string) {
    *value.tensor.as<std::string>() = node.get_string("default_string", "_Unused");
  } else if (is_float(dtype)) {
    const float number = node.get_float("default_float", -0.0f);
    store_from<float>(dtype, value.tensor.data, 0, 1, &number);
  } else {
    const int64_t number = node.get_int("default_int64", -1);
    store_from<int64_t>(dtype, value.tensor.data, 0, 1, &number);
  }
  return value;
}

// Finds a key's position; numbers as doubles or integers, a NaN as any NaN.
struct LabelMap {
  DType dtype = DType::undefined;
  std::unordered_map<std::string, int64_t> strings;
  std::unordered_map<int64_t, int64_t> integers;
  std::unordered_map<double, int64_t> floats;
  int64_t nan = -1;
  RuntimeValue values, absent;

  explicit LabelMap(const Node& node) {
    const std::optional<RuntimeValue> keys = list_attribute(node, "keys"), given = list_attribute(node, "values");
    require(keys && given, "the keys or the values are missing");
    require(keys->tensor.count() == given->tensor.count(), "there must be one value for each key");
    dtype = keys->tensor.dtype;
    values = *given;
    absent = default_label(node, values.tensor.dtype);
    const int64_t count = keys->tensor.count();
    if (dtype == DType::string) {
      for (int64_t i = 0; i < count; ++i) strings[keys->tensor.as<std::string>()[i]] = i;  // the last of equal keys holds
    } else if (is_float(dtype)) {
      const std::vector<double> numbers = as_doubles(keys->tensor);
      for (int64_t i = 0; i < count; ++i) (std::isnan(numbers[static_cast<size_t>(i)]) ? nan : floats[numbers[static_cast<size_t>(i)]]) = i;
    } else {
      const std::vector<int64_t> numbers = as_ints(keys->tensor);
      for (int64_t i = 0; i < count; ++i) integers[numbers[static_cast<size_t>(i)]] = i;
    }
  }

  template <typename Map, typename Key>
  static int64_t find(const Map& map, const Key& key) {
    const auto found = map.find(key);
    return found == map.end() ? -1 : found->second;
  }

  std::vector<int64_t> positions(const TensorView& x) const {
    std::vector<int64_t> result;
    if (dtype == DType::string) {
      require(x.dtype == DType::string, "the keys are strings, the input is not");
      for (int64_t i = 0; i < x.count(); ++i) result.push_back(find(strings, x.as<std::string>()[i]));
    } else if (is_float(dtype)) {
      for (double number : as_doubles(x)) result.push_back(std::isnan(number) ? nan : find(floats, number));
    } else {
      for (int64_t number : as_ints(x)) result.push_back(find(integers, number));
    }
    return result;
  }
};

CompiledKernel make_label_encoder(const CompileContext& c) {
  const auto map = std::make_shared<const LabelMap>(c.node());
  return {[map](RunContext& r) {
    const TensorView& x = r.input(0);
    const DType dtype = map->values.tensor.dtype;
    const std::vector<int64_t> positions = map->positions(x);
    TensorView& y = sized_output(r, 0, x.dims, dtype);
    ElementReader values(map->values.tensor), absent(map->absent.tensor);
    ElementWriter to(y);
    for (size_t i = 0; i < positions.size(); ++i) {
      const void* from = positions[i] < 0 ? absent.data() : offset_by(values.data(), positions[i], dtype);
      copy_elements(dtype, offset_by(to.data(), static_cast<int64_t>(i), dtype), from, 1);
    }
    to.finish();
  }};
}

}  // namespace

void register_machine_learning(KernelRegistry& registry) {
  const std::string domain = "ai.onnx.ml";
  registry.add({.op = "ArrayFeatureExtractor", .domain = domain, .make = make_array_feature_extractor});
  registry.add({.op = "Binarizer", .domain = domain, .make = make_binarizer});
  registry.add({.op = "LabelEncoder", .domain = domain, .make = make_label_encoder});
  register_trees(registry);
  register_optimizers(registry);
}

}  // namespace fretsaw
