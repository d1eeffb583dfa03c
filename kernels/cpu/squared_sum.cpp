// SquaredSum: pieces of one size are added up by all threads, and the pieces' sums in their order.
#include <numeric>
#include <vector>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/gradients.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/parallel.h"

namespace fretsaw {
namespace {

constexpr int64_t kPiece = 1 << 14;  // elements

struct Piece {
  const TensorView* of;
  int64_t begin, count;
};

double sum_of(const Piece& piece) {
  double sum = 0;
  with_compute_type(piece.of->dtype, [&]<typename T>() {
    std::vector<T> converted;
    const T* x = piece.of->as<const T>() + piece.begin;
    if (piece.of->dtype != dtype_of<T>()) {
      converted.resize(static_cast<size_t>(piece.count));
      load_as<T>(piece.of->dtype, piece.of->data, piece.begin, piece.count, converted.data());
      x = converted.data();
    }
    constexpr int64_t kLanes = 8;  // sums side by side
    double lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= piece.count; i += kLanes)
      for (int64_t k = 0; k < kLanes; ++k) lanes[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
    for (; i < piece.count; ++i) lanes[0] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    sum = std::accumulate(lanes, lanes + kLanes, 0.0);
  });
  return sum;
}

CompiledKernel make_squared_sum(const CompileContext& c) {
  const size_t inputs = c.node().inputs.size();
  return {[inputs](RunContext& r) {
    std::vector<Piece> pieces;
    for (size_t i = 0; i < inputs; ++i) {
      const TensorView& x = r.input(i);
      for (int64_t begin = 0; begin < x.count(); begin += kPiece) pieces.push_back({&x, begin, std::min(kPiece, x.count() - begin)});
    }
    std::vector<double> sums(pieces.size());
    parallel_for(static_cast<int64_t>(pieces.size()), 1, r.threads(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) sums[static_cast<size_t>(i)] = sum_of(pieces[static_cast<size_t>(i)]);
    });
    *sized_output(r, 0, {}, DType::float32).as<float>() = static_cast<float>(std::accumulate(sums.begin(), sums.end(), 0.0));
  }};
}

}  // namespace

void register_squared_sum(KernelRegistry& registry) {
  add_gradient(registry, "SquaredSum", make_squared_sum);
}

}  // namespace fretsaw
