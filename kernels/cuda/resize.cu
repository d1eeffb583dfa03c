// Resize: a kernel writes the taps of each axis into tables, a second one reads the input by them.
#include <algorithm>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/resize_taps.h"
#include "kernels/cuda/index_math.h"
#include "kernels/cuda/movement.h"
#include "kernels/cuda/resize.h"
#include "kernels/cuda/strided_copy.h"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;

// Where the tables of one axis lie in the scratch memory.
struct TableLayout {
  size_t index = 0, weight = 0, extrapolated = 0, end = 0;

  TableLayout(const TapRule& rule, size_t weight_bytes, size_t begin) {
    const auto entries = static_cast<size_t>(rule.taps * rule.size.out);
    const auto aligned = [](size_t at) { return (at + 15) / 16 * 16; };
    index = aligned(begin);
    weight = aligned(index + entries * sizeof(int32_t));
    extrapolated = aligned(weight + entries * weight_bytes);
    end = extrapolated + static_cast<size_t>(rule.size.out);
  }
};

template <typename W>
__global__ void __launch_bounds__(kThreads) write_taps(TapRule rule, int32_t* index, W* weight, uint8_t* extrapolated) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= rule.size.out) return;
  const double x = rule.coordinate(j);
  extrapolated[j] = rule.extrapolates(x);
  const int64_t out = rule.size.out;
  rule.each_tap(x, [=](int64_t t, int32_t i, double w) {
    index[t * out + j] = i;
    weight[t * out + j] = static_cast<W>(w);
  });
}

size_t table_bytes(const std::vector<TapRule>& rules, size_t weight_bytes) {
  size_t bytes = 0;
  for (const TapRule& rule : rules) {
    if (!rule.identity) bytes = TableLayout(rule, weight_bytes, bytes).end;
  }
  return bytes;
}

// Has a kernel write the axis's table to `scratch`.
ResizedAxis resized_axis(const TapRule& rule, const TableLayout& table, size_t weight_bytes, char* scratch, cudaStream_t stream) {
  auto* index = reinterpret_cast<int32_t*>(scratch + table.index);
  auto* extrapolated = reinterpret_cast<uint8_t*>(scratch + table.extrapolated);
  const auto blocks = static_cast<unsigned>((rule.size.out + kThreads - 1) / kThreads);
  if (weight_bytes == sizeof(double)) {
    write_taps<double><<<blocks, kThreads, 0, stream>>>(rule, index, reinterpret_cast<double*>(scratch + table.weight), extrapolated);
  } else {
    write_taps<float><<<blocks, kThreads, 0, stream>>>(rule, index, reinterpret_cast<float*>(scratch + table.weight), extrapolated);
  }
  check_launch("Resize's tables");
  ResizedAxis axis{.out = rule.size.out, .taps = rule.taps, .index = index, .weight = scratch + table.weight};
  if (rule.rule.coordinates == Coordinates::tf_crop_and_resize) axis.extrapolated = extrapolated;
  return axis;
}

// From the rules of all dimensions in the order of memory. The axes that change stand at the plan's end.
ResizePlan<kMaxResized> plan_of(const std::vector<TapRule>& rules, size_t weight_bytes, char* scratch, cudaStream_t stream) {
  const auto changed = std::count_if(rules.begin(), rules.end(), [](const TapRule& rule) { return !rule.identity; });
  require(changed <= kMaxResized, "more than four axes are resized at once", "use --device cpu");
  ResizePlan<kMaxResized> plan;
  int64_t level = kMaxResized - changed, input_elements = 1;
  size_t used = 0;
  for (const TapRule& rule : rules) {
    if (rule.identity) {
      plan.kept[level].extent *= rule.size.out;
      continue;
    }
    const TableLayout table(rule, weight_bytes, used);
    used = table.end;
    plan.resized[level++] = resized_axis(rule, table, weight_bytes, scratch, stream);
  }
  auto rule = rules.rbegin();
  for (level = kMaxResized; level >= 0; --level) {
    plan.kept[level].stride = input_elements;
    for (; rule != rules.rend() && rule->identity; ++rule) input_elements *= rule->size.in;
    if (rule == rules.rend()) break;
    plan.resized[level - 1].stride = input_elements;
    input_elements *= rule++->size.in;
  }
  return plan;
}

CompiledKernel make_resize(const CompileContext& c) {
  const ResizeNode node(c.node());
  const Layout layout = offered_layout(c, 0);
  const auto run = [=](RunContext& r) {
    const TensorView& x = r.input(0);
    const std::vector<AxisSize> sizes = axis_sizes(node, r);
    Dims dims;
    for (const AxisSize& size : sizes) dims.push_back(size.out);
    TensorView& y = device_output(r, 0, dims, x.dtype, layout);
    if (y.count() == 0) return;
    require(x.count() > 0, "a tensor without elements can't be resized to one with elements");
    std::vector<TapRule> rules(sizes.size(), TapRule(node.rule, AxisSize{1, 1}));
    for (size_t k = 0; k < sizes.size(); ++k) rules[physical_axis(k, layout)] = TapRule(node.rule, sizes[k]);
    if (std::all_of(rules.begin(), rules.end(), [](const TapRule& rule) { return rule.identity; })) {
      return r.device().copy(y.data, x.data, x.bytes());
    }
    const size_t weight_bytes = computes_in_double(x.dtype) ? sizeof(double) : sizeof(float);
    auto* scratch = static_cast<char*>(r.scratch(table_bytes(rules, weight_bytes)));
    const auto plan = plan_of(rules, weight_bytes, scratch, stream_of(r));
    if (node.rule.mode == ResizeMode::nearest) {
      resize_nearest(plan, element_bytes(x.dtype), x.data, y.data, node.extrapolation, x.dtype, stream_of(r));
    } else {
      resize_smooth(plan, x.data, y.data, node.extrapolation, x.dtype, stream_of(r));
    }
  };
  return {.run = run, .input_layouts = {layout}, .output_layouts = {layout}};
}

std::string unsupported_resize(const CompileContext& c) {
  constexpr TypeSet kSmooth = types::floats | set_of(DType::int8, DType::uint8, DType::int32, DType::int64);
  const DType dtype = c.input_dtype(0);
  if (c.node().get_string("mode", "nearest") != "nearest") return contains(kSmooth, dtype) ? "" : not_supported(dtype);
  const std::string reason = refuse_unmovable(dtype);
  return reason.empty() && (dtype == DType::complex64 || dtype == DType::complex128) ? not_supported(dtype) : reason;
}

}  // namespace

void register_resize(KernelRegistry& registry) {
  registry.add({.op = "Resize", .make = make_resize, .unsupported = unsupported_resize, .host_inputs = {1, 2, 3}});
}

}  // namespace fretsaw::cuda
