// What the sources of all steps have in common: the functions of their values, arguments, and names.
#pragma once
#include <string>
#include <vector>

#include "kernels/cuda/pointwise_plan.h"

namespace fretsaw::cuda {

// The values that outputs need, and of these the operands, in order.
std::vector<bool> needed_values(const PointStep& step);
std::vector<int> operands_read(const PointStep& step);

class StepPrinter {
 public:
  explicit StepPrinter(const PointStep& step);

  // "v3", or the number itself of a literal.
  std::string value(int i) const;
  // "const float v5 = Add_0(v3, v4);", rounded to the value's type
  std::string computed(int i) const;
  // Preludes, functions, and struct Arguments for a space.
  std::string declarations(const SpacePlan& space, size_t inputs, size_t outputs) const;
  // A source of these and the text of a kernel.
  static std::string source(const std::string& declarations, const std::string& kernel);
  // "points_Add_Gelu"
  std::string name(const std::string& prefix) const;
  // The offset of operand `k`, the `number`th that has strides, as an I, from coordinates c0, c1, ...
  static std::string offset(const SpacePlan& space, size_t k, size_t number, size_t dimensions);
  // Declares c0, c1, ... of the element `index` of the space.
  static std::string coordinates(const SpacePlan& space, const std::string& index);

 private:
  void define_function(int i);
  const PointStep& step_;
  std::string definitions_;
  std::vector<std::string> called_;  // for each value: the function that computes it
};

// The number among the strided operands of each operand of a space.
std::vector<size_t> strided_numbers(const SpacePlan& space);
// "static_cast<const float*>(a.in[2])"
std::string input_address(const PointStep& step, int value, size_t place);
std::string output_address(const PointStep& step, int value, size_t place);

}  // namespace fretsaw::cuda
