// MaxPool, AveragePool, LpPool over windows; which input cells each output cell sees is worked out once for a shape.
#include "kernels/cpu/pooling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>

#include "kernels/cpu/families.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/cpu/through_float.h"

namespace fretsaw {

namespace {

// Along one dimension: the positions under each output's window, and how many there are with padding.
struct LineCells {
  std::vector<std::vector<int64_t>> positions;
  std::vector<int64_t> counts;
};

LineCells line_cells(const Window& w, size_t i, int64_t in, int64_t out) {
  LineCells line;
  line.positions.resize(static_cast<size_t>(out));
  for (int64_t o = 0; o < out; ++o) {
    const int64_t start = o * w.strides[i] - w.pads_begin[i], step = w.dilations[i];
    const int64_t first = start < 0 ? (-start + step - 1) / step : 0;
    for (int64_t tap = first; tap < w.kernel[i] && start + tap * step < in; ++tap)
      line.positions[static_cast<size_t>(o)].push_back(start + tap * step);
    const int64_t room = in + w.pads_end[i] - start;  // cells up to the end of the padding
    line.counts.push_back(std::max<int64_t>(0, std::min(w.kernel[i], (room + step - 1) / step)));
  }
  return line;
}

}  // namespace

// The most cells that the windows of one image may cover in all: what bounds the memory of PoolCells.
constexpr int64_t kMostCells = int64_t{1} << 27;

PoolCells pool_cells(const Window& w, const Dims& spatial, bool ceil_mode) {
  PoolCells pool;
  pool.out = output_spatial(w, spatial, ceil_mode);
  if (count_of(spatial) > std::numeric_limits<int32_t>::max())
    throw Error("a pooling over " + to_string(spatial), "it has too many cells for one image");
  if (count_of(pool.out) > kMostCells) throw Error("a pooling to " + to_string(pool.out), "use less padding");
  // Dimension by dimension: each cell so far becomes one for each position of the next dimension.
  pool.starts = {0, 1};
  pool.cells = {0};
  pool.counts = {1};
  for (size_t i = 0; i < w.rank(); ++i) {
    const LineCells line = line_cells(w, i, spatial[i], pool.out[i]);
    int64_t positions = 0;
    for (const std::vector<int64_t>& window : line.positions) positions += static_cast<int64_t>(window.size());
    if (positions > 0 && static_cast<int64_t>(pool.cells.size()) > kMostCells / positions) {
      throw Error("a pooling whose windows cover more than " + std::to_string(kMostCells) + " cells",
                  "use smaller windows or larger strides");
    }
    PoolCells next;
    next.starts = {0};
    for (size_t before = 0; before + 1 < pool.starts.size(); ++before) {
      for (size_t o = 0; o < line.positions.size(); ++o) {
        for (int64_t at = pool.starts[before]; at < pool.starts[before + 1]; ++at) {
          for (int64_t position : line.positions[o]) {
            next.cells.push_back(static_cast<int32_t>(pool.cells[static_cast<size_t>(at)] * spatial[i] + position));
          }
        }
        next.starts.push_back(static_cast<int64_t>(next.cells.size()));
        next.counts.push_back(
            static_cast<int32_t>(std::min<int64_t>(pool.counts[before] * line.counts[o], std::numeric_limits<int32_t>::max())));
      }
    }
    next.out = std::move(pool.out);
    pool = std::move(next);
  }
  return pool;
}

namespace {

enum class PoolKind { max, average, lp };

struct PoolSettings {
  PoolKind kind = PoolKind::max;
  bool ceil_mode = false, include_padding = false, column_major = false;
  int64_t p = 2;
};

// Folds the cells of one window of a plane x.
template <typename T>
T pool_cell(const PoolSettings& s, const T* x, const int32_t* cells, int64_t n, int64_t count, int32_t& best) {
  if constexpr (std::is_floating_point_v<T>) {
    if (s.kind == PoolKind::average) {
      T sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += x[cells[i]];
      const int64_t divisor = s.include_padding ? count : n;
      return divisor ? sum / static_cast<T>(divisor) : T(0);
    }
    if (s.kind == PoolKind::lp) {
      T sum = 0;
      const T p = static_cast<T>(s.p);
      for (int64_t i = 0; i < n; ++i) sum += std::pow(std::fabs(x[cells[i]]), p);
      return std::pow(sum, T(1) / p);
    }
  }
  T value = std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::lowest();
  best = n ? cells[0] : 0;
  for (int64_t i = 0; i < n; ++i) {
    if (x[cells[i]] > value || x[cells[i]] != x[cells[i]]) value = x[cells[i]], best = cells[i];
  }
  return value;
}

template <typename T>
void pool_planes(RunContext& r, const PoolSettings& s, const PoolCells& pool, const TensorView& x, TensorView& y, int64_t* indices) {
  const int64_t in_cells = count_of(spatial_of(x.dims)), out_cells = count_of(pool.out), planes = x.dims[0] * x.dims[1];
  const Dims spatial = spatial_of(x.dims);
  parallel_for(planes, kGrainElements / (static_cast<int64_t>(pool.cells.size()) + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) {
      const T* from = x.as<T>() + plane * in_cells;
      for (int64_t i = 0; i < out_cells; ++i) {
        const int64_t start = pool.starts[static_cast<size_t>(i)], n = pool.starts[static_cast<size_t>(i) + 1] - start;
        int32_t best = 0;
        y.as<T>()[plane * out_cells + i] = pool_cell(s, from, pool.cells.data() + start, n, pool.counts[static_cast<size_t>(i)], best);
        if (!indices) continue;
        int64_t index = best;
        if (s.column_major) {
          int64_t rest = best, step = 1;
          index = 0;
          std::vector<int64_t> position(spatial.size());
          for (size_t d = spatial.size(); d-- > 0;) position[d] = rest % spatial[d], rest /= spatial[d];
          for (size_t d = 0; d < spatial.size(); ++d) index += position[d] * step, step *= spatial[d];
        }
        indices[plane * out_cells + i] = plane * in_cells + index;
      }
    }
  });
}

// One output cell of an nhwc image for all C channels. The order of the sums is that of pool_cell.
void pool_pixel(const PoolSettings& s, const float* x, int64_t C, const int32_t* cells, int64_t n, int64_t count, float* y) {
  run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
    if (s.kind == PoolKind::max) {
      for (int64_t c = 0; c < C; ++c) y[c] = -std::numeric_limits<float>::infinity();
      for (int64_t i = 0; i < n; ++i) {
        const float* from = x + cells[i] * C;
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) y[c] = from[c] > y[c] || from[c] != from[c] ? from[c] : y[c];
      }
      return;
    }
    const int64_t divisor = s.include_padding ? count : n;
    const float by = divisor ? static_cast<float>(divisor) : 1.0f;
    for (int64_t c = 0; c < C; ++c) y[c] = 0.0f;
    for (int64_t i = 0; i < n; ++i) {
      const float* from = x + cells[i] * C;
#pragma omp simd
      for (int64_t c = 0; c < C; ++c) y[c] += from[c];
    }
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) y[c] /= by;
  });
}

