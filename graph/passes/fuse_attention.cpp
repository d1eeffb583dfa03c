// Attention from its pieces: softmax(scale * Q K^T + mask) V.
//
//   x [B, S, H * D] -> Reshape -> Transpose -> q [B, H, S, D] ---.
//   z [B, T, G * D] -> Reshape -> Transpose (-> repeat) -> k^T --+- MatMul - scale - mask - Softmax - MatMul -> Transpose -> Reshape
//   w [B, T, G * E] -> Reshape -> Transpose (-> repeat) -> v ----------------------------------------'
//
// becomes Attention(x, z, w, mask) where all three have that form, and Attention(q, k, v, mask) otherwise. Views and permutations of any
// kind are seen through (strided_view.h), so that it does not matter how an exporter writes them.
#include <algorithm>
#include <set>

#include "graph/passes.h"
#include "graph/passes/attention_operands.h"
#include "graph/passes/attention_parts.h"
#include "graph/passes/patterns.h"

namespace fretsaw {
namespace {

struct Operands {
  Choice q, k, v;
  bool flat = false;
};

// The fewest heads of keys and values first, and for those the form that needs no transposes; it says the number of heads in attributes.
std::optional<Operands> choose(const std::vector<Choice>& q, const std::vector<Choice>& k, const std::vector<Choice>& v, int64_t H,
                               bool may_be_flat) {
  std::set<int64_t> heads;
  for (const Choice& c : k) heads.insert(c.heads);
  for (int64_t h : heads)
    for (bool flat : {true, false}) {
      if (flat && !may_be_flat) continue;
      const Choice *a = best_of(q, H, flat), *b = best_of(k, h, flat), *c = best_of(v, h, flat);
      if (a && b && c) return Operands{*a, *b, *c, flat};
    }
  return std::nullopt;
}

struct Problem {
  AttentionScores scores;
  Node* root = nullptr;  // MatMul of probabilities and values
  Dims lead;             // of the root's output, before the last two dimensions
  ScoreSizes sizes;
  int64_t D = 1, E = 1;
};

class AttentionFuser {
 public:
  AttentionFuser(Graph& graph, int64_t batch) : graph_(graph), batch_(batch), uses_(graph), edit_(graph), masks_(edit_), operands_(edit_) {}

  void run() {
    edit_.walk([&](Node& node) {
      if (node.is("MatMul")) fuse(node);
      return true;
    });
    for (Node* node : graph_.nodes)
      if (groups_.count(node->group)) node->group = -1;
  }

 private:
  void fuse(Node& root) {
    Problem p;
    p.root = &root;
    if (!describe(p)) return;
    for (int64_t H : head_counts(p)) {
      p.sizes.H = H, p.sizes.B = count_of(p.lead) / H;
      auto operands = find_operands(p);
      if (!operands || (!operands->flat && H != head_counts(p).back())) continue;
      auto mask = masks_.make(p.scores.masks, p.sizes);
      if (!mask) return;
      write(p, *operands, *mask);
      return;
    }
  }

  bool describe(Problem& p) {
    const Value* y = p.root->out(0);
    auto dims = static_dims(y);
    if (!dims || dims->size() < 3 || count_of(*dims) == 0 || !p.root->input(0)->producer) return false;
    p.sizes.dtype = y->type.dtype;
    if (p.sizes.dtype != DType::float32 && p.sizes.dtype != DType::float16 && p.sizes.dtype != DType::bfloat16) return false;
    auto scores = find_scores(p.root->inputs[0], *p.root, uses_);
    if (!scores) return false;
    p.scores = std::move(*scores);
    auto q = static_dims(p.scores.product->input(0)), k = static_dims(p.scores.product->input(1));
    auto made = static_dims(p.scores.product->out(0));
    if (!q || !k || !made || q->size() < 3 || k->size() < 3 || made->size() != dims->size()) return false;
    for (const Value* v : {p.scores.product->inputs[0], p.scores.product->inputs[1], p.root->inputs[1]})
      if (v->type.dtype != p.sizes.dtype) return false;
    p.lead.assign(dims->begin(), dims->end() - 2);
    if (!std::equal(p.lead.begin(), p.lead.end(), made->begin())) return false;
    p.sizes.S = (*dims)[dims->size() - 2], p.E = dims->back();
    p.D = q->back(), p.sizes.T = k->back();
    return p.D > 0 && p.sizes.T > 0;
  }

