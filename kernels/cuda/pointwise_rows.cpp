// The kernel of a step with reductions over the last axis: some threads share a row and keep it in registers.
//
//   Add(x, residual) -> LayerNormalization                            rows of n elements
//   stage 0: s = x + residual, fold s      stage 1: d = s - mean, fold d * d      stage 2: y = d * inverse * scale + bias
//
// A stage ends with the folds of what it computed. What a later stage needs again is kept in registers; outputs are written in the
// last stage, so that they may lie on inputs. Which thread holds which element depends on n alone: a row gives the same bits in any step.
#include <fmt/format.h>

#include <algorithm>

#include "kernels/cuda/pointwise_print.h"

namespace fretsaw::cuda {
namespace {

using Access = SpacePlan::Access;
using Kind = PointValue::Kind;

constexpr int64_t longest_row = 16384;
constexpr int64_t a_thread = 8;  // elements, while there are threads enough

// A row in chunks of neighbours; chunk number k * threads + t is thread t's.
struct RowShape {
  explicit RowShape(int64_t n) : chunk(n % 4 == 0 ? 4 : 1) {
    const int64_t chunks = n / chunk, each = a_thread / chunk;
    if (chunks <= 32 * each) {
      while (threads < 32 && threads < chunks) threads *= 2;
      block = 128;
    } else {
      block = threads = std::min<int64_t>(1024, ((chunks + each - 1) / each + 31) / 32 * 32);
    }
    rounds = (chunks + threads - 1) / threads;
  }
  int64_t chunk, threads = 1, rounds = 1, block = 128;
};

const Dims& row_space(const PointStep& step) {
  const auto found = std::find_if(step.values.begin(), step.values.end(), [](const PointValue& v) { return v.kind == Kind::reduction; });
  return *step.at(found->arguments[0]).dims;
}

class RowPrinter {
 public:
  explicit RowPrinter(const PointStep& step)
      : step_(step),
        printer_(step),
        dims_(row_space(step)),
        shape_(dims_.back()),
        operands_(operands_read(step)),
        needed_(needed_values(step)) {
    const Dims leading(dims_.begin(), dims_.end() - 1);
    std::vector<Strides> strides;
    std::vector<int64_t> each;
    for (int i : operands_) {
      strides.push_back(broadcast_strides(*step.at(i).dims, Layout::plain, dims_));
      strides.back().pop_back();
      each.push_back(step.at(i).per_row ? 1 : dims_.back());
    }
    plan_ = plan_space(leading, strides, each);
    numbers_ = strided_numbers(plan_);
    find_stages();
  }

  const SpacePlan& plan() const { return plan_; }
  const RowShape& shape() const { return shape_; }
  const std::vector<int>& operands() const { return operands_; }
  std::string name() const { return printer_.name("rows"); }

  std::string source() const {
    std::string text = fmt::format("extern \"C\" __global__ void __launch_bounds__({}) {}(const __grid_constant__ Arguments a) {{\n",
                                   shape_.block, name());
    text += "begin_beside_earlier();\ntypedef unsigned long long I;\nconst bool whole = a.aligned;\n";
    text += fmt::format("const unsigned lane = threadIdx.x % {0}u, place = blockIdx.x * {1}u + threadIdx.x / {0}u;\n", shape_.threads,
                        shape_.block / shape_.threads);
    // Threads without a row of their own compute the last one again, for the folds take all threads of a warp.
    text += "const bool live = place < a.count;\nconst unsigned row = live ? place : unsigned(a.count) - 1u;\n";
    if (std::any_of(plan_.operands.begin(), plan_.operands.end(), [](const auto& o) { return !o.strides.empty(); }))
      text += StepPrinter::coordinates(plan_, "row");
    for (size_t k = 0; k < operands_.size(); ++k) text += offset_declared(k);
    for (int stage = 0; stage <= last_stage_; ++stage) text += stage_text(stage);
    return StepPrinter::source(printer_.declarations(plan_, operands_.size(), step_.outputs.size()), text + row_outputs() + "}\n");
  }

 private:
  bool is_needed(size_t i, Kind kind, bool per_row) const {
    const PointValue& v = step_.values[i];
    return needed_[i] && v.kind == kind && v.per_row == per_row;
  }