void pool_pixels(RunContext& r, const PoolSettings& s, const PoolCells& pool, const TensorView& x, TensorView& y) {
  const int64_t C = x.dims[1], in_cells = x.dims[2] * x.dims[3], out_cells = count_of(pool.out);
  parallel_for(x.dims[0] * out_cells, kGrainElements / (4 * C + 1) + 1, r.threads(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / out_cells, cell = i % out_cells, start = pool.starts[static_cast<size_t>(cell)];
      pool_pixel(s, x.as<float>() + n * in_cells * C, C, pool.cells.data() + start, pool.starts[static_cast<size_t>(cell) + 1] - start,
                 pool.counts[static_cast<size_t>(cell)], y.as<float>() + i * C);
    }
  });
}

class Pooling {
 public:
  Pooling(const CompileContext& c, PoolKind kind) : node_(c.node()) {
    settings_.kind = kind;
    settings_.ceil_mode = node_.get_int("ceil_mode", 0) != 0;
    settings_.include_padding = node_.get_int("count_include_pad", 0) != 0;
    settings_.column_major = node_.get_int("storage_order", 0) != 0;
    settings_.p = node_.get_int("p", 2);
    if (kind == PoolKind::lp && settings_.p < 1) throw Error("LpPool with p = " + std::to_string(settings_.p), "use 1 or more");
    const bool indices = c.outputs.size() > 1 && c.outputs[1];
    const std::optional<Dims> dims = c.input_dims(0);
    // The numbers are the same in either layout, so it takes what its producer leaves.
    if (dims && dims->size() == 4 && c.input_dtype(0) == DType::float32 && !indices && kind != PoolKind::lp && !c.offered.empty()) {
      layout_ = c.offered[0] == Layout::nhwc ? Layout::nhwc : Layout::plain;
    }
  }

