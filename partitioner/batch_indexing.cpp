// Operators that join and part tensors or pick elements by index, and control flow.
#include <algorithm>

#include "graph/passes/rewrite.h"
#include "partitioner/batch_analysis.h"

namespace fretsaw {
// Along the batch axis, joined batches lie one after the other: [2 batch, ...], outer = 2. On the last axis, index columns are joined.
bool BatchAnalysis::concat(Node& node) {
  bool numbers = false, along = false, any = false;
  int64_t axis = 0;
  for (Value* v : node.inputs) {
    if (!v || !v->type.shape) return false;
    axis = axis_from_front(node.get_int("axis", 0), v->type.shape->size());
    auto it = axes.find(v);
    if (it == axes.end()) continue;
    any |= it->second.holds_batch();
    numbers |= !it->second.sample_index.empty();
    along |= it->second.axis == axis;
  }
  if (!any || node.inputs.size() == 1) return false;
  if (along) {
    BatchAxis result;
    result.uniform = true;
    result.outer = 0;
    for (Value* v : node.inputs) {
      auto it = axes.find(v);
      bool joins = it != axes.end() && it->second.axis == axis && it->second.outer.is_number() && it->second.sample_index.empty();
      if (!joins || (result.holds_batch() && !(it->second.inner == result.inner)))
        throw Mixing{"it joins samples with other data along the batch axis"};
      result.axis = static_cast<int>(axis);
      result.inner = it->second.inner;
      result.outer.number += it->second.outer.number;
      result.uniform &= it->second.uniform;
    }
    FactorRule rule = factor_rule(node);
    refine_outputs(node, &rule);
    axes[node.out(0)] = result;
    return true;
  }
  FactorRule rule = factor_rule(node);
  if (!rule.unknown.empty()) return false;
  Place place = common_place(node, rule);
  refine_outputs(node, &rule);
  size_t rank = node.inputs[0]->type.shape->size();
  bool last = axis + 1 == static_cast<int64_t>(rank);
  BatchAxis result;
  result.uniform = true;
  std::vector<SampleIndex> columns;
  bool lost = false;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    Value* v = node.inputs[i];
    if (sized(v)) throw Mixing{"it computes with the size of the batch"};
    BatchAxis b = axis_of_value(v);
    std::vector<SampleIndex> mine = b.sample_index;
    if (!b.holds_batch()) {
      for (size_t d = 0; d < rule.inputs[i].size(); ++d) {
        const std::vector<int>& dim = rule.inputs[i][d];
        if (dim.empty() || dim[0] != place.factor) continue;
        mine = narrow_index(node, i, d, place.outer, place.inner);
      }
    }
    result.uniform &= (b.uniform || !b.holds_batch()) && mine.empty();
    const Dim& width = v->type.shape->back();
    if (last && width.known()) {
      bool one = mine.size() == 1;
      for (int64_t c = 0; c < width.value; ++c) columns.push_back(mine.empty() ? SampleIndex{} : mine[one ? 0 : c]);
      numbers |= !mine.empty();
    } else if (i == 0) {
      columns = mine;
      numbers |= !mine.empty();
    } else {
      lost |= columns != mine;
      numbers |= !mine.empty();
    }
  }
  if (numbers && !lost) result.sample_index = columns;
  set_outputs(node, rule, place, result);
  if (numbers && lost) throw Mixing{"it uses the position of samples in the batch", "", false};
  return true;
}

// [2 batch, ...] parts again into whole batches.
bool BatchAnalysis::split(Node& node) {
  BatchAxis b = axis_of_value(node.input(0));
  if (!b.holds_batch() || node.outputs.size() < 2 || !node.input(0)->type.shape) return false;
  int64_t axis = axis_from_front(node.get_int("axis", 0), node.input(0)->type.shape->size());
  if (axis != b.axis) return false;
  auto parts = static_cast<int64_t>(node.outputs.size());
  if (!b.outer.is_number() || b.outer.number % parts != 0) throw Mixing{"it parts the samples of the batch"};
  DimProduct each(b.outer.number / parts);
  if (node.input(1)) {
    auto sizes = contents(node.input(1));
    if (!sizes) throw Mixing{"its sizes are computed in a way that cannot be followed"};
    for (const DimProduct& size : *sizes)
      if (in_types(size) != each * batch_ * b.inner) throw Mixing{"it parts the samples of the batch"};
    Node* n = &node;
    if (!mentions_batch(*sizes))
      edits.push_back([=](BatchRewriter&) {
        n->inputs.resize(1);
        n->set("num_outputs", parts);
      });
  }
  FactorRule rule = factor_rule(node);
  refine_outputs(node, &rule);
  for (Value* out : node.outputs) {
    if (!out) continue;
    BatchAxis result = b;
    result.outer = each;
    axes[out] = result;
  }
  return true;
}