  // The stage in which each value is computed: of an operand, the first that uses it; of a reduction, the one after its fold.
  void find_stages() {
    stages_.assign(step_.values.size(), 0);
    first_use_.assign(step_.values.size(), 1 << 30);
    last_use_.assign(step_.values.size(), 0);
    for (size_t i = 0; i < step_.values.size(); ++i) {
      if (!needed_[i]) continue;
      for (int argument : step_.values[i].arguments) stages_[i] = std::max(stages_[i], stages_[static_cast<size_t>(argument)]);
      for (int argument : step_.values[i].arguments) use(argument, stages_[i]);
      if (step_.values[i].kind == Kind::reduction) ++stages_[i];
      last_stage_ = std::max(last_stage_, stages_[i]);
    }
    for (const auto& output : step_.outputs) use(output.value, last_stage_);
    for (int i : operands_) {
      if (!step_.at(i).per_row) stages_[static_cast<size_t>(i)] = first_use_[static_cast<size_t>(i)];
    }
  }
  void use(int i, int stage) {
    first_use_[static_cast<size_t>(i)] = std::min(first_use_[static_cast<size_t>(i)], stage);
    last_use_[static_cast<size_t>(i)] = std::max(last_use_[static_cast<size_t>(i)], stage);
  }
  bool is_kept(size_t i) const { return last_use_[i] > stages_[i]; }

  // Where the row begins in each operand.
  std::string offset_declared(size_t k) const {
    const SpacePlan::Operand& o = plan_.operands[k];
    const int i = operands_[k];
    if (o.access == Access::linear) return fmt::format("const I o{} = I(row) * {}u;\n", i, step_.at(i).per_row ? 1 : dims_.back());
    return fmt::format("const I o{} = {};\n", i,
                       o.access == Access::single ? "0" : StepPrinter::offset(plan_, k, numbers_[k], plan_.sizes.size()));
  }

  std::string stage_text(int stage) const {
    std::string text, folds;
    for (size_t k = 0; k < operands_.size(); ++k) {
      const int i = operands_[k];
      if (stage == 0 && step_.at(i).per_row)
        text += fmt::format("const {0} v{1} = {0}({2}[o{1}]);\n", compute_type(step_.at(i).dtype), i, input_address(step_, i, k));
    }
    for (size_t i = 0; i < step_.values.size(); ++i) {
      const PointValue& v = step_.values[i];
      if (is_needed(i, Kind::function, true) && stages_[i] == stage) text += printer_.computed(static_cast<int>(i));
      if (is_needed(i, Kind::function, false) || (is_needed(i, Kind::operand, false))) text += kept_declared(i, stage);
      if (!is_needed(i, Kind::reduction, true) || stages_[i] != stage + 1) continue;
      const char* type = compute_type(v.dtype);
      text += fmt::format("{0} f{1} = {2}::start<{0}>();\n", type, i, v.text);
      folds += shape_.threads > 32 ? fmt::format("__shared__ {} s{}[32];\n", type, i) : "";
      folds += fmt::format("const {0} v{1} = fold_row<{2}, {3}, {0}>(f{1}, {4});\n", type, i, shape_.threads, v.text,
                           shape_.threads > 32 ? fmt::format("s{}", i) : "nullptr");
    }
    return text + loop_text(stage) + folds;
  }
  std::string kept_declared(size_t i, int stage) const {
    if (!is_kept(i) || stages_[i] != stage) return "";
    return fmt::format("{} k{}[{}];\n", compute_type(step_.values[i].dtype), i, shape_.rounds * shape_.chunk);
  }

