// Evaluates symbolic dimensions and makes copies of models in which they are numbers.
#include "graph/sizes.h"

#include <algorithm>
#include <cctype>

#include "graph/passes.h"

namespace fretsaw {
namespace {

// Sums and products of numbers and names. Anything else makes the text one name.
class Expression {
 public:
  Expression(const std::string& text, const DimSizes& sizes) : text_(text), sizes_(sizes) {}
  int64_t value() {
    if (const auto whole = sizes_.find(text_); whole != sizes_.end()) return whole->second;
    const int64_t result = sum();
    return failed_ || at_ != text_.size() ? 1 : result;
  }

 private:
  bool take(char c) {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  int64_t checked(bool overflows, int64_t result) {
    failed_ |= overflows;
    return overflows ? 1 : result;
  }
  int64_t sum() {
    int64_t total = product();
    while (!failed_) {
      const bool plus = take('+'), minus = !plus && take('-');
      if (!plus && !minus) break;
      const int64_t next = product();
      int64_t result = 0;
      const bool overflows = plus ? __builtin_add_overflow(total, next, &result) : __builtin_sub_overflow(total, next, &result);
      total = checked(overflows, result);
    }
    return total;
  }
  int64_t product() {
    int64_t total = factor();
    while (!failed_ && take('*')) {
      int64_t result = 0;
      const bool overflows = __builtin_mul_overflow(total, factor(), &result);
      total = checked(overflows, result);
    }
    return total;
  }
  int64_t factor() {
    constexpr int kDeepest = 64;
    if (take('(')) {
      failed_ |= ++depth_ > kDeepest;
      const int64_t inner = failed_ ? 1 : sum();
      failed_ |= !take(')');
      --depth_;
      return inner;
    }
    const size_t begin = at_;
    while (at_ < text_.size() && std::string(" +-*()").find(text_[at_]) == std::string::npos) ++at_;
    const std::string word = text_.substr(begin, at_ - begin);
    failed_ |= word.empty();
    constexpr size_t kMostDigits = 18;
    const bool number = !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
    if (number) return word.size() <= kMostDigits ? std::stoll(word) : checked(true, 0);
    const auto found = sizes_.find(word);
    return found == sizes_.end() ? 1 : found->second;
  }

  const std::string& text_;
  const DimSizes& sizes_;
  size_t at_ = 0;
  int depth_ = 0;
  bool failed_ = false;
};

bool is_open(const Type& type) {
  if (type.kind == Type::Kind::unknown || (type.is_tensor() && !type.shape)) return true;
  return type.is_tensor() &&
         std::any_of(type.shape->begin(), type.shape->end(), [](const Dim& d) { return !d.known() && d.symbol.empty(); });
}

void replace_symbols(Type& type, const DimSizes& sizes) {
  if (!type.is_tensor() || !type.shape) return;
  for (Dim& d : *type.shape) {
    if (!d.known() && !d.symbol.empty()) d = Dim(size_of(d, sizes));
  }
}

// Whether a value's type is still open.
bool replace_symbols(Graph& graph, const DimSizes& sizes) {
  bool open = false;
  for (Value& v : graph.all_values()) {
    replace_symbols(v.type, sizes);
    open |= is_open(v.type);
  }
  for (Node* node : graph.nodes) {
    for (const GraphPtr& body : bodies(*node)) open |= replace_symbols(*body, sizes);
  }
  return open;
}

}  // namespace

int64_t size_of(const Dim& dim, const DimSizes& sizes) {
  if (dim.known()) return dim.value;
  return dim.symbol.empty() ? 1 : std::max<int64_t>(Expression(dim.symbol, sizes).value(), 0);
}

Type with_sizes(Type type, const DimSizes& sizes) {
  replace_symbols(type, sizes);
  return type;
}

Model with_sizes(const Model& model, const DimSizes& sizes) {
  Model sized = clone(model);
  if (!replace_symbols(*sized.graph, sizes)) return sized;
  for (Value* input : sized.graph->inputs) {
    if (!input->type.is_tensor() || !input->type.shape) continue;
    for (Dim& d : *input->type.shape) {
      if (!d.known()) d = Dim(1);
    }
  }
  infer_shapes(sized);
  replace_symbols(*sized.graph, sizes);
  return sized;
}

bool ones_suffice(const Graph& graph, const DimSizes& sizes) {
  for (const Value& v : graph.all_values()) {
    if (is_open(v.type)) return false;
    if (!v.type.is_tensor()) continue;
    for (const Dim& d : *v.type.shape) {
      if (!d.known() && size_of(d, sizes) != 1) return false;
    }
  }
  return true;
}

DimSizes micro_batch_sizes(const Plan& plan) {
  DimSizes sizes;
  if (plan.batch <= 0) return sizes;
  const int64_t share = (plan.batch + plan.mesh.data - 1) / plan.mesh.data;
  for (const PlanInput& input : plan.inputs) {
    const auto axis = static_cast<size_t>(input.batch_axis);
    if (input.batch_axis < 0 || !input.type.shape || axis >= input.type.shape->size()) continue;
    const Dim& d = (*input.type.shape)[axis];
    if (!d.known() && !d.symbol.empty()) sizes[d.symbol] = (share + plan.micro_batches - 1) / plan.micro_batches;
  }
  return sizes;
}

}  // namespace fretsaw
