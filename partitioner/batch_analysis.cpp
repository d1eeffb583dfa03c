// Following the batch axis through factor rules.
#include "partitioner/batch_analysis.h"

#include <algorithm>

#include "graph/catalogue.h"

namespace fretsaw {
namespace {

const char* const kTorn = "samples are torn apart or interleaved by this change of shape";

// Operands of size 1 along this dimension broadcast, so one row is as good as equal rows.
bool broadcasts(const Node& node, const FactorRule& rule, size_t operand, size_t dim) {
  if (rule.inputs[operand][dim].size() != 1) return false;
  if (node.is("MatMul")) return dim + 2 < rule.inputs[operand].size();
  return role_of(node) == Role::elementwise &&
         !is_one_of(node, {"QuantizeLinear", "DequantizeLinear", "Cast", "CastLike", "BitCast", "Dropout"});
}

// Whether an attribute says how many groups or heads a dimension of the first operand holds: parts of a batch among them would have fewer.
bool is_counted_in_file(const FactorRule& rule, const Node& node, int factor) {
  const bool counts = node.get_int("group", 1) > 1 || node.has("num_groups") || node.has("q_num_heads");
  for (size_t d = 1; counts && d < rule.inputs[0].size(); ++d)
    if (std::find(rule.inputs[0][d].begin(), rule.inputs[0][d].end(), factor) != rule.inputs[0][d].end()) return true;
  return false;
}

bool reduces(const Node& node) {
  return role_of(node) == Role::reduction || role_of(node) == Role::normalisation;
}

std::string mixing_reason(const Node& node, const Factor& factor, bool in_output) {
  if (factor.kind == Factor::Kind::sum) return "the batch axis is summed over here";
  if (in_output) return "it looks at all samples of the batch together";
  return reduces(node) ? "the batch axis is reduced here" : "it moves, adds or drops samples along the batch axis";
}

}  // namespace

BatchAnalysis::BatchAnalysis(Graph& graph, DimProduct batch, const std::vector<std::pair<Value*, int>>& inputs)
    : graph_(graph), batch_(std::move(batch)), inputs_(inputs) {}

void BatchAnalysis::run() {
  for (auto [value, axis] : inputs_) {
    BatchAxis b;
    b.axis = axis;
    axes[value] = b;
  }
  for (Value* input : graph_.inputs) name_dims(input);
  visit_graph(graph_);
}

BatchAxis BatchAnalysis::axis_of_value(const Value* value) const {
  auto it = axes.find(value);
  return it == axes.end() ? BatchAxis{} : it->second;
}

void BatchAnalysis::visit_graph(Graph& graph) {
  for (Node* node : graph.nodes) visit(*node);
}

void BatchAnalysis::visit(Node& node) {
  auto concerned = [&](Value* v) { return v && (axes.count(v) || sized(v)); };
  bool any = std::any_of(node.inputs.begin(), node.inputs.end(), concerned);
  for (Value* v : captures(node)) any |= concerned(v);
  if (any)
    transfer(node);
  else
    complete_types(node);
  for (Value* out : node.outputs)
    if (out) name_dims(out);
  if (!any && node.out(0))
    if (auto c = evaluate(node)) contents_[node.out(0)] = *c;
}

void BatchAnalysis::transfer(Node& node) {
  if (is_one_of(node, {"Shape", "Size"})) {
    try {
      shape_of(node);
    } catch (const Mixing& mixing) {
      mix_outputs(node, mixing);
    }
    return;
  }
  if (auto c = evaluate(node)) {
    contents_[node.out(0)] = *c;
    return;
  }
  std::shared_ptr<const MixedCause> cause;
  bool lost = false;
  auto look = [&](const Value* v) {
    auto it = axes.find(v);
    if (it == axes.end() || !it->second.mixed) return;
    if (!cause) cause = it->second.mixed;
    lost |= it->second.unknown_shape;
  };
  for (Value* v : node.inputs) look(v);
  for (Value* v : captures(node)) look(v);
  try {
    if (lost) throw Mixing{cause->why, "", true};
    if (!special(node)) by_rule(node, factor_rule(node));
  } catch (const Mixing& mixing) {
    mix_outputs(node, mixing);
  }
  if (cause) carry_mixed(node, *cause);
}

bool BatchAnalysis::special(Node& node) {
  if (!node.domain.empty()) return false;
  using Handler = void (BatchAnalysis::*)(Node&);
  static const std::map<std::string, Handler> handlers = {
      {"Reshape", &BatchAnalysis::reshape}, {"Expand", &BatchAnalysis::expand}, {"ConstantOfShape", &BatchAnalysis::constant_of_shape},
      {"Range", &BatchAnalysis::range},     {"Tile", &BatchAnalysis::tile},     {"Slice", &BatchAnalysis::slice},
      {"Resize", &BatchAnalysis::resize},   {"If", &BatchAnalysis::branch},     {"Squeeze", &BatchAnalysis::squeeze},
      {"Loop", &BatchAnalysis::loop},       {"Scan", &BatchAnalysis::loop},
  };
  if (auto it = handlers.find(node.op); it != handlers.end()) {
    (this->*it->second)(node);
    return true;
  }
  if (node.is("Concat")) return concat(node);
  if (node.is("Split")) return split(node);
  if (node.is("Gather")) return gather(node);
  if (node.is("GatherND")) return gather_nd(node);
  if (node.is("ScatterND")) return scatter_nd(node);
  if (node.is("MaxPool")) return max_pool(node);
  if (node.is("MaxUnpool")) return max_unpool(node);
  return sequence(node);
}

DimProduct BatchAnalysis::product(const FactorRule& rule, const std::vector<int>& dim, size_t first, size_t last) const {
  DimProduct p(1);
  for (size_t k = first; k < last; ++k) {
    auto size = product_of(rule.factors[dim[k]].size);
    p = p * (size ? *size : DimProduct("?factor" + std::to_string(dim[k])));
  }
  return p;
}

// In a dimension of factors s0 s1 ..., the batch may lie within one of them: s_j = outer' * batch * inner'.
std::optional<BatchAnalysis::Place> BatchAnalysis::locate(const FactorRule& rule, const std::vector<int>& dim,
                                                          const BatchAxis& batch) const {
  if (dim.size() == 1) return Place{dim[0], batch.outer, batch.inner};
  for (size_t j = 0; j < dim.size(); ++j) {
    auto outer = quotient(batch.outer, product(rule, dim, 0, j));
    auto inner = quotient(batch.inner, product(rule, dim, j + 1, dim.size()));
    if (!outer || !inner) continue;
    if (product(rule, dim, j, j + 1) == *outer * batch_ * *inner) return Place{dim[j], *outer, *inner};
  }
  return std::nullopt;
}

BatchAnalysis::Place BatchAnalysis::common_place(Node& node, const FactorRule& rule) {
  Place place;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    auto it = node.inputs[i] ? axes.find(node.inputs[i]) : axes.end();
    if (it == axes.end() || !it->second.holds_batch()) continue;
    if (i == 1 && node.is("CastLike")) continue;  // only its type is read
    const BatchAxis& batch = it->second;
    if (batch.axis >= static_cast<int>(rule.inputs[i].size())) throw Mixing{"the batch axis cannot be followed through it"};
    auto here = locate(rule, rule.inputs[i][batch.axis], batch);
    if (!here) throw Mixing{rule.inputs[i][batch.axis].empty() ? "it reads more than the elements of each sample" : kTorn};
    if (place.factor < 0) {
      place = *here;
    } else if (place.factor != here->factor || place.outer != here->outer || place.inner != here->inner) {
      throw Mixing{"it brings different samples of the batch together"};
    }
  }
  return place;
}

