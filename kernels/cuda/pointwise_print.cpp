// What the sources of all steps have in common.
#include "kernels/cuda/pointwise_print.h"

#include <fmt/format.h>

#include <map>

#include "kernels/cpu/scalar_types.h"
#include "kernels/cuda/pointwise_prelude.h"

namespace fretsaw::cuda {

std::vector<bool> needed_values(const PointStep& step) {
  std::vector<bool> needed(step.values.size(), false);
  for (const auto& output : step.outputs) needed[static_cast<size_t>(output.value)] = true;
  for (size_t i = step.values.size(); i-- > 0;) {
    if (!needed[i]) continue;
    for (int argument : step.values[i].arguments) needed[static_cast<size_t>(argument)] = true;
  }
  return needed;
}

std::vector<int> operands_read(const PointStep& step) {
  const std::vector<bool> needed = needed_values(step);
  std::vector<int> operands;
  for (size_t i = 0; i < step.values.size(); ++i) {
    if (needed[i] && step.values[i].kind == PointValue::Kind::operand) operands.push_back(static_cast<int>(i));
  }
  return operands;
}

StepPrinter::StepPrinter(const PointStep& step) : step_(step), called_(step.values.size()) {
  const std::vector<bool> needed = needed_values(step);
  for (size_t i = 0; i < step.values.size(); ++i) {
    if (needed[i] && step.values[i].kind == PointValue::Kind::function) define_function(static_cast<int>(i));
  }
}

// Equal functions are printed once.
void StepPrinter::define_function(int i) {
  static const char* const letters[] = {"x", "y", "z"};
  const PointValue& v = step_.at(i);
  std::string parameters;
  for (size_t k = 0; k < v.arguments.size(); ++k) {
    parameters += fmt::format("{}{} {}", k ? ", " : "", compute_type(step_.at(v.arguments[k]).dtype), letters[k]);
  }
  // Beside 1, halves need no more of erf than this, and the library's is what such a step would wait for.
  const bool coarse = contains(types::half_floats, v.type) && v.text.find("T(1) + erf(") != std::string::npos;
  const char* const erf = coarse ? "const auto erf = [](float z) { return coarse_erf(z); }; " : "";
  const std::string body = fmt::format("({}) {{ typedef {} T; {}{} }}\n", parameters, compute_type(v.type), erf, v.text);
  int number = 0;
  for (int j = 0; j < i; ++j) {
    const PointValue& other = step_.at(j);
    if (called_[static_cast<size_t>(j)].empty() || other.name != v.name) continue;
    const std::string defined = fmt::format("{} {}{}", compute_type(other.dtype), called_[static_cast<size_t>(j)], body);
    if (compute_type(other.dtype) == compute_type(v.dtype) && definitions_.find("FN " + defined) != std::string::npos) {
      called_[static_cast<size_t>(i)] = called_[static_cast<size_t>(j)];
      return;
    }
    ++number;
  }
  called_[static_cast<size_t>(i)] = fmt::format("{}_{}", v.name, number);
  definitions_ += fmt::format("FN {} {}{}", compute_type(v.dtype), called_[static_cast<size_t>(i)], body);
}

std::string StepPrinter::value(int i) const {
  const PointValue& v = step_.at(i);
  return v.kind == PointValue::Kind::literal ? v.text : fmt::format("v{}", i);
}

std::string StepPrinter::computed(int i) const {
  const PointValue& v = step_.at(i);
  std::string call = called_[static_cast<size_t>(i)] + "(";
  for (size_t k = 0; k < v.arguments.size(); ++k) call += (k ? ", " : "") + value(v.arguments[k]);
  call += ")";
  if (contains(types::half_floats, v.dtype)) call = fmt::format("float({}({}))", storage_type(v.dtype), call);
  return fmt::format("const {} v{} = {};\n", compute_type(v.dtype), i, call);
}

std::string StepPrinter::declarations(const SpacePlan& space, size_t inputs, size_t outputs) const {
  std::string members;
  if (inputs) members += fmt::format("  const void* in[{}];\n", inputs);
  members += fmt::format("  void* out[{}];\n  unsigned long long count;\n", outputs);
  size_t strided = 0;
  for (const auto& operand : space.operands) strided += !operand.strides.empty();
  if (strided) members += fmt::format("  long long strides[{}][{}];\n", strided, space.sizes.size());
  const size_t words = (space.sizes.size() * 3 + 1) / 2 * 2 - space.sizes.size() * 3;
  members += fmt::format("  Size sizes[{}];\n{}  unsigned long long aligned;\n", space.sizes.size(), words ? "  unsigned unused;\n" : "");
  return fmt::format("{}struct Arguments {{\n{}}};\n", definitions_, members);
}

std::string StepPrinter::source(const std::string& declarations, const std::string& kernel) {
  return fmt::format("{}{}namespace fretsaw {{\n{}{}}}  // namespace fretsaw\n", pointwise_functions, pointwise_accesses, declarations,
                     kernel);
}

std::string StepPrinter::name(const std::string& prefix) const {
  std::string name = prefix;
  for (size_t i = 0; i < step_.members.size() && i < 6; ++i) name += "_" + step_.members[i];
  return step_.members.size() > 6 ? fmt::format("{}_and_{}", name, step_.members.size() - 6) : name;
}

std::string StepPrinter::offset(const SpacePlan& space, size_t k, size_t number, size_t dimensions) {
  std::string sum;
  for (size_t d = 0; d < dimensions; ++d) {
    const int64_t stride = space.operands[k].strides[d];
    if (stride == 0) continue;
    if (!sum.empty()) sum += " + ";
    sum += stride == 1 ? fmt::format("I(c{})", d) : fmt::format("I(c{}) * I(a.strides[{}][{}])", d, number, d);
  }
  return sum.empty() ? "I(0)" : sum;
}

std::string StepPrinter::coordinates(const SpacePlan& space, const std::string& index) {
  std::string text, rest = index;
  for (size_t d = space.sizes.size(); d-- > 1;) {
    text += fmt::format("const auto q{0} = quotient({1}, a.sizes[{0}]), c{0} = {1} - q{0} * a.sizes[{0}].size;\n", d, rest);
    rest = fmt::format("q{}", d);
  }
  return text + fmt::format("const auto c0 = {};\n", rest);
}

std::vector<size_t> strided_numbers(const SpacePlan& space) {
  std::vector<size_t> numbers;
  size_t next = 0;
  for (const auto& operand : space.operands) numbers.push_back(operand.strides.empty() ? next : next++);
  return numbers;
}

std::string input_address(const PointStep& step, int value, size_t place) {
  return fmt::format("static_cast<const {}*>(a.in[{}])", storage_type(step.at(value).dtype), place);
}
std::string output_address(const PointStep& step, int value, size_t place) {
  return fmt::format("static_cast<{}*>(a.out[{}])", storage_type(step.at(value).dtype), place);
}

}  // namespace fretsaw::cuda
