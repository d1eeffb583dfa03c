// DetGrad: the cofactors of square matrices, which a matrix without an inverse has too.
//
// Gaussian elimination with pivots from the whole rest of the matrix gives X = P L U Q, with permutations P and Q. Cofactors of a product
// are the product of the cofactors, so that
//
//   cof(X) = det(P) det(Q) P L^-T cof(U) Q,   and with U = (V u; 0 d):  cof(U) = det(V) (d V^-T 0; -(V^-1 u)^T 1).
//
// The last pivot d, which is 0 where the rank is M - 1, is never divided by. With a lower rank the rest of the matrix is 0 before that, and
// so are all cofactors. This takes about three times the operations of the determinant.
#include <cmath>

#include "kernels/cpu/gradients.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scalar_types.h"

namespace fretsaw {
namespace {

class Cofactors {
 public:
  explicit Cofactors(int64_t n)
      : n_(n), m_(static_cast<size_t>(n * n)), cofactors_(m_.size()), rows_(static_cast<size_t>(n)), columns_(rows_) {}

  // to = factor * cof(from)
  template <typename T>
  void compute(const T* from, double factor, T* to) {
    std::copy_n(from, n_ * n_, m_.begin());
    if (!eliminate()) {
      std::fill_n(to, n_ * n_, T(0));
      return;
    }
    fill_upper();
    apply_lower();
    for (int64_t i = 0; i < n_; ++i)
      for (int64_t j = 0; j < n_; ++j) to[rows_[index(i)] * n_ + columns_[index(j)]] = static_cast<T>(factor * sign_ * c(i, j));
  }

 private:
  static size_t index(int64_t i) { return static_cast<size_t>(i); }
  double& m(int64_t i, int64_t j) { return m_[index(i * n_ + j)]; }
  double& c(int64_t i, int64_t j) { return cofactors_[index(i * n_ + j)]; }

  // The largest number of the rest is the pivot, or a NaN. Leaves U on and above the diagonal of m, and L's factors below it. False where
  // there is nothing left before the last pivot.
  bool eliminate() {
    sign_ = 1;
    for (int64_t i = 0; i < n_; ++i) rows_[index(i)] = columns_[index(i)] = i;
    for (int64_t k = 0; k + 1 < n_; ++k) {
      int64_t row = k, column = k;
      for (int64_t i = k; i < n_; ++i)
        for (int64_t j = k; j < n_; ++j)
          if (const double best = std::fabs(m(row, column)); !(std::fabs(m(i, j)) <= best) && !std::isnan(best)) row = i, column = j;
      if (m(row, column) == 0) return false;
      exchange(k, row, column);
      for (int64_t i = k + 1; i < n_; ++i) {
        const double factor = m(i, k) / m(k, k);
        m(i, k) = factor;
        for (int64_t j = k + 1; j < n_; ++j) m(i, j) -= factor * m(k, j);
      }
    }
    return true;
  }

  void exchange(int64_t k, int64_t row, int64_t column) {
    if (row != k) {
      for (int64_t j = 0; j < n_; ++j) std::swap(m(k, j), m(row, j));
      std::swap(rows_[index(k)], rows_[index(row)]);
      sign_ = -sign_;
    }
    if (column != k) {
      for (int64_t i = 0; i < n_; ++i) std::swap(m(i, k), m(i, column));
      std::swap(columns_[index(k)], columns_[index(column)]);
      sign_ = -sign_;
    }
  }

  // c = cof(U): each column j of V^-1 becomes row j, solved from below.
  void fill_upper() {
    const int64_t last = n_ - 1;
    double of_v = 1;
    for (int64_t k = 0; k < last; ++k) of_v *= m(k, k);
    std::fill(cofactors_.begin(), cofactors_.end(), 0.0);
    for (int64_t j = 0; j < last; ++j) solve_upper(j, j, [j](int64_t i) { return i == j ? 1.0 : 0.0; });
    solve_upper(last, last - 1, [&](int64_t i) { return -m(i, last); });
    for (int64_t j = 0; j < last; ++j)
      for (int64_t i = 0; i <= j; ++i) c(j, i) *= of_v * m(last, last);
    for (int64_t i = 0; i < last; ++i) c(last, i) *= of_v;
    c(last, last) = of_v;
  }

  // V x = b, which is 0 below `from`, into the beginning of row `to` of c.
  template <typename Right>
  void solve_upper(int64_t to, int64_t from, const Right& right) {
    for (int64_t i = from; i >= 0; --i) {
      double rest = right(i);
      for (int64_t k = i + 1; k <= from; ++k) rest -= m(i, k) * c(to, k);
      c(to, i) = rest / m(i, i);
    }
  }

  // c = L^-T c, a row after the other from below.
  void apply_lower() {
    for (int64_t i = n_ - 1; i >= 0; --i) {
      for (int64_t k = i + 1; k < n_; ++k) {
        const double factor = m(k, i);
        for (int64_t j = 0; j < n_; ++j) c(i, j) -= factor * c(k, j);
      }
    }
  }

  int64_t n_;
  std::vector<double> m_, cofactors_;
  std::vector<int64_t> rows_, columns_;  // where those of m come from
  double sign_ = 1;
};

void run_gradient(RunContext& r) {
  const TensorView &dy = r.input(0), &x = r.input(1);
  if (x.rank() < 2 || x.dims[x.rank() - 1] != x.dims[x.rank() - 2] || dy.dims != Dims(x.dims.begin(), x.dims.end() - 2))
    throw Error("a gradient that is not of the shape of Det's result", "give that of the forward node's output");
  const int64_t n = x.dims.back();
  TensorView& dx = r.output(0, x.dims);
  if (n == 0) return;
  dispatch<types::wide_floats>(x.dtype, [&]<typename T>() {
    parallel_for(dy.count(), 1, r.threads(), [&](int64_t begin, int64_t end) {
      Cofactors cofactors(n);
      for (int64_t i = begin; i < end; ++i)
        cofactors.compute(x.as<T>() + i * n * n, static_cast<double>(dy.as<T>()[i]), dx.as<T>() + i * n * n);
    });
  });
}

CompiledKernel make_plain(const CompileContext&) {
  return {run_gradient};
}

}  // namespace

void register_determinant_gradient(KernelRegistry& registry) {
  add_gradient(registry, "DetGrad", any_float<make_plain>);
}

}  // namespace fretsaw