  // How many of the leading dimensions' elements may be heads: certain for four dimensions, to be tried for three. The last is for
  // the form that keeps the leading dimensions.
  std::vector<int64_t> head_counts(const Problem& p) const {
    const int64_t all = count_of(p.lead);
    if (p.lead.size() > 1) return {all / p.lead[0]};
    if (p.scores.four_dims && count_of(*p.scores.four_dims) == all * p.sizes.S * p.sizes.T) return {(*p.scores.four_dims)[1]};
    std::set<int64_t> found;
    auto view = whole_view(p.scores.product->inputs[0], {all, p.sizes.S, p.D});
    while (view && step_back(*view, true))
      for (const auto& a : view->axes)
        if (a.at == p.sizes.S * p.D) found.insert(a.size);
    found.erase(all);
    std::vector<int64_t> counts(found.begin(), found.end());
    counts.push_back(all);
    return counts;
  }

  std::optional<Operands> find_operands(const Problem& p) const {
    const ScoreSizes& s = p.sizes;
    auto q = choices_of(p.scores.product->inputs[0], p.lead, {s.B, s.H, s.S, p.D, false}, true);
    auto k = choices_of(p.scores.product->inputs[1], p.lead, {s.B, s.H, s.T, p.D, true}, true);
    auto v = choices_of(p.root->inputs[1], p.lead, {s.B, s.H, s.T, p.E, false}, false);
    return choose(q, k, v, s.H, batch_ == 0 || s.H % batch_ != 0);
  }

  void write(const Problem& p, const Operands& o, const AttentionMask& mask) {
    const ScoreSizes& s = p.sizes;
    Node& node = *p.root;
    std::vector<Value*> inputs = {operands_.make(o.q, s.B, s.S, p.D), operands_.make(o.k, s.B, s.T, p.D),
                                  operands_.make(o.v, s.B, s.T, p.E)};
    if (mask.value) inputs.push_back(mask.value);
    for (const Node* gone : p.scores.nodes) groups_.insert(gone->group);
    groups_.insert(node.group);
    groups_.erase(-1);
    node.op = "Attention";
    node.inputs = std::move(inputs);
    node.attributes = {{"scale", static_cast<float>(p.scores.scale * o.q.scale * o.k.scale)}};
    if (mask.causal) node.set("is_causal", int64_t{1});
    if (p.scores.softcap != 0) node.set("softcap", static_cast<float>(p.scores.softcap));
    if (p.scores.float32_softmax) node.set("softmax_precision", static_cast<int64_t>(DType::float32));
    if (o.flat) {
      node.set("q_num_heads", s.H);
      node.set("kv_num_heads", o.k.heads);
      write_flat_result(p);
    } else {
      write_result(p, {s.B, s.H, s.S, p.E});
    }
  }

  // The result as [B, H, S, E], in the root's own dimensions.
  void write_result(const Problem& p, const Dims& dims) {
    Value* y = p.root->out(0);
    if (static_dims(y) == dims) return;
    edit_.detach(*p.root, 0);
    p.root->out(0)->type = Type::tensor(p.sizes.dtype, shape_of(dims));
    edit_.add_making("Reshape", {p.root->out(0), operands_.ints(*static_dims(y))}, {y}, {}, true);
  }

