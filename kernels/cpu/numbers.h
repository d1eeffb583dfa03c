// Numeric tensors of any type seen as one type, for kernels that compute in float or double whatever they are given.
#pragma once
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cpu/convert.h"
#include "kernels/kernel.h"

namespace fretsaw {

// Every element as an integer; fractions are cut off.
std::vector<int64_t> as_ints(const TensorView& view);
std::vector<double> as_doubles(const TensorView& view);
// For each element 1 when it differs from zero (or is not the empty string), else 0.
std::vector<uint8_t> non_zero_flags(const TensorView& view);
// The one number of input `i`.
double input_number(RunContext& r, size_t i);

// Elements as T (float or double): the tensor's own memory where it holds T, otherwise a converted copy.
template <typename T>
class NumberReader {
 public:
  explicit NumberReader(const TensorView& view) : data_(view.as<const T>()) {
    if (view.dtype == dtype_of<T>()) return;
    converted_.resize(static_cast<size_t>(view.count()));
    load_as<T>(view.dtype, view.data, 0, view.count(), converted_.data());
    data_ = converted_.data();
  }
  const T* data() const { return data_; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  std::vector<T> converted_;
  const T* data_;
};

// Likewise for an output; `finish` converts what was written.
template <typename T>
class NumberWriter {
 public:
  explicit NumberWriter(TensorView& view) : view_(view), data_(view.as<T>()) {
    if (view.dtype == dtype_of<T>()) return;
    converted_.resize(static_cast<size_t>(view.count()));
    data_ = converted_.data();
  }
  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }
  void finish() {
    if (!converted_.empty()) store_from<T>(view_.dtype, view_.data, 0, static_cast<int64_t>(converted_.size()), converted_.data());
  }

 private:
  TensorView& view_;
  std::vector<T> converted_;
  T* data_;
};

// Calls f.operator()<T>() with the type to compute in: double for float64, else float.
template <typename F>
decltype(auto) with_compute_type(DType dtype, F&& f) {
  if (dtype == DType::float64) return f.template operator()<double>();
  return f.template operator()<float>();
}

}  // namespace fretsaw
