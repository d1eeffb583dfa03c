// A product in cuBLASLt's terms. Its matrices are column-major, so that it computes the transpose: D' [N, M] = B' [N, K] A' [K, M], and
// the bias, one number for each row of D', is one for each column of D.
#include "kernels/cuda/matmul_lt.h"

#include <algorithm>
#include <cstring>

namespace fretsaw::cuda {
namespace {

cudaDataType_t data_type(DType type) {
  switch (type) {
    case DType::float16:
      return CUDA_R_16F;
    case DType::bfloat16:
      return CUDA_R_16BF;
    case DType::float64:
      return CUDA_R_64F;
    default:
      return CUDA_R_32F;
  }
}

cublasComputeType_t compute_type(const ProductSpec& spec) {
  if (spec.type == DType::float64) return CUBLAS_COMPUTE_64F;
  return spec.type == DType::float32 && spec.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

cublasLtEpilogue_t epilogue(const ProductSpec& spec) {
  switch (spec.activation) {
    case ProductActivation::relu:
      return spec.bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case ProductActivation::gelu_tanh:
      return spec.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    default:
      return spec.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
}

template <typename T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, T value) {
  FRETSAW_CUDA_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)));
}
template <typename T>
void set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, T value) {
  FRETSAW_CUDA_CHECK(cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof(value)));
}
template <typename T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  FRETSAW_CUDA_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
}

cublasLtMatrixLayout_t make_layout(DType type, int64_t rows, int64_t columns, int64_t line, int64_t batches, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  FRETSAW_CUDA_CHECK(cublasLtMatrixLayoutCreate(&layout, data_type(type), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                                                std::max(line, rows)));
  if (batches > 1) {
    set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batches));
    set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
  }
  return layout;
}

}  // namespace

std::string to_text(const LtAlgorithm& algorithm) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  const auto* bytes = reinterpret_cast<const unsigned char*>(&algorithm.algorithm);
  for (size_t i = 0; i < sizeof(algorithm.algorithm); ++i) text += kDigits[bytes[i] >> 4], text += kDigits[bytes[i] & 15];
  return text;
}

std::optional<LtAlgorithm> algorithm_of(const std::string& text) {
  LtAlgorithm out;
  if (text.size() != 2 * sizeof(out.algorithm)) return std::nullopt;
  auto* bytes = reinterpret_cast<unsigned char*>(&out.algorithm);
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) return std::nullopt;
    bytes[i / 2] = static_cast<unsigned char>(bytes[i / 2] << 4 | digit);
  }
  return out;
}

LtProduct::LtProduct(GpuDevice& device, const ProductSpec& s, size_t alignment, int64_t d_row)
    : handle_(device.cublas_lt()),
      bias_(s.bias),
      double_scale_(s.type == DType::float64),
      alpha_(s.alpha),
      beta_(s.beta),
      alpha32_(static_cast<float>(s.alpha)),
      beta32_(static_cast<float>(s.beta)),
      alignment_(alignment),
      half_(s.type == DType::float16 || s.type == DType::bfloat16) {
  const ProductBatch batch = s.batches.empty() ? ProductBatch{} : s.batches.front();
  FRETSAW_CUDA_CHECK(cublasLtMatmulDescCreate(&operation_, compute_type(s), double_scale_ ? CUDA_R_64F : CUDA_R_32F));
  set(operation_, CUBLASLT_MATMUL_DESC_TRANSA, s.b_column == 1 ? CUBLAS_OP_N : CUBLAS_OP_T);
  set(operation_, CUBLASLT_MATMUL_DESC_TRANSB, s.a_column == 1 ? CUBLAS_OP_N : CUBLAS_OP_T);
  set(operation_, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(s));
  first_ = s.b_column == 1 ? make_layout(s.type, s.N, s.K, s.b_row, batch.count, batch.b)
                           : make_layout(s.type, s.K, s.N, s.b_column, batch.count, batch.b);
  second_ = s.a_column == 1 ? make_layout(s.type, s.K, s.M, s.a_row, batch.count, batch.a)
                            : make_layout(s.type, s.M, s.K, s.a_column, batch.count, batch.a);
  result_ = make_layout(output_type(s), s.N, s.M, d_row, batch.count, batch.d);
}

LtProduct::~LtProduct() {
  if (first_) cublasLtMatrixLayoutDestroy(first_);
  if (second_) cublasLtMatrixLayoutDestroy(second_);
  if (result_) cublasLtMatrixLayoutDestroy(result_);
  if (operation_) cublasLtMatmulDescDestroy(operation_);
}

std::vector<LtAlgorithm> LtProduct::candidates(int at_most) const {
  cublasLtMatmulPreference_t preference = nullptr;
  FRETSAW_CUDA_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  const std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>, cublasStatus_t (*)(cublasLtMatmulPreference_t)> owner(
      preference, cublasLtMatmulPreferenceDestroy);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kProductWorkspace);
  // Partial sums of halves are added up in float32.
  if (half_) set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  for (auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                         CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(preference, attribute, static_cast<uint32_t>(alignment_));
  }
  std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(at_most));
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_, operation_, first_, second_, result_, result_, preference, at_most, found.data(), &count);
  if (status != CUBLAS_STATUS_SUCCESS) return {};
  std::vector<LtAlgorithm> out;
  for (int i = 0; i < count; ++i) {
    const auto& result = found[static_cast<size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= kProductWorkspace)
      out.push_back({result.algo, result.workspaceSize});
  }
  return out;
}

bool LtProduct::accepts(LtAlgorithm& algorithm) const {
  cublasLtMatmulHeuristicResult_t result = {};
  if (cublasLtMatmulAlgoCheck(handle_, operation_, first_, second_, result_, result_, &algorithm.algorithm, &result) !=
          CUBLAS_STATUS_SUCCESS ||
      result.state != CUBLAS_STATUS_SUCCESS || result.workspaceSize > kProductWorkspace)
    return false;
  algorithm.workspace = result.workspaceSize;
  return true;
}

cublasStatus_t LtProduct::run(const ProductOperands& o, const LtAlgorithm& algorithm, void* workspace, cudaStream_t stream) {
  if (bias_) set(operation_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias);
  const void* alpha = double_scale_ ? static_cast<const void*>(&alpha_) : &alpha32_;
  const void* beta = double_scale_ ? static_cast<const void*>(&beta_) : &beta32_;
  return cublasLtMatmul(handle_, operation_, alpha, o.b, first_, o.a, second_, beta, o.c ? o.c : o.d, result_, o.d, result_,
                        &algorithm.algorithm, workspace, algorithm.workspace, stream);
}

}  // namespace fretsaw::cuda
