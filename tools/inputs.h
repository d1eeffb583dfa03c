// What a run is given: inputs from files, or made up from a seed.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "graph/plan.h"
#include "kernels/tensor_view.h"

namespace fretsaw {

using Inputs = std::map<std::string, RuntimeValue>;

// One input of a plan, and whether it may be left out because its graph has a default for it.
struct InputSlot {
  const PlanInput* input = nullptr;
  bool has_default = false;
};
std::vector<InputSlot> input_slots(const Plan& plan);

// DIR with input_K.pb, K counting the inputs that have no default, or NAME.npy or NAME.pb. Throws Error naming the input that is not there.
Inputs read_input_folder(const Plan& plan, const std::string& folder);
// --input NAME=FILE, added to `inputs`.
void read_input_files(const Plan& plan, const std::vector<std::string>& pairs, Inputs& inputs);

// Inputs of the shapes that `shapes` or the plan give; a symbol has one size everywhere, 1 when nothing fixes it, and the batch is as large
// as the micro-batches need. Floats are normal, integers and booleans 0 or 1: valid as indexes of any table.
Inputs random_inputs(const Plan& plan, uint64_t seed, const std::map<std::string, Dims>& shapes, std::vector<std::string>& notes);

// Throws Error when an input that was given has not the shape that --shape says.
void check_shapes(const Inputs& inputs, const std::map<std::string, Dims>& shapes);

}  // namespace fretsaw
