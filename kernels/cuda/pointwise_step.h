// A fused step of elementwise nodes, and of reductions over the last axis, as values that are computed one after another.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernel.h"

namespace fretsaw::cuda {

// Why a step can't be done; thrown while it is read and caught by whoever asked for it.
struct Refused {
  std::string reason;
};

struct PointValue {
  enum class Kind : uint8_t {
    operand,    // an input, read from memory
    literal,    // `text` is the number
    function,   // `text` computes it from `arguments` x, y, z or x0, x1, ...; `type` is its T
    reduction,  // arguments[0] folded by `text` over the last axis
  };
  Kind kind;
  DType dtype;  // elements of half types are kept as float, rounded to what the type holds
  DType type = DType::undefined;
  std::string name, text;  // `name`: of the operator, for the printed function
  std::vector<int> arguments;
  int dims_like = -1;    // has the shape of that value; otherwise of its arguments, broadcast
  bool per_row = false;  // one number for a row: a reduction, or computed from such or from operands whose last dimension is 1
  bool dropped = false;  // its last dimension, of 1, is not kept
  std::optional<Dims> dims;
};

struct PointStep {
  struct Place {
    size_t index;  // among the inputs or outputs of the context
    int value;
  };
  std::vector<PointValue> values;  // arguments come before what is computed of them
  std::vector<Place> inputs;       // those that have a value, also when only its shape or type is used
  std::vector<Place> outputs;
  std::vector<std::string> members;  // the operators, in order
  bool reduces = false;

  const PointValue& at(int value) const { return values[static_cast<size_t>(value)]; }
};

// Throws Refused.
PointStep read_step(const CompileContext& c);
// Shapes of all values from those of the operands (which stand in `dims` of the values already). Throws Error when they don't go together.
void infer_dims(PointStep& step);

// Builds the values; the lowering of an operator calls it.
class StepBuilder {
 public:
  explicit StepBuilder(const CompileContext& c) : context(c) {}

  const PointValue& at(int value) const { return step.at(value); }
  // T is `type`; the result is of type `dtype`.
  int function(const std::string& name, DType dtype, DType type, const std::string& text, std::vector<int> arguments);
  int function(const std::string& name, DType dtype, const std::string& text, std::vector<int> arguments) {
    return function(name, dtype, dtype, text, std::move(arguments));
  }
  int literal(DType dtype, const std::string& text);
  int reduction(const std::string& fold, int value);  // Add, Multiply, Smaller or Larger; halves fold as float32
  int cast(int value, DType to, bool saturate = true, const std::string& round_mode = "up");
  void shape_like(int value, int other);        // has the shape of `other`, whatever its arguments'
  void drop_axis(int value);                    // a number for each row whose last dimension is not kept
  int input(const Node& node, size_t i) const;  // -1 where it is left out
  int required(const Node& node, size_t i) const;
  bool has_input(const Node& node, size_t i) const { return node.input(i) != nullptr; }
  TensorPtr constant(const Node& node, size_t i) const;  // null unless it is known now
  void output(const Node& node, size_t i, int value);

  const CompileContext& context;
  PointStep step;
  std::map<const Value*, int> operands, results;
};

// The type in registers: float for half types, unsigned char for 8-bit floats.
const char* compute_type(DType dtype);
const char* storage_type(DType dtype);
// A number of that type as CUDA text.
std::string literal_text(DType dtype, const void* data);
std::string literal_text(DType dtype, double number);

}  // namespace fretsaw::cuda
