// GridSampleGrad: an output is a sum of weights times elements around its point; the elements get the weights back, and the point what the
// weights change by as it moves.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "kernels/cpu/gradients.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/sampling_slopes.h"
#include "kernels/cpu/scalar_types.h"

namespace fretsaw {
namespace {

// The elements around a point: offsets in a plane, weights, and for each axis of the image what a weight changes by as the point moves
// along it.
class Neighbours {
 public:
  Neighbours(const SampleRule& rule, const Dims& spatial) : rule_(rule), spatial_(spatial) {}

  struct Neighbour {
    int64_t offset = 0;
    double weight = 1;
    std::array<double, 6> slopes{};
  };
  template <typename T>
  const std::vector<Neighbour>& around(const T* point) {
    const size_t rank = spatial_.size();
    found_.assign(1, {});
    for (size_t d = 0; d < rank; ++d) {
      const auto at = static_cast<double>(point[rank - 1 - d]);  // points name the last axis first
      const SampleTaps taps = axis_taps_at(rule_, at, spatial_[d]);
      const SampleSlopes slopes = axis_slopes_at(rule_, at, spatial_[d]);
      next_.clear();
      for (const Neighbour& n : found_) {
        for (int t = 0; t < rule_.taps(); ++t) {
          if (taps.index[t] < 0) continue;
          Neighbour& made = next_.emplace_back(n);
          made.offset = n.offset * spatial_[d] + taps.index[t];
          made.weight = n.weight * taps.weight[t];
          for (size_t before = 0; before < d; ++before) made.slopes[before] *= taps.weight[t];
          made.slopes[d] = n.weight * slopes.slope[t];
        }
      }
      found_.swap(next_);
    }
    return found_;
  }

 private:
  const SampleRule& rule_;
  const Dims& spatial_;
  std::vector<Neighbour> found_, next_;
};

template <typename T>
void run_gradient(RunContext& r, const SampleRule& rule) {
  const TensorView &dy = r.input(0), &x = r.input(1), &grid = r.input(2);  // [N, C, G...], [N, C, D...], [N, G..., rank]
  TensorView* dx = r.wants_output(0) ? &r.output(0, x.dims) : nullptr;
  TensorView* dgrid = r.wants_output(1) ? &r.output(1, grid.dims) : nullptr;
  const Dims spatial(x.dims.begin() + 2, x.dims.end());
  const auto rank = static_cast<int64_t>(spatial.size());
  const int64_t channels = x.dims[1], plane = count_of(spatial), places = grid.count() / std::max<int64_t>(x.dims[0] * rank, 1);
  if (dy.count() != x.dims[0] * channels * places)
    throw Error("a gradient that is not of the shape of GridSample's result", "give that of the forward node's output");
  // Images of a batch have elements of their own; points of one may share some.
  parallel_for(x.dims[0], 1, r.threads(), [&](int64_t begin, int64_t end) {
    Neighbours neighbours(rule, spatial);
    for (int64_t n = begin; n < end; ++n) {
      T* image = dx ? dx->as<T>() + n * channels * plane : nullptr;
      if (image) std::fill_n(image, channels * plane, T(0));
      for (int64_t place = 0; place < places; ++place) {
        const int64_t item = n * places + place;
        std::array<double, 6> moved{};
        for (const auto& [offset, weight, slopes] : neighbours.around(grid.as<T>() + item * rank)) {
          for (int64_t c = 0; c < channels; ++c) {
            const int64_t at = c * plane + offset;
            const T g = dy.as<T>()[(n * channels + c) * places + place];
            if (image) image[at] += static_cast<T>(weight) * g;
            const auto product = static_cast<double>(g) * static_cast<double>(x.as<T>()[n * channels * plane + at]);
            for (size_t d = 0; d < spatial.size(); ++d) moved[d] += product * slopes[d];
          }
        }
        for (size_t d = 0; d < spatial.size() && dgrid; ++d)
          dgrid->as<T>()[item * rank + rank - 1 - static_cast<int64_t>(d)] = static_cast<T>(moved[d]);
      }
    }
  });
}

CompiledKernel make_plain(const CompileContext& c) {
  return {[rule = SampleRule(c.node())](RunContext& r) {
    dispatch<types::wide_floats>(r.input(1).dtype, [&]<typename T>() { run_gradient<T>(r, rule); });
  }};
}

}  // namespace

void register_sampling_gradient(KernelRegistry& registry) {
  add_gradient(registry, "GridSampleGrad", any_float<make_plain>);
}

}  // namespace fretsaw
