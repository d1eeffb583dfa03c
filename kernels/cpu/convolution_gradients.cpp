// ConvGradInput and ConvGradWeight: oneDNN's in float32, loops in float64.
#include <algorithm>
#include <list>
#include <memory>

#include "kernels/cpu/convolution.h"
#include "kernels/cpu/convolution_loops.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/gradients.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/scalar_types.h"

namespace fretsaw {

using dnnl::memory;

namespace {

constexpr size_t kPlansKept = 8;

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
  std::vector<Dims> key;
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
    } else {
      run_plan(r, g, plan_for(g), made);
    }
  }

 private:
  Plan& plan_for(const Geometry& g) {
    const std::vector<Dims> key = {g.x, g.w};
    auto it = std::find_if(plans_.begin(), plans_.end(), [&](const Plan& plan) { return plan.key == key; });
    if (it != plans_.end()) {
      plans_.splice(plans_.begin(), plans_, it);
      return plans_.front();
    }
    try {
      plans_.push_front(make_plan<kWeight>(g));
    } catch (const dnnl::error& error) {
      onednn::rethrow(error, "the gradient of a convolution");
    }
    plans_.front().key = key;
    if (plans_.size() > kPlansKept) plans_.pop_back();
    return plans_.front();
  }

  // Copies what the primitive wants in other formats than the plain one, before and after.
  void run_plan(RunContext& r, const Geometry& g, Plan& plan, TensorView& made) {
    const memory::desc dy = onednn::description(g.y), w = onednn::description(grouped_weights(g)), x = onednn::description(g.x);
    const memory::desc &other = kWeight ? x : w, &result = kWeight ? w : x;
    onednn::ScratchPlan scratch;
    const size_t at_dy = scratch.add(plan.dy == dy ? 0 : plan.dy.get_size()),
                 at_other = scratch.add(plan.other == other ? 0 : plan.other.get_size()),
                 at_result = scratch.add(plan.result == result ? 0 : plan.result.get_size()),
                 at_pad = scratch.add(plan.scratchpad.get_size());
    char* block = scratch.total() ? static_cast<char*>(r.scratch(scratch.total())) : nullptr;
    const auto given = [&](int argument, const memory::desc& from, const memory::desc& to, const void* data, size_t at) {
      if (from != to) onednn::Reordering(from, to).run(data, block + at);
      plan.call.set(argument, from == to ? data : block + at);
    };
    given(DNNL_ARG_DIFF_DST, dy, plan.dy, r.input(0).data, at_dy);
    given(kWeight ? DNNL_ARG_SRC : DNNL_ARG_WEIGHTS, other, plan.other, r.input(1).data, at_other);
    void* to = plan.result == result ? made.data : block + at_result;
    plan.call.set(kWeight ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_DIFF_SRC, to);
    plan.call.set(DNNL_ARG_SCRATCHPAD, block ? block + at_pad : nullptr);
    plan.call.run();
    if (to != made.data) onednn::Reordering(plan.result, result).run(to, made.data);
  }

  Node node_;
  std::list<Plan> plans_;
};

template <bool kWeight>
CompiledKernel make_plain(const CompileContext& c) {
  const DType type = c.input_dtype(0);
  if (!contains(types::wide_floats, type)) throw Error(not_supported(type), "cast the tensor to float32");
  return {[gradient = std::make_shared<ConvolutionGradient<kWeight>>(c.node())](RunContext& r) { gradient->run(r); }};
}

template <bool kWeight>
CompiledKernel make_gradient(const CompileContext& c) {
  return make_any_float(c, make_plain<kWeight>);
}

}  // namespace

void register_convolution_gradients(KernelRegistry& registry) {
  add_gradient(registry, "ConvGradInput", make_gradient<false>);
  add_gradient(registry, "ConvGradWeight", make_gradient<true>);
}

}  // namespace fretsaw
