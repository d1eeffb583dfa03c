// Control flow: the batch axis through bodies.
#include <unordered_set>

#include "graph/passes/rewrite.h"
#include "partitioner/batch_analysis.h"

namespace fretsaw {

// Both branches are followed; which one is taken may not depend on the samples.
void BatchAnalysis::branch(Node& node) {
  if (axes.count(node.input(0)) || sized(node.input(0))) throw Mixing{"which branch is taken depends on the samples of the batch"};
  std::vector<GraphPtr> both = bodies(node);
  for (const GraphPtr& body : both) visit_graph(*body);
  for (size_t o = 0; o < node.outputs.size(); ++o) {
    Value* out = node.outputs[o];
    if (!out) continue;
    std::optional<BatchAxis> common;
    for (const GraphPtr& body : both) {
      Value* v = o < body->outputs.size() ? body->outputs[o] : nullptr;
      if (!v) throw Mixing{"its branches have different outputs"};
      BatchAxis b = axis_of_value(v);
      if (sized(v)) throw Mixing{"it computes with the size of the batch"};
      if (b.mixed) throw Mixing{b.mixed->why, "", b.unknown_shape};
      if (common && !common->same_place(b)) throw Mixing{"its branches hold the batch in different dimensions"};
      if (common) {
        b.uniform &= common->uniform;
        if (b.sample_index != common->sample_index) b.sample_index.clear();
      }
      common = b;
    }
    if (common && common->holds_batch()) axes[out] = *common;
  }
}

// The passes treat all samples alike: what is carried holds the batch in one place, and how often it runs depends on no sample.
void BatchAnalysis::loop(Node& node) {
  const GraphPtr body = node.get_graph("body");
  const bool scans = node.is("Scan");
  const size_t ahead = scans ? 0 : 2;  // the trip count and the condition
  const auto slices = static_cast<size_t>(scans ? std::max<int64_t>(node.get_int("num_scan_inputs", 0), 0) : 0);
  if (!body || node.inputs.size() < ahead + slices || body->inputs.size() != node.inputs.size() ||
      body->outputs.size() + slices + ahead / 2 < body->inputs.size())
    throw Mixing{"its body does not fit it"};
  for (size_t i = 0; i < ahead; ++i)
    if (node.inputs[i] && (axes.count(node.inputs[i]) || sized(node.inputs[i]))) throw Mixing{"how often it runs depends on the batch"};

  const size_t carried = node.inputs.size() - ahead - slices, results = body->outputs.size() - carried - ahead / 2;
  std::vector<BatchAxis> given;  // of the body's inputs behind `ahead`
  for (size_t i = ahead; i < node.inputs.size(); ++i)
    given.push_back(i < ahead + carried ? carried_axis(node.inputs[i]) : slice_axis(node, i));
  std::vector<size_t> narrowed;
  const auto edits_before = std::ssize(edits);
  // In the first pass alone, what is carried has the rows that it begins with: what that pass makes of them tells where the batch is.
  for (size_t k = 0; k < carried; ++k) begins_[body->inputs[ahead + k]] = node.inputs[ahead + k];
  for (bool settled = false, first = true; !settled; first = false) {
    edits.erase(edits.begin() + edits_before, edits.end());
    forget(*body);
    for (size_t i = 0; i < given.size(); ++i)
      if (given[i].holds_batch()) axes[body->inputs[ahead + i]] = given[i];
    visit_graph(*body);
    for (size_t k = 0; k < carried; ++k) begins_.erase(body->inputs[ahead + k]);
    settled = !first;
    for (size_t k = 0; k < carried; ++k) {
      const BatchAxis after = carried_axis(body->outputs[ahead / 2 + k]);
      if (!given[k].holds_batch() && after.holds_batch()) {  // it begins with equal rows
        given[k] = after, given[k].uniform = true;
        narrowed.push_back(k);
        settled = false;
      }
      if (!given[k].same_place(after)) throw Mixing{"what it carries does not hold the batch in one place"};
      if (given[k].uniform && !after.uniform) given[k].uniform = settled = false;
    }
  }
  if (ahead && (axes.count(body->outputs[0]) || sized(body->outputs[0])))
    throw Mixing{"whether it goes on depends on the samples of the batch"};
  for (const size_t k : narrowed) narrow(node, ahead + k, static_cast<size_t>(given[k].axis), given[k].outer, given[k].inner, false);
  const std::vector<int64_t> out_axes = node.get_ints("scan_output_axes");
  for (size_t o = 0; o < carried + results && o < node.outputs.size(); ++o) {
    BatchAxis result = o < carried ? given[o] : carried_axis(body->outputs[ahead / 2 + o]);
    if (!node.outputs[o] || !result.holds_batch()) continue;
    if (o >= carried) {
      const Type& row = body->outputs[ahead / 2 + o]->type;
      const int64_t axis = o - carried < out_axes.size() ? out_axes[o - carried] : 0;
      if (axis < 0 && !row.shape) throw Mixing{"the rank of what it stacks is not known"};
      if (axis_from_front(axis, axis < 0 ? row.shape->size() + 1 : 1) <= result.axis) ++result.axis;
    }
    axes[node.outputs[o]] = result;
  }
}

// Of a value that goes from one pass to the next, or a row that one makes.
BatchAxis BatchAnalysis::carried_axis(const Value* value) {
  if (!value) return {};
  if (sized(value)) throw Mixing{"it computes with the size of the batch"};
  BatchAxis b = axis_of_value(value);
  if (b.mixed) throw Mixing{b.mixed->why, "", b.unknown_shape};
  b.sample_index.clear();
  return b;
}

// Of what a pass of a Scan takes of this input.
BatchAxis BatchAnalysis::slice_axis(const Node& node, size_t input) {
  const Value* x = node.inputs[input];
  BatchAxis b = carried_axis(x);
  if (!b.holds_batch()) return b;
  const std::vector<int64_t> axes_of = node.get_ints("scan_input_axes");
  const size_t i = input + static_cast<size_t>(node.get_int("num_scan_inputs", 0)) - node.inputs.size();
  const int64_t axis = i < axes_of.size() ? axes_of[i] : 0;
  if (axis < 0 && !x->type.shape) throw Mixing{"the rank of what it goes through is not known"};
  const int64_t from_front = axis_from_front(axis, axis < 0 ? x->type.shape->size() : 1);
  if (from_front == b.axis) throw Mixing{"it goes through the samples one after another"};
  if (from_front < b.axis) --b.axis;
  return b;
}

// What is known of the values of a body, for another round.
void BatchAnalysis::forget(Graph& body) {
  std::unordered_set<const Value*> inside;
  for_each_graph(body, [&](Graph& graph) {
    for (const Value& v : graph.all_values()) inside.insert(&v);
  });
  const auto is_inside = [&](const Value* v) { return inside.contains(v); };
  std::erase_if(axes, [&](const auto& entry) { return is_inside(entry.first); });
  std::erase_if(contents_, [&](const auto& entry) { return is_inside(entry.first); });
  std::erase_if(patterns_, [&](const auto& entry) { return is_inside(entry.first.first); });
}

}  // namespace fretsaw
