// MatMul and Gemm.
#include "kernels/cpu/matmul.h"

#include <algorithm>
#include <dnnl.hpp>
#include <memory>

#include "kernels/cpu/families.h"
#include "kernels/cpu/fused_chain.h"
#include "kernels/cpu/inner_product.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

MatMulShape matmul_shape(const Dims& a_dims, const Dims& b_dims) {
  const auto refuse = [&]() {
    return Error("a product of shapes " + to_string(a_dims) + " and " + to_string(b_dims),
                 "their inner dimensions must be equal and the others broadcast");
  };
  if (a_dims.empty() || b_dims.empty()) throw refuse();
  MatMulShape s;
  Dims a = a_dims, b = b_dims;
  if (a_dims.size() == 1) a.insert(a.begin(), 1);
  if (b_dims.size() == 1) b.push_back(1);
  s.M = a[a.size() - 2], s.K = a.back(), s.N = b.back();
  if (b[b.size() - 2] != s.K) throw refuse();
  const size_t rank = std::max(a.size(), b.size());
  a.insert(a.begin(), rank - a.size(), 1);
  b.insert(b.begin(), rank - b.size(), 1);
  Dims batch(rank - 2);
  for (size_t i = 0; i + 2 < rank; ++i) {
    if (a[i] != b[i] && a[i] != 1 && b[i] != 1) throw refuse();
    batch[i] = a[i] == 1 ? b[i] : a[i];
  }
  s.y = batch;
  if (a_dims.size() > 1) s.y.push_back(s.M);
  if (b_dims.size() > 1) s.y.push_back(s.N);
  s.single_b = std::all_of(b.begin(), b.end() - 2, [](int64_t d) { return d == 1; });
  const int64_t count = count_of(batch);
  s.batches.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, at_a = 0, at_b = 0, step_a = 1, step_b = 1;
    for (size_t d = batch.size(); d-- > 0;) {
      const int64_t index = rest % batch[d];
      rest /= batch[d];
      at_a += a[d] == 1 ? 0 : index * step_a, step_a *= a[d];
      at_b += b[d] == 1 ? 0 : index * step_b, step_b *= b[d];
    }
    s.batches.emplace_back(at_a, at_b);
  }
  return s;
}

void multiply(int64_t M, int64_t N, int64_t K, MatrixView a, MatrixView b, float* c, int64_t c_row, float alpha, float beta) {
  if (M == 0 || N == 0) return;
  if (K == 0) {
    for (int64_t i = 0; i < M; ++i) {
      for (int64_t j = 0; j < N; ++j) c[i * c_row + j] = beta == 0.0f ? 0.0f : beta * c[i * c_row + j];
    }
    return;
  }
  // A matrix whose columns are contiguous is given as the transpose of one whose rows are. A leading dimension may not be less than a row.
  const bool a_rows = a.column == 1 && (a.row >= K || M == 1), b_rows = b.column == 1 && (b.row >= N || K == 1);
  const int64_t lda = std::max(a_rows ? a.row : a.column, a_rows ? K : M), ldb = std::max(b_rows ? b.row : b.column, b_rows ? N : K);
  if (dnnl::sgemm(a_rows ? 'N' : 'T', b_rows ? 'N' : 'T', M, N, K, alpha, a.data, lda, b.data, ldb, beta, c, std::max(c_row, N)) !=
      dnnl::status::success) {
    throw Error("oneDNN refuses a matrix product", "check the shapes of the node");
  }
}

namespace {

struct Operands {
  bool transpose_a = false, transpose_b = false;  // of a Gemm
};

// MatMul, or Gemm's product, in float32 with the steps of its group (a Gemm's alpha, C and beta are its first steps).
class Product {
 public:
  Product(const CompileContext& c, Operands operands, std::vector<FusedStep> steps) : operands_(operands), steps_(std::move(steps)) {
    const TensorPtr b = c.constants.size() > 1 ? c.constants[1] : nullptr;
    if (!b || b->dims.empty() || b->count() == 0 || operands.transpose_a) return;
    const Dims dims = stored_b(b->dims);
    if (!std::all_of(dims.begin(), dims.end() - 2, [](int64_t d) { return d == 1; })) return;
    const int64_t K = dims[dims.size() - 2], N = dims.back();
    packed_ = std::make_unique<InnerProduct>(b, K, N, operands.transpose_b ? 1 : N, operands.transpose_b ? K : 1, steps_);
    std::vector<Dims> inputs;
    for (size_t i = 0; i < c.inputs.size(); ++i) {
      const std::optional<Dims> known = c.input_dims(i);
      if (c.has_input(i) && !known) return;
      inputs.push_back(known.value_or(Dims{}));
    }
    const MatMulShape shape = shape_of(inputs[0], inputs[1]);
    if (count_of(shape.y) > 0) packed_->prepare(count_of(inputs[0]) / K, shape.y, inputs);
  }