  // What a stage does for each element of the row.
  std::string loop_text(int stage) const {
    std::string loads, body, stores;
    for (size_t k = 0; k < operands_.size(); ++k) {
      const auto i = static_cast<size_t>(operands_[k]);
      if (step_.values[i].per_row || stages_[i] != stage) continue;
      loads += fmt::format("const auto p{0} = load<{1}>({2} + o{0} + column, {1}u, whole);\n", i, shape_.chunk,
                           input_address(step_, operands_[k], k));
    }
    for (size_t i = 0; i < step_.values.size(); ++i) body += element_text(i, stage);
    if (stage == last_stage_) {
      for (size_t o = 0; o < step_.outputs.size(); ++o) {
        const PointValue& v = step_.at(step_.outputs[o].value);
        if (v.per_row) continue;
        loads += fmt::format("Pack<{}, {}> r{};\n", storage_type(v.dtype), shape_.chunk, o);
        body += fmt::format("r{}.at[j] = ({})({});\n", o, storage_type(v.dtype), printer_.value(step_.outputs[o].value));
        stores += fmt::format("if (live) store<{}>({} + I(row) * {}u + column, r{}, {}u, whole);\n", shape_.chunk,
                              output_address(step_, step_.outputs[o].value, o), dims_.back(), o, shape_.chunk);
      }
    }
    if (body.empty()) return "";
    return fmt::format(
        "#pragma unroll\nfor (int round = 0; round < {}; ++round) {{\nconst unsigned column = (round * {}u + lane) * {}u;\n"
        "if (column < {}u) {{\n{}#pragma unroll\nfor (int j = 0; j < {}; ++j) {{\nconst int e = round * {} + j;\n{}}}\n{}}}\n}}\n",
        shape_.rounds, shape_.threads, shape_.chunk, dims_.back(), loads, shape_.chunk, shape_.chunk, body, stores);
  }
  // Value `i` at element e: taken again, computed, or folded.
  std::string element_text(size_t i, int stage) const {
    const PointValue& v = step_.values[i];
    if (is_needed(i, Kind::reduction, true)) {
      return stages_[i] == stage + 1 ? fmt::format("f{0} = {1}()(f{0}, {2});\n", i, v.text, printer_.value(v.arguments[0])) : "";
    }
    if (!needed_[i] || v.per_row || v.kind == Kind::literal) return "";
    const char* type = compute_type(v.dtype);
    if (stages_[i] < stage && stage <= last_use_[i]) return used_in(i, stage) ? fmt::format("const {0} v{1} = k{1}[e];\n", type, i) : "";
    if (stages_[i] != stage) return "";
    const std::string keep = is_kept(i) ? fmt::format("k{0}[e] = v{0};\n", i) : "";
    if (v.kind == Kind::operand) return fmt::format("const {0} v{1} = {0}(p{1}.at[j]);\n", type, i) + keep;
    return printer_.computed(static_cast<int>(i)) + keep;
  }
  bool used_in(size_t i, int stage) const {
    const auto value = static_cast<int>(i);
    for (size_t j = 0; j < step_.values.size(); ++j) {
      const PointValue& user = step_.values[j];
      const int at = user.kind == Kind::reduction ? stages_[j] - 1 : stages_[j];
      if (needed_[j] && at == stage && std::count(user.arguments.begin(), user.arguments.end(), value)) return true;
    }
    return stage == last_stage_ &&
           std::any_of(step_.outputs.begin(), step_.outputs.end(), [&](const auto& output) { return output.value == value; });
  }

  std::string row_outputs() const {
    std::string text;
    for (size_t o = 0; o < step_.outputs.size(); ++o) {
      const PointValue& v = step_.at(step_.outputs[o].value);
      if (!v.per_row) continue;
      text += fmt::format("if (live && lane == 0) {}[row] = ({})({});\n", output_address(step_, step_.outputs[o].value, o),
                          storage_type(v.dtype), printer_.value(step_.outputs[o].value));
    }
    return text;
  }

  const PointStep& step_;
  StepPrinter printer_;
  const Dims dims_;
  const RowShape shape_;
  const std::vector<int> operands_;
  const std::vector<bool> needed_;
  SpacePlan plan_;
  std::vector<size_t> numbers_;
  std::vector<int> stages_, first_use_, last_use_;
  int last_stage_ = 0;
};

}  // namespace

std::string refuse_rows(const PointStep& step) {
  const Dims& space = row_space(step);
  if (space.back() > longest_row) return "rows of more than " + std::to_string(longest_row) + " elements";
  if (count_of(space) / space.back() >= (int64_t{1} << 31) - 1024) return "more than 2^31 rows";
  for (const PointValue& v : step.values) {
    if (v.kind == Kind::reduction && *step.at(v.arguments[0]).dims != space) return "reductions over rows of two shapes";
  }
  Dims one = space;
  one.back() = 1;
  const Dims dropped(space.begin(), space.end() - 1);
  for (const auto& output : step.outputs) {
    const PointValue& v = step.at(output.value);
    if (*v.dims != (v.dropped ? dropped : v.per_row ? one : space)) return "results of another shape than the rows";
  }
  return "";
}

PreparedStep prepare_rows(const PointStep& step, size_t inputs, size_t outputs) {
  const RowPrinter printer(step);
  PreparedStep made;
  made.source = printer.source();
  made.name = printer.name();
  made.threads = static_cast<unsigned>(printer.shape().block);
  const uint64_t a_block = static_cast<uint64_t>(printer.shape().block / printer.shape().threads);
  made.blocks = (static_cast<uint64_t>(printer.plan().count) + a_block - 1) / a_block;
  made.arguments = pack_arguments(printer.operands().size() + step.outputs.size(), printer.plan());
  made.input_layouts.assign(inputs, Layout::plain);
  made.output_layouts.assign(outputs, Layout::plain);
  for (int i : printer.operands()) {
    made.inputs.push_back(std::find_if(step.inputs.begin(), step.inputs.end(), [&](const auto& input) { return input.value == i; })->index);
  }
  for (const auto& output : step.outputs) {
    made.outputs.push_back({output.index, *step.at(output.value).dims, step.at(output.value).dtype});
  }
  if (!step.at(step.outputs.front().value).per_row) choose_overwritten(step, printer.operands(), made);
  return made;
}

}  // namespace fretsaw::cuda
