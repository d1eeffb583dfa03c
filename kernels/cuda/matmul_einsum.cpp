// Einsum: operands are joined two by two, each time as a batched matrix product where it is one, otherwise by loops over its elements.
#include "kernels/cuda/matmul_einsum.h"

#include <algorithm>
#include <optional>
#include <set>

#include "kernels/cpu/einsum_equation.h"
#include "kernels/cuda/matmul.h"

namespace fretsaw::cuda {
namespace {

using namespace einsum;

// Where a term's elements are.
struct Place {
  enum class Kind : uint8_t { input, scratch, output };
  Kind kind = Kind::input;
  size_t at = 0;  // which input, or bytes into the scratch memory
};

// A tensor whose axes have labels; strides in elements.
struct Term {
  Labels labels;
  Dims dims, strides;
  Place place;
};

struct Step {
  std::shared_ptr<Product> product;  // null: loops
  EinsumLoops loops = {};
  Place a, b, y;
  bool has_b = false;
};

int64_t size_of(const Labels& labels, const Extents& extents) {
  int64_t size = 1;
  for (int label : labels) size *= extents.at(label);
  return size;
}

int64_t stride_of(const Term& term, int label) {
  const auto at = std::find(term.labels.begin(), term.labels.end(), label);
  return at == term.labels.end() ? 0 : term.strides[static_cast<size_t>(at - term.labels.begin())];
}

// Merges repeated labels into diagonals, and drops axes of 1 that broadcast.
Term open_term(const Dims& dims, const Labels& labels, const Extents& extents, size_t input) {
  Term term;
  term.place = {Place::Kind::input, input};
  int64_t stride = count_of(dims);
  for (size_t i = 0; i < labels.size(); ++i) {
    stride = dims[i] == 0 ? 0 : stride / dims[i];
    const int64_t extent = extents.at(labels[i]);
    if (dims[i] == 1 && extent != 1) continue;
    const auto at = std::find(term.labels.begin(), term.labels.end(), labels[i]);
    if (at != term.labels.end()) {
      term.strides[static_cast<size_t>(at - term.labels.begin())] += stride;
      continue;
    }
    term.labels.push_back(labels[i]), term.dims.push_back(extent), term.strides.push_back(stride);
  }
  return term;
}

// The one stride of several axes taken together, or -1 when there is none.
int64_t merged_stride(const Term& term, const Labels& labels, const Extents& extents) {
  int64_t stride = 1, expected = -1;
  bool first = true;
  for (size_t i = labels.size(); i-- > 0;) {
    const int64_t extent = extents.at(labels[i]), own = stride_of(term, labels[i]);
    if (extent == 1) continue;
    if (first) stride = own;
    if (!first && own != expected) return -1;
    first = false, expected = own * extent;
  }
  return first ? 1 : stride;
}

// Rows and columns of one operand of a product; nullopt where they are no matrix that libraries take.
struct MatrixStrides {
  int64_t row, column;
};
std::optional<MatrixStrides> matrix_of(const Term& term, const Labels& rows, const Labels& columns, const Extents& extents) {
  const int64_t row = merged_stride(term, rows, extents), column = merged_stride(term, columns, extents);
  const int64_t R = size_of(rows, extents), C = size_of(columns, extents);
  if (R == 1 && column == 1) return MatrixStrides{C, 1};
  if (C == 1 && row == 1) return MatrixStrides{1, R};
  if (column == 1 && row >= C) return MatrixStrides{row, 1};
  if (row == 1 && column >= R) return MatrixStrides{1, column};
  return std::nullopt;
}

class Planner {
 public:
  Planner(const CompileContext& c, Resolved equation) : c_(c), e_(std::move(equation)), type_(c.input_dtype(0)) {
    Term result = open(0);
    if (e_.inputs.size() == 1) arrange(result, e_.output, Place{Place::Kind::output, 0});
    for (size_t i = 1; i < e_.inputs.size(); ++i) {
      Labels later = e_.output;
      for (size_t k = i + 1; k < e_.inputs.size(); ++k) later.insert(later.end(), e_.inputs[k].begin(), e_.inputs[k].end());
      result = join(result, open(i), later, i + 1 == e_.inputs.size());
    }
  }
  Dims output_dims() const {
    Dims dims;
    for (int label : e_.output) dims.push_back(e_.extents.at(label));
    return dims;
  }

  std::vector<Step> steps;
  size_t buffers_bytes = 0, product_bytes = 0;  // of scratch memory: what is between, and what products need beside

