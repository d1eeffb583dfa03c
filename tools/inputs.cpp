// What a run is given: inputs from files, or made up from a seed.
#include "tools/inputs.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <set>

#include "graph/errors.h"
#include "tools/elements.h"
#include "tools/options.h"
#include "tools/text.h"
#include "tools/value_files.h"

namespace fretsaw {
namespace {

// "a/b" or ".." in a name must not lead out of the folder.
bool fits_file_name(const std::string& name) {
  return !name.empty() && name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
}

// The file of this name in the folder, or "".
std::string file_of(const std::string& folder, const std::string& name) {
  const std::string path = (std::filesystem::path(folder) / name).string();
  std::error_code unusable;  // a name too long for a file
  return std::filesystem::is_regular_file(path, unusable) ? path : "";
}

// K of "input_K.pb", or -1.
int64_t number_of(const std::string& file) {
  const std::string prefix = "input_", suffix = ".pb";
  if (!file.starts_with(prefix) || !file.ends_with(suffix) || file.size() <= prefix.size() + suffix.size()) return -1;
  const std::string digits = file.substr(prefix.size(), file.size() - prefix.size() - suffix.size());
  if (digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos) return -1;
  return digits.size() > 1 && digits[0] == '0' ? -1 : std::stoll(digits);
}

std::set<int64_t> numbered_files(const std::string& folder) {
  std::set<int64_t> numbers;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const int64_t number = number_of(entry.path().filename().string());
    if (number >= 0) numbers.insert(number);
  }
  if (error) throw Error("cannot be read: " + error.message(), "check the folder and its permissions").in_file(folder);
  return numbers;
}

// Whether input_K.pb counts all inputs, or those without a default only: as many files as there are say which.
bool counts_defaults(const std::vector<InputSlot>& slots, size_t files, const std::string& folder) {
  size_t needed = 0;
  for (const InputSlot& slot : slots) needed += !slot.has_default;
  if (files == 0 || files == needed || needed == slots.size()) return false;
  if (files == slots.size()) return true;
  throw Error("holds " + std::to_string(files) + " files input_K.pb, and the model has " + std::to_string(slots.size()) + " inputs, " +
                  std::to_string(needed) + " of them without a default",
              "give a file for each input or for each without a default, or name them NAME.npy")
      .in_file(folder);
}

const PlanInput* find_input(const Plan& plan, const std::string& name) {
  for (const PlanInput& input : plan.inputs)
    if (input.name == name) return &input;
  return nullptr;
}

std::string known_inputs(const Plan& plan) {
  std::vector<std::string> names;
  for (const PlanInput& input : plan.inputs) names.push_back("'" + input.name + "'");
  return names.empty() ? "it has no inputs" : "its inputs are " + join(names, ", ");
}

// Symbol -> size, from the shapes that are known.
using Sizes = std::map<std::string, int64_t>;

void bind(const Shape& shape, const Dims& dims, Sizes& sizes) {
  for (size_t i = 0; i < shape.size() && i < dims.size(); ++i)
    if (!shape[i].known() && !shape[i].symbol.empty()) sizes.emplace(shape[i].symbol, dims[i]);
}

Sizes known_sizes(const Plan& plan, const std::map<std::string, Dims>& shapes) {
  Sizes sizes;
  for (const PlanInput& input : plan.inputs) {
    const auto fixed = shapes.find(input.name);
    if (fixed != shapes.end() && input.type.shape) bind(*input.type.shape, fixed->second, sizes);
  }
  const int64_t parts = int64_t{plan.micro_batches} * plan.mesh.data;
  for (const PlanInput& input : plan.inputs) {
    const auto axis = static_cast<size_t>(std::max(input.batch_axis, 0));
    if (input.batch_axis < 0 || !input.type.shape || axis >= input.type.shape->size()) continue;
    const Dim& batch = (*input.type.shape)[axis];
    if (!batch.known() && !batch.symbol.empty()) sizes.emplace(batch.symbol, plan.batch > 0 ? plan.batch : parts);
  }
  return sizes;
}

Dims random_dims(const Plan& plan, const PlanInput& input, const std::map<std::string, Dims>& shapes, const Sizes& sizes,
                 std::set<std::string>& assumed) {
  const auto fixed = shapes.find(input.name);
  if (fixed != shapes.end()) return fixed->second;
  Dims dims;
  if (!input.type.shape) return dims;
  for (size_t i = 0; i < input.type.shape->size(); ++i) {
    const Dim& dim = (*input.type.shape)[i];
    const auto size = sizes.find(dim.symbol);
    if (dim.known()) {
      dims.push_back(dim.value);
    } else if (!dim.symbol.empty() && size != sizes.end()) {
      dims.push_back(size->second);
    } else {
      const bool batch = static_cast<int>(i) == input.batch_axis;
      dims.push_back(batch ? int64_t{plan.micro_batches} * plan.mesh.data : 1);
      assumed.insert(dim.symbol.empty() ? "dimension " + std::to_string(i) + " of " + input.name : dim.symbol);
    }
  }
  return dims;
}

// Half of the machine's memory: an input that a damaged file makes larger than that is refused before it is made.
int64_t most_input_bytes() {
  return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE) / 2;
}