void BatchAnalysis::by_rule(Node& node, const FactorRule& rule, bool sizes_read) {
  for (Value* v : node.inputs)
    if (!sizes_read && v && sized(v)) throw Mixing{"it computes with the size of the batch", "", !node.is("Cast")};
  if (!rule.unknown.empty()) throw Mixing{"the batch axis cannot be followed through it: " + rule.unknown};
  Place place = common_place(node, rule);
  refine_outputs(node, &rule);
  if (place.factor < 0) return;
  if (is_counted_in_file(rule, node, place.factor)) throw Mixing{"the batch is among its groups, whose number stands in the file"};
  BatchAxis result;
  result.uniform = true;
  bool numbers = false;
  for (Value* v : node.inputs) {
    auto it = axes.find(v);
    if (it == axes.end()) continue;
    result.uniform &= it->second.uniform;
    numbers |= !it->second.sample_index.empty();
  }
  const OperatorRecord* record = find_operator(node.op, node.domain);
  if (record && record->random) {
    result.uniform = false;
    has_random = true;
  }
  demand_rows(node, rule, place, result);
  bool numbers_lost = numbers && !keeps_sample_index(node, result);
  set_outputs(node, rule, place, result);
  const Factor& factor = rule.factors[place.factor];
  bool in_output = false;
  for (const auto& out : rule.outputs)
    for (const auto& dim : out) in_output |= std::find(dim.begin(), dim.end(), place.factor) != dim.end();
  if (factor.kind == Factor::Kind::sum && !in_output) throw Mixing{mixing_reason(node, factor, in_output), "sum", false};
  if (factor.kind != Factor::Kind::parallel || !in_output)
    throw Mixing{mixing_reason(node, factor, in_output), partial_of(node, "mean"), false};
  if (numbers_lost) throw Mixing{"it uses the position of samples in the batch", "", false};
}