 private:
  Term open(size_t i) const { return open_term(c_.input_dims(i).value_or(Dims{}), e_.inputs[i], e_.extents, i); }

  // A dense term in new scratch memory, or at `place`.
  Term dense(const Labels& labels, std::optional<Place> place) {
    Term term;
    term.labels = labels;
    term.strides.resize(labels.size());
    int64_t count = 1;
    for (size_t i = labels.size(); i-- > 0;) term.strides[i] = count, count *= e_.extents.at(labels[i]);
    for (int label : labels) term.dims.push_back(e_.extents.at(label));
    if (place) {
      term.place = *place;
    } else {
      term.place = {Place::Kind::scratch, buffers_bytes};
      buffers_bytes += (bytes_of(type_, count) + 255) / 256 * 256;
    }
    return term;
  }

  // y [kept] = sum over `summed` of a * b, or of a.
  Term loop(const Term& a, const Term* b, const Labels& kept, const Labels& summed, std::optional<Place> place) {
    if (kept.size() > kEinsumAxes || summed.size() > kEinsumAxes) throw Error("Einsum of more than 12 labels", "use fewer");
    const Term y = dense(kept, place);
    Step step;
    EinsumLoops& l = step.loops;
    l.kept = static_cast<int>(kept.size()), l.summed = static_cast<int>(summed.size());
    for (size_t i = 0; i < kept.size(); ++i)
      l.kept_size[i] = e_.extents.at(kept[i]), l.kept_a[i] = stride_of(a, kept[i]), l.kept_b[i] = b ? stride_of(*b, kept[i]) : 0;
    for (size_t i = 0; i < summed.size(); ++i)
      l.summed_size[i] = e_.extents.at(summed[i]), l.summed_a[i] = stride_of(a, summed[i]),
      l.summed_b[i] = b ? stride_of(*b, summed[i]) : 0;
    step.a = a.place, step.y = y.place, step.has_b = b != nullptr;
    if (b) step.b = b->place;
    steps.push_back(step);
    return y;
  }

  // The axes `wanted`, dense; the others are summed.
  Term arrange(const Term& term, const Labels& wanted, std::optional<Place> place) {
    Labels summed;
    for (int label : term.labels)
      if (!contains_label(wanted, label)) summed.push_back(label);
    return loop(term, nullptr, wanted, summed, place);
  }

  struct Roles {
    Labels batch, rows, columns, summed;
  };
  Roles roles_of(const Term& a, const Term& b, const Labels& later) const {
    Roles roles;
    for (int label : a.labels) {
      const bool wanted = contains_label(later, label), common = contains_label(b.labels, label);
      if (common) (wanted ? roles.batch : roles.summed).push_back(label);
      if (!common && wanted) roles.rows.push_back(label);
    }
    for (int label : b.labels)
      if (!contains_label(a.labels, label) && contains_label(later, label)) roles.columns.push_back(label);
    return roles;
  }

  // Sums what only this term has and nobody wants.
  Term without_private(const Term& term, const Term& other, const Labels& later) {
    Labels wanted;
    for (int label : term.labels)
      if (contains_label(other.labels, label) || contains_label(later, label)) wanted.push_back(label);
    return wanted.size() == term.labels.size() ? term : arrange(term, wanted, std::nullopt);
  }

  Term join(Term a, Term b, const Labels& later, bool last) {
    a = without_private(a, b, later), b = without_private(b, a, later);
    Roles roles = roles_of(a, b, later);
    const std::optional<Place> place = last ? std::optional<Place>({Place::Kind::output, 0}) : std::nullopt;
    // The result is [batch, rows, columns]; with the operands the other way round [batch, columns, rows].
    if (last && joined({roles.batch, roles.columns, roles.rows}) == e_.output) std::swap(a, b), std::swap(roles.rows, roles.columns);
    const Labels labels = joined({roles.batch, roles.rows, roles.columns});
    const bool in_order = !last || labels == e_.output;
    const int64_t batches = size_of(roles.batch, e_.extents);
    const bool vectors = size_of(roles.rows, e_.extents) == 1 && size_of(roles.columns, e_.extents) == 1 && batches > 1;
    if (roles.summed.empty() || vectors || batches > 65535 || size_of(joined({labels, roles.summed}), e_.extents) == 0)
      return loop(a, &b, last ? e_.output : labels, roles.summed, place);
    Term y = dense(labels, in_order ? place : std::nullopt);
    multiply(a, b, roles, y);
    if (!in_order) arrange(y, e_.output, place);
    return y;
  }

