// The kernel of a step without reductions: each thread computes some neighbours of the outputs.
//
//   Add(x [8, 512, 768], bias [768]) -> Gelu        sizes [4096, 768]; x is linear, bias has strides [0, 1]
//   a thread: 4 neighbours of x and of bias, by one access of 16 bytes each
#include <fmt/format.h>

#include <algorithm>

#include "kernels/cuda/pointwise_print.h"

namespace fretsaw::cuda {
namespace {

using Access = SpacePlan::Access;

constexpr unsigned block_threads = 256;

// Outputs have the space's shape. In nhwc the space is walked in that order; operands that are smaller are indexed as they lie.
struct PointSpace {
  Dims dims;
  Layout layout = Layout::plain;
  std::vector<int> operands;
  std::vector<Layout> layouts;  // of the operands
  SpacePlan plan;
};

Dims in_order(const Dims& dims, Layout layout) {
  return layout == Layout::nhwc ? Dims{dims[0], dims[2], dims[3], dims[1]} : dims;
}

std::vector<Layout> offered_layouts(const PointStep& step, const std::vector<Layout>& offered) {
  std::vector<Layout> layouts(step.values.size(), Layout::plain);
  for (const auto& input : step.inputs) {
    const bool four = step.at(input.value).dims && step.at(input.value).dims->size() == 4;
    if (four && input.index < offered.size() && offered[input.index] == Layout::nhwc)
      layouts[static_cast<size_t>(input.value)] = Layout::nhwc;
  }
  return layouts;
}

PointSpace space_of(const PointStep& step, const std::vector<Layout>& offered) {
  PointSpace space;
  space.dims = *step.at(step.outputs.front().value).dims;
  space.operands = operands_read(step);
  const std::vector<Layout> left_in = offered_layouts(step, offered);
  for (int i : space.operands) {
    if (left_in[static_cast<size_t>(i)] == Layout::nhwc && *step.at(i).dims == space.dims) space.layout = Layout::nhwc;
  }
  std::vector<Strides> strides;
  for (int i : space.operands) {
    const Dims& dims = *step.at(i).dims;
    const bool full = dims == space.dims;
    space.layouts.push_back(full ? space.layout : left_in[static_cast<size_t>(i)]);
    strides.push_back(in_order(broadcast_strides(dims, space.layouts.back(), space.dims), space.layout));
  }
  space.plan = plan_space(in_order(space.dims, space.layout), strides, std::vector<int64_t>(strides.size(), 1));
  return space;
}

// Neighbours that a thread computes: 16 bytes of the largest elements that are read or written in one go.
int vector_of(const PointStep& step, const PointSpace& space) {
  int bits = 8;
  for (const auto& output : step.outputs) bits = std::max(bits, bits_of(step.at(output.value).dtype));
  for (size_t k = 0; k < space.operands.size(); ++k) {
    if (space.plan.operands[k].access == Access::linear) bits = std::max(bits, bits_of(step.at(space.operands[k]).dtype));
  }
  return std::clamp(128 / bits, 1, 8);
}

class PointPrinter {
 public:
  PointPrinter(const PointStep& step, const PointSpace& space)
      : step_(step), space_(space), printer_(step), numbers_(strided_numbers(space.plan)), vector_(vector_of(step, space)) {
    has_strides_ = std::any_of(space.plan.operands.begin(), space.plan.operands.end(), [](const auto& o) { return !o.strides.empty(); });
    whole_rows_ = space.plan.sizes.back() % vector_ == 0;
  }
  int vector() const { return vector_; }
  std::string name() const { return printer_.name("points"); }