  void run(RunContext& r) {
    const TensorView &a = r.input(0), &b = r.input(1);
    const MatMulShape shape = shape_of(a.dims, b.dims);
    TensorView& y = r.output(0, shape.y, DType::float32);
    if (y.count() == 0) return;
    if (packed_ && shape.K > 0 && packed_->run(r, a.as<float>(), a.count() / shape.K, y)) return;
    general(r, shape, a.as<float>(), b.as<float>(), y);
    apply_steps(r, steps_, 0, y);
  }

 private:
  // B's dimensions as [..., K, N].
  Dims stored_b(Dims dims) const {
    if (dims.size() == 1) dims.push_back(1);
    if (operands_.transpose_b) std::swap(dims[0], dims[1]);
    return dims;
  }

  MatMulShape shape_of(Dims a, Dims b) const {
    if (operands_.transpose_a || operands_.transpose_b) {
      if (a.size() != 2 || b.size() != 2) throw Error("Gemm of shapes " + to_string(a) + " and " + to_string(b), "give it matrices");
      if (operands_.transpose_a) std::swap(a[0], a[1]);
      if (operands_.transpose_b) std::swap(b[0], b[1]);
    }
    return matmul_shape(a, b);
  }

  void general(RunContext& r, const MatMulShape& s, const float* a, const float* b, TensorView& y) const {
    const int64_t a_row = operands_.transpose_a ? 1 : s.K, a_column = operands_.transpose_a ? s.M : 1;
    const int64_t b_row = operands_.transpose_b ? 1 : s.N, b_column = operands_.transpose_b ? s.K : 1;
    float* out = y.as<float>();
    const int64_t batches = static_cast<int64_t>(s.batches.size());
    if (s.single_b && !operands_.transpose_a) {  // one product of all rows
      multiply(batches * s.M, s.N, s.K, {a, a_row, a_column}, {b, b_row, b_column}, out, s.N);
      return;
    }
    for_each_batch(batches, r.threads(), [&](int64_t i) {
      const auto [at_a, at_b] = s.batches[static_cast<size_t>(i)];
      multiply(s.M, s.N, s.K, {a + at_a * s.M * s.K, a_row, a_column}, {b + at_b * s.K * s.N, b_row, b_column}, out + i * s.M * s.N, s.N);
    });
  }