// What a mean over the batch is after `node`, or what the node makes of samples when it reduces them itself ("mean" is asked for then).
std::string BatchAnalysis::partial_of(const Node& node, const std::string& partial) const {
  auto loss = [&] { return is_one_of(node, {"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"}); };
  bool plain_mean =
      node.is("ReduceMean") || (loss() && node.get_string("reduction", "mean") == "mean" && !node.input(2) && !node.has("ignore_index"));
  if (loss() && node.get_string("reduction", "mean") == "sum") return "sum";
  return plain_mean ? partial : reduces(node) ? "other" : "";
}

void BatchAnalysis::demand_rows(Node& node, const FactorRule& rule, const Place& place, BatchAxis&) {
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!node.inputs[i] || axes.count(node.inputs[i])) continue;
    for (size_t d = 0; d < rule.inputs[i].size(); ++d) {
      const std::vector<int>& dim = rule.inputs[i][d];
      auto at = std::find(dim.begin(), dim.end(), place.factor);
      if (at == dim.end()) continue;
      auto k = static_cast<size_t>(at - dim.begin());
      DimProduct outer = product(rule, dim, 0, k) * place.outer, inner = place.inner * product(rule, dim, k + 1, dim.size());
      narrow(node, i, d, outer, inner, broadcasts(node, rule, i, d));
    }
  }
}

std::pair<Value*, int> BatchAnalysis::sample_source(const Node& node) const {
  for (Value* v : node.inputs) {
    auto it = v ? axes.find(v) : axes.end();
    if (it == axes.end() || !it->second.holds_batch() || it->second.unknown_shape || v->type.kind != Type::Kind::tensor) continue;
    if (it->second.outer.is_one() && it->second.inner.is_one()) return {v, it->second.axis};
  }
  return inputs_.front();
}

void BatchAnalysis::narrow(Node& node, size_t operand, size_t dim, const DimProduct& outer, const DimProduct& inner, bool broadcast) {
  RowPattern rows = pattern(node.inputs[operand], dim, outer, inner);
  if (rows.kind == RowPattern::Kind::sample_index) throw Mixing{"it uses the position of samples in the batch"};
  if (rows.kind == RowPattern::Kind::varying) throw Mixing{"its operand '" + node.inputs[operand]->name + "' " + rows.why};
  auto [like, like_dim] = sample_source(node);
  Node* n = &node;
  int64_t rows_each = inner.number;
  if (broadcast && rows_each == 1) {
    edits.push_back([=](BatchRewriter& r) { r.first_rows(*n, operand, dim, 1); });
  } else {
    edits.push_back([=, like = like, like_dim = like_dim](BatchRewriter& r) { r.equal_rows(*n, operand, dim, rows_each, like, like_dim); });
  }
}

