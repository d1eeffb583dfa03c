// The elementwise family: what its files share, and its registration.
#include "kernels/cpu/elementwise.h"

#include "kernels/cpu/families.h"

namespace fretsaw {

double number_attribute(const Node& node, const char* name, double absent) {
  const Attribute* found = *name ? node.attribute(name) : nullptr;
  if (!found) return absent;
  if (const auto* i = std::get_if<int64_t>(&found->value)) return static_cast<double>(*i);
  return node.get_float(name, 0);  // throws where it is no number
}

bool takes_second_choice(const Node& node, const char* attribute, const char* first, const char* second) {
  const std::string value = node.get_string(attribute, first);
  if (value != first && value != second) {
    throw Error("attribute " + std::string(attribute) + " is '" + value + "'", std::string("use '") + first + "' or '" + second + "'")
        .at_node(node.name, node.op);
  }
  return value == second;
}

std::string refuse_other_types(const CompileContext& c, size_t i, TypeSet types) {
  const DType type = c.input_dtype(i);
  return type == DType::undefined || contains(types, type) ? "" : not_supported(type);
}

void register_elementwise(KernelRegistry& registry) {
  register_unary(registry);
  register_binary(registry);
  register_comparison(registry);
  register_power(registry);
  register_variadic(registry);
  register_ternary(registry);
}

}  // namespace fretsaw