// Data that holds the batch in a dimension that is indexed: right when every index finds its own sample. `operand` holds the indices,
// `last_dim` is the number of its dimensions that go to the result, `out_dim` where they start there.
void BatchAnalysis::take_samples(Node& node, const BatchAxis& data, size_t operand, size_t last_dim, size_t column, size_t out_dim) {
  Value* indices = node.inputs[operand];
  BatchAxis index = axis_of_value(indices);
  auto finds = [&](const std::vector<SampleIndex>& columns) {
    if (columns.empty() || !data.outer.is_one()) return false;
    auto one = [&](const SampleIndex& i) {
      bool within = quotient(data.inner, i.below).has_value() ||
                    (data.inner.is_number() && i.below.is_number() && i.below.number <= data.inner.number);
      return i.step == data.inner && within;
    };
    if (columns.size() == 1) return one(columns[0]);
    bool tuples = node.is("GatherND");
    return tuples ? one(columns.at(column)) : std::all_of(columns.begin(), columns.end(), one);
  };
  if (!index.holds_batch()) {
    for (size_t d = 0; d < last_dim && !index.holds_batch(); ++d) {
      RowPattern rows = pattern(indices, d, 1, 1);
      if (rows.kind != RowPattern::Kind::sample_index || !finds(rows.columns)) continue;
      index.axis = static_cast<int>(d);
      index.sample_index = narrow_index(node, operand, d, 1, 1);
    }
  }
  if (!index.holds_batch() || !finds(index.sample_index)) throw Mixing{"it picks samples by index"};
  FactorRule rule = factor_rule(node);
  if (!rule.unknown.empty()) throw Mixing{"the batch axis cannot be followed through it: " + rule.unknown};
  refine_outputs(node, &rule);
  BatchAxis result;
  result.axis = index.axis + static_cast<int>(out_dim);
  result.outer = index.outer;
  result.inner = index.inner;
  axes[node.out(0)] = result;
}

bool BatchAnalysis::gather(Node& node) {
  BatchAxis b = axis_of_value(node.input(0));
  if (!b.holds_batch() || !node.input(0)->type.shape || !node.input(1)->type.shape || sized(node.input(1))) return false;
  if (axis_from_front(node.get_int("axis", 0), node.input(0)->type.shape->size()) != b.axis) return false;
  take_samples(node, b, 1, node.input(1)->type.shape->size(), 0, static_cast<size_t>(b.axis));
  return true;
}

bool BatchAnalysis::gather_nd(Node& node) {
  Value *data = node.input(0), *indices = node.input(1);
  BatchAxis b = axis_of_value(data);
  auto batch_dims = node.get_int("batch_dims", 0);
  if (!b.holds_batch() || b.axis < batch_dims || !indices->type.shape || indices->type.shape->empty()) return false;
  const Dim& tuple = indices->type.shape->back();
  if (!tuple.known()) throw Mixing{"the length of its index tuples is not known"};
  auto column = static_cast<size_t>(b.axis - batch_dims);
  if (column >= static_cast<size_t>(tuple.value)) return false;
  take_samples(node, b, 1, indices->type.shape->size() - 1, column, 0);
  return true;
}

// Updates go to the place of their own sample: data [batch, ...], indices whose column for that axis numbers the samples.
bool BatchAnalysis::scatter_nd(Node& node) {
  Value *data = node.input(0), *indices = node.input(1), *updates = node.input(2);
  BatchAxis b = axis_of_value(data), index = axis_of_value(indices), update = axis_of_value(updates);
  if (!indices->type.shape || indices->type.shape->empty() || !indices->type.shape->back().known()) return false;
  auto tuple = static_cast<size_t>(indices->type.shape->back().value);
  if (b.holds_batch() && b.axis >= static_cast<int>(tuple)) return false;
  if (!index.holds_batch()) {  // constant indices that number the samples
    for (size_t d = 0; d + 1 < indices->type.shape->size() && !index.holds_batch(); ++d) {
      RowPattern rows = pattern(indices, d, 1, 1);
      if (rows.kind != RowPattern::Kind::sample_index) continue;
      index.axis = static_cast<int>(d);
      index.sample_index = narrow_index(node, 1, d, 1, 1);
    }
  }
  if (index.sample_index.empty()) {
    if (!b.holds_batch()) return false;
    throw Mixing{"it writes to samples by index"};
  }
  size_t column = tuple;
  for (size_t c = 0; c < tuple; ++c) {
    const SampleIndex& i = index.sample_index[index.sample_index.size() == 1 ? 0 : c];
    if (i.step.is_one() && i.below.is_one() && column == tuple) column = c;
  }
  bool matches = column < tuple && index.outer.is_one() && index.inner.is_one() &&
                 (!b.holds_batch() || static_cast<size_t>(b.axis) == column) &&
                 (!b.holds_batch() || (b.outer.is_one() && b.inner.is_one()));
  if (!matches) throw Mixing{"it writes to samples by index"};
  if (!b.holds_batch()) narrow(node, 0, column, 1, 1, false);
  if (!update.holds_batch())
    narrow(node, 2, index.axis, 1, 1, false);
  else if (update.axis != index.axis || !update.outer.is_one() || !update.inner.is_one())
    throw Mixing{"it writes to samples by index"};
  FactorRule rule = factor_rule(node);
  if (rule.unknown.empty()) refine_outputs(node, &rule);
  BatchAxis result;
  result.axis = static_cast<int>(column);
  axes[node.out(0)] = result;
  return true;
}

