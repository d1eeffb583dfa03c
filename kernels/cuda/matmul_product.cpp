// Makes a product: simplifies it, and chooses between cuBLASLt's algorithms and our own kernels by time.
#include "kernels/cuda/matmul_product.h"

#include <algorithm>
#include <numeric>

#include "kernels/cuda/matmul_lt.h"
#include "kernels/cuda/matmul_padding.h"
#include "kernels/cuda/matmul_simple.h"
#include "kernels/cuda/matmul_small.h"
#include "kernels/cuda/matmul_tuning.h"

namespace fretsaw::cuda {

namespace {

// Whether the innermost batch dimension only adds rows to A and D.
bool adds_rows(const ProductSpec& s, const ProductBatch& inner) {
  if (inner.b != 0 || s.a_column != 1 || inner.d != s.M * s.N) return false;
  return s.M == 1 ? inner.a >= s.K : inner.a == s.M * s.a_row;
}

size_t in_blocks(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

}  // namespace

void simplify(ProductSpec& s) {
  std::erase_if(s.batches, [](const ProductBatch& b) { return b.count == 1; });
  for (size_t i = s.batches.size(); i-- > 1;) {
    ProductBatch& outer = s.batches[i - 1];
    const ProductBatch inner = s.batches[i];
    if (outer.a != inner.a * inner.count || outer.b != inner.b * inner.count || outer.d != inner.d * inner.count) continue;
    outer = {outer.count * inner.count, inner.a, inner.b, inner.d};
    s.batches.erase(s.batches.begin() + static_cast<int64_t>(i));
  }
  // A single row or column may be seen either way: as dense lines along K.
  if (s.M == 1 && s.a_column == 1) s.a_row = s.K;
  while (!s.batches.empty() && adds_rows(s, s.batches.back())) {
    if (s.M == 1) s.a_row = s.batches.back().a;
    s.M *= s.batches.back().count;
    s.batches.pop_back();
  }
  if (s.N == 1 && s.b_row == 1) s.b_column = s.K;
}

std::vector<ProductBatch> broadcast_batches(const Dims& a, const Dims& b, int64_t a_matrix, int64_t b_matrix, int64_t d_matrix) {
  const size_t rank = std::max(a.size(), b.size());
  std::vector<ProductBatch> out(rank);
  for (size_t i = rank; i-- > 0;) {
    const int64_t of_a = i + a.size() >= rank ? a[i + a.size() - rank] : 1, of_b = i + b.size() >= rank ? b[i + b.size() - rank] : 1;
    if (of_a != of_b && of_a != 1 && of_b != 1)
      throw Error("a product of batches " + to_string(a) + " and " + to_string(b), "they must be equal or broadcast");
    out[i] = {of_a == 1 ? of_b : of_a, of_a == 1 ? 0 : a_matrix, of_b == 1 ? 0 : b_matrix, d_matrix};
    a_matrix *= of_a, b_matrix *= of_b, d_matrix *= out[i].count;
  }
  return out;
}

ProductExtents extents_of(const ProductSpec& s) {
  ProductExtents out{(s.M - 1) * s.a_row + (s.K - 1) * s.a_column + 1, (s.K - 1) * s.b_row + (s.N - 1) * s.b_column + 1, s.M * s.N};
  for (const ProductBatch& b : s.batches) out.a += (b.count - 1) * b.a, out.b += (b.count - 1) * b.b, out.d += (b.count - 1) * b.d;
  return out;
}

std::string describe(const ProductSpec& s) {
  std::string text = std::string(name_of(s.type)) + (s.tf32 && s.type == DType::float32 ? " tf32" : "");
  for (int64_t n : {s.M, s.N, s.K, s.a_row, s.a_column, s.b_row, s.b_column}) text += " " + std::to_string(n);
  for (const ProductBatch& b : s.batches) {
    text += " batch";
    for (int64_t n : {b.count, b.a, b.b, b.d}) text += " " + std::to_string(n);
  }
  if (s.constant_b) text += " constant";
  if (s.b_columns) text += " of " + std::to_string(s.b_columns) + " columns";
  if (output_type(s) != s.type) text += " to " + std::string(name_of(s.out));
  return text + (s.beta != 0 ? " c" : "") + (s.bias ? " bias" : "") + " activation " + std::to_string(static_cast<int>(s.activation));
}

size_t common_alignment(std::initializer_list<int64_t> bytes) {
  int64_t all = 16;
  for (int64_t n : bytes) all = std::gcd(all, n);
  return static_cast<size_t>(all);
}

struct Product::Implementation {
  ProductSpec spec;                    // simplified; its batches are `loops`
  std::vector<ProductBatch> loops;     // dimensions that need a call for each index
  ProductSpec call;                    // of one call: at most one batch dimension
  int64_t element = 0, d_element = 0;  // bytes
  size_t alignment = 16;
  int multiprocessors = 0;
  ProductChoice choice;
  std::unique_ptr<LtProduct> lt;

