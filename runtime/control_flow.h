// Control flow while a program runs: bodies are graphs of their own, compiled when they first run.
#pragma once
#include <memory>
#include <vector>

#include "runtime/program.h"

namespace fretsaw {

// One body of a control-flow node.
struct Body {
  std::unique_ptr<ProgramCache> cache;
  size_t own_inputs = 0;         // of the body graph; the values it captures follow them
  std::vector<size_t> captured;  // for each captured value: its place among the step's inputs
  std::vector<const RuntimeValue*> arguments;
  std::vector<RuntimeValue> results;

  // Sets the captured values; the own inputs are the caller's.
  void capture(const Step& step);
  void run(RankContext& rank, size_t depth);
  // What a result would be for the arguments, for loops that never run their body.
  Type type_of_result(size_t i, RankContext& rank);
};

struct ControlFlow {
  enum class Kind : uint8_t { conditional, loop, scan, sequence_map };
  Kind kind = Kind::conditional;
  const Node* node = nullptr;
  std::vector<Body> bodies;  // If: then, else
};

// Stacks parts [a, b] of one shape along a new axis: n parts -> [.., n, ..]. `from_types` gives type and shape when there is none.
void stack_parts(const std::vector<RuntimeValue>& parts, int64_t axis, bool reversed, const Type& part_type, RuntimeValue& out,
                 RankContext& rank);
// Slice `at` of `whole` along `axis`, without that axis. A view where the slice lies in one piece.
void take_slice(const RuntimeValue& whole, int64_t axis, int64_t at, RuntimeValue& out, RankContext& rank);

}  // namespace fretsaw