// The places of maxima count over the whole tensor, so those of a part are others: nobody but a MaxUnpool may read them.
bool BatchAnalysis::max_pool(Node& node) {
  const Value* places = node.out(1);
  const BatchAxis b = axis_of_value(node.input(0));
  if (!places || b.axis != 0 || !b.outer.is_one() || !b.inner.is_one()) return false;
  bool read = std::find(graph_.outputs.begin(), graph_.outputs.end(), places) != graph_.outputs.end();
  for_each_graph(graph_, [&](const Graph& graph) {
    for (const Node* user : graph.nodes)
      for (size_t i = 0; i < user->inputs.size(); ++i) read |= user->inputs[i] == places && !(user->is("MaxUnpool") && i == 1);
    read |= &graph != &graph_ && std::find(graph.outputs.begin(), graph.outputs.end(), places) != graph.outputs.end();
  });
  if (read) return false;
  for (Value* out : node.outputs)
    if (out) axes[out].axis = 0;
  return true;
}

// What a MaxPool of the same samples found goes back to where it was, in images of the size that they had.
bool BatchAnalysis::max_unpool(Node& node) {
  const BatchAxis x = axis_of_value(node.input(0)), places = axis_of_value(node.input(1));
  const Node* pool = node.input(1)->producer;
  if (!x.holds_batch() || !places.holds_batch() || !pool || !pool->is("MaxPool") || node.input(2)) return false;
  if (x.axis != 0 || !x.outer.is_one() || !x.inner.is_one()) return false;
  const Value *before = pool->input(0), *after = node.out(0);
  const bool known = before->type.shape && after->type.shape && before->type.shape->size() == after->type.shape->size();
  if (!known || !std::equal(before->type.shape->begin() + 1, before->type.shape->end(), after->type.shape->begin() + 1)) {
    throw Mixing{"its images are not known to be of the size that those of '" + pool->name + "' have"};
  }
  axes[node.out(0)].axis = 0;
  return true;
}

// Sequences and optionals of tensors that all hold the batch at the same place are followed as one of them.
bool BatchAnalysis::sequence(Node& node) {
  static const char* const ops[] = {"SequenceConstruct", "SequenceAt", "SequenceInsert", "SequenceErase", "Optional", "OptionalGetElement"};
  bool plain = std::any_of(std::begin(ops), std::end(ops), [&](const char* op) { return node.is(op); });
  bool joins = node.is("ConcatFromSequence"), parts = node.is("SplitToSequence");
  if (!plain && !joins && !parts) return false;
  std::optional<BatchAxis> common;
  size_t data = node.is("SequenceConstruct") ? node.inputs.size() : node.is("SequenceInsert") ? 2 : 1;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    Value* v = node.inputs[i];
    if (!v) continue;
    if (sized(v)) throw Mixing{"it computes with the size of the batch"};
    if (i >= data) {
      if (axes.count(v)) throw Mixing{"it picks elements of a sequence by what is in the samples"};
      continue;
    }
    if (node.is("SequenceInsert") && i == 0 && v->producer && v->producer->is("SequenceEmpty")) continue;
    BatchAxis b = axis_of_value(v);
    if (common && !common->same_place(b)) throw Mixing{"its elements hold the batch in different dimensions"};
    common = b;
  }
  if (!common || !common->holds_batch()) return true;
  common->sample_index.clear();
  int64_t axis = node.get_int("axis", 0);
  if (joins) {
    bool added = node.get_int("new_axis", 0) != 0;
    if (axis < 0) {
      if (!node.out(0)->type.shape) throw Mixing{"its axis is not known"};
      axis += static_cast<int64_t>(node.out(0)->type.shape->size());
    }
    if (!added && axis == common->axis) throw Mixing{"it joins samples with other data along the batch axis"};
    if (added && axis <= common->axis) ++common->axis;
  } else if (parts) {
    const Value* x = node.input(0);
    if (!x->type.shape) throw Mixing{"the shape of its operand is not known"};
    if (axis_from_front(axis, x->type.shape->size()) == common->axis || node.get_int("keepdims", 1) == 0)
      throw Mixing{"it parts the samples of the batch"};
  }
  axes[node.out(0)] = *common;
  return true;
}

}  // namespace fretsaw
