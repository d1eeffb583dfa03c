// ConvGradInput and ConvGradWeight: oneDNN's in float32, loops in float64.
//
// A weight's gradient is a sum over samples. oneDNN divides it by the threads that there are; here it is divided by the samples, each part
// on one thread, and parts are added in their order: the result does not depend on the number of threads, nor do ranks with fewer of them
// train another model.
#include <omp.h>

#include <algorithm>
#include <list>
#include <memory>
#include <optional>

#include "kernels/cpu/convolution.h"
#include "kernels/cpu/convolution_loops.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/gradients.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/scratch_pieces.h"

namespace fretsaw {

using dnnl::memory;

namespace {

constexpr size_t kPlansKept = 8;
constexpr int64_t kMostParts = 32, kMostPartBytes = int64_t{64} << 20;  // of a weight's gradient; bytes of all parts

// The convolution whose gradient is taken: X [N, C, D...], W [O, C/groups, K...], Y [N, O, E...].
struct Geometry {
  Dims x, w, y;
  int64_t groups = 1;
  Window window;

  bool empty() const { return count_of(x) == 0 || count_of(w) == 0 || count_of(y) == 0; }
};

Geometry geometry_of(const Node& node, const Dims& x, const Dims& w, const Dims& dy) {
  Geometry g{x, w, {}, node.get_int("group", 1), {}};
  g.y = convolution_output(node, x, w, false, g.window);
  if (dy != g.y) throw Error("a gradient of shape " + to_string(dy) + " for a convolution to " + to_string(g.y), "give that of its result");
  return g;
}

// ConvGradInput takes dY, W and the shape of X; ConvGradWeight dY and X.
template <bool kWeight>
Geometry read_geometry(RunContext& r, const Node& node) {
  const Dims& dy = r.input(0).dims;
  if (!kWeight) return geometry_of(node, r.input_ints(2), r.input(1).dims, dy);
  const Dims x = r.input(1).dims, kernel = node.get_ints("kernel_shape");
  if (dy.size() < 3 || x.size() != dy.size())
    throw Error("a gradient " + to_string(dy) + " and an input " + to_string(x), "X is [N,C,D1,...]");
  Dims w = {dy[1], x[1] / std::max<int64_t>(node.get_int("group", 1), 1)};
  w.insert(w.end(), kernel.begin(), kernel.end());
  return geometry_of(node, x, w, dy);
}

void input_by_loops(RunContext& r, const Geometry& g, double* dx) {
  const double *dy = r.input(0).as<double>(), *w = r.input(1).as<double>();
  const ConvolutionShape shape{g.y[0], g.y[1], g.x[1], g.groups, spatial_of(g.y), spatial_of(g.x)};
  const int64_t in_cells = count_of(shape.in), out_cells = count_of(shape.out), taps = g.window.taps(), second = g.w[1];
  convolve_transposed_by_loops<double>(
      shape, g.window, r.threads(), [&](int64_t row, int64_t cell) { return dy[row * in_cells + cell]; },
      [&](int64_t a, int64_t b, int64_t t) { return w[(a * second + b) * taps + t]; },
      [&](int64_t n, int64_t c, const double* sums) { std::copy_n(sums, out_cells, dx + (n * g.x[1] + c) * out_cells); });
}

void weight_by_loops(RunContext& r, const Geometry& g, double* dw) {
  const double *dy = r.input(0).as<double>(), *x = r.input(1).as<double>();
  const Dims in = spatial_of(g.x), out = spatial_of(g.y);
  const int64_t in_cells = count_of(in), out_cells = count_of(out), taps = g.window.taps(), group_out = g.w[0] / g.groups;
  parallel_for(g.w[0] * g.w[1], 1, r.threads(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t o = i / g.w[1], c = o / group_out * g.w[1] + i % g.w[1];
      Dims tap(g.window.rank(), 0);
      int64_t t = 0;
      do {
        double sum = 0;
        for_each_pair(g.window, in, out, tap, [&](int64_t out_cell, int64_t in_cell) {
          for (int64_t n = 0; n < g.x[0]; ++n)
            sum += dy[(n * g.y[1] + o) * out_cells + out_cell] * x[(n * g.x[1] + c) * in_cells + in_cell];
        });
        dw[i * taps + t++] = sum;
      } while (next_index(tap, g.window.kernel));
    }
  });
}

// A primitive for one set of shapes, and the formats it wants its tensors in.
struct Plan {
  onednn::Call call;
  memory::desc dy, other, result, scratchpad;  // `other`: W or X
};

// [groups, O/groups, C/groups, K...] where there are several.
Dims grouped_weights(const Geometry& g) {
  Dims dims = g.w;
  if (g.groups == 1) return dims;
  dims[0] /= g.groups;
  dims.insert(dims.begin(), g.groups);
  return dims;
}

template <bool kWeight>
Plan make_plan(const Geometry& g) {
  const auto any = [](const Dims& dims) { return onednn::any_format(dims); };
  const Dims w = grouped_weights(g);
  Dims dilations = g.window.dilations, right(g.window.rank());
  for (size_t i = 0; i < g.window.rank(); ++i) {
    --dilations[i];
    right[i] = (g.y[i + 2] - 1) * g.window.strides[i] + g.window.extent(i) - g.x[i + 2] - g.window.pads_begin[i];
  }
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  constexpr auto kDirect = dnnl::algorithm::convolution_direct;
  const dnnl::convolution_forward::primitive_desc forward(onednn::engine(), dnnl::prop_kind::forward_training, kDirect, any(g.x), any(w),
                                                          any(g.y), g.window.strides, dilations, g.window.pads_begin, right, attributes);
  Plan plan;
  const auto keep = [&](const auto& desc, auto primitive, int other, const memory::desc& other_desc, int result, const memory::desc& made) {
    onednn::report_choice(kWeight ? "ConvGradWeight" : "ConvGradInput", g.x, desc.impl_info_str());
    plan.dy = desc.diff_dst_desc(), plan.other = other_desc, plan.result = made, plan.scratchpad = desc.scratchpad_desc();
    plan.call = onednn::Call(primitive);
    plan.call.add(DNNL_ARG_DIFF_DST, plan.dy);
    plan.call.add(other, plan.other);
    plan.call.add(result, plan.result);
    plan.call.add(DNNL_ARG_SCRATCHPAD, plan.scratchpad);
  };
  if constexpr (kWeight) {
    const dnnl::convolution_backward_weights::primitive_desc desc(onednn::engine(), kDirect, any(g.x), any(w), any(g.y), g.window.strides,
                                                                  dilations, g.window.pads_begin, right, forward, attributes);
    keep(desc, dnnl::convolution_backward_weights(desc), DNNL_ARG_SRC, desc.src_desc(), DNNL_ARG_DIFF_WEIGHTS, desc.diff_weights_desc());
  } else {
    const dnnl::convolution_backward_data::primitive_desc desc(onednn::engine(), kDirect, any(g.x), any(w), any(g.y), g.window.strides,
                                                               dilations, g.window.pads_begin, right, forward, attributes);
    keep(desc, dnnl::convolution_backward_data(desc), DNNL_ARG_WEIGHTS, desc.weights_desc(), DNNL_ARG_DIFF_SRC, desc.diff_src_desc());
  }
  return plan;
}

// Where a run of a plan has its copies in the primitive's formats, from the beginning of its scratch memory.
struct Layouts {
  memory::desc dy, other, result;  // as the tensors are
  ScratchPieces scratch;
  size_t at_dy, at_other, at_result, at_pad;

