// One operator in a table of gradients: its gradient is compared with central differences in float64, and then with itself in other forms,
// all of it relative to the largest element of each gradient.
//
//   {.op = "Gemm", .inputs = {x({2, 3}), x({3, 4}), x({4})}}
//
// The loss is the sum of all floating-point outputs times fixed random numbers between `least` and `most`.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "graph/ir.h"
#include "kernels/tensor_view.h"

namespace fretsaw::testing {

struct GradientCase {
  std::string op;
  std::vector<RuntimeValue> inputs;  // float64 ones are graph inputs whose gradients are wanted; others are initializers
  std::vector<Attribute> attributes;
  size_t outputs = 1;
  size_t in_loss = SIZE_MAX;       // how many of the outputs, from the first, the loss is made of
  std::vector<size_t> left_out;    // outputs that the node does not have
  std::vector<size_t> frozen;      // inputs whose gradient is not wanted
  std::vector<size_t> fed;         // integer inputs that are graph inputs all the same: what the rule cannot know beforehand
  bool symbolic = true;            // also with shapes that are not known beforehand
  bool narrow = true;              // also in float32 and float16
  bool coarse = true;              // and in bfloat16
  double tolerance = 1e-6;         // of the differences, relative to the gradient's size
  double least = 0.5, most = 1.5;  // what the outputs are multiplied by in the loss
};

// Tensors of numbers that look random and are the same in every run, each with others than the one before.
struct Draw {
  uint32_t next = 1;
  RuntimeValue operator()(const Dims& dims, double low = -2, double high = 2);
};

// "" when the gradients are right: against differences; with symbolic shapes, with several threads, with one input wanted alone, and in
// float32, float16 and bfloat16, against float64 at the same numbers.
std::string gradient_failure(const GradientCase& c);
// Differentiates a case by the rules alone.
void note_gradient_operators(const GradientCase& c);
// The names of the gradient operators of ai.fretsaw that the cases so far made.
const std::set<std::string>& gradient_operators_made();

// The tables, a family each.
std::vector<GradientCase> unary_gradient_cases();
std::vector<GradientCase> broadcasting_gradient_cases();
std::vector<GradientCase> reduction_gradient_cases();
std::vector<GradientCase> product_gradient_cases();
std::vector<GradientCase> contraction_gradient_cases();
std::vector<GradientCase> convolution_gradient_cases();
std::vector<GradientCase> pooling_gradient_cases();
std::vector<GradientCase> normalization_gradient_cases();
std::vector<GradientCase> loss_gradient_cases();
std::vector<GradientCase> movement_gradient_cases();
std::vector<GradientCase> indexing_gradient_cases();
std::vector<GradientCase> image_gradient_cases();
std::vector<GradientCase> attention_gradient_cases();
std::vector<GradientCase> recurrent_gradient_cases();

}  // namespace fretsaw::testing
