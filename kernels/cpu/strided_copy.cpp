// The N-dimensional strided copy: merges dimensions, then copies runs, transposes in blocks, or walks element by element.
#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/parallel.h"
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

namespace fretsaw {
namespace {

constexpr int64_t kBlock = 32;                  // rows and columns of a transposed block: two blocks stay in the first-level cache
constexpr int64_t kBytesPerThread = 128 << 10;  // less than this is not worth another thread

struct Walk {
  Dims dims, to, from;  // outermost first
};

// Drops dimensions of one and joins neighbours that both sides walk as one.
Walk merged(const Dims& dims, const Dims& to_strides, const Dims& from_strides) {
  Walk walk;
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] == 1) continue;
    if (!walk.dims.empty() && walk.to.back() == to_strides[i] * dims[i] && walk.from.back() == from_strides[i] * dims[i]) {
      walk.dims.back() *= dims[i];
      walk.to.back() = to_strides[i];
      walk.from.back() = from_strides[i];
    } else {
      walk.dims.push_back(dims[i]);
      walk.to.push_back(to_strides[i]);
      walk.from.push_back(from_strides[i]);
    }
  }
  if (walk.dims.empty()) walk = {{1}, {1}, {1}};
  return walk;
}

// Steps through all indexes of the outer dimensions, keeping both offsets.
class Odometer {
 public:
  Odometer(const Walk& walk, int64_t start) : walk_(walk), index_(walk.dims.size()) {
    for (size_t i = walk.dims.size(); i-- > 0;) {
      index_[i] = start % walk.dims[i];
      start /= walk.dims[i];
      to += index_[i] * walk.to[i];
      from += index_[i] * walk.from[i];
    }
  }
  void step() {
    for (size_t i = index_.size(); i-- > 0;) {
      to += walk_.to[i];
      from += walk_.from[i];
      if (++index_[i] < walk_.dims[i]) return;
      to -= walk_.to[i] * walk_.dims[i];
      from -= walk_.from[i] * walk_.dims[i];
      index_[i] = 0;
    }
  }
  int64_t to = 0, from = 0;

 private:
  const Walk& walk_;
  Dims index_;
};

template <typename T>
void copy_row(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t count) {
  if (to_stride == 1 && from_stride == 1) {
    if constexpr (std::is_trivially_copyable_v<T>) {
      std::memcpy(static_cast<void*>(to), from, static_cast<size_t>(count) * sizeof(T));
    } else {
      std::copy_n(from, count, to);
    }
  } else if (to_stride == 1 && from_stride == 0) {
    std::fill_n(to, count, *from);
  } else if (to_stride == 1) {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i * from_stride];
  } else {
    for (int64_t i = 0; i < count; ++i) to[i * to_stride] = from[i * from_stride];
  }
}

// to[i * to_stride + j] = from[j * from_stride + i] for i < rows, j < columns.
template <typename T>
void transpose_block(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t rows, int64_t columns) {
  int64_t i = 0;
#ifdef __SSE2__
  if constexpr (sizeof(T) == 4) {
    for (; i + 4 <= rows; i += 4) {
      int64_t j = 0;
      for (; j + 4 <= columns; j += 4) {
        const auto* source = reinterpret_cast<const float*>(from + j * from_stride + i);
        auto* target = reinterpret_cast<float*>(to + i * to_stride + j);
        __m128 a = _mm_loadu_ps(source), b = _mm_loadu_ps(source + from_stride);
        __m128 c = _mm_loadu_ps(source + 2 * from_stride), d = _mm_loadu_ps(source + 3 * from_stride);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_storeu_ps(target, a);
        _mm_storeu_ps(target + to_stride, b);
        _mm_storeu_ps(target + 2 * to_stride, c);
        _mm_storeu_ps(target + 3 * to_stride, d);
      }
      for (int64_t k = i; k < i + 4; ++k) {
        for (int64_t l = j; l < columns; ++l) to[k * to_stride + l] = from[l * from_stride + k];
      }
    }
  }
#endif
  for (; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) to[i * to_stride + j] = from[j * from_stride + i];
  }
}

