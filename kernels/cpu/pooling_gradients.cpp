// MaxPoolGrad and AveragePoolGrad: what a window gave goes back to the cells under it.
#include <algorithm>
#include <memory>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/gradients.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/pooling.h"
#include "kernels/cpu/scalar_types.h"

namespace fretsaw {

namespace {

class PoolGradient {
 public:
  explicit PoolGradient(const Node& node)
      : node_(node), ceil_mode_(node.get_int("ceil_mode", 0) != 0), counts_padding_(node.get_int("count_include_pad", 0) != 0) {}

  // dY [N, C, E...], X [N, C, D...]
  void run_max(RunContext& r) {
    const TensorView &dy = r.input(0), &x = r.input(1);
    prepare(dy.dims, x.dims);
    TensorView& dx = sized_output(r, 0, x.dims);
    dispatch<types::wide_floats>(x.dtype, [&]<typename T>() {
      each_plane<T>(r, dy, dx, [&](const T* g, T* to, int64_t plane) { spread_max(x.as<T>() + plane * cells_, g, to); });
    });
  }

  // dY [N, C, E...], the shape [N, C, D...]
  void run_average(RunContext& r) {
    const TensorView& dy = r.input(0);
    const Dims dims = r.input_ints(1);
    prepare(dy.dims, dims);
    TensorView& dx = sized_output(r, 0, dims);
    dispatch<types::wide_floats>(
        dy.dtype, [&]<typename T>() { each_plane<T>(r, dy, dx, [&](const T* g, T* to, int64_t) { spread_average(g, to); }); });
  }

 private:
  void prepare(const Dims& dy, const Dims& x) {
    if (x.size() < 3) throw Error("a pooling of shape " + to_string(x), "give it [N,C,D1,...]");
    if (x != prepared_for_) {
      Window window = read_window(node_, x.size() - 2);
      resolve_padding(window, spatial_of(x));
      const bool same = window.auto_pad == "SAME_UPPER" || window.auto_pad == "SAME_LOWER";
      pool_ = pool_cells(window, spatial_of(x), ceil_mode_ && !same);
      cells_ = count_of(spatial_of(x));
      prepared_for_ = x;
    }
    Dims wanted = {x[0], x[1]};
    wanted.insert(wanted.end(), pool_.out.begin(), pool_.out.end());
    if (dy != wanted)
      throw Error("a gradient of shape " + to_string(dy) + " for a pooling to " + to_string(wanted), "give that of its result");
  }

  template <typename T, typename Spread>
  void each_plane(RunContext& r, const TensorView& dy, TensorView& dx, const Spread& spread) {
    const int64_t planes = dx.dims[0] * dx.dims[1], out_cells = count_of(pool_.out);
    const int64_t work = static_cast<int64_t>(pool_.cells.size()) + cells_;
    parallel_for(planes, kGrainElements / (work + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
      for (int64_t plane = begin; plane < end; ++plane) {
        T* to = dx.as<T>() + plane * cells_;
        std::fill_n(to, cells_, T(0));
        spread(dy.as<T>() + plane * out_cells, to, plane);
      }
    });
  }

  // The cell that MaxPool takes: the first of the largest, or the last NaN.
  template <typename T>
  void spread_max(const T* x, const T* g, T* to) const {
    for (size_t i = 0; i + 1 < pool_.starts.size(); ++i) {
      const int32_t *cell = pool_.cells.data() + pool_.starts[i], *last = pool_.cells.data() + pool_.starts[i + 1];
      if (cell == last) continue;
      int32_t best = *cell;
      for (++cell; cell < last; ++cell)
        if (x[*cell] > x[best] || x[*cell] != x[*cell]) best = *cell;
      to[best] += g[i];
    }
  }

  template <typename T>
  void spread_average(const T* g, T* to) const {
    for (size_t i = 0; i + 1 < pool_.starts.size(); ++i) {
      const int64_t n = pool_.starts[i + 1] - pool_.starts[i], divisor = counts_padding_ ? pool_.counts[i] : n;
      if (n == 0 || divisor == 0) continue;
      const T share = g[i] / static_cast<T>(divisor);
      for (int64_t k = pool_.starts[i]; k < pool_.starts[i + 1]; ++k) to[pool_.cells[static_cast<size_t>(k)]] += share;
    }
  }

  Node node_;
  bool ceil_mode_, counts_padding_;
  PoolCells pool_;
  Dims prepared_for_;
  int64_t cells_ = 0;
};

CompiledKernel make_max_plain(const CompileContext& c) {
  return {[gradient = std::make_shared<PoolGradient>(c.node())](RunContext& r) { gradient->run_max(r); }};
}
CompiledKernel make_average_plain(const CompileContext& c) {
  return {[gradient = std::make_shared<PoolGradient>(c.node())](RunContext& r) { gradient->run_average(r); }};
}

}  // namespace

void register_pooling_gradients(KernelRegistry& registry) {
  add_gradient(registry, "MaxPoolGrad", any_float<make_max_plain>);
  add_gradient(registry, "AveragePoolGrad", any_float<make_average_plain>);
}

}  // namespace fretsaw
