// Models of doubles from text, what they are given, and what they make of it.
#pragma once
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "tests/graph/text_model.h"
#include "tests/runtime/training_runs.h"

namespace fretsaw::double_models {

using namespace testing_plans;
using Inputs = std::map<std::string, RuntimeValue>;

inline Model model_of(const std::string& text) {
  Model model = testing::parse_model(static_cast<int>(newest_opset()), text);
  run_passes(model, normalise_passes());
  infer_shapes(model);
  return model;
}

inline RuntimeValue doubles(const Dims& dims, const std::vector<double>& numbers) {
  RuntimeValue value = make_value(DType::float64, dims);
  std::copy(numbers.begin(), numbers.end(), value.tensor.as<double>());
  return value;
}
inline std::vector<double> random_numbers(int64_t count, unsigned seed) {
  const std::vector<float> numbers = noise(static_cast<size_t>(count), seed);
  return {numbers.begin(), numbers.end()};
}
inline Inputs random_inputs(const Model& model, bool condition) {
  Inputs inputs;
  unsigned seed = 1;
  for (const Value* v : model.graph->inputs) {
    const Dims dims = dims_of(*v->type.shape);
    inputs[v->name] = v->type.dtype == DType::boolean ? bool_value(condition) : doubles(dims, random_numbers(count_of(dims), seed++));
  }
  return inputs;
}
inline std::vector<RuntimeValue> run_model(const Model& model, const Inputs& inputs) {
  return Session(make_plan({std::make_shared<Model>(clone(model))}), {.threads = 1}).run(inputs);
}

}  // namespace fretsaw::double_models