int64_t count_in(const Dims& dims) {
  return product(dims, 0, dims.size());
}

// `row` is the dimension whose elements lie side by side in `from`; the last one lies side by side in `to`.
template <typename T>
void copy_transposed(T* to, const T* from, Walk walk, size_t row, int threads) {
  const int64_t rows = walk.dims[row], to_stride = walk.to[row];
  const int64_t columns = walk.dims.back(), from_stride = walk.from.back();
  walk.dims.pop_back(), walk.to.pop_back(), walk.from.pop_back();
  const auto at = static_cast<ptrdiff_t>(row);
  walk.dims.erase(walk.dims.begin() + at), walk.to.erase(walk.to.begin() + at), walk.from.erase(walk.from.begin() + at);
  const int64_t row_blocks = (rows + kBlock - 1) / kBlock;
  const int64_t grain = std::max<int64_t>(1, kBytesPerThread / (kBlock * columns * static_cast<int64_t>(sizeof(T)) + 1));
  parallel_for(count_in(walk.dims) * row_blocks, grain, threads, [&](int64_t begin, int64_t end) {
    Odometer outer(walk, begin / row_blocks);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first_row = item % row_blocks * kBlock, block_rows = std::min(kBlock, rows - first_row);
      for (int64_t column = 0; column < columns; column += kBlock) {
        transpose_block(to + outer.to + first_row * to_stride + column, to_stride, from + outer.from + column * from_stride + first_row,
                        from_stride, block_rows, std::min(kBlock, columns - column));
      }
      if (item % row_blocks == row_blocks - 1) outer.step();
    }
  });
}

template <typename T>
void copy_rows(T* to, const T* from, Walk walk, int threads) {
  const int64_t count = walk.dims.back(), to_stride = walk.to.back(), from_stride = walk.from.back();
  walk.dims.pop_back(), walk.to.pop_back(), walk.from.pop_back();
  if (walk.dims.empty() && threads > 1) {  // one long row: cut it
    const int64_t grain = std::max<int64_t>(1, kBytesPerThread / static_cast<int64_t>(sizeof(T)));
    parallel_for(count, grain, threads, [&](int64_t begin, int64_t end) {
      copy_row(to + begin * to_stride, to_stride, from + begin * from_stride, from_stride, end - begin);
    });
    return;
  }
  const int64_t grain = std::max<int64_t>(1, kBytesPerThread / (count * static_cast<int64_t>(sizeof(T)) + 1));
  parallel_for(count_in(walk.dims), grain, threads, [&](int64_t begin, int64_t end) {
    Odometer outer(walk, begin);
    for (int64_t item = begin; item < end; ++item, outer.step()) {
      copy_row(to + outer.to, to_stride, from + outer.from, from_stride, count);
    }
  });
}

template <typename T>
void copy_walk(T* to, const T* from, const Walk& walk, int threads) {
  if (walk.to.back() == 1 && walk.from.back() != 1 && walk.from.back() != 0) {
    for (size_t row = 0; row + 1 < walk.dims.size(); ++row) {
      if (walk.from[row] == 1) return copy_transposed(to, from, walk, row, threads);
    }
  }
  copy_rows(to, from, walk, threads);
}

}  // namespace

void copy_strided(DType dtype, const Dims& dims, void* to, const Dims& to_strides, const void* from, const Dims& from_strides,
                  int threads) {
  if (count_of(dims) == 0) return;
  const Walk walk = merged(dims, to_strides, from_strides);
  with_element_type(dtype,
                    [&]<typename T>(std::type_identity<T>) { copy_walk(static_cast<T*>(to), static_cast<const T*>(from), walk, threads); });
}

void copy_elements_threaded(DType dtype, void* to, const void* from, int64_t count, int threads) {
  const int64_t grain = std::max<int64_t>(1, kBytesPerThread / static_cast<int64_t>(element_bytes(dtype)));
  parallel_for(count, grain, threads, [&](int64_t begin, int64_t end) {
    copy_elements(dtype, offset_by(to, begin, dtype), offset_by(from, begin, dtype), end - begin);
  });
}

}  // namespace fretsaw