  void multiply(Term a, Term b, const Roles& roles, const Term& y) {
    std::optional<MatrixStrides> left = matrix_of(a, roles.rows, roles.summed, e_.extents);
    if (!left) {
      a = arrange(a, joined({roles.batch, roles.rows, roles.summed}), std::nullopt);
      left = matrix_of(a, roles.rows, roles.summed, e_.extents);
    }
    std::optional<MatrixStrides> right = matrix_of(b, roles.summed, roles.columns, e_.extents);
    if (!right) {
      b = arrange(b, joined({roles.batch, roles.summed, roles.columns}), std::nullopt);
      right = matrix_of(b, roles.summed, roles.columns, e_.extents);
    }
    ProductSpec s;
    s.type = type_, s.tf32 = c_.tf32;
    s.M = size_of(roles.rows, e_.extents), s.N = size_of(roles.columns, e_.extents), s.K = size_of(roles.summed, e_.extents);
    s.a_row = left->row, s.a_column = left->column, s.b_row = right->row, s.b_column = right->column;
    for (int label : roles.batch)
      s.batches.push_back({e_.extents.at(label), stride_of(a, label), stride_of(b, label), stride_of(y, label)});
    Step step;
    step.product = std::make_shared<Product>(gpu(c_), s);
    step.a = a.place, step.b = b.place, step.y = y.place, step.has_b = true;
    product_bytes = std::max(product_bytes, step.product->scratch_bytes());
    steps.push_back(step);
  }

  const CompileContext& c_;
  Resolved e_;
  DType type_;
};

std::vector<Dims> dims_of_inputs(const CompileContext& c) {
  std::vector<Dims> dims;
  for (size_t i = 0; i < c.inputs.size(); ++i) dims.push_back(c.input_dims(i).value_or(Dims{}));
  return dims;
}

// What two operands have in common with the rest may have as many dimensions as all labels together.
bool has_too_many_labels(const CompileContext& c) {
  std::set<int> labels;
  try {
    for (const auto& input : resolve(parse_equation(c.node().get_string("equation", "")), dims_of_inputs(c)).inputs)
      labels.insert(input.begin(), input.end());
  } catch (const Error&) {  // the kernel says what is wrong with the equation
  }
  return labels.size() > kEinsumAxes;
}

std::string unsupported(const CompileContext& c) {
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    const std::string reason = refuse_other_types(
        c, i, {DType::float32, DType::float16, DType::bfloat16, DType::float64, DType::int32, DType::int64, DType::uint32, DType::uint64});
    if (!reason.empty()) return reason;
  }
  if (std::string reason = refuse_unknown_dims(c); !reason.empty()) return reason;
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    if (c.input_dims(i).value_or(Dims{}).size() > kEinsumAxes / 2) return "more than 6 dimensions";
  }
  return c.inputs.size() > 2 && has_too_many_labels(c) ? "more than 12 labels" : "";
}

CompiledKernel make_einsum(const CompileContext& c) {
  const auto plan = std::make_shared<Planner>(c, resolve(parse_equation(c.node().get_string("equation", "")), dims_of_inputs(c)));
  return {[steps = plan->steps, y_dims = plan->output_dims(), buffers = plan->buffers_bytes, products = plan->product_bytes,
           type = c.input_dtype(0)](RunContext& r) {
    TensorView& y = r.output(0, y_dims, type);
    if (y.count() == 0) return;
    char* scratch = buffers + products ? static_cast<char*>(r.scratch(buffers + products)) : nullptr;
    const auto address = [&](const Place& place) -> void* {
      if (place.kind == Place::Kind::input) return r.input(place.at).data;
      return place.kind == Place::Kind::output ? y.data : scratch + place.at;
    };
    for (const Step& step : steps) {
      const void* b = step.has_b ? address(step.b) : nullptr;
      if (step.product)
        step.product->run({address(step.a), b, nullptr, nullptr, address(step.y)}, scratch + buffers, stream_of(r));
      else
        run_einsum_loops(type, step.loops, address(step.a), b, address(step.y), stream_of(r));
    }
  }};
}

}  // namespace

void register_einsum(KernelRegistry& registry) {
  registry.add({.op = "Einsum", .make = make_einsum, .unsupported = unsupported});
}

}  // namespace fretsaw::cuda
