// MatMulInteger and QLinearMatMul: 8-bit operands with zero points, sums in int32.
#include "kernels/cuda/integer_products.h"

namespace fretsaw::cuda {

LineParameter::LineParameter(RunContext& r, size_t input, int64_t line_count) {
  if (!r.has_input(input)) return;
  const TensorView& view = r.input(input);
  data = view.data, type = view.dtype, count = view.count(), lines = line_count;
  if (count != 1 && (lines == 0 || count % lines != 0)) {
    throw Error("a scale or zero point of shape " + to_string(view.dims), "give one, or one for each row of A or column of B");
  }
}

namespace {

// Which matrix of an operand belongs to a matrix of the result; batch dimensions are broadcast.
struct BatchMap {
  int rank = 0;
  int64_t dims[kMaxRank], strides[kMaxRank];  // of the result; of the operand, in matrices

  // `operand` without its matrices' dimensions is broadcast to `batch`.
  BatchMap(const Dims& batch, const Dims& operand) : rank(static_cast<int>(batch.size())) {
    Dims own(operand.begin(), operand.end() - std::min<ptrdiff_t>(2, static_cast<ptrdiff_t>(operand.size())));
    own.insert(own.begin(), batch.size() - own.size(), 1);
    int64_t stride = 1;
    for (size_t k = batch.size(); k-- > 0; stride *= own[k]) dims[k] = batch[k], strides[k] = own[k] == 1 ? 0 : stride;
  }
  __device__ int64_t operator()(int64_t matrix) const {
    int64_t at = 0;
    for (int k = rank - 1; k >= 0; --k, matrix /= dims[k + 1]) at += matrix % dims[k] * strides[k];
    return at;
  }
};

// The shapes of a product as numpy's matmul has it: vectors count as a row (A) or a column (B) that the result does not have.
struct ProductShape {
  int64_t M = 1, K = 0, N = 1;
  Dims batch, y;

  ProductShape(const Dims& a, const Dims& b) {
    require(!a.empty() && !b.empty() && std::max(a.size(), b.size()) <= kMaxRank, "the operands of a product need 1 to 16 dimensions");
    const auto leading = [](const Dims& d) { return Dims(d.begin(), d.end() - std::min<ptrdiff_t>(2, static_cast<ptrdiff_t>(d.size()))); };
    K = a.back();
    if (a.size() > 1) M = a[a.size() - 2];
    if (b.size() > 1) N = b.back();
    if (b[b.size() > 1 ? b.size() - 2 : 0] != K) {
      throw Error("a product of shapes " + to_string(a) + " and " + to_string(b), "their inner dimensions must be equal");
    }
    y = batch = broadcast_dims(leading(a), leading(b));
    if (a.size() > 1) y.push_back(M);
    if (b.size() > 1) y.push_back(N);
  }
};

// A [batch..., M, K] and B [batch..., K, N] of 8-bit integers.
struct ByteMatrices {
  int64_t M, N, K;
  const void *a_data, *b_data;
  bool a_signed, b_signed;
  BatchMap a_map, b_map;
  LineParameter a_zeros, b_zeros;

  // B and the zero points are the inputs given.
  ByteMatrices(RunContext& r, const ProductShape& s, size_t b, size_t a_zero, size_t b_zero)
      : M(s.M),
        N(s.N),
        K(s.K),
        a_data(r.input(0).data),
        b_data(r.input(b).data),
        a_signed(r.input(0).dtype == DType::int8),
        b_signed(r.input(b).dtype == DType::int8),
        a_map(s.batch, r.input(0).dims),
        b_map(s.batch, r.input(b).dims),
        a_zeros(r, a_zero, s.M),
        b_zeros(r, b_zero, s.N) {}

