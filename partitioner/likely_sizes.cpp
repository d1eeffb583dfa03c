// Sizes that costs are computed for, where a model leaves them open.
#include "partitioner/likely_sizes.h"

#include <fmt/format.h>

#include <algorithm>

namespace fretsaw {
namespace {

// A likely size of an input's dimension that has no number: one sample, a sentence of 128, an image of 224. Where two dimensions have one
// symbol they get one size.
int64_t likely_size(const Shape& shape, size_t axis, std::map<std::string, int64_t>& sizes) {
  const Dim& d = shape[axis];
  if (d.known()) return d.value;
  int64_t likely = axis == 0 ? 1 : shape.size() == 4 && axis >= 2 ? 224 : shape.size() <= 3 ? 128 : 16;
  if (d.symbol.empty()) return likely;
  return sizes.try_emplace(d.symbol, likely).first->second;
}

}  // namespace

Model at_likely_sizes(const Model& model, const BatchFacts& facts, const std::map<std::string, Dims>& whole, int parts,
                      std::vector<std::string>& notes) {
  Model sized = clone(model);
  std::map<std::string, Dims> shapes;
  std::map<std::string, int64_t> sizes;
  for (const Value* v : sized.graph->inputs) {
    if (!v->type.shape || is_static(*v->type.shape)) continue;
    Dims& dims = shapes[v->name];
    for (size_t k = 0; k < v->type.shape->size(); ++k) dims.push_back(likely_size(*v->type.shape, k, sizes));
  }
  if (facts.batch > 0)
    for (const auto& [value, axis] : facts.inputs) {
      auto it = whole.find(value->name);
      if (it == whole.end() || axis < 0) continue;
      Dims dims = it->second;
      int64_t& d = dims[static_cast<size_t>(axis)];
      d = d / facts.batch * ((facts.batch + parts - 1) / parts);
      shapes[value->name] = dims;
      sizes.erase(facts.symbol);
    }
  set_input_shapes(sized, shapes);
  infer_shapes(sized);
  std::vector<std::string> assumed;
  for (const auto& [symbol, size] : sizes)
    if (size != 1) assumed.push_back(fmt::format("{}={}", symbol, size));
  if (!assumed.empty()) notes.push_back(fmt::format("the cut is balanced for {}; --shape fixes other sizes", fmt::join(assumed, ", ")));
  return sized;
}

bool likely_sizes_are_one(const Graph& graph) {
  std::map<std::string, int64_t> sizes;
  for (const Value* v : graph.inputs)
    if (v->type.shape)
      for (size_t k = 0; k < v->type.shape->size(); ++k)
        if (!(*v->type.shape)[k].known() && likely_size(*v->type.shape, k, sizes) != 1) return false;
  return true;
}

std::map<std::string, Dims> static_inputs(const Graph& graph) {
  std::map<std::string, Dims> shapes;
  for (const Value* v : graph.inputs)
    if (v->type.shape && is_static(*v->type.shape)) shapes[v->name] = dims_of(*v->type.shape);
  return shapes;
}

}  // namespace fretsaw