  // The result as [B, S, H * E]: the transposes of the old result hand it through.
  void write_flat_result(const Problem& p) {
    const ScoreSizes& s = p.sizes;
    Value* y = edit_.detach(*p.root, 0);
    Value* flat = p.root->out(0);
    flat->type = Type::tensor(s.dtype, shape_of({s.B, s.S, s.H * p.E}));
    std::vector<Node*> transposes;
    if (covered(y, y, p, transposes)) {
      for (Node* t : transposes) {
        groups_.insert(t->group);
        t->op = "Reshape";
        t->attributes.clear();
        t->inputs = {flat, operands_.ints(*static_dims(t->out(0)))};
      }
      groups_.erase(-1);
      if (!uses_.unused(y))
        edit_.add_making("Reshape", {flat, operands_.ints(*static_dims(y))}, {y}, {}, true);  // for nodes that die with it
      return;
    }
    const Dims four = {s.B, s.S, s.H, p.E}, turned = {s.B, s.H, s.S, p.E};
    auto after = [&](const std::string& op, std::vector<Value*> inputs, Value* out, std::vector<Attribute> attributes = {}) {
      edit_.add_making(op, std::move(inputs), {out}, std::move(attributes), true);
      return out;
    };
    auto fresh = [&](const Dims& dims) {
      return graph_.add_value(graph_.fresh_name(y->name + "_heads"), Type::tensor(s.dtype, shape_of(dims)));
    };
    const bool direct = static_dims(y) == turned;
    Value* v = after("Reshape", {flat, operands_.ints(four)}, fresh(four));
    v = after("Transpose", {v}, direct ? y : fresh(turned), {{"perm", std::vector<int64_t>{0, 2, 1, 3}}});
    if (!direct) after("Reshape", {v, operands_.ints(*static_dims(y))}, y);
  }

  // Whether all that uses `v`, the result `y` in some dimensions, are transposes that put its elements in the order of the flat form.
  bool covered(Value* v, Value* y, const Problem& p, std::vector<Node*>& transposes) const {
    if (uses_.is_output(v)) return false;
    return uses_.all_users(v, [&](const Node* user) {
      Node* node = const_cast<Node*>(user);
      if (user->is("Transpose")) {
        transposes.push_back(node);
        return is_flat(*node, y, p);
      }
      const bool view = user->is("Reshape") || user->is("Squeeze") || user->is("Unsqueeze");
      return view && user->input(0) == v && covered(node->out(0), y, p, transposes);
    });
  }

  // Whether the elements of a transpose's output have the order [B, S, H, E], those of `y` being [B, H, S, E].
  static bool is_flat(const Node& transpose, Value* y, const Problem& p) {
    auto dims = static_dims(transpose.out(0));
    auto view = dims ? whole_view(transpose.out(0), *dims) : std::nullopt;
    while (view && view->base != y)
      if (!step_back(*view, false)) return false;
    if (!view || view->offset != 0) return false;
    const int64_t E = p.E, S = p.sizes.S, H = p.sizes.H;
    return std::all_of(view->axes.begin(), view->axes.end(), [&](const StridedView::Axis& a) {
      if (a.size == 1) return true;
      const int64_t r = a.stride, end = a.stride * a.size;
      if (r < E) return a.at == r && end <= E;
      if (r < S * E) return r % E == 0 && a.at == r / E * (H * E) && end <= S * E;
      if (r < H * S * E) return r % (S * E) == 0 && a.at == r / (S * E) * E && end <= H * S * E;
      return a.at == r;
    });
  }

  Graph& graph_;
  int64_t batch_;
  Uses uses_;
  Rewriter edit_;
  MaskMaker masks_;
  OperandMaker operands_;
  std::set<int> groups_;  // fusion groups that lost a node
};

}  // namespace

void fuse_attention(Model& model, int64_t batch) {
  for_each_graph(*model.graph, [&](Graph& graph) {
    if (has_any(graph, {"Softmax"})) AttentionFuser(graph, batch).run();
  });
  remove_unused_nodes(*model.graph);
}

}  // namespace fretsaw
