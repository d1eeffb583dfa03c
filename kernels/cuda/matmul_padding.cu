// Copies of a product's operands in lines of whole packs.
#include <algorithm>

#include "kernels/cuda/element_packs.cuh"
#include "kernels/cuda/matmul_padding.h"

namespace fretsaw::cuda {
namespace {

constexpr int kThreads = 256, kPack = 8;  // elements of 16 bits
constexpr double kLarge = 1e10;           // multiplications: as many take longer than reading the operands several times

// An operand as lines of neighbouring elements.
struct Lines {
  int64_t count = 0, length = 0;  // elements of a line that count
  int64_t from_one = 0;           // elements from one line to the next
};

// The operand of `major` x `minor` elements whose strides are these; `minor_stride` is 1, or `major_stride` is.
Lines lines_of(int64_t major, int64_t minor, int64_t major_stride, int64_t minor_stride) {
  return minor_stride == 1 ? Lines{major, minor, major_stride} : Lines{minor, major, minor_stride};
}
Lines lines_of_a(const ProductSpec& s) {
  return lines_of(s.M, s.K, s.a_row, s.a_column);
}
Lines lines_of_b(const ProductSpec& s) {
  return lines_of(s.K, std::max(s.N, s.b_columns), s.b_row, s.b_column);
}
bool is_ragged(const ProductSpec& s, const Lines& lines) {
  return lines.count > 1 && lines.from_one % (128 / bits_of(s.type)) != 0;
}

// Whether the operands' forms differ: A along K by its lines, B by its lines or, where these run along K, by their number: as many as make
// D's rows whole packs.
struct Changes {
  bool a = false, b = false;
};
// Whether B's lines run along K and D's rows are no whole packs; a bias has N elements and no more.
bool adds_lines(const ProductSpec& s) {
  return s.b_column != 1 && s.beta == 0 && !s.bias && in_whole_packs(s.N, s.type) != s.N;
}
Changes changes_of(const ProductSpec& s) {
  const bool a = is_ragged(s, lines_of_a(s)), b = is_ragged(s, lines_of_b(s));
  // A longer K is one of both operands.
  const bool longer = (a && s.a_column == 1) || (b && s.b_column != 1);
  const bool both = longer && in_whole_packs(s.K, s.type) != s.K;
  return {a || both, b || both || adds_lines(s)};
}

// The eight elements from `shift` on of the sixteen in `low` and `high`.
__device__ uint4 shifted(const uint4& low, const uint4& high, int shift) {
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  uint32_t at[5];
  switch (shift / 2) {  // the same for a whole line: no thread of a warp waits for another
    case 0:
#pragma unroll
      for (int i = 0; i < 5; ++i) at[i] = words[i];
      break;
    case 1:
#pragma unroll
      for (int i = 0; i < 5; ++i) at[i] = words[i + 1];
      break;
    case 2:
#pragma unroll
      for (int i = 0; i < 5; ++i) at[i] = words[i + 2];
      break;
    default:
#pragma unroll
      for (int i = 0; i < 5; ++i) at[i] = words[i + 3];
  }
  const unsigned bits = static_cast<unsigned>(shift % 2) * 16;
  return {__funnelshift_r(at[0], at[1], bits), __funnelshift_r(at[1], at[2], bits), __funnelshift_r(at[2], at[3], bits),
          __funnelshift_r(at[3], at[4], bits)};
}

// to [lines, packs of 8] = the `count` lines of `length` elements in `from`, then zeros. Packs are read whole wherever the line has them.
__global__ void __launch_bounds__(kThreads) pad_lines(const uint16_t* __restrict__ from, int64_t from_one, int64_t count, int64_t length,
                                                      uint4* __restrict__ to, int64_t lines, int64_t packs) {
  for (int64_t line = blockIdx.y; line < lines; line += gridDim.y) {
    const uint16_t* in = from + line * from_one;
    const auto shift = static_cast<int>(reinterpret_cast<uintptr_t>(in) % 16 / sizeof(uint16_t));
    for (int64_t pack = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; pack < packs; pack += int64_t{gridDim.x} * blockDim.x) {
      const int64_t first = pack * kPack;
      uint4 out = {0, 0, 0, 0};
      if (line < count && first >= shift && first - shift + 2 * kPack <= length) {
        const auto* aligned = reinterpret_cast<const uint4*>(in + first - shift);
        out = shift == 0 ? aligned[0] : shifted(aligned[0], aligned[1], shift);
      } else if (line < count) {
        Lanes<uint16_t, kPack> lanes = {};
#pragma unroll
        for (int v = 0; v < kPack; ++v)
          if (first + v < length) lanes.at[v] = in[first + v];
        out = *reinterpret_cast<const uint4*>(&lanes);
      }
      to[line * packs + pack] = out;
    }
  }
}

// The operand's lines, copied into those of its padded form.
void copy_padded(const Lines& from, const Lines& to, const void* operand, void* copy, cudaStream_t stream) {
  const int64_t packs = to.from_one / kPack;
  const auto rows = static_cast<unsigned>(std::min<int64_t>(to.count, 65535));
  const auto columns = static_cast<unsigned>(std::clamp<int64_t>((packs + kThreads - 1) / kThreads, 1, std::max(1u, 65536 / rows)));
  pad_lines<<<dim3(columns, rows), kThreads, 0, stream>>>(static_cast<const uint16_t*>(operand), from.from_one, from.count, from.length,
                                                          static_cast<uint4*>(copy), to.count, packs);
  check_launch("pad_lines");
}

size_t bytes_of_lines(const ProductSpec& s, const Lines& lines) {
  return (bytes_of(s.type, lines.count * lines.from_one) + 255) / 256 * 256;
}

}  // namespace

bool is_large_product(const ProductSpec& s) {
  const bool half = s.type == DType::float16 || s.type == DType::bfloat16;
  return half && static_cast<double>(s.M) * static_cast<double>(s.N) * static_cast<double>(s.K) >= kLarge;
}

bool takes_padding(const ProductSpec& s) {
  const Changes changes = changes_of(s);
  return s.batches.empty() && is_large_product(s) && (changes.a || changes.b);
}

ProductSpec padded_form(const ProductSpec& s) {
  const Changes changes = changes_of(s);
  ProductSpec out = s;
  if (changes.a && changes.b) out.K = in_whole_packs(s.K, s.type);
  if (changes.a) (s.a_column == 1 ? out.a_row : out.a_column) = in_whole_packs(s.a_column == 1 ? out.K : s.M, s.type);
  if (changes.b) (s.b_column == 1 ? out.b_row : out.b_column) = in_whole_packs(s.b_column == 1 ? s.N : out.K, s.type);
  if (changes.b && s.b_column == 1) out.b_columns = out.b_row;
  if (adds_lines(s)) out.b_columns = in_whole_packs(s.N, s.type);
  return out;
}

size_t padded_bytes(const ProductSpec& s) {
  const Changes changes = changes_of(s);
  const ProductSpec form = padded_form(s);
  return (changes.a ? bytes_of_lines(s, lines_of_a(form)) : 0) + (changes.b ? bytes_of_lines(s, lines_of_b(form)) : 0);
}

ProductOperands pad_operands(const ProductSpec& s, const ProductOperands& operands, void* scratch, cudaStream_t stream) {
  const Changes changes = changes_of(s);
  const ProductSpec form = padded_form(s);
  ProductOperands out = operands;
  auto* free = static_cast<char*>(scratch);
  if (changes.a) {
    copy_padded(lines_of_a(s), lines_of_a(form), operands.a, free, stream);
    out.a = free;
    free += bytes_of_lines(s, lines_of_a(form));
  }
  if (changes.b) {
    copy_padded(lines_of_b(s), lines_of_b(form), operands.b, free, stream);
    out.b = free;
  }
  return out;
}

}  // namespace fretsaw::cuda
