// MatMul and Gemm, with the bias, activation and residual that follow them in a fused step.
#include "kernels/cuda/matmul.h"

#include <algorithm>

#include "kernels/cuda/matmul_simple.h"

namespace fretsaw::cuda {
namespace {

constexpr int64_t kShortestPadded = 64;  // elements of a line that are worth a copy

// A product with what follows it, read from the nodes of a step.
struct ProductStep {
  ProductSpec spec;
  Dims y;                  // as the model sees it
  int c = -1, bias = -1;   // which of the step's inputs are C and the bias
  bool expands_c = false;  // C broadcasts: it is first written to the output, element (i, j) from i * c_row + j * c_column
  int64_t c_row = 0, c_column = 0;
  int64_t padded_b = 0;        // a constant B is held in lines of this many elements, whole packs, where its own are none
  bool column_is_last = true;  // y ends with N, so that a bias is an operand of [N]
};

Dims known_dims(const CompileContext& c, size_t i) {
  return c.input_dims(i).value_or(Dims{});
}

Error wrong_shapes(const Dims& a, const Dims& b) {
  return Error("a product of shapes " + to_string(a) + " and " + to_string(b),
               "their inner dimensions must be equal and the others broadcast");
}

// MatMul: vectors count as a row (A) or a column (B), whose dimension is left out of the result.
ProductStep read_matmul(const CompileContext& c) {
  const Dims a_dims = known_dims(c, 0), b_dims = known_dims(c, 1);
  if (a_dims.empty() || b_dims.empty()) throw wrong_shapes(a_dims, b_dims);
  Dims a = a_dims, b = b_dims;
  if (a.size() == 1) a.insert(a.begin(), 1);
  if (b.size() == 1) b.push_back(1);
  ProductStep step;
  ProductSpec& s = step.spec;
  s.M = a[a.size() - 2], s.K = a.back(), s.N = b.back();
  if (b[b.size() - 2] != s.K) throw wrong_shapes(a_dims, b_dims);
  s.a_row = s.K, s.b_row = s.N;
  s.batches = broadcast_batches(Dims(a.begin(), a.end() - 2), Dims(b.begin(), b.end() - 2), s.M * s.K, s.K * s.N, s.M * s.N);
  for (const ProductBatch& batch : s.batches) step.y.push_back(batch.count);
  if (a_dims.size() > 1) step.y.push_back(s.M);
  if (b_dims.size() > 1) step.y.push_back(s.N);
  step.column_is_last = b_dims.size() > 1;
  return step;
}

// C of a Gemm: a bias where it is one number for each column and counts as it is; a whole matrix; or broadcast into the output first.
void read_gemm_c(const CompileContext& c, ProductStep& step, double beta) {
  ProductSpec& s = step.spec;
  const Dims dims = known_dims(c, 2);
  const int64_t columns = dims.empty() ? 1 : dims.back(), rows = dims.size() > 1 ? dims[0] : 1;
  if (dims.size() > 2 || (columns != 1 && columns != s.N) || (rows != 1 && rows != s.M))
    throw Error("Gemm's C does not broadcast to Y", "give it the shape [M,N] or less");
  if (rows == 1 && columns == s.N && beta == 1 && is_float(s.type) && s.type != DType::float64) {
    s.bias = true, step.bias = 2;
    return;
  }
  step.c = 2, s.beta = beta;
  step.expands_c = rows * columns != s.M * s.N;
  step.c_row = rows == 1 ? 0 : columns, step.c_column = columns == 1 ? 0 : 1;
}

ProductStep read_gemm(const CompileContext& c) {
  const Dims a = known_dims(c, 0), b = known_dims(c, 1);
  if (a.size() != 2 || b.size() != 2) throw Error("Gemm of tensors that are no matrices", "give it A [M,K] and B [K,N]");
  const bool ta = c.node().get_int("transA", 0) != 0, tb = c.node().get_int("transB", 0) != 0;
  ProductStep step;
  ProductSpec& s = step.spec;
  s.type = c.input_dtype(0);
  s.M = a[ta], s.K = a[!ta], s.N = b[!tb];
  if (b[tb] != s.K) throw wrong_shapes(a, b);
  s.a_row = ta ? 1 : s.K, s.a_column = ta ? s.M : 1;
  s.b_row = tb ? 1 : s.N, s.b_column = tb ? s.K : 1;
  step.y = {s.M, s.N};
  // A matrix of one row or column is its own transpose: the dense form is the one that more kernels know.
  if (ta && s.M == 1) s.a_row = s.K, s.a_column = 1;
  if (tb && s.N == 1) s.b_row = 1, s.b_column = 1;
  s.alpha = static_cast<double>(c.node().get_float("alpha", 1));
  const auto beta = static_cast<double>(c.node().get_float("beta", 1));
  if (c.node().input(2) && beta != 0) read_gemm_c(c, step, beta);
  return step;
}

// Its last place: the value may stand among the product's own inputs too, in a form of their own.
int input_index(const CompileContext& c, const Value* value) {
  const auto found = std::find(c.inputs.rbegin(), c.inputs.rend(), value);
  return value && found != c.inputs.rend() ? static_cast<int>(c.inputs.rend() - found) - 1 : -1;
}

// The dimensions without leading ones.
Dims without_ones(const Dims& dims) {
  return Dims(std::find_if(dims.begin(), dims.end(), [](int64_t d) { return d != 1; }), dims.end());
}

// An Add after the product: of a bias [N], or of a tensor of the output's shape. After a Cast only the latter.
std::string read_add(const CompileContext& c, const Node& node, const Value* previous, ProductStep& step) {
  if (node.input(0) == node.input(1)) return "an Add of a value to itself";
  const int operand = input_index(c, node.input(node.input(0) == previous ? 1 : 0));
  if (operand < 0) return "an Add of no value from outside";
  const auto at = static_cast<size_t>(operand);
  const std::optional<Dims> dims = c.input_dims(at);
  if (!dims || c.input_dtype(at) != output_type(step.spec) || dims->size() > step.y.size()) return "an Add of another shape or type";
  if (step.bias < 0 && step.spec.out == DType::undefined && step.column_is_last && count_of(*dims) == step.spec.N && !dims->empty() &&
      dims->back() == step.spec.N) {
    step.bias = operand, step.spec.bias = true;
    return "";
  }
  if (step.c < 0 && without_ones(*dims) == without_ones(step.y) && count_of(*dims) == count_of(step.y)) {
    step.c = operand, step.spec.beta = 1;
    return "";
  }
  return "an Add that no epilogue does";
}

// Halves are summed in float32: a Cast to it leaves the sums as they are.
std::string read_cast(const Node& node, ProductStep& step) {
  ProductSpec& s = step.spec;
  const bool half = s.type == DType::float16 || s.type == DType::bfloat16;
  if (!half || node.get_int("to", 0) != static_cast<int64_t>(DType::float32)) return "a Cast to another type";
  if (s.bias || step.c >= 0) return "a Cast of a sum";
  s.out = DType::float32;
  return "";
}

std::string read_follower(const CompileContext& c, const Node& node, const Value* previous, ProductStep& step) {
  ProductSpec& s = step.spec;
  if (s.activation != ProductActivation::none) return "a node after the activation";
  if (node.op == "Add") return read_add(c, node, previous, step);
  if (s.out != DType::undefined) return "a node after a Cast that is no Add";
  if (node.op == "Cast") return read_cast(node, step);
  if (node.op == "Relu") s.activation = ProductActivation::relu;
  // cuBLASLt's Gelu is the tanh form, and not exact enough for float32.
  if (node.op == "Gelu" && node.get_string("approximate", "none") == "tanh" && s.type != DType::float32)
    s.activation = ProductActivation::gelu_tanh;
  return s.activation == ProductActivation::none ? "a follower that no epilogue does" : "";
}

// A constant B whose lines are no whole packs of 16 bytes, which cuBLASLt's fast algorithms want, is held in longer lines.
void pad_constant_b(const CompileContext& c, ProductStep& step) {
  ProductSpec& s = step.spec;
  if (!is_float(s.type) || !c.constants[1] || c.constants[1]->dims.size() != 2) return;
  int64_t& line = s.b_column == 1 ? s.b_row : s.b_column;
  if (line < kShortestPadded || in_whole_packs(line, s.type) == line) return;
  line = step.padded_b = in_whole_packs(line, s.type);
  if (s.b_column == 1) s.b_columns = line;
}

// The reason to refuse the step, or "".
std::string read_step(const CompileContext& c, ProductStep& step) {
  step = c.node().op == "Gemm" ? read_gemm(c) : read_matmul(c);
  step.spec.type = c.input_dtype(0);
  step.spec.tf32 = c.tf32;
  step.spec.constant_b = c.constants[1] != nullptr;
  pad_constant_b(c, step);
  if (c.nodes.size() == 1) return "";
  if (!is_float(step.spec.type) || step.spec.type == DType::float64) return "followers of this type";
  for (size_t i = 1; i < c.nodes.size(); ++i) {
    const std::string reason = read_follower(c, *c.nodes[i], c.nodes[i - 1]->out(0), step);
    if (!reason.empty()) return reason;
  }
  for (const Value* output : c.outputs) {
    if (output && output != c.nodes.back()->out(0)) return "an output between the nodes of the step";
  }
  return "";
}

std::string unsupported(const CompileContext& c) {
  if (!c.has_input(0) || !c.has_input(1)) return "";
  for (size_t i : {0, 1}) {
    const std::string reason = refuse_other_types(
        c, i, {DType::float32, DType::float16, DType::bfloat16, DType::float64, DType::int32, DType::int64, DType::uint32, DType::uint64});
    if (!reason.empty()) return reason;
  }
  if (std::string reason = refuse_unknown_dims(c); !reason.empty()) return reason;
  ProductStep step;
  return read_step(c, step);
}

std::shared_ptr<void> padded_constant(GpuDevice& device, const TensorPtr& tensor, int64_t line) {
  const auto element = static_cast<size_t>(bits_of(tensor->dtype) / 8), rows = static_cast<size_t>(tensor->dims[0]);
  const size_t own_bytes = static_cast<size_t>(tensor->dims[1]) * element, line_bytes = static_cast<size_t>(line) * element;
  const std::shared_ptr<void> plain = device.constant(tensor);
  return device.constant(tensor, "lines of " + std::to_string(line), rows * line_bytes, [&](void* to) {
    device.clear(to, rows * line_bytes);
    device.copy_rows(to, line_bytes, plain.get(), own_bytes, own_bytes, rows);
    device.synchronize();  // before `plain` goes
  });
}

CompiledKernel make_product(const CompileContext& c) {
  if (!c.has_input(0) || !c.has_input(1)) throw Error("a product needs two inputs", "give both");
  ProductStep step;
  if (const std::string reason = read_step(c, step); !reason.empty()) throw Error(reason, "report this as a fault");
  const auto product = std::make_shared<Product>(gpu(c), step.spec);
  CompiledKernel kernel;
  if (step.c >= 0 && !step.expands_c) kernel.overwrites = step.c;
  std::shared_ptr<void> padded_b;
  if (step.padded_b) {
    padded_b = padded_constant(gpu(c), c.constants[1], step.padded_b);
    kernel.packed_inputs = {1};
  }
  kernel.run = [step, product, padded_b](RunContext& r) {
    TensorView& y = r.output(0, step.y, output_type(step.spec));
    if (y.count() == 0) return;
    const auto data = [&](int i) -> const void* { return i < 0 ? nullptr : r.input(static_cast<size_t>(i)).data; };
    ProductOperands operands{data(0), padded_b ? padded_b.get() : data(1), data(step.c), data(step.bias), y.data};
    if (step.expands_c) {
      expand_matrix(step.spec.type, operands.c, step.c_row, step.c_column, y.data, step.spec.M, step.spec.N, stream_of(r));
      operands.c = y.data;
    }
    const size_t bytes = product->scratch_bytes();
    product->run(operands, bytes ? r.scratch(bytes) : nullptr, stream_of(r));
  };
  return kernel;
}

}  // namespace

void register_matmul(KernelRegistry& registry) {
  for (const char* op : {"MatMul", "Gemm"}) registry.add({.op = op, .make = make_product, .unsupported = unsupported, .leads = true});
  register_einsum(registry);
}

}  // namespace fretsaw::cuda