std::vector<SampleIndex> BatchAnalysis::narrow_index(Node& node, size_t operand, size_t dim, const DimProduct& outer,
                                                     const DimProduct& inner) {
  RowPattern rows = pattern(node.inputs[operand], dim, outer, inner);
  if (rows.kind != RowPattern::Kind::sample_index) {
    narrow(node, operand, dim, outer, inner, false);
    return {};
  }
  auto [like, like_dim] = sample_source(node);
  Node* n = &node;
  edits.push_back([=, like = like, like_dim = like_dim](BatchRewriter& r) { r.leading_rows(*n, operand, dim, 1, like, like_dim); });
  return rows.columns;
}

// Operators that only move indices keep them, and sums and products with what is no index make others: sample * columns + column. Several
// columns only where the last dimension stays as it is.
bool BatchAnalysis::keeps_sample_index(const Node& node, BatchAxis& result) {
  if (is_one_of(node, {"Mul", "Add"}) && node.inputs.size() == 2) {
    size_t which = axis_of_value(node.input(0)).sample_index.empty() ? 1 : 0;
    const std::vector<SampleIndex>& columns = axis_of_value(node.input(which)).sample_index;
    const Value* other = node.input(1 - which);
    if (columns.size() != 1 || !axis_of_value(other).sample_index.empty() || !columns[0].below.is_one()) return false;
    SampleIndex index = columns[0];
    if (node.is("Add")) {
      auto bound = below(other);
      if (!bound) return false;
      index.below = *bound;
    } else {
      auto factor = contents(other);
      if (!factor || factor->size() != 1 || (*factor)[0].number < 1) return false;
      index.step = index.step * in_types((*factor)[0]);
    }
    result.sample_index = {index};
    return true;
  }
  if (!is_one_of(node, {"Unsqueeze", "Squeeze", "Reshape", "Flatten", "Expand", "Transpose", "Identity", "Cast", "Slice"})) return false;
  const std::vector<SampleIndex> columns = axis_of_value(node.input(0)).sample_index;
  if (node.is("Cast")) {
    auto to = static_cast<DType>(node.get_int("to", 0));
    if (to != DType::int64 && to != DType::int32) return false;
  }
  if (columns.size() > 1) {
    const Value *x = node.input(0), *y = node.out(0);
    bool same_last = x->type.shape && y && y->type.shape && !y->type.shape->empty() && y->type.shape->back() == x->type.shape->back();
    if (!same_last || is_one_of(node, {"Unsqueeze", "Squeeze", "Slice"})) return false;
    if (node.is("Transpose")) {
      std::vector<int64_t> perm = node.get_ints("perm");
      if (perm.empty() || perm.back() + 1 != static_cast<int64_t>(perm.size())) return false;
    }
  }
  result.sample_index = columns;
  return true;
}

void BatchAnalysis::set_outputs(Node& node, const FactorRule& rule, const Place& place, const BatchAxis& like) {
  for (size_t o = 0; o < node.outputs.size(); ++o) {
    if (!node.outputs[o]) continue;
    BatchAxis result = like;
    for (size_t d = 0; d < rule.outputs[o].size(); ++d) {
      const std::vector<int>& dim = rule.outputs[o][d];
      auto at = std::find(dim.begin(), dim.end(), place.factor);
      if (at == dim.end()) continue;
      if (result.holds_batch()) throw Mixing{"the batch axis stands twice in its result"};
      auto k = static_cast<size_t>(at - dim.begin());
      result.axis = static_cast<int>(d);
      result.outer = product(rule, dim, 0, k) * place.outer;
      result.inner = place.inner * product(rule, dim, k + 1, dim.size());
    }
    if (result.holds_batch()) axes[node.outputs[o]] = result;
  }
}

// Every output is mixed; those whose batch axis has been set already keep it.
void BatchAnalysis::mix_outputs(Node& node, const Mixing& mixing) {
  auto cause = std::make_shared<const MixedCause>(MixedCause{&node, mixing.why, mixing.partial});
  for (Value* out : node.outputs) {
    if (!out) continue;
    BatchAxis& b = axes[out];
    b.mixed = cause;
    b.uniform = false;
    b.sample_index.clear();
    b.unknown_shape = mixing.unknown_shape;
    contents_.erase(out);
  }
}

