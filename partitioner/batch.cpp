// Choosing the inputs that hold the batch, judging the outputs, and applying the rewrites.
#include "partitioner/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "graph/errors.h"
#include "graph/passes.h"
#include "partitioner/batch_analysis.h"

namespace fretsaw {
namespace {

const char* const kUndivided = "run it with --micro-batches 1 and no data axis";

struct Candidate {
  Value* input = nullptr;
  int axis = 0;
  bool certain = false;  // the user said so
  const Dim& dim() const { return (*input->type.shape)[axis]; }
};

// Inputs that may hold the batch: those that are tensors with dimensions, at the axis the user gave or 0.
std::vector<Candidate> candidates(const Model& model, const std::map<std::string, int>& batch_axes) {
  std::vector<Candidate> result;
  std::set<std::string> unknown;
  for (const auto& [name, axis] : batch_axes) unknown.insert(name);
  const auto users = consumers_of(*model.graph);
  const auto is_used = [&](const Value* input) {
    const auto found = users.find(input);
    return (found != users.end() && !found->second.empty()) || std::count(model.graph->outputs.begin(), model.graph->outputs.end(), input);
  };
  for (Value* input : model.graph->inputs) {
    unknown.erase(input->name);
    if (input->is_constant()) continue;
    auto told = batch_axes.find(input->name);
    if (told != batch_axes.end() && told->second < 0) continue;
    bool tensor = input->type.is_tensor() && input->type.shape;
    int axis = told != batch_axes.end() ? told->second : 0;
    if (told == batch_axes.end() && !is_used(input)) continue;
    if (!tensor || axis >= static_cast<int>(input->type.shape->size())) {
      if (told != batch_axes.end())
        throw Error(fmt::format("input '{}' of type {} has no axis {}", input->name, to_string(input->type), axis),
                    "give --batch an axis it has", ErrorCode::usage);
      continue;
    }
    result.push_back({input, axis, told != batch_axes.end()});
  }
  if (!unknown.empty())
    throw Error(fmt::format("--batch names '{}', which is no input of the model", *unknown.begin()), "see `fretsaw inspect`",
                ErrorCode::usage);
  return result;
}

// Further sets, of a batch that is another axis than the first (time-major models): all inputs with a dimension of one name, for each name
// that stands behind the first axis of an input.
std::vector<std::vector<Candidate>> later_axes(const Model& model, const std::map<std::string, int>& batch_axes) {
  std::vector<std::vector<Candidate>> sets;
  std::set<std::string> tried;
  const auto open = [&](const Value* v) { return !v->is_constant() && v->type.is_tensor() && v->type.shape && !batch_axes.count(v->name); };
  for (const Value* first : model.graph->inputs) {
    if (!open(first)) continue;
    for (size_t d = 1; d < first->type.shape->size(); ++d) {
      const Dim size = (*first->type.shape)[d];
      if (size.known() || size.symbol.empty() || !tried.insert(size.symbol).second) continue;
      std::vector<Candidate>& set = sets.emplace_back();
      for (Value* input : model.graph->inputs) {
        if (!open(input)) continue;
        const auto at = std::find(input->type.shape->begin(), input->type.shape->end(), size);
        if (at != input->type.shape->end()) set.push_back({input, static_cast<int>(at - input->type.shape->begin())});
      }
    }
  }
  return sets;
}

// Sets of inputs to try, the likeliest first. `later`: those of later axes.
std::vector<std::vector<Candidate>> choices(const std::vector<Candidate>& all, const std::vector<std::vector<Candidate>>& later) {
  std::vector<std::vector<Candidate>> sets;
  auto add = [&](auto takes) {
    std::vector<Candidate> set;
    for (const Candidate& c : all)
      if (c.certain || takes(c)) set.push_back(c);
    auto same = [&](const std::vector<Candidate>& other) {
      return std::equal(set.begin(), set.end(), other.begin(), other.end(), [](auto& a, auto& b) { return a.input == b.input; });
    };
    if (!set.empty() && std::none_of(sets.begin(), sets.end(), same)) sets.push_back(std::move(set));
  };
  // The batch is what the user's inputs say, else the first input's of more than one dimension, else the first one's.
  std::vector<Dim> sizes;
  auto consider = [&](const Dim& d) {
    if (std::find(sizes.begin(), sizes.end(), d) == sizes.end()) sizes.push_back(d);
  };
  for (const Candidate& c : all)
    if (c.certain) consider(c.dim());
  for (const Candidate& c : all)
    if (c.input->type.shape->size() > 1 && c.dim().value != 1) consider(c.dim());
  for (const Candidate& c : all) consider(c.dim());
  for (const Dim& size : sizes) {
    auto fits = [&](const Candidate& c) { return c.dim() == size && (size.known() || !size.symbol.empty()); };
    add(fits);
    // A symbol may go by several names, and one input may have a number where another has a symbol.
    add([&](const Candidate& c) { return fits(c) || !c.dim().known(); });
    add([&](const Candidate& c) { return fits(c) || !c.dim().known() || (!size.known() && c.dim().value > 1); });
    // A mask [s, s] may have the batch's size by chance.
    for (const Candidate& left : all) add([&](const Candidate& c) { return fits(c) && c.input != left.input; });
    for (const Candidate& only : all) add([&](const Candidate& c) { return fits(c) && c.input == only.input; });
    if (size == sizes.front()) sets.insert(sets.end(), later.begin(), later.end());
  }
  return sets;
}

std::string free_symbol(const Model& model, const std::vector<Candidate>& set) {
  for (const Candidate& c : set)
    if (!c.dim().known() && !c.dim().symbol.empty() && c.dim().symbol.find_first_of("*+-/() ") == std::string::npos) return c.dim().symbol;
  std::set<std::string> used;
  for (const Value& v : model.graph->all_values())
    if (v.type.is_tensor() && v.type.shape)
      for (const Dim& d : *v.type.shape)
        if (!d.symbol.empty()) used.insert(d.symbol);
  std::string name = "batch";
  for (int k = 1; used.count(name); ++k) name = fmt::format("batch_{}", k);
  return name;
}

// The types of all values, put back when an attempt fails: analysis refines them.
class TypeKeeper {
 public:
  explicit TypeKeeper(Graph& graph) { keep(graph); }
  void restore() {
    for (auto& [value, type] : types_) value->type = type;
  }