RuntimeValue random_tensor(const PlanInput& input, const Dims& dims, std::mt19937_64& generator) {
  const DType type = input.type.dtype;
  double bytes = std::max(1.0, static_cast<double>(bits_of(type)) / 8);
  for (const int64_t size : dims) bytes *= static_cast<double>(size);
  if (bytes > static_cast<double>(most_input_bytes()))
    throw Error("input '" + input.name + "' of shape " + to_string(dims) + " takes " + human_bytes(bytes),
                "fix a smaller shape with --shape");
  RuntimeValue value = make_value(type, dims);
  if (type == DType::string) {
    for (int64_t i = 0; i < value.tensor.count(); ++i)
      value.tensor.as<std::string>()[i] = std::string(1, static_cast<char>('a' + generator() % 26));
    return value;
  }
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < value.tensor.count(); ++i) {
    const double number = is_float(type) ? normal(generator) : dims.empty() ? 1.0 : static_cast<double>(generator() % 2);
    set_element(type, value.tensor.data, i, number);
  }
  return value;
}

RuntimeValue random_value(const Plan& plan, const PlanInput& input, const std::map<std::string, Dims>& shapes, const Sizes& sizes,
                          std::set<std::string>& assumed, std::mt19937_64& generator) {
  if (input.type.is_tensor()) return random_tensor(input, random_dims(plan, input, shapes, sizes, assumed), generator);
  RuntimeValue value;  // an empty optional
  if (input.type.kind == Type::Kind::optional) return value;
  if (input.type.kind == Type::Kind::sequence && input.type.element) {
    value.kind = RuntimeValue::Kind::sequence;
    value.element = input.type.element->dtype;
    return value;
  }
  throw Error("input '" + input.name + "' of type " + to_string(input.type) + " can't be made up", "give it in a file (--input NAME=FILE)");
}

}  // namespace

std::vector<InputSlot> input_slots(const Plan& plan) {
  std::set<std::string> defaults;
  for (const PlanGraph& graph : plan.graphs)
    for (const Value* value : graph.model->graph->inputs)
      if (value->is_constant()) defaults.insert(value->source_name());
  std::vector<InputSlot> slots;
  for (const PlanInput& input : plan.inputs) slots.push_back({&input, defaults.contains(input.name)});
  return slots;
}

Inputs read_input_folder(const Plan& plan, const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    throw Error("is no folder", "give the folder that holds input_0.pb or NAME.npy").in_file(folder);
  const std::vector<InputSlot> slots = input_slots(plan);
  std::set<int64_t> untaken = numbered_files(folder);
  const bool all = counts_defaults(slots, untaken.size(), folder);
  Inputs inputs;
  int64_t number = 0;
  for (const InputSlot& slot : slots) {
    std::string path;
    const std::string numbered = slot.has_default && !all ? "" : "input_" + std::to_string(number++) + ".pb";
    if (fits_file_name(slot.input->name)) {
      path = file_of(folder, slot.input->name + ".npy");
      if (path.empty() && number_of(slot.input->name + ".pb") < 0) path = file_of(folder, slot.input->name + ".pb");
    }
    if (path.empty() && !numbered.empty()) {
      path = file_of(folder, numbered);
      untaken.erase(number - 1);
    }
    if (path.empty()) {
      if (slot.has_default || slot.input->stages.empty()) continue;
      throw Error("holds no file for the input '" + slot.input->name + "'", "add " + numbered + " or '" + slot.input->name + ".npy'")
          .in_file(folder);
    }
    inputs[slot.input->name] = read_value_file(path, slot.input->type);
  }
  if (!untaken.empty())
    throw Error("is taken by no input: each has its file", known_inputs(plan) + "; remove it")
        .in_file((std::filesystem::path(folder) / ("input_" + std::to_string(*untaken.begin()) + ".pb")).string());
  return inputs;
}

void read_input_files(const Plan& plan, const std::vector<std::string>& pairs, Inputs& inputs) {
  for (const std::string& pair : pairs) {
    // Either part may hold '=': the longest name that is an input wins.
    const PlanInput* input = nullptr;
    for (const PlanInput& candidate : plan.inputs)
      if (pair.starts_with(candidate.name + "=") && (!input || candidate.name.size() > input->name.size())) input = &candidate;
    if (!input) {
      const std::string name = pair.substr(0, pair.find('='));
      if (pair.find('=') == std::string::npos) usage_error("--input '" + pair + "' is not NAME=FILE");
      throw Error("--input names '" + name + "', which is no input of the model", known_inputs(plan));
    }
    inputs[input->name] = read_value_file(pair.substr(input->name.size() + 1), input->type);
  }
}

Inputs random_inputs(const Plan& plan, uint64_t seed, const std::map<std::string, Dims>& shapes, std::vector<std::string>& notes) {
  for (const auto& [name, dims] : shapes)
    if (!find_input(plan, name)) throw Error("--shape names '" + name + "', which is no input of the model", known_inputs(plan));
  const Sizes sizes = known_sizes(plan, shapes);
  std::mt19937_64 generator(seed);
  std::set<std::string> assumed;
  Inputs inputs;
  for (const InputSlot& slot : input_slots(plan))
    if (!slot.has_default) inputs[slot.input->name] = random_value(plan, *slot.input, shapes, sizes, assumed, generator);
  if (!assumed.empty())
    notes.push_back("unknown dimensions are as small as they may be: " + join({assumed.begin(), assumed.end()}, ", ") +
                    " (--shape fixes them)");
  return inputs;
}

void check_shapes(const Inputs& inputs, const std::map<std::string, Dims>& shapes) {
  for (const auto& [name, dims] : shapes) {
    const auto found = inputs.find(name);
    if (found == inputs.end() || found->second.kind != RuntimeValue::Kind::tensor || found->second.tensor.dims == dims) continue;
    throw Error("input '" + name + "' has the shape " + to_string(found->second.tensor.dims) + ", --shape says " + to_string(dims),
                "leave --shape out or give inputs of that shape");
  }
}

}  // namespace fretsaw
