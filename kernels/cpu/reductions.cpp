// The Reduce operators: the rows of the table, over any axes.
//
// float32 is summed in lanes of float32 for at most 64 terms, and these sums in double: the error does not grow with the length,
// and neither threads nor the machine's vectors change the order.
#include "kernels/cpu/reductions.h"

#include <algorithm>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/reduced_dims.h"

namespace fretsaw {

namespace math::reduction {

struct add {
  template <typename T>
  static constexpr T start() {
    return T(0);
  }
  template <typename T>
  FRETSAW_ALWAYS_INLINE static T fold(T z, T x) {
    return static_cast<T>(z + x);
  }
};
struct multiply {
  template <typename T>
  static constexpr T start() {
    return T(1);
  }
  template <typename T>
  FRETSAW_ALWAYS_INLINE static T fold(T z, T x) {
    return static_cast<T>(z * x);
  }
};
struct smaller {
  template <typename T>
  static constexpr T start() {
    return highest<T>();
  }
  template <typename T>
  FRETSAW_ALWAYS_INLINE static T fold(T z, T x) {
    return math::min(z, x);
  }
};
struct larger {
  template <typename T>
  static constexpr T start() {
    return lowest<T>();
  }
  template <typename T>
  FRETSAW_ALWAYS_INLINE static T fold(T z, T x) {
    return math::max(z, x);
  }
};

#define FRETSAW_ROW(Name, set, fold, term_expression, finish_expression, shifted)    \
  struct Name {                                                                      \
    static constexpr TypeSet kTypes = types::set;                                    \
    static constexpr bool kShifted = shifted;                                        \
    /* integers are computed as double where the result is a function of the fold */ \
    static constexpr bool kFinishes = std::string_view(#finish_expression) != "z";   \
    using Fold = fold;                                                               \
    template <typename T>                                                            \
    FRETSAW_ALWAYS_INLINE static T term(T x) {                                       \
      return static_cast<T>(term_expression);                                        \
    }                                                                                \
    template <typename T>                                                            \
    static T finish(T z, [[maybe_unused]] int64_t n) {                               \
      return finish_expression;                                                      \
    }                                                                                \
  };
#define FRETSAW_REDUCTION(name, set, fold, term, finish) FRETSAW_ROW(name, set, fold, term, finish, false)
#define FRETSAW_REDUCTION_SHIFTED(name, set, fold, term, finish) FRETSAW_ROW(name, set, fold, term, finish, true)
#include "graph/operators/elementwise.inc"
#undef FRETSAW_ROW

// The maximum that a shifted row subtracts first.
struct Maximum {
  static constexpr bool kShifted = false;
  using Fold = larger;
  template <typename T>
  FRETSAW_ALWAYS_INLINE static T term(T x) {
    return x;
  }
};

}  // namespace math::reduction

std::vector<bool> reduced_dimensions(const std::vector<int64_t>& axes, size_t rank, bool none_when_empty) {
  std::vector<bool> reduce(rank, axes.empty() && !none_when_empty);
  for (size_t axis : normalise_axes(axes, rank)) reduce[axis] = true;
  return reduce;
}

Dims reduced_dims(const Dims& dims, const std::vector<bool>& reduce, bool keep) {
  Dims out;
  for (size_t i = 0; i < dims.size(); ++i) {
    if (!reduce[i])
      out.push_back(dims[i]);
    else if (keep)
      out.push_back(1);
  }
  return out;
}

ReductionPlan plan_reduction(const Dims& dims, const std::vector<bool>& reduce) {
  struct Merged {
    int64_t size, stride;
    bool reduced;
  };
  ReductionPlan plan;
  std::vector<Merged> merged;
  int64_t stride = 1;
  for (size_t i = dims.size(); i-- > 0;) {  // from the innermost
    (reduce[i] ? plan.each : plan.results) *= dims[i];
    if (dims[i] != 1) {
      if (!merged.empty() && merged.back().reduced == reduce[i])
        merged.back().size *= dims[i];
      else
        merged.push_back({dims[i], stride, reduce[i]});
    }
    stride *= dims[i];
  }
  for (size_t i = 0; i < merged.size(); ++i) {
    const Merged& m = merged[i];
    if (i == 0) {
      (m.reduced ? plan.run : plan.width) = m.size;
      continue;
    }
    Dims& sizes = m.reduced ? plan.reduced : plan.kept;
    Dims& strides = m.reduced ? plan.reduced_strides : plan.kept_strides;
    sizes.insert(sizes.begin(), m.size);
    strides.insert(strides.begin(), m.stride);
  }
  return plan;
}

namespace {

constexpr int64_t kLanes = 256;       // results, or parts of one result, that fold in step
constexpr int64_t kRunLanes = 64;     // parts of one result
constexpr int64_t kRowsBetween = 64;  // rows folded in the lanes' type before they are added up in the wider one

// The types that elements of T fold in: lanes, and their sums.
template <typename T, bool kInDouble>
struct FoldTypes {
  static constexpr bool kInteger = std::is_integral_v<T>;
  using Lane = std::conditional_t<
      std::is_same_v<T, bool>, uint8_t,
      std::conditional_t<!kInteger, ComputeType<T>,
                         std::conditional_t<kInDouble, double, std::conditional_t<std::is_same_v<T, uint64_t>, uint64_t, int64_t>>>>;
  using Total = std::conditional_t<std::is_same_v<Lane, float>, double, Lane>;
};

template <typename Row, typename Lane, typename Total>
struct Lanes {
  alignas(64) Lane lane[kLanes];
  alignas(64) Lane shift[kLanes];
  Total total[kLanes];