  explicit Implementation(GpuDevice& device, ProductSpec given);
  void split_batches();
  size_t staged_size() const { return choice.staged_rows > 0 ? in_blocks(staged_bytes(call, choice.staged_rows)) : 0; }
  void run_call(const ProductOperands& o, void* scratch, cudaStream_t stream);
};

// The longest batch dimension is cuBLASLt's own; the others are loops of calls.
void Product::Implementation::split_batches() {
  call = spec;
  call.batches.clear();
  loops = spec.batches;
  if (loops.empty()) return;
  const auto longest = std::max_element(loops.begin(), loops.end(), [](const auto& a, const auto& b) { return a.count < b.count; });
  call.batches = {*longest};
  loops.erase(longest);
  for (const ProductBatch& b : loops) alignment = std::min(alignment, common_alignment({b.a * element, b.b * element, b.d * d_element}));
}

Product::Implementation::Implementation(GpuDevice& device, ProductSpec given)
    : spec(std::move(given)),
      element(bits_of(spec.type) / 8),
      d_element(bits_of(output_type(spec)) / 8),
      multiprocessors(device.multiprocessors()) {
  simplify(spec);
  split_batches();
  const ProductExtents extents = extents_of(spec);
  if (spec.M == 0 || spec.N == 0 || spec.K == 0 || !is_float(spec.type) || extents.d == 0) return;  // by simple loops
  choice = choose(device, call, alignment, lt);
}

void Product::Implementation::run_call(const ProductOperands& o, void* scratch, cudaStream_t stream) {
  bool aligned = true;
  for (const void* p : {o.a, o.b, o.c, o.bias, static_cast<const void*>(o.d)})
    aligned = aligned && reinterpret_cast<uintptr_t>(p) % alignment == 0;
  if (choice.kind == ProductChoice::Kind::simple || !aligned) return run_simple_product(call, o, stream);
  if (choice.kind == ProductChoice::Kind::small) return run_small_product(call, o, multiprocessors, stream);
  // In scratch memory: the workspace, the staged D, the padded operands.
  char* staged = static_cast<char*>(scratch) + in_blocks(choice.algorithm.workspace);
  const ProductOperands whole = choice.padded ? pad_operands(call, o, staged + staged_size(), stream) : o;
  if (choice.staged_rows > 0) {
    const ProductSpec form = choice.padded ? padded_form(call) : call;
    FRETSAW_CUDA_CHECK(run_staged(form, choice.staged_rows, *lt, choice.algorithm, whole, staged, scratch, stream));
    return;
  }
  FRETSAW_CUDA_CHECK(lt->run(whole, choice.algorithm, scratch, stream));
  const int64_t batches = call.batches.empty() ? 1 : call.batches.front().count;
  if (choice.separate_epilogue) run_epilogue(call, call.bias ? o.bias : nullptr, o.d, batches * call.M, stream);
}

Product::Product(GpuDevice& device, ProductSpec spec) : self_(std::make_unique<Implementation>(device, std::move(spec))) {}
Product::~Product() = default;

size_t Product::scratch_bytes() const {
  const ProductChoice& choice = self_->choice;
  if (choice.kind != ProductChoice::Kind::lt) return 0;
  if (choice.staged_rows == 0 && !choice.padded) return choice.algorithm.workspace;
  return in_blocks(choice.algorithm.workspace) + self_->staged_size() + (choice.padded ? padded_bytes(self_->call) : 0);
}

void Product::run(const ProductOperands& o, void* scratch, cudaStream_t stream) {
  const Implementation& p = *self_;
  int64_t calls = 1;
  for (const ProductBatch& b : p.loops) calls *= b.count;
  if (p.spec.M == 0 || p.spec.N == 0) return;
  for (int64_t i = 0; i < calls; ++i) {
    int64_t rest = i, a = 0, b = 0, d = 0;
    for (size_t l = p.loops.size(); l-- > 0;) {
      const int64_t index = rest % p.loops[l].count;
      rest /= p.loops[l].count;
      a += index * p.loops[l].a, b += index * p.loops[l].b, d += index * p.loops[l].d;
    }
    const auto at = [](const void* base, int64_t bytes) -> const void* { return base ? static_cast<const char*>(base) + bytes : nullptr; };
    void* to = static_cast<char*>(o.d) + d * p.d_element;
    self_->run_call({at(o.a, a * p.element), at(o.b, b * p.element), at(o.c, d * p.d_element), o.bias, to}, scratch, stream);
  }
}

}  // namespace fretsaw::cuda
