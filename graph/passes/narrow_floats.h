// float32 numbers as float16 or bfloat16: single ones, and whole constants. Private to graph/passes.
#pragma once
#include <unordered_map>
#include <vector>

#include "graph/tensor.h"

namespace fretsaw {

// Rounded to nearest, ties to even. Numbers that are too large for the type become its largest; infinities and NaN stay.
void narrow_floats(DType type, const float* from, uint16_t* to, size_t count);
// The largest finite number of a floating-point type of 16 or more bits.
double largest_of(DType type);
// A constant of a floating-point type with these elements, rounded as above.
TensorPtr float_tensor(DType type, Dims dims, const std::vector<double>& numbers);

// Narrows many constants: each tensor once, all of them side by side.
class FloatNarrower {
 public:
  // `lazy`: large constants are converted when their bytes are asked for (Tensor::generate).
  FloatNarrower(DType type, bool lazy) : type_(type), lazy_(lazy) {}
  // The narrow form of a float32 constant. Its bytes are there after finish().
  TensorPtr narrowed(const TensorPtr& wide);
  void finish();

 private:
  struct Job {
    TensorPtr wide;
    std::shared_ptr<Tensor> narrow;
  };
  DType type_;
  bool lazy_;
  std::unordered_map<const Tensor*, Job> jobs_;
  std::vector<const Tensor*> waiting_;
};

}  // namespace fretsaw