  void start(int64_t width) { std::fill_n(total, width, Row::Fold::template start<Total>()); }

  // Folds `rows` rows of `width` elements into total[0, width).
  template <typename T>
  FRETSAW_ALWAYS_INLINE void fold_rows(const T* x, int64_t rows, int64_t row_stride, int64_t width) {
    for (int64_t begin = 0; begin < rows; begin += kRowsBetween) {
      const int64_t end = std::min(rows, begin + kRowsBetween);
      for (int64_t j = 0; j < width; ++j) lane[j] = Row::Fold::template start<Lane>();
      for (int64_t i = begin; i < end; ++i) {
        const T* row = x + i * row_stride;
        FRETSAW_INDEPENDENT
        for (int64_t j = 0; j < width; ++j) {
          const Lane value = static_cast<Lane>(row[j]);
          lane[j] = Row::Fold::fold(lane[j], Row::template term<Lane>(Row::kShifted ? static_cast<Lane>(value - shift[j]) : value));
        }
      }
      for (int64_t j = 0; j < width; ++j) total[j] = Row::Fold::fold(total[j], static_cast<Total>(lane[j]));
    }
  }

  // Folds a run of `n` neighbours into total[0, kRunLanes).
  template <typename T>
  FRETSAW_ALWAYS_INLINE void fold_run(const T* x, int64_t n) {
    const int64_t rows = n / kRunLanes, rest = n % kRunLanes;
    if (rows) fold_rows(x, rows, kRunLanes, kRunLanes);
    if (rest) fold_rows(x + rows * kRunLanes, 1, 0, rest);
  }
};

// Folds results [first, first + width) of one kept position, which starts at `x`, into lanes.total[0, width).
template <typename Row, typename T, typename Lane, typename Total>
FRETSAW_ALWAYS_INLINE inline void fold_results(const ReductionPlan& plan, const T* x, int64_t width, Lanes<Row, Lane, Total>& lanes) {
  const bool rowwise = plan.width > 1;
  const int64_t active = rowwise ? width : std::min(plan.run, kRunLanes);
  lanes.start(active);
  if (plan.each == 0) {
    if (!rowwise) lanes.start(1);
    return;
  }
  // The innermost of the reduced dimensions is walked without computing offsets.
  const size_t outer = plan.reduced.empty() ? 0 : plan.reduced.size() - 1;
  const int64_t rows = rowwise && !plan.reduced.empty() ? plan.reduced.back() : 1;
  const int64_t row_stride = rowwise && !plan.reduced.empty() ? plan.reduced_strides.back() : 0;
  const Dims outer_dims(plan.reduced.begin(), plan.reduced.begin() + static_cast<std::ptrdiff_t>(rowwise ? outer : plan.reduced.size()));
  const int64_t positions = product(outer_dims, 0, outer_dims.size());
  for (int64_t p = 0; p < positions; ++p) {
    const T* from = x + offset_of(p, outer_dims, plan.reduced_strides);
    if (rowwise)
      lanes.fold_rows(from, rows, row_stride, width);
    else
      lanes.fold_run(from, plan.run);
  }
  if (rowwise) return;
  for (int64_t left = active; left > 1;) {  // in pairs: the second half onto the first
    const int64_t half = (left + 1) / 2;
    for (int64_t j = 0; j < left - half; ++j) lanes.total[j] = Row::Fold::fold(lanes.total[j], lanes.total[j + half]);
    left = half;
  }
}

template <typename Total, typename T>
void store_results(const Total* totals, T* y, int64_t n) {
  if constexpr (std::is_same_v<T, bool>) {
    for (int64_t j = 0; j < n; ++j) y[j] = totals[j] != 0;
  } else {
    store_from<Total>(dtype_of<T>(), y, 0, n, totals);
  }
}

// Results [begin, end) in units of (kept position, chunk of the width).
template <typename Row, typename T>
void reduce_range(const ReductionPlan& plan, const T* x, T* y, int64_t begin, int64_t end) {
  using Types = FoldTypes<T, Row::kFinishes>;
  using Lane = typename Types::Lane;
  using Total = typename Types::Total;
  using Maximum = Lanes<math::reduction::Maximum, Lane, Lane>;
  const int64_t chunks = (plan.width + kLanes - 1) / kLanes;
  Lanes<Row, Lane, Total> lanes;
  Maximum maxima;
  auto loop = [&]() FRETSAW_ALWAYS_INLINE {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t kept = unit / chunks, first = unit % chunks * kLanes, width = std::min(kLanes, plan.width - first);
      const T* from = x + offset_of(kept, plan.kept, plan.kept_strides) + first;
      if constexpr (Row::kShifted) {
        fold_results(plan, from, width, maxima);
        const bool rowwise = plan.width > 1;
        for (int64_t j = 0; j < (rowwise ? width : kRunLanes); ++j) {
          const Lane top = maxima.total[rowwise ? j : 0];
          lanes.shift[j] = std::isfinite(static_cast<double>(top)) ? top : Lane(0);  // an infinite maximum would give NaN
        }
      }
      fold_results(plan, from, width, lanes);
      for (int64_t j = 0; j < width; ++j) {
        lanes.total[j] = Row::template finish<Total>(lanes.total[j], plan.each);
        if constexpr (Row::kShifted) lanes.total[j] += static_cast<Total>(lanes.shift[j]);
      }
      store_results(lanes.total, y + kept * plan.width + first, width);
    }
  };
  if constexpr (std::is_same_v<T, float>)
    run_vectorised(loop);  // half floats are rare enough to spare the compiler
  else
    loop();
}

template <typename Row>
CompiledKernel compile_reduction(const CompileContext& c) {
  const bool keep = c.node().get_int("keepdims", 1) != 0, none_when_empty = c.node().get_int("noop_with_empty_axes", 0) != 0;
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);
    const std::vector<int64_t> axes = r.has_input(1) ? r.input_ints(1) : std::vector<int64_t>{};
    const std::vector<bool> reduce = reduced_dimensions(axes, x.rank(), none_when_empty);
    TensorView& y = r.output(0, reduced_dims(x.dims, reduce, keep), x.dtype);
    const ReductionPlan plan = plan_reduction(x.dims, reduce);
    if (plan.results == 0) return;
    const int64_t units = plan.results / plan.width * ((plan.width + kLanes - 1) / kLanes);
    const int64_t unit_elements = std::max<int64_t>(1, plan.each * std::min(plan.width, kLanes));
    dispatch<Row::kTypes>(x.dtype, [&]<typename T>() {
      parallel_for(units, kGrainElements / unit_elements + 1, r.threads(),
                   [&](int64_t begin, int64_t end) { reduce_range<Row>(plan, x.as<T>(), y.as<T>(), begin, end); });
    });
  }};
}

template <typename Row>
std::string unsupported_reduction(const CompileContext& c) {
  return refuse_other_types(c, 0, Row::kTypes);
}

}  // namespace

void register_reductions(KernelRegistry& registry) {
  using namespace math::reduction;
#define FRETSAW_REDUCTION(name, set, fold, term, finish) \
  registry.add({.op = #name, .make = compile_reduction<name>, .unsupported = unsupported_reduction<name>});
#define FRETSAW_REDUCTION_SHIFTED(name, set, fold, term, finish) FRETSAW_REDUCTION(name, set, fold, term, finish)
#include "graph/operators/elementwise.inc"
  register_arg_reductions(registry);
  register_cumulative(registry);
}

}  // namespace fretsaw
