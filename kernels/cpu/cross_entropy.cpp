// CrossEntropy and CrossEntropyGrad: rows are taken to float32 one at a time.
#include <cmath>
#include <optional>
#include <vector>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/gradients.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/softmax.h"

namespace fretsaw {
namespace {

struct Settings {
  explicit Settings(const Node& node) : smoothing(node.get_float("label_smoothing", 0)) {
    if (node.has("ignore_index")) ignored = node.get_int("ignore_index", 0);
    if (node.has("classes")) classes = node.get_int("classes", 0);
  }
  float smoothing;
  std::optional<int64_t> classes;
  std::optional<int64_t> ignored;

  // How many of a row's scores count.
  int64_t classes_of(int64_t columns) const {
    require(!classes || (*classes > 0 && *classes <= columns), "more classes than scores in a row");
    return classes.value_or(columns);
  }
  // The class of a row; -1 where it counts for nothing.
  int64_t class_of(int64_t target, int64_t classes) const {
    if (ignored && target == *ignored) return -1;
    require(target >= 0 && target < classes, "a target is none of the classes", "see --loss softmax_cross_entropy:ignore_index=K");
    return target;
  }
};

void check(const TensorView& scores, const TensorView& target) {
  require(scores.rank() == 2, "scores are no rows of classes");
  require(target.rank() == 1 && target.dims[0] == scores.dims[0], "there is not one target for each row of scores");
}

CompiledKernel make_cross_entropy(const CompileContext& c) {
  return {[s = Settings(c.node())](RunContext& r) {
    const TensorView &scores = r.input(0), &target = r.input(1);
    check(scores, target);
    const int64_t rows = scores.dims[0], columns = scores.dims[1], C = s.classes_of(columns);
    float* losses = sized_output(r, 0, {rows}, DType::float32).as<float>();
    float* lse = r.wants_output(1) ? sized_output(r, 1, {rows}, DType::float32).as<float>() : nullptr;
    parallel_for(rows, std::max<int64_t>(kGrainElements / std::max<int64_t>(C, 1), 1), r.threads(), [&](int64_t begin, int64_t end) {
      std::vector<float> row(static_cast<size_t>(C));
      for (int64_t i = begin; i < end; ++i) {
        const int64_t label = s.class_of(target.as<int64_t>()[i], C);
        load_as<float>(scores.dtype, scores.data, i * columns, C, row.data());
        float log_sum = 0, mean = 0;
        run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
          const float top = max_row(row.data(), C);
          log_sum = top + std::log(sum_row(row.data(), C, [top](float v) FRETSAW_ALWAYS_INLINE { return exp_of(v - top); }));
          if (s.smoothing > 0) mean = sum_row(row.data(), C, [](float v) FRETSAW_ALWAYS_INLINE { return v; }) / static_cast<float>(C);
        });
        if (lse) lse[i] = log_sum;
        losses[i] = label < 0 ? 0.0f : log_sum - (1 - s.smoothing) * row[static_cast<size_t>(label)] - s.smoothing * mean;
      }
    });
  }};
}

CompiledKernel make_cross_entropy_grad(const CompileContext& c) {
  return {[s = Settings(c.node())](RunContext& r) {
    const TensorView &dloss = r.input(0), &scores = r.input(1), &target = r.input(2), &lse = r.input(3);
    check(scores, target);
    const int64_t rows = scores.dims[0], columns = scores.dims[1], C = s.classes_of(columns);
    require(dloss.count() == rows && lse.count() == rows, "a gradient and a logarithm are wanted for each row of scores");
    TensorView& dx = sized_output(r, 0, scores.dims, scores.dtype);
    parallel_for(rows, std::max<int64_t>(kGrainElements / std::max<int64_t>(C, 1), 1), r.threads(), [&](int64_t begin, int64_t end) {
      std::vector<float> row(static_cast<size_t>(columns));  // zeros behind the classes
      for (int64_t i = begin; i < end; ++i) {
        const int64_t label = s.class_of(target.as<int64_t>()[i], C);
        const float factor = label < 0 ? 0.0f : dloss.as<float>()[i], shift = lse.as<float>()[i], all = s.smoothing / static_cast<float>(C);
        load_as<float>(scores.dtype, scores.data, i * columns, C, row.data());
        run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
#pragma omp simd
          for (int64_t k = 0; k < C; ++k) row[static_cast<size_t>(k)] = factor * (exp_of(row[static_cast<size_t>(k)] - shift) - all);
        });
        if (label >= 0) row[static_cast<size_t>(label)] -= factor * (1 - s.smoothing);
        store_from<float>(dx.dtype, dx.data, i * columns, columns, row.data());
      }
    });
  }};
}

}  // namespace

void register_cross_entropy(KernelRegistry& registry) {
  add_gradient(registry, "CrossEntropy", make_cross_entropy);
  add_gradient(registry, "CrossEntropyGrad", make_cross_entropy_grad);
}

}  // namespace fretsaw