  Layouts(const Geometry& g, const Plan& plan, bool of_weight) {
    const memory::desc w = onednn::description(grouped_weights(g)), x = onednn::description(g.x);
    dy = onednn::description(g.y), other = of_weight ? x : w, result = of_weight ? w : x;
    at_dy = scratch.add(plan.dy == dy ? 0 : plan.dy.get_size()), at_other = scratch.add(plan.other == other ? 0 : plan.other.get_size());
    at_result = scratch.add(plan.result == result ? 0 : plan.result.get_size()), at_pad = scratch.add(plan.scratchpad.get_size());
  }
};

// Copies what the primitive wants in other formats than the plain one, before and after.
template <bool kWeight>
void run_plan(Plan& plan, const Layouts& at, const void* dy, const void* other, void* made, char* block) {
  const auto given = [&](int argument, const memory::desc& from, const memory::desc& to, const void* data, size_t place) {
    if (from != to) onednn::Reordering(from, to).run(data, block + place);
    plan.call.set(argument, from == to ? data : block + place);
  };
  given(DNNL_ARG_DIFF_DST, at.dy, plan.dy, dy, at.at_dy);
  given(kWeight ? DNNL_ARG_SRC : DNNL_ARG_WEIGHTS, at.other, plan.other, other, at.at_other);
  void* to = plan.result == at.result ? made : block + at.at_result;
  plan.call.set(kWeight ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_DIFF_SRC, to);
  plan.call.set(DNNL_ARG_SCRATCHPAD, block ? block + at.at_pad : nullptr);
  plan.call.run();
  if (to != made) onednn::Reordering(plan.result, at.result).run(to, made);
}

// Primitives that are made while it lives run on one thread.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

int64_t parts_of(const Geometry& g) {
  const int64_t bytes = count_of(g.w) * static_cast<int64_t>(sizeof(float));
  return std::clamp<int64_t>(kMostPartBytes / std::max<int64_t>(bytes, 1), 1, std::min(kMostParts, g.x[0]));
}

template <bool kWeight>
class ConvolutionGradient {
 public:
  explicit ConvolutionGradient(const Node& node) : node_(node) {}

