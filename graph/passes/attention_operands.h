// How queries, keys and values lie in the values they come from, whatever reshapes and transposes stand between. Private to graph/passes.
#pragma once
#include <map>
#include <vector>

#include "graph/passes/rewrite.h"
#include "graph/passes/strided_view.h"

namespace fretsaw {

struct Choice {
  enum class Form {
    flat,  // [B, L, heads * D]
    part,  // [B, L, parts * heads * D], one of the parts
    four,  // [B, heads, L, D]
  };
  Form form = Form::four;
  Value* base = nullptr;
  int64_t heads = 1;  // fewer than asked for where neighbouring heads are the same one repeated
  double scale = 1;   // the operand is the base times this
  int64_t part = 0, parts = 1;
  bool transposed = false;  // four, with the last two dimensions swapped
  int copies = 0;           // nodes that are not needed any more where the operand is taken from the base
};

// The sizes of one operand, and how its value lies: [..., L, D], or [..., D, L].
struct OperandDims {
  int64_t B = 1, H = 1, L = 1, D = 1;
  bool transposed = false;
  int64_t at_row() const { return transposed ? 1 : D; }
  int64_t at_column() const { return transposed ? L : 1; }
};

// The forms that a value [lead..., L, D] has in the values before it; the leading dimensions are B * H together. `scaled`: products with
// a constant scalar are passed.
std::vector<Choice> choices_of(Value* value, const Dims& lead, const OperandDims& d, bool scaled);

// The choice to take for so many heads among those of rank 3, or of rank 4. Null: there is none.
const Choice* best_of(const std::vector<Choice>& choices, int64_t heads, bool flat);

// Writes the operands of one graph.
class OperandMaker {
 public:
  explicit OperandMaker(Rewriter& edit) : edit_(edit) {}
  // Rank 3 or 4, as the form says.
  Value* make(const Choice& choice, int64_t B, int64_t L, int64_t D);
  Value* reshaped(Value* value, const Dims& dims);
  Value* ints(const Dims& dims) { return edit_.constant(make_int64s(dims), "attention_dims"); }

 private:
  Value* part_of(const Choice& choice, const Dims& dims);
  Rewriter& edit_;
  std::map<std::pair<Value*, int64_t>, std::vector<Value*>> parts_;
};

}  // namespace fretsaw