  std::string declarations() const { return printer_.declarations(space_.plan, space_.operands.size(), step_.outputs.size()); }
  std::string body() const {
    std::string text = fmt::format("typedef {} I;\n", space_.plan.wide() ? "unsigned long long" : "unsigned");
    text += fmt::format("const I first = (I(block) * {}u + threadIdx.x) * {}u, count = I(a.count);\n", block_threads, vector_);
    text +=
        fmt::format("if (first >= count) return;\nconst I left = count - first;\nconst bool whole = a.aligned && left >= {}u;\n", vector_);
    if (has_strides_ && whole_rows_) text += StepPrinter::coordinates(space_.plan, "first");
    for (size_t k = 0; k < space_.operands.size(); ++k) text += loaded(k);
    if (has_strides_ && !whole_rows_) text += loaded_one_by_one();
    return text + computed();
  }

 private:
  const char* storage(size_t k) const { return storage_type(step_.at(space_.operands[k]).dtype); }
  std::string address(size_t k) const { return input_address(step_, space_.operands[k], k); }
  std::string pack(size_t k) const { return fmt::format("Pack<{}, {}> p{}", storage(k), vector_, space_.operands[k]); }
  std::string one_value(size_t k, const std::string& at) const {
    const int i = space_.operands[k];
    return fmt::format("const {0} v{1} = {0}({2}[{3}]);\n", std::string("V") + std::to_string(i), i, address(k), at);
  }
  bool same_for_all(size_t k) const {  // of the neighbours of a thread
    const SpacePlan::Operand& o = space_.plan.operands[k];
    return o.access == Access::single || (o.access == Access::strided && whole_rows_ && o.strides.back() == 0);
  }
  // Declares v of an operand that is the same for all neighbours, or p with all of them.
  std::string loaded(size_t k) const {
    const SpacePlan::Operand& o = space_.plan.operands[k];
    const std::string type = fmt::format("typedef {} V{};\n", compute_type(step_.at(space_.operands[k]).dtype), space_.operands[k]);
    if (o.access == Access::linear)
      return type + fmt::format("const {} = load<{}>({} + first, left, whole);\n", pack(k), vector_, address(k));
    if (o.access == Access::single) return type + one_value(k, "0");
    if (!whole_rows_) return type + fmt::format("{} = {{}};\n", pack(k));
    const std::string offset = StepPrinter::offset(space_.plan, k, numbers_[k], space_.plan.sizes.size());
    if (o.strides.back() == 0) return type + one_value(k, offset);
    const bool neighbours =
        o.strides.back() == 1 && std::all_of(o.strides.begin(), o.strides.end() - 1, [&](int64_t s) { return s % vector_ == 0; });
    if (neighbours)
      return type + fmt::format("const {0} = load<{1}>({2} + ({3}), I({1}), a.aligned);\n", pack(k), vector_, address(k), offset);
    return type +
           fmt::format("{} = {{}};\n#pragma unroll\nfor (int j = 0; j < {}; ++j) p{}.at[j] = {}[({}) + I(j) * I(a.strides[{}][{}])];\n",
                       pack(k), vector_, space_.operands[k], address(k), offset, numbers_[k], o.strides.size() - 1);
  }
  // Rows that end between the neighbours of a thread: each has coordinates of its own.
  std::string loaded_one_by_one() const {
    std::string text =
        fmt::format("#pragma unroll\nfor (int j = 0; j < {}; ++j) {{\nconst I index = I(j) < left ? first + I(j) : first;\n", vector_);
    text += StepPrinter::coordinates(space_.plan, "index");
    for (size_t k = 0; k < space_.operands.size(); ++k) {
      if (space_.plan.operands[k].access != Access::strided) continue;
      text += fmt::format("p{}.at[j] = {}[{}];\n", space_.operands[k], address(k),
                          StepPrinter::offset(space_.plan, k, numbers_[k], space_.plan.sizes.size()));
    }
    return text + "}\n";
  }
  std::string computed() const {
    std::string text;
    for (size_t o = 0; o < step_.outputs.size(); ++o)
      text += fmt::format("Pack<{}, {}> r{} = {{}};\n", storage_type(step_.at(step_.outputs[o].value).dtype), vector_, o);
    text += fmt::format("#pragma unroll\nfor (int j = 0; j < {}; ++j) {{\n", vector_);
    for (size_t k = 0; k < space_.operands.size(); ++k) {
      if (!same_for_all(k)) text += fmt::format("const V{0} v{0} = V{0}(p{0}.at[j]);\n", space_.operands[k]);
    }
    const std::vector<bool> needed = needed_values(step_);
    for (size_t i = 0; i < step_.values.size(); ++i) {
      if (needed[i] && step_.values[i].kind == PointValue::Kind::function) text += printer_.computed(static_cast<int>(i));
    }
    for (size_t o = 0; o < step_.outputs.size(); ++o) {
      const int value = step_.outputs[o].value;
      // Opaque elements of 16 bytes have no cast.
      const std::string cast = step_.at(value).dtype == DType::complex128 ? "" : fmt::format("({})", storage_type(step_.at(value).dtype));
      text += fmt::format("r{}.at[j] = {}({});\n", o, cast, printer_.value(value));
    }
    text += "}\n";
    for (size_t o = 0; o < step_.outputs.size(); ++o)
      text += fmt::format("store<{}>({} + first, r{}, left, whole);\n", vector_, output_address(step_, step_.outputs[o].value, o), o);
    return text;
  }

