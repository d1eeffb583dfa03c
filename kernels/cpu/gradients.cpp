// SumTo and GatherGrad; registers the other gradient operators too.
#include "kernels/cpu/gradients.h"

#include <algorithm>

#include "kernels/cpu/broadcast.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/indexing.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row_sums.h"
#include "kernels/cpu/scalar_types.h"

namespace fretsaw {

namespace {

// x summed over what y was broadcast along, in the order of x's elements.
template <typename T>
void sum_to(const TensorView& x, TensorView& y) {
  std::vector<double> sums(static_cast<size_t>(y.count()));
  const auto plan = plan_broadcast<1>(x.dims, {y.dims});
  const T* from = x.as<T>();
  for_each_run(plan, 0, x.count(), [&](int64_t begin, const std::array<int64_t, 1>& at, int64_t n) {
    double* to = sums.data() + at[0];
    if (plan.strides[0].back() != 0) {
      for (int64_t i = 0; i < n; ++i) to[i] += static_cast<double>(from[begin + i]);
      return;
    }
    run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
      *to += sum_terms<double>(n, [from, begin](int64_t i) FRETSAW_ALWAYS_INLINE { return static_cast<double>(from[begin + i]); });
    });
  });
  for (size_t i = 0; i < sums.size(); ++i) y.as<T>()[i] = static_cast<T>(sums[i]);
}

// x [rows, columns] summed over its rows; each thread has columns of its own.
template <typename T>
void sum_rows(const T* x, T* y, int64_t rows, int64_t columns, int threads) {
  constexpr int64_t kColumns = 64;
  const int64_t blocks = (columns + kColumns - 1) / kColumns;
  parallel_for(blocks, kGrainElements / (rows * kColumns + 1) + 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kColumns, count = std::min(kColumns, columns - first);
      double sums[kColumns] = {};
      run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
        for (int64_t row = 0; row < rows; ++row) {
          const T* from = x + row * columns + first;
          for (int64_t k = 0; k < count; ++k) sums[k] += static_cast<double>(from[k]);
        }
      });
      for (int64_t k = 0; k < count; ++k) y[first + k] = static_cast<T>(sums[k]);
    }
  });
}

// Whether y was broadcast along x's first axes only: then x is rows of y. (Of the same shape: one row.)
bool sums_rows(const Dims& x, const Dims& y) {
  size_t first = 0;
  while (first < y.size() && y[first] == 1) ++first;
  const size_t own = y.size() - first;
  return own <= x.size() && std::equal(y.begin() + static_cast<int64_t>(first), y.end(), x.end() - static_cast<int64_t>(own));
}

CompiledKernel make_sum_to_plain(const CompileContext&) {
  return {[](RunContext& r) {
    const TensorView& x = r.input(0);
    const std::vector<int64_t> shape = r.input_ints(1);
    require(broadcast_dims(shape, x.dims) == x.dims, "the shape to sum to does not broadcast to the tensor's", "give the operand's shape");
    TensorView& y = sized_output(r, 0, shape);
    dispatch<types::wide_floats>(x.dtype, [&]<typename T>() {
      const int64_t columns = y.count();
      if (columns == 0 || !sums_rows(x.dims, y.dims)) return sum_to<T>(x, y);
      sum_rows(x.as<T>(), y.as<T>(), x.count() / columns, columns, r.threads());
    });
  }};
}

// dY [outer, n, inner], indices [n], dX [outer, v, inner]. Each thread has columns (or slices) of its own, in which it adds in order.
template <typename T>
void add_rows(const T* dy, const std::vector<int64_t>& indices, T* dx, int64_t outer, int64_t v, int64_t inner, int threads) {
  const auto n = static_cast<int64_t>(indices.size());
  constexpr int64_t kColumns = 64;
  const int64_t blocks = (inner + kColumns - 1) / kColumns, work = (n + v) * std::min(inner, kColumns);
  parallel_for(outer * blocks, kGrainElements / (work + 1) + 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t slice = part / blocks, first = part % blocks * kColumns, count = std::min(kColumns, inner - first);
      T* to = dx + slice * v * inner + first;
      const T* from = dy + slice * n * inner + first;
      for (int64_t row = 0; row < v; ++row) std::fill_n(to + row * inner, count, T(0));
      for (int64_t i = 0; i < n; ++i) {
        T* target = to + indices[static_cast<size_t>(i)] * inner;
#pragma omp simd
        for (int64_t k = 0; k < count; ++k) target[k] += from[i * inner + k];
      }
    }
  });
}

CompiledKernel make_gather_grad_plain(const CompileContext& c) {
  return {[axis_attribute = c.node().get_int("axis", 0)](RunContext& r) {
    const TensorView& dy = r.input(0);
    const Dims dims = r.input_ints(2);
    const size_t axis = normalise_axis(axis_attribute, dims.size());
    Dims wanted = dims;
    const Dims& index_dims = r.input(1).dims;
    wanted.erase(wanted.begin() + static_cast<int64_t>(axis));
    wanted.insert(wanted.begin() + static_cast<int64_t>(axis), index_dims.begin(), index_dims.end());
    require(dy.dims == wanted, "the gradient has another shape than Gather's result", "give Gather's indices and the shape of its data");
    const std::vector<int64_t> indices = normalised_indices(r, 1, dims[axis]);
    TensorView& dx = sized_output(r, 0, dims);
    dispatch<types::wide_floats>(dy.dtype, [&]<typename T>() {
      add_rows(dy.as<T>(), indices, dx.as<T>(), product(dims, 0, axis), dims[axis], product(dims, axis + 1, dims.size()), r.threads());
    });
  }};
}

}  // namespace

void register_summing_gradients(KernelRegistry& registry) {
  add_gradient(registry, "SumTo", any_float<make_sum_to_plain>);
  add_gradient(registry, "GatherGrad", any_float<make_gather_grad_plain>);
}

void register_gradients(KernelRegistry& registry) {
  register_summing_gradients(registry);
  register_convolution_gradients(registry);
  register_deformable_gradient(registry);
  register_pooling_gradients(registry);
  register_normalization_gradients(registry);
  register_loss_gradients(registry);
  register_cross_entropy(registry);
  register_squared_sum(registry);
  register_attention_gradient(registry);
  register_recurrent_gradients(registry);
  register_sampling_gradient(registry);
  register_regions_gradient(registry);
  register_cumulative_gradient(registry);
  register_determinant_gradient(registry);
  register_linear_attention_gradient(registry);
}

}  // namespace fretsaw