 private:
  void keep(Graph& graph) {
    for (Value& v : graph.all_values()) types_.emplace_back(&v, v.type);
    for (Node* node : graph.nodes)
      for (const GraphPtr& body : bodies(*node)) keep(*body);
  }
  std::vector<std::pair<Value*, Type>> types_;
};

Error mixed_error(const Value& output, const MixedCause& cause) {
  std::string remedy = kUndivided;
  if (cause.partial.empty() || cause.partial == "mean" || cause.partial == "sum")
    remedy += fmt::format(", or say with --merge {}={} how its parts come together", output.name,
                          cause.partial.empty() ? "mean, sum or same" : cause.partial);
  Error e(fmt::format("output '{}' mixes the samples of the batch: {}", output.name, cause.why), remedy);
  return cause.node ? e.at_node(cause.node->name, cause.node->op) : e;
}

void check_declared(const Value& output, const BatchAxis& b, const MergeRule& declared, BatchFacts& facts) {
  if (b.mixed && b.holds_batch()) throw mixed_error(output, *b.mixed);
  if (b.holds_batch() && declared.merge != "concat")
    throw Error(fmt::format("--merge {}={}, but its dimension {} holds the batch", output.name, declared.merge, b.axis),
                "leave --merge out for it", ErrorCode::usage);
  if (b.mixed && declared.merge == "concat") throw mixed_error(output, *b.mixed);
  if (!b.mixed || declared.merge == "concat") return;
  const std::string& is = b.mixed->partial;
  if (is == "other")
    throw Error(fmt::format("output '{}' is neither a sum nor a mean over samples, as --merge {}={} would need", output.name, output.name,
                            declared.merge),
                kUndivided)
        .at_node(b.mixed->node->name, b.mixed->node->op);
  if (!is.empty() && declared.merge != is)
    throw Error(
        fmt::format("output '{}' is a {} over the batch, not what --merge {}={} says", output.name, is, output.name, declared.merge),
        fmt::format("use --merge {}={}", output.name, is), ErrorCode::usage)
        .at_node(b.mixed->node->name, b.mixed->node->op);
  if (is.empty()) {
    facts.unproved[output.name] = *b.mixed;
    facts.notes.push_back(
        fmt::format("output '{}' is merged by '{}' as declared; node '{}' ({}) mixes the samples in a way that does not prove it",
                    output.name, declared.merge, b.mixed->node->name, b.mixed->node->op));
  }
  if (b.unknown_shape) throw mixed_error(output, *b.mixed);
}

// How one output's parts come together; throws when they cannot.
MergeRule merge_of(const Value& output, const BatchAxis& b, const MergeRule* declared, BatchFacts& facts) {
  if (declared) check_declared(output, b, *declared, facts);
  if (declared && declared->merge != "concat") return *declared;
  if (b.mixed) throw mixed_error(output, *b.mixed);
  if (!b.holds_batch()) {
    if (declared)
      throw Error(fmt::format("output '{}' does not depend on the batch and cannot be joined along it", output.name),
                  fmt::format("use --merge {}=same", output.name), ErrorCode::usage);
    facts.notes.push_back(fmt::format("output '{}' does not depend on the batch: one part is taken", output.name));
    return {"same", 0};
  }
  if (!output.type.is_tensor())
    throw Error(
        fmt::format("output '{}' is a {} of tensors that hold the batch, which cannot be joined", output.name, to_string(output.type)),
        kUndivided);
  if (!b.sample_index.empty()) throw Error(fmt::format("output '{}' holds the position of samples in the batch", output.name), kUndivided);
  if (!b.outer.is_one())
    throw Error(fmt::format("output '{}' holds several batches one after the other in dimension {}, so that parts of it cannot be joined",
                            output.name, b.axis),
                kUndivided);
  if (declared && declared->axis != b.axis)
    throw Error(fmt::format("output '{}' holds the batch in dimension {}, not {}", output.name, b.axis, declared->axis),
                "give --merge that axis", ErrorCode::usage);
  return {"concat", b.axis};
}

void judge_outputs(const Model& model, BatchAnalysis& analysis, const std::map<std::string, MergeRule>& merges, BatchFacts& facts) {
  std::set<std::string> unknown;
  for (const auto& [name, rule] : merges) unknown.insert(name);
  for (const Value* output : model.graph->outputs) {
    unknown.erase(output->name);
    auto declared = merges.find(output->name);
    BatchAxis b = analysis.axis_of_value(output);
    if (!b.mixed && analysis.depends_on_size(output)) {
      auto cause = MixedCause{output->producer, "it is computed from the size of the batch", ""};
      b.mixed = std::make_shared<const MixedCause>(cause);
    }
    facts.outputs[output->name] = merge_of(*output, b, declared == merges.end() ? nullptr : &declared->second, facts);
  }
  if (!unknown.empty())
    throw Error(fmt::format("--merge names '{}', which is no output of the model", *unknown.begin()), "see `fretsaw inspect`",
                ErrorCode::usage);
}

// Sizes of one name are equal: no input may be left whole that has the batch's in some dimension.
void check_left_out(const std::vector<Candidate>& set, const std::vector<Candidate>& all) {
  for (const Candidate& left : all) {
    if (std::any_of(set.begin(), set.end(), [&](const Candidate& c) { return c.input == left.input; })) continue;
    for (const Dim& dim : *left.input->type.shape)
      for (const Candidate& c : set)
        if (!dim.known() && !dim.symbol.empty() && c.dim() == dim)
          throw Error(fmt::format("input '{}' has the size '{}' of the batch and would be given whole", left.input->name, dim.symbol),
                      kUndivided);
  }
}

// One choice of batch inputs, analysed. Throws the Error that stands against it.
BatchFacts attempt(Model& model, const std::vector<Candidate>& set, const std::vector<Candidate>& all,
                   const std::map<std::string, MergeRule>& merges) {
  check_left_out(set, all);
  BatchFacts facts;
  facts.symbol = free_symbol(model, set);
  for (const Candidate& c : set) {
    if (!c.dim().known()) continue;
    if (facts.batch >= 0 && facts.batch != c.dim().value)
      throw Error(fmt::format("input '{}' has {} samples where another has {}", c.input->name, c.dim().value, facts.batch),
                  "say with --batch NAME=none which inputs hold no batch");
    facts.batch = c.dim().value;
  }
  // One batch has one size everywhere: the number where there is one, else the symbol.
  Dim batch = facts.batch >= 0 ? Dim(facts.batch) : Dim(facts.symbol);
  bool changed = false;
  for (const Candidate& c : set) {
    Dim& dim = (*c.input->type.shape)[c.axis];
    changed |= !(dim == batch);
    dim = batch;
    facts.inputs.emplace_back(c.input, c.axis);
  }
  if (changed) infer_shapes(model);
  BatchAnalysis analysis(*model.graph, *product_of(batch), facts.inputs);
  if (facts.batch == 1) {  // nothing to divide
    for (const Value* output : model.graph->outputs) {
      auto declared = merges.find(output->name);
      facts.outputs[output->name] = declared == merges.end() ? MergeRule{"same", 0} : declared->second;
    }
    return facts;
  }
  analysis.run();
  judge_outputs(model, analysis, merges, facts);
  facts.axes = std::move(analysis.axes);
  facts.edits = std::move(analysis.edits);
  if (analysis.has_random)
    facts.notes.push_back("random operators draw the same numbers in each part of the batch, not those of the whole");
  return facts;
}

}  // namespace

BatchFacts analyse_batch(Model& model, const std::map<std::string, int>& batch_axes, const std::map<std::string, MergeRule>& merges) {
  std::vector<Candidate> all = candidates(model, batch_axes);
  if (all.empty()) throw Error("no input of the model holds a batch that could be divided", kUndivided);
  TypeKeeper types(*model.graph);
  std::optional<Error> first;
  const bool told = std::any_of(all.begin(), all.end(), [](const Candidate& c) { return c.certain; });
  for (const std::vector<Candidate>& set : choices(all, told ? std::vector<std::vector<Candidate>>() : later_axes(model, batch_axes))) {
    try {
      BatchFacts facts = attempt(model, set, all, merges);
      if (facts.batch == 1 && first) throw Error("a batch of 1");
      for (Value* input : model.graph->inputs) {
        bool holds = std::any_of(set.begin(), set.end(), [&](const Candidate& c) { return c.input == input; });
        if (!holds && !input->is_constant())
          facts.notes.push_back(fmt::format("input '{}' holds no batch: every micro-batch is given all of it", input->name));
      }
      return facts;
    } catch (const Error& e) {
      if (e.code() == ErrorCode::usage) throw;
      if (!first) first = e;
      types.restore();
    }
  }
  throw *first;
}

void make_batch_symbolic(Model& model, const BatchFacts& facts) {
  if (facts.batch == 1) return;
  BatchRewriter rewriter(model, facts);
  for (const auto& edit : facts.edits) edit(rewriter);
  rewriter.finish();
  DimProduct symbol(facts.symbol);
  for (const auto& [const_value, b] : facts.axes) {
    auto* value = const_cast<Value*>(const_value);
    if (!b.holds_batch() || b.unknown_shape || !value->type.is_tensor() || !value->type.shape) continue;
    if (b.axis < static_cast<int>(value->type.shape->size())) (*value->type.shape)[b.axis] = dim_of(b.outer * symbol * b.inner);
  }
  // Names that the analysis gave to unknown dimensions are no use to anybody else.
  auto forget = [&](auto&& self, Graph& graph) -> void {
    for (Value& v : graph.all_values())
      if (v.type.is_tensor() && v.type.shape)
        for (Dim& d : *v.type.shape)
          if (!d.known() && d.symbol.find('?') != std::string::npos) d = Dim();
    for (Node* node : graph.nodes)
      for (const GraphPtr& body : bodies(*node)) self(self, *body);
  };
  forget(forget, *model.graph);
  remove_dead_nodes(*model.graph);
  infer_shapes(model);
}

}  // namespace fretsaw