  Operands operands_;
  std::vector<FusedStep> steps_;
  std::unique_ptr<InnerProduct> packed_;
};

CompiledKernel make_matmul_float(const CompileContext& c) {
  auto product = std::make_shared<Product>(c, Operands{}, read_chain(c));
  return {[product](RunContext& r) { product->run(r); }};
}

void check_inputs(const CompileContext& c) {
  if (!c.has_input(0) || !c.has_input(1)) throw Error("a product needs two inputs", "give both");
}

CompiledKernel make_matmul(const CompileContext& c) {
  check_inputs(c);
  const DType type = c.input_dtype(0);
  if (type == DType::float32 || is_half_float(type)) return make_any_float(c, make_matmul_float);
  return {[](RunContext& r) {
    const TensorView &a = r.input(0), &b = r.input(1);
    const MatMulShape s = matmul_shape(a.dims, b.dims);
    TensorView& y = r.output(0, s.y);
    constexpr TypeSet kTypes = set_of(DType::float64, DType::int32, DType::int64, DType::uint32, DType::uint64);
    dispatch<kTypes>(a.dtype, [&]<typename T>() {
      for_each_batch(static_cast<int64_t>(s.batches.size()), r.threads(), [&](int64_t i) {
        const auto [at_a, at_b] = s.batches[static_cast<size_t>(i)];
        multiply_by_loops(a.as<T>() + at_a * s.M * s.K, b.as<T>() + at_b * s.K * s.N, y.as<T>() + i * s.M * s.N, s.M, s.K, s.N);
      });
    });
  }};
}

struct GemmAttributes {
  explicit GemmAttributes(const Node& node)
      : operands{node.get_int("transA", 0) != 0, node.get_int("transB", 0) != 0},
        alpha(node.get_float("alpha", 1)),
        beta(node.get_float("beta", 1)) {}
  Operands operands;
  float alpha, beta;
};

// Y = beta * (alpha / beta * A B + C) keeps C as it is, so that it can be a bias.
std::vector<FusedStep> gemm_steps(const CompileContext& c, const GemmAttributes& g) {
  const bool adds = c.node().input(2) != nullptr && g.beta != 0.0f;
  const float beta = adds ? g.beta : 1.0f;
  std::vector<FusedStep> steps;
  if (g.alpha != beta) steps.push_back({FusedStep::Kind::linear, g.alpha / beta, 0.0f});
  if (adds) {
    steps.push_back({FusedStep::Kind::add});
    steps.back().operand = 2;
  }
  if (beta != 1.0f) steps.push_back({FusedStep::Kind::linear, beta, 0.0f});
  const std::vector<FusedStep> chain = read_chain(c);
  steps.insert(steps.end(), chain.begin(), chain.end());
  return steps;
}

CompiledKernel make_gemm_float(const CompileContext& c) {
  const GemmAttributes g(c.node());
  auto product = std::make_shared<Product>(c, g.operands, gemm_steps(c, g));
  return {[product](RunContext& r) {
    if (r.input(0).rank() != 2 || r.input(1).rank() != 2)
      throw Error("Gemm of tensors that are no matrices", "give it A [M,K] and B [K,N]");
    product->run(r);
  }};
}

// alpha and beta are applied in T; integers take their whole part.
template <typename T>
void gemm_by_loops(RunContext& r, const GemmAttributes& g) {
  const TensorView &a = r.input(0), &b = r.input(1);
  if (a.rank() != 2 || b.rank() != 2) throw Error("Gemm of tensors that are no matrices", "give it A [M,K] and B [K,N]");
  const bool ta = g.operands.transpose_a, tb = g.operands.transpose_b;
  const int64_t M = a.dims[ta], K = a.dims[!ta], N = b.dims[!tb];
  if (b.dims[tb] != K)
    throw Error("Gemm of shapes " + to_string(a.dims) + " and " + to_string(b.dims), "their inner dimensions must be equal");
  const TensorView* c = r.has_input(2) ? &r.input(2) : nullptr;
  const int64_t c_rank = c ? static_cast<int64_t>(c->rank()) : 0;
  const int64_t columns = c_rank > 0 ? c->dims.back() : 1, rows = c_rank > 1 ? c->dims[0] : 1;
  if (c_rank > 2 || (columns != 1 && columns != N) || (rows != 1 && rows != M))
    throw Error("Gemm's C does not broadcast to Y", "give it the shape [M,N] or less");
  TensorView& y = r.output(0, {M, N});
  parallel_for(M, 1, r.threads(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < N; ++j) {
        T sum = T(0);
        for (int64_t k = 0; k < K; ++k) sum += a.as<T>()[ta ? k * M + i : i * K + k] * b.as<T>()[tb ? j * K + k : k * N + j];
        const T added = c ? c->as<T>()[(rows == 1 ? 0 : i) * columns + (columns == 1 ? 0 : j)] : T(0);
        y.as<T>()[i * N + j] = static_cast<T>(static_cast<T>(g.alpha) * sum + static_cast<T>(g.beta) * added);
      }
    }
  });
}

CompiledKernel make_gemm(const CompileContext& c) {
  check_inputs(c);
  const DType type = c.input_dtype(0);
  if (type == DType::float32 || is_half_float(type)) return make_any_float(c, make_gemm_float);
  return {[g = GemmAttributes(c.node())](RunContext& r) {
    constexpr TypeSet kTypes = set_of(DType::float64, DType::int32, DType::int64, DType::uint32, DType::uint64);
    dispatch<kTypes>(r.input(0).dtype, [&]<typename T>() { gemm_by_loops<T>(r, g); });
  }};
}

}  // namespace

void register_matmul(KernelRegistry& registry) {
  registry.add({.op = "MatMul", .make = make_matmul});
  registry.add({.op = "Gemm", .make = make_gemm});
  register_quantized_matmul(registry);
  register_einsum(registry);
  register_determinant(registry);
}

}  // namespace fretsaw
