// Einsum: operands are joined two by two, each time as a batched matrix product.
//
//   "bij,bjk->bik"   labels in both and wanted later: batch (b); in both and not wanted: summed (j); in one alone: rows (i), columns (k)
#include <algorithm>
#include <complex>

#include "kernels/cpu/convolution_loops.h"
#include "kernels/cpu/einsum_equation.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

namespace {

using namespace einsum;

// A tensor whose axes have labels; strides in elements.
template <typename T>
struct Term {
  Labels labels;
  Dims dims, strides;
  const T* data = nullptr;
  std::vector<T> owned;
};

// Merges repeated labels into diagonals, and drops axes of 1 that broadcast.
template <typename T>
Term<T> open_term(const TensorView& x, const Labels& labels, const Extents& extents) {
  Term<T> term;
  term.data = x.as<T>();
  const Dims strides = strides_of(x.dims);
  for (size_t i = 0; i < labels.size(); ++i) {
    const int64_t extent = extents.at(labels[i]);
    if (x.dims[i] == 1 && extent != 1) continue;
    const auto at = std::find(term.labels.begin(), term.labels.end(), labels[i]);
    if (at != term.labels.end()) {
      term.strides[static_cast<size_t>(at - term.labels.begin())] += strides[i];
      continue;
    }
    term.labels.push_back(labels[i]), term.dims.push_back(extent), term.strides.push_back(strides[i]);
  }
  return term;
}

// A dense copy with the axes `wanted` (all of them the term's), the others summed.
template <typename T>
Term<T> arrange(const Term<T>& term, const Labels& wanted) {
  Term<T> out;
  Dims kept, rest, rest_strides;
  out.labels = wanted;
  for (int label : wanted) {
    const auto i = static_cast<size_t>(std::find(term.labels.begin(), term.labels.end(), label) - term.labels.begin());
    out.dims.push_back(term.dims.at(i)), kept.push_back(term.strides[i]);
  }
  for (size_t i = 0; i < term.labels.size(); ++i) {
    if (!contains_label(wanted, term.labels[i])) rest.push_back(term.dims[i]), rest_strides.push_back(term.strides[i]);
  }
  out.strides = strides_of(out.dims);
  out.owned.assign(static_cast<size_t>(count_of(out.dims)), T(0));
  out.data = out.owned.data();
  if (out.owned.empty() || count_of(rest) == 0) return out;
  const auto offset = [](const Dims& index, const Dims& strides) {
    int64_t sum = 0;
    for (size_t i = 0; i < index.size(); ++i) sum += index[i] * strides[i];
    return sum;
  };
  Dims index(out.dims.size(), 0);
  size_t at = 0;
  do {
    const int64_t base = offset(index, kept);
    Dims inner(rest.size(), 0);
    T sum = T(0);
    do sum += term.data[base + offset(inner, rest_strides)];
    while (next_index(inner, rest));
    out.owned[at++] = sum;
  } while (next_index(index, out.dims));
  return out;
}

template <typename T>
void multiply_matrices(const T* a, const T* b, T* y, int64_t M, int64_t K, int64_t N) {
  if constexpr (std::is_same_v<T, float>)
    multiply(M, N, K, {a, K, 1}, {b, N, 1}, y, N);
  else
    multiply_by_loops(a, b, y, M, K, N);
}

// The product of two terms with the labels that `later` still names; the other common ones are summed.
template <typename T>
Term<T> join(const Term<T>& a, const Term<T>& b, const Labels& later, int threads) {
  Labels batch, rows, columns, summed;
  for (int label : a.labels) {
    const bool wanted = contains_label(later, label);
    if (contains_label(b.labels, label))
      (wanted ? batch : summed).push_back(label);
    else if (wanted)
      rows.push_back(label);
  }
  for (int label : b.labels) {
    if (!contains_label(a.labels, label) && contains_label(later, label)) columns.push_back(label);
  }
  const Term<T> left = arrange(a, joined({batch, rows, summed})), right = arrange(b, joined({batch, summed, columns}));
  const auto extent = [](const Term<T>& term, size_t from, size_t count) { return product(term.dims, from, from + count); };
  const int64_t batches = extent(left, 0, batch.size()), M = extent(left, batch.size(), rows.size());
  const int64_t K = extent(left, batch.size() + rows.size(), summed.size()),
                N = extent(right, batch.size() + summed.size(), columns.size());
  Term<T> y;
  y.labels = joined({batch, rows, columns});
  y.dims.assign(left.dims.begin(), left.dims.begin() + static_cast<int64_t>(batch.size() + rows.size()));
  y.dims.insert(y.dims.end(), right.dims.begin() + static_cast<int64_t>(batch.size() + summed.size()), right.dims.end());
  y.strides = strides_of(y.dims);
  y.owned.assign(static_cast<size_t>(count_of(y.dims)), T(0));
  y.data = y.owned.data();
  if (M > 0 && N > 0) {
    for_each_batch(batches, threads, [&](int64_t i) {
      multiply_matrices(left.data + i * M * K, right.data + i * K * N, y.owned.data() + i * M * N, M, K, N);
    });
  }
  return y;
}

template <typename T>
void run_einsum(RunContext& r, const Resolved& e) {
  Term<T> result = open_term<T>(r.input(0), e.inputs[0], e.extents);
  for (size_t i = 1; i < e.inputs.size(); ++i) {
    Labels later = e.output;
    for (size_t k = i + 1; k < e.inputs.size(); ++k) later.insert(later.end(), e.inputs[k].begin(), e.inputs[k].end());
    result = join(result, open_term<T>(r.input(i), e.inputs[i], e.extents), later, r.threads());
  }
  Dims dims;
  for (int label : e.output) dims.push_back(e.extents.at(label));
  TensorView& y = r.output(0, dims);
  const Term<T> arranged = arrange(result, e.output);
  std::copy(arranged.owned.begin(), arranged.owned.end(), y.as<T>());
}

CompiledKernel make_einsum_plain(const CompileContext& c) {
  return {[equation = parse_equation(c.node().get_string("equation", ""))](RunContext& r) {
    std::vector<Dims> dims;
    for (size_t i = 0; i < r.input_count(); ++i) dims.push_back(r.input(i).dims);
    const Resolved e = resolve(equation, dims);
    constexpr TypeSet kTypes = types::wide_floats | types::integers;
    dispatch<kTypes>(r.input(0).dtype, [&]<typename T>() { run_einsum<T>(r, e); });
  }};
}

}  // namespace

void register_einsum(KernelRegistry& registry) {
  registry.add({.op = "Einsum", .make = any_float<make_einsum_plain>});
}

}  // namespace fretsaw