// Outputs of a node with mixed operands are mixed by the node that mixed those. What they are as parts of a whole survives linear
// operators.
void BatchAnalysis::carry_mixed(Node& node, const MixedCause& cause) {
  bool linear = is_one_of(node, {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Neg", "Cast"});
  int mixed_operands = 0;
  bool same = true;
  for (Value* v : node.inputs) {
    auto it = axes.find(v);
    if (it == axes.end()) continue;
    ++mixed_operands;
    same &= it->second.mixed && it->second.mixed->partial == cause.partial && !it->second.holds_batch();
  }
  bool first = node.input(0) && axes.count(node.input(0));
  linear |= node.is("Mul") && mixed_operands == 1;
  linear |= is_one_of(node, {"Slice", "Gather"}) && mixed_operands == 1 && first;  // parts of it, at indices that are no partial results
  linear |= node.is("Div") && mixed_operands == 1 && first;
  linear |= is_one_of(node, {"Add", "Sub", "Sum", "Concat"}) && mixed_operands == static_cast<int>(node.inputs.size());
  linear |= is_one_of(node, {"Add", "Sub"}) && cause.partial == "mean";
  linear |= is_one_of(node, {"ReduceSum", "ReduceMean"});
  if (node.is("Cast")) linear &= is_float(static_cast<DType>(node.get_int("to", 0)));
  MixedCause next = cause;
  // A function of one partial result that is not linear is no partial result: the root of a mean, a sum plus a constant.
  bool bends = !linear && mixed_operands == 1 && (role_of(node) == Role::elementwise || reduces(node));
  if (cause.partial != "other" && (!linear || !same)) next.partial = bends && !cause.partial.empty() ? "other" : "";
  if (node.is("Div") && first && is_sum(node.input(0)) && is_batch_size(node.input(1))) next.partial = "mean";
  auto shared = std::make_shared<const MixedCause>(std::move(next));
  for (Value* out : node.outputs) {
    if (!out) continue;
    BatchAxis& b = axes[out];
    b.mixed = shared;
    b.uniform = false;
    b.sample_index.clear();
    contents_.erase(out);
  }
}

// Gives dimensions that inference left open, or calls by another name, the sizes that the rule says.
void BatchAnalysis::refine_outputs(Node& node, const FactorRule* rule) {
  for (size_t o = 0; o < node.outputs.size(); ++o) {
    Value* out = node.outputs[o];
    if (!out || (out->type.kind != Type::Kind::tensor && out->type.kind != Type::Kind::unknown)) continue;
    const auto& dims = rule->outputs[o];
    if (!out->type.shape) out->type = Type::tensor(out->type.dtype, Shape(dims.size()));
    if (out->type.shape->size() != dims.size()) continue;
    for (size_t d = 0; d < dims.size(); ++d) {
      Dim& dim = (*out->type.shape)[d];
      if (dim.known()) continue;
      bool sizes_known = std::all_of(dims[d].begin(), dims[d].end(), [&](int f) { return product_of(rule->factors[f].size).has_value(); });
      if (sizes_known) dim = dim_of(product(*rule, dims[d], 0, dims[d].size()));
    }
  }
}

void BatchAnalysis::set_shape(Value* value, const std::vector<DimProduct>& dims) {
  if (!value) return;
  Shape shape;
  for (const DimProduct& p : dims) shape.push_back(dim_of(in_types(p)));
  value->type = Type::tensor(value->type.dtype, std::move(shape));
}

// Dimensions of values without a batch that inference left open.
void BatchAnalysis::complete_types(Node& node) {
  auto open = [](const Value* v) {
    if (!v || v->type.kind != Type::Kind::tensor) return false;
    if (!v->type.shape) return true;
    return std::any_of(v->type.shape->begin(), v->type.shape->end(), [](const Dim& d) { return !d.known() && d.symbol.empty(); });
  };
  if (std::none_of(node.outputs.begin(), node.outputs.end(), open)) return;
  if (auto shape = made_shape(node)) return set_shape(node.out(0), *shape);
  FactorRule rule = factor_rule(node);
  if (rule.unknown.empty()) refine_outputs(node, &rule);
}

void BatchAnalysis::name_dims(Value* value) {
  if (!value->type.is_tensor() || !value->type.shape) return;
  for (Dim& d : *value->type.shape)
    if (!d.known() && d.symbol.empty()) d = Dim("?" + std::to_string(++fresh_count_));
}

}  // namespace fretsaw