  void run(RunContext& r) {
    const Geometry g = read_geometry<kWeight>(r, node_);
    TensorView& made = sized_output(r, 0, kWeight ? g.w : g.x);
    if (made.count() == 0) return;
    if (g.empty()) {
      std::fill_n(static_cast<char*>(made.data), made.bytes(), 0);
    } else if (made.dtype == DType::float64) {
      kWeight ? weight_by_loops(r, g, made.as<double>()) : input_by_loops(r, g, made.as<double>());
    } else if (kWeight && parts_of(g) > 1) {
      run_parts(r, g, made.as<float>());
    } else {
      Plan& plan = plans_for(g, 1).front();
      const Layouts at(g, plan, kWeight);
      char* block = at.scratch.total() ? static_cast<char*>(r.scratch(at.scratch.total())) : nullptr;
      run_plan<kWeight>(plan, at, r.input(0).data, r.input(1).data, made.data, block);
    }
  }

 private:
  // One for each part, in order: larger ones first.
  struct Plans {
    std::vector<Dims> key;
    std::vector<Plan> parts;
  };
  static Geometry part_of(const Geometry& g, int64_t part, int64_t parts) {
    Geometry own = g;
    own.x[0] = own.y[0] = g.x[0] / parts + (part < g.x[0] % parts);
    return own;
  }

  std::vector<Plan>& plans_for(const Geometry& g, int64_t parts) {
    const std::vector<Dims> key = {g.x, g.w};
    auto it = std::find_if(plans_.begin(), plans_.end(), [&](const Plans& plans) { return plans.key == key; });
    if (it != plans_.end()) {
      plans_.splice(plans_.begin(), plans_, it);
      return plans_.front().parts;
    }
    try {
      Plans made{key, {}};
      std::optional<OneThread> one;
      if (parts > 1) one.emplace();
      for (int64_t part = 0; part < parts; ++part) made.parts.push_back(make_plan<kWeight>(part_of(g, part, parts)));
      plans_.push_front(std::move(made));
    } catch (const dnnl::error& error) {
      onednn::rethrow(error, "the gradient of a convolution");
    }
    if (plans_.size() > kPlansKept) plans_.pop_back();
    return plans_.front().parts;
  }

  void run_parts(RunContext& r, const Geometry& g, float* made) {
    const int64_t parts = parts_of(g), count = count_of(g.w);
    std::vector<Plan>& plans = plans_for(g, parts);
    std::vector<Layouts> at;
    ScratchPieces scratch;
    std::vector<size_t> sums, blocks;
    for (int64_t part = 0; part < parts; ++part) {
      at.emplace_back(part_of(g, part, parts), plans[static_cast<size_t>(part)], true);
      sums.push_back(scratch.add(static_cast<size_t>(count) * sizeof(float)));
      blocks.push_back(scratch.add(at.back().scratch.total()));
    }
    char* memory = static_cast<char*>(r.scratch(scratch.total()));
    const int64_t dy_sample = count_of(g.y) / g.y[0], x_sample = count_of(g.x) / g.x[0];
    parallel_for(parts, 1, r.threads(), [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const auto i = static_cast<size_t>(part);
        const int64_t first = g.x[0] / parts * part + std::min(part, g.x[0] % parts);
        run_plan<true>(plans[i], at[i], r.input(0).as<float>() + first * dy_sample, r.input(1).as<float>() + first * x_sample,
                       memory + sums[i], memory + blocks[i]);
      }
    });
    parallel_for(count, kGrainElements, r.threads(), [&](int64_t begin, int64_t end) {
      for (int64_t e = begin; e < end; ++e) {
        float sum = 0;
        for (size_t offset : sums) sum += reinterpret_cast<const float*>(memory + offset)[e];
        made[e] = sum;
      }
    });
  }

  Node node_;
  std::list<Plans> plans_;
};

template <bool kWeight>
CompiledKernel make_plain(const CompileContext& c) {
  const DType type = c.input_dtype(0);
  if (!contains(types::wide_floats, type)) throw Error(not_supported(type), "cast the tensor to float32");
  return {[gradient = std::make_shared<ConvolutionGradient<kWeight>>(c.node())](RunContext& r) { gradient->run(r); }};
}

}  // namespace

void register_convolution_gradients(KernelRegistry& registry) {
  add_gradient(registry, "ConvGradInput", any_float<make_plain<false>>);
  add_gradient(registry, "ConvGradWeight", any_float<make_plain<true>>);
}

}  // namespace fretsaw