  const PointStep& step_;
  const PointSpace& space_;
  StepPrinter printer_;
  std::vector<size_t> numbers_;
  int vector_;
  bool has_strides_, whole_rows_;
};

std::string kernel_text(const std::string& name, const char* arguments, const std::string& text) {
  return fmt::format(
      "extern \"C\" __global__ void __launch_bounds__({}) {}(const __grid_constant__ {}) {{\nbegin_beside_earlier();\n{}}}\n",
      block_threads, name, arguments, text);
}

}  // namespace

std::string joined_source(const PreparedStep& step, size_t members) {
  const std::string all = fmt::format("struct Joined {{\n  Arguments of[{0}];\n  unsigned ends[{0}];\n}};\n", members);
  std::string text = fmt::format("unsigned member = 0;\nfor (unsigned high = {}u; member < high;) {{\n", members - 1);
  text += "const unsigned middle = (member + high) / 2;\nif (blockIdx.x < j.ends[middle]) high = middle; else member = middle + 1;\n}\n";
  text += "const Arguments& a = j.of[member];\nconst unsigned block = member > 0 ? blockIdx.x - j.ends[member - 1] : blockIdx.x;\n";
  return StepPrinter::source(step.declarations + all, kernel_text(step.name, "Joined j", text + step.body));
}

PreparedStep prepare_points(const PointStep& step, const std::vector<Layout>& offered, size_t outputs) {
  const PointSpace space = space_of(step, offered);
  const PointPrinter printer(step, space);
  PreparedStep made;
  made.name = printer.name();
  made.declarations = printer.declarations(), made.body = printer.body();
  made.source =
      StepPrinter::source(made.declarations, kernel_text(made.name, "Arguments a", "const unsigned block = blockIdx.x;\n" + made.body));
  made.threads = block_threads;
  const uint64_t a_block = uint64_t{block_threads} * static_cast<unsigned>(printer.vector());
  made.blocks = (static_cast<uint64_t>(space.plan.count) + a_block - 1) / a_block;
  made.arguments = pack_arguments(space.operands.size() + step.outputs.size(), space.plan);
  made.input_layouts.assign(offered.size(), Layout::plain);
  made.output_layouts.assign(outputs, space.layout);
  for (size_t k = 0; k < space.operands.size(); ++k) {
    bool first = true;
    for (const auto& input : step.inputs) {
      if (input.value != space.operands[k]) continue;
      if (first) made.inputs.push_back(input.index);
      first = false;
      made.input_layouts[input.index] = space.layouts[k];
    }
  }
  for (const auto& output : step.outputs) {
    made.outputs.push_back({output.index, *step.at(output.value).dims, step.at(output.value).dtype});
  }
  choose_overwritten(step, space.operands, made);
  return made;
}

}  // namespace fretsaw::cuda
