// MatMulInteger and QLinearMatMul: 8-bit operands with zero points, sums in int32.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/matmul.h"

namespace fretsaw {

namespace {

// One parameter for a whole operand, for each row or for each column of its matrices, or for each of these in each batch.
class Parameter {
 public:
  // A parameter of one entry serves all; with `rows`, one of `rows` entries (or [..., rows, 1]) belongs to rows; else to columns.
  Parameter(std::vector<float> values, const Dims& dims, int64_t lines, bool rows)
      : values_(std::move(values)), lines_(lines), rows_(rows) {
    const int64_t count = static_cast<int64_t>(values_.size());
    if (count == 1) return;
    if (lines_ == 0 || count % lines_ != 0) {
      throw Error("a scale or zero point of shape " + to_string(dims), "give one, or one for each row of A or column of B");
    }
  }
  float at(int64_t matrix, int64_t row, int64_t column) const {
    if (values_.size() == 1) return values_[0];
    const int64_t sets = static_cast<int64_t>(values_.size()) / lines_;
    return values_[static_cast<size_t>(matrix % sets * lines_ + (rows_ ? row : column))];
  }

 private:
  std::vector<float> values_;
  int64_t lines_;
  bool rows_;
};

std::vector<float> floats(const TensorView& x) {
  std::vector<float> values(static_cast<size_t>(x.count()));
  load_as<float>(x.dtype, x.data, 0, x.count(), values.data());
  return values;
}

Parameter parameter(RunContext& r, size_t i, int64_t lines, bool rows) {
  if (!r.has_input(i)) return Parameter({0.0f}, {}, lines, rows);
  return Parameter(floats(r.input(i)), r.input(i).dims, lines, rows);
}

// The elements less their zero points, as [matrices, rows, columns].
std::vector<int32_t> centred(const TensorView& x, const Parameter& zero, int64_t rows, int64_t columns) {
  std::vector<int64_t> wide(static_cast<size_t>(x.count()));
  load_as<int64_t>(x.dtype, x.data, 0, x.count(), wide.data());
  std::vector<int32_t> out(wide.size());
  for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
    const float z = zero.at(i / (rows * columns), i / columns % rows, i % columns);
    out[static_cast<size_t>(i)] = static_cast<int32_t>(wide[static_cast<size_t>(i)]) - static_cast<int32_t>(z);
  }
  return out;
}

// put(matrix of Y, sums [M, N]) for each product.
template <typename Put>
void multiply_integers(const MatMulShape& s, const std::vector<int32_t>& a, const std::vector<int32_t>& b, int threads, const Put& put) {
  for_each_batch(static_cast<int64_t>(s.batches.size()), threads, [&](int64_t i) {
    const auto [at_a, at_b] = s.batches[static_cast<size_t>(i)];
    std::vector<int32_t> sums(static_cast<size_t>(s.M * s.N));
    multiply_by_loops(a.data() + at_a * s.M * s.K, b.data() + at_b * s.K * s.N, sums.data(), s.M, s.K, s.N);
    put(i, sums.data());
  });
}

CompiledKernel make_matmul_integer(const CompileContext&) {
  return {[](RunContext& r) {
    const MatMulShape s = matmul_shape(r.input(0).dims, r.input(1).dims);
    const auto a = centred(r.input(0), parameter(r, 2, s.M, true), s.M, s.K),
               b = centred(r.input(1), parameter(r, 3, s.N, false), s.K, s.N);
    TensorView& y = r.output(0, s.y, DType::int32);
    multiply_integers(s, a, b, r.threads(),
                      [&](int64_t i, const int32_t* sums) { std::copy(sums, sums + s.M * s.N, y.as<int32_t>() + i * s.M * s.N); });
  }};
}

// Inputs: a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point.
void qlinear_matmul(RunContext& r) {
  const MatMulShape s = matmul_shape(r.input(0).dims, r.input(3).dims);
  const Parameter a_scale = parameter(r, 1, s.M, true), b_scale = parameter(r, 4, s.N, false);
  const Parameter y_scale = parameter(r, 6, s.M, true), y_zero = parameter(r, 7, s.M, true);
  const auto a = centred(r.input(0), parameter(r, 2, s.M, true), s.M, s.K), b = centred(r.input(3), parameter(r, 5, s.N, false), s.K, s.N);
  const DType type = r.input(7).dtype;
  TensorView& y = r.output(0, s.y, type);
  if (s.M == 0 || s.N == 0) return;
  multiply_integers(s, a, b, r.threads(), [&](int64_t matrix, const int32_t* sums) {
    std::vector<float> values(static_cast<size_t>(s.M * s.N));
    const auto [at_a, at_b] = s.batches[static_cast<size_t>(matrix)];
    for (int64_t i = 0; i < s.M * s.N; ++i) {
      const int64_t row = i / s.N, column = i % s.N;
      const float scale = a_scale.at(at_a, row, 0) * b_scale.at(at_b, 0, column) / y_scale.at(matrix, row, column);
      values[static_cast<size_t>(i)] = std::nearbyint(static_cast<float>(sums[i]) * scale) + y_zero.at(matrix, row, column);
    }
    const bool is_signed = type == DType::int8;
    for (float& v : values) v = std::clamp(v, is_signed ? -128.0f : 0.0f, is_signed ? 127.0f : 255.0f);
    store_from<float>(type, y.data, matrix * s.M * s.N, s.M * s.N, values.data());
  });
}

CompiledKernel make_qlinear_matmul(const CompileContext&) {
  return {qlinear_matmul};
}

}  // namespace

void register_quantized_matmul(KernelRegistry& registry) {
  registry.add({.op = "MatMulInteger", .make = make_matmul_integer});
  registry.add({.op = "QLinearMatMul", .make = make_qlinear_matmul});
}

}  // namespace fretsaw