  __device__ ProductAt matrices_of(int64_t index) const { return {a_map(index), b_map(index), index}; }
  __device__ int8_t a(const ProductAt& at, int64_t m, int64_t k) const { return byte_at(a_data, a_signed, (at.a * M + m) * K + k); }
  __device__ int8_t b(const ProductAt& at, int64_t k, int64_t n) const { return byte_at(b_data, b_signed, (at.b * K + k) * N + n); }
  // Left out, a zero point is what 0 of the operand's type is read as.
  __device__ int a_zero(const ProductAt& at, int64_t m) const { return a_zeros.data ? a_zeros.zero(at.a, m) : a_signed ? 0 : -128; }
  __device__ int b_zero(const ProductAt& at, int64_t n) const { return b_zeros.data ? b_zeros.zero(at.b, n) : b_signed ? 0 : -128; }
};

struct IntegerProduct : ByteMatrices {
  int32_t* y;
  __device__ void put(const ProductAt& at, int64_t m, int64_t n, int32_t sum) const { y[(at.y * M + m) * N + n] = sum; }
};

struct QuantizedProduct : ByteMatrices {
  LineParameter a_scale, b_scale, y_scale, y_zero;
  uint8_t* y;
  bool y_signed;

  __device__ void put(const ProductAt& at, int64_t m, int64_t n, int32_t sum) const {
    const float scale = __fdiv_rn(__fmul_rn(a_scale.number(at.a, m), b_scale.number(at.b, n)), y_scale.number(at.y, m));
    y[(at.y * M + m) * N + n] = quantized(sum, scale, y_zero.number(at.y, m), y_signed);
  }
};

CompiledKernel make_matmul_integer(const CompileContext&) {
  CompiledKernel kernel;
  kernel.run = [](RunContext& r) {
    const ProductShape s(r.input(0).dims, r.input(1).dims);
    const TensorView& y = r.output(0, s.y, DType::int32);
    launch_products(r, IntegerProduct{ByteMatrices(r, s, 1, 2, 3), y.as<int32_t>()}, count_of(s.batch));
  };
  return kernel;
}

// Inputs: a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point.
CompiledKernel make_qlinear_matmul(const CompileContext&) {
  CompiledKernel kernel;
  kernel.run = [](RunContext& r) {
    const ProductShape s(r.input(0).dims, r.input(3).dims);
    const DType type = r.input(7).dtype;
    const TensorView& y = r.output(0, s.y, type);
    const QuantizedProduct product{ByteMatrices(r, s, 3, 2, 5), LineParameter(r, 1, s.M), LineParameter(r, 4, s.N),
                                   LineParameter(r, 6, s.M),    LineParameter(r, 7, s.M), y.as<uint8_t>(),
                                   type == DType::int8};
    launch_products(r, product, count_of(s.batch));
  };
  return kernel;
}

std::string refuse_no_bytes(const CompileContext& c, std::initializer_list<size_t> inputs) {
  for (size_t i : inputs) {
    if (const std::string reason = refuse_other_types(c, i, {DType::int8, DType::uint8}); !reason.empty()) return reason;
  }
  return "";
}

std::string unsupported_matmul_integer(const CompileContext& c) {
  return refuse_no_bytes(c, {0, 1, 2, 3});
}

std::string unsupported_qlinear_matmul(const CompileContext& c) {
  const std::string reason = refuse_no_bytes(c, {0, 2, 3, 5, 7});
  if (!reason.empty()) return reason;
  for (size_t i : {1, 4, 6}) {
    const std::string scale = refuse_other_types(c, i, {DType::float32, DType::float16, DType::bfloat16});
    if (!scale.empty()) return scale;
  }
  return "";
}

}  // namespace

void register_integer_products(KernelRegistry& registry) {
  registry.add({.op = "MatMulInteger", .make = make_matmul_integer, .unsupported = unsupported_matmul_integer});
  registry.add({.op = "QLinearMatMul", .make = make_qlinear_matmul, .unsupported = unsupported_qlinear_matmul});
  register_integer_convolutions(registry);
}

}  // namespace fretsaw::cuda