  void set_layouts(CompiledKernel& kernel, const CompileContext& c) const {
    if (layout_ == Layout::plain) return;
    kernel.input_layouts = {layout_};
    kernel.output_layouts.assign(std::max<size_t>(c.outputs.size(), 1), Layout::plain);
    kernel.output_layouts[0] = layout_;
  }

  void run(RunContext& r) {
    const TensorView& x = r.input(0);
    prepare(x.dims);
    Dims y_dims = {x.dims[0], x.dims[1]};
    y_dims.insert(y_dims.end(), pool_.out.begin(), pool_.out.end());
    TensorView& y = r.output(0, y_dims, x.dtype, x.layout == Layout::nhwc ? Layout::nhwc : Layout::plain);
    int64_t* indices = r.wants_output(1) ? r.output(1, y_dims, DType::int64).as<int64_t>() : nullptr;
    if (y.count() == 0) return;
    if (x.layout == Layout::nhwc) return pool_pixels(r, settings_, pool_, x, y);
    if (settings_.kind == PoolKind::max) {
      constexpr TypeSet kTypes = types::wide_floats | set_of(DType::int8, DType::uint8);
      dispatch<kTypes>(x.dtype, [&]<typename T>() { pool_planes<T>(r, settings_, pool_, x, y, indices); });
    } else {
      dispatch<types::wide_floats>(x.dtype, [&]<typename T>() { pool_planes<T>(r, settings_, pool_, x, y, nullptr); });
    }
  }

 private:
  void prepare(const Dims& dims) {
    if (dims == prepared_for_ && !dims.empty()) return;
    if (dims.size() < 3) throw Error("a pooling of shape " + to_string(dims), "give it [N,C,D1,...]");
    Window window = read_window(node_, dims.size() - 2);
    const Dims spatial = spatial_of(dims);
    resolve_padding(window, spatial);
    const bool same = window.auto_pad == "SAME_UPPER" || window.auto_pad == "SAME_LOWER";
    pool_ = pool_cells(window, spatial, settings_.ceil_mode && !same);
    prepared_for_ = dims;
  }

  Node node_;
  PoolSettings settings_;
  Layout layout_ = Layout::plain;
  PoolCells pool_;
  Dims prepared_for_;
};

template <PoolKind kKind>
CompiledKernel make_pool(const CompileContext& c) {
  auto pooling = std::make_shared<Pooling>(c, kKind);
  CompiledKernel kernel{[pooling](RunContext& r) { pooling->run(r); }};
  pooling->set_layouts(kernel, c);
  return kernel;
}

}  // namespace

void register_window_pooling(KernelRegistry& registry) {
  registry.add({.op = "MaxPool", .make = any_float<make_pool<PoolKind::max>>});
  registry.add({.op = "AveragePool", .make = any_float<make_pool<PoolKind::average>>});
  registry.add({.op = "LpPool", .make = any_float<make_pool<PoolKind::lp>>});
}

void register_pooling(KernelRegistry& registry) {
  register_window_pooling(registry);
  register_global_pooling(registry);
  register_unpooling(registry);
}

}  // namespace fretsaw
