// RotaryEmbedding from its pieces: x * cos + rotated(x) * sin, where rotated(x) = Concat(-x[half:], x[:half]) on the last axis.
//
// Only a part of each head may be rotated: Concat(pieces(x[:R]), x[R:]). cos and sin hold each number twice, once for each half; the
// operator takes it once.
#include <algorithm>
#include <cstring>
#include <map>

#include "graph/passes.h"
#include "graph/passes/attention_operands.h"
#include "graph/passes/narrow_floats.h"
#include "graph/passes/patterns.h"

namespace fretsaw {
namespace {

// x's last axis, elements [begin, begin + size).
struct Columns {
  Value* of = nullptr;
  int64_t begin = 0, size = 0;
};

// `v` as columns of another value, or all of its own.
Columns columns_of(Value* v) {
  auto own = static_dims(v);
  if (!own || own->empty()) return {};
  const Columns all{v, 0, own->back()};
  auto view = whole_view(v, *own);
  if (!view || !v->producer || (!v->producer->is("Slice") && !v->producer->is("Split")) || !step_back(*view, false)) return all;
  const Dims base = *static_dims(view->base);
  if (base.size() != own->size() || !std::equal(base.begin(), base.end() - 1, own->begin())) return all;
  for (const auto& a : view->axes) {
    const int64_t wanted = a.at < own->back() ? a.at : a.at / own->back() * base.back();
    if (a.size > 1 && a.stride != wanted) return all;
  }
  return {view->base, view->offset, own->back()};
}

// Where heads and positions stand in x: [B, H, S, D] or [B, S, H, D].
struct Place {
  bool heads_first = true;
  int64_t B = 1, H = 1, S = 1;
};

struct Rotation {
  Columns x;                             // what is rotated: the first columns of x.of
  Value *cos = nullptr, *sin = nullptr;  // they broadcast to it
  Place place;
};

class RotaryFuser {
 public:
  explicit RotaryFuser(Graph& graph) : graph_(graph), uses_(graph), edit_(graph), operands_(edit_) {}

  void run() {
    edit_.walk([&](Node& node) {
      if (node.is("Concat")) fuse_part(node);
      if (node.is("Add") && !begins_part(node)) fuse_whole(node);
      return true;
    });
  }

 private:
  static Node* made_by(const Value* v, std::string_view op) {
    Node* node = v ? v->producer : nullptr;
    return node && node->is(op) && node->graph == v->graph && v->output == 0 ? node : nullptr;
  }

  // Concat(-x[half:], x[:half]): gives x.
  static Value* rotated(const Value* v) {
    const Node* concat = made_by(v, "Concat");
    if (!concat || concat->inputs.size() != 2 || !last_axis(*concat)) return nullptr;
    const Node* neg = made_by(concat->inputs[0], "Neg");
    if (!neg) return nullptr;
    const Columns second = columns_of(neg->inputs[0]), first = columns_of(concat->inputs[1]);
    if (!first.of || first.of != second.of || first.begin != 0 || second.begin != first.size || first.size != second.size) return nullptr;
    return last_dim(first.of) == 2 * first.size ? first.of : nullptr;
  }

  static bool last_axis(const Node& concat) {
    const int64_t axis = concat.get_int("axis", 0);
    return axis == -1 || axis == rank_of(concat.out(0)) - 1;
  }

  static std::optional<Rotation> find(const Node& add) {
    for (size_t i : {0, 1}) {
      const Node *straight = made_by(add.input(i), "Mul"), *turned = made_by(add.input(1 - i), "Mul");
      if (!straight || !turned) return std::nullopt;
      for (size_t j : {0, 1}) {
        Value* x = rotated(turned->input(j));
        if (!x) continue;
        for (size_t k : {0, 1}) {
          if (straight->input(k) != x) continue;
          Rotation r{{x, 0, last_dim(x)}, straight->input(1 - k), turned->input(1 - j), {}};
          if (placed(r)) return r;
        }
      }
    }
    return std::nullopt;
  }

  // cos and sin have one row for each position, the same for all heads.
  static bool placed(Rotation& r) {
    auto x = static_dims(r.x.of), c = static_dims(r.cos), s = static_dims(r.sin);
    const DType type = r.x.of->type.dtype;
    if (!x || !c || c != s || x->size() != 4 || c->size() < 2 || c->size() > 4 || count_of(*x) == 0) return false;
    if (type != DType::float32 && type != DType::float16 && type != DType::bfloat16) return false;
    if (r.cos->type.dtype != type || r.sin->type.dtype != type) return false;
    Dims dims(4 - c->size(), 1);
    dims.insert(dims.end(), c->begin(), c->end());
    if (dims[3] != (*x)[3] || (dims[0] != 1 && dims[0] != (*x)[0])) return false;
    for (bool heads_first : {true, false}) {
      const size_t heads = heads_first ? 1 : 2, positions = 3 - heads;
      if (dims[heads] != 1 || dims[positions] != (*x)[positions]) continue;
      r.place = {heads_first, (*x)[0], (*x)[heads], (*x)[positions]};
      return true;
    }
    return false;
  }

  // Concat(rotated columns, the other columns) of one value.
  std::optional<Rotation> find_part(const Node& concat) const {
    if (concat.inputs.size() != 2 || !last_axis(concat)) return std::nullopt;
    const Node* add = made_by(concat.inputs[0], "Add");
    auto r = add ? find(*add) : std::nullopt;
    if (!r) return std::nullopt;
    const Columns rotated = columns_of(r->x.of), rest = columns_of(concat.inputs[1]);
    if (rotated.of == r->x.of || rotated.of != rest.of || rotated.begin != 0 || rest.begin != rotated.size) return std::nullopt;
    if (rest.begin + rest.size != last_dim(rest.of)) return std::nullopt;
    r->x = rotated;
    return r;
  }

  bool begins_part(const Node& add) const {
    const Node* user = uses_.only_user(add.out(0));
    return user && user->is("Concat") && find_part(*user);
  }

  void fuse_part(Node& concat) {
    if (auto r = find_part(concat)) write(concat, *r);
  }
  void fuse_whole(Node& add) {
    if (auto r = find(add)) write(add, *r);
  }

  // Whether both halves of the last axis are equal.
  static bool halves_equal(const Value* v, int depth = 0) {
    if (!v || depth > 16) return false;
    if (v->constant) return constant_halves_equal(*v);
    const Node* node = v->producer;
    if (!node) return false;
    if (node->is("Concat")) return node->inputs.size() == 2 && node->inputs[0] == node->inputs[1] && last_axis(*node);
    if (node->is("Cos") || node->is("Sin") || node->is("Cast") || node->is("Identity")) return halves_equal(node->inputs[0], depth + 1);
    if (node->is("Unsqueeze") || node->is("Squeeze") || node->is("Reshape") || node->is("Expand"))
      return last_dim(node->inputs[0]) == last_dim(v) && halves_equal(node->inputs[0], depth + 1);
    double number = 0;
    if (node->is("Mul") && scalar_value(node->input(1), number)) return halves_equal(node->inputs[0], depth + 1);
    if (node->is("Gather"))  // rows of a table
      return node->get_int("axis", 0) == 0 && rank_of(node->inputs[0]) > 1 && halves_equal(node->inputs[0], depth + 1);
    return false;
  }

  static bool constant_halves_equal(const Value& v) {
    std::vector<double> numbers;
    const auto width = static_cast<size_t>(std::max<int64_t>(last_dim(&v), 1));
    if (width % 2 != 0 || !float_values(&v, numbers)) return false;
    for (size_t i = 0; i < numbers.size(); i += width)
      if (!std::equal(&numbers[i], &numbers[i] + width / 2, &numbers[i] + width / 2)) return false;
    return true;
  }

  // [S, R / 2] of a cache that all batches share, else [B, S, R / 2].
  Value* half_cache(Value* cache, const Place& place, bool shared) {
    Value*& made = caches_[{cache, shared}];
    if (made) return made;
    const int64_t width = last_dim(cache), half = width / 2;
    const Dims dims = shared ? Dims{place.S, half} : Dims{place.B, place.S, half};
    std::vector<double> numbers, first;
    if (float_values(cache, numbers)) {
      for (size_t i = 0; i < numbers.size(); ++i)
        if (static_cast<int64_t>(i) % width < half) first.push_back(numbers[i]);
      made = edit_.constant(float_tensor(cache->type.dtype, dims, first), cache->name + "_half");
      made->type = Type::tensor(cache->type.dtype, shape_of(dims));
      return made;
    }
    auto ints = [&](int64_t x) { return edit_.constant(make_int64s({x}), "rotary_half"); };
    Value* cut = edit_.add("Slice", {cache, ints(0), ints(half), ints(-1)}, {}, cache->name + "_half");
    Shape cut_shape = *cache->type.shape;
    cut_shape.back() = half;
    cut->type = Type::tensor(cache->type.dtype, cut_shape);
    return made = operands_.reshaped(cut, dims);
  }

  // [B, S]: 0, 1, 2, ... for each batch.
  Value* positions(const Place& place) {
    Value*& made = positions_[{place.B, place.S}];
    if (made) return made;
    auto tensor = make_tensor(DType::int64, {place.B, place.S});
    for (int64_t i = 0; i < place.B * place.S; ++i) {
      const int64_t at = i % place.S;
      std::memcpy(mutable_data(*tensor) + i * static_cast<int64_t>(sizeof at), &at, sizeof at);
    }
    return made = edit_.constant(tensor, "rotary_positions");
  }

  void write(Node& root, const Rotation& r) {
    if (!halves_equal(r.cos) || !halves_equal(r.sin)) return;
    const Place& p = r.place;
    Value *x = r.x.of, *y = root.out(0);
    const int64_t D = last_dim(x);
    auto cache_dims = *static_dims(r.cos);
    const bool shared = p.B > 1 && (cache_dims.size() < 4 || cache_dims[0] == 1);
    Value* flat = flat_form(x, p, D);
    std::vector<Value*> inputs = {flat ? flat : x, half_cache(r.cos, p, shared), half_cache(r.sin, p, shared)};
    if (shared) inputs.push_back(positions(p));
    root.op = "RotaryEmbedding";
    root.group = -1;
    root.inputs = std::move(inputs);
    root.attributes.clear();
    if (r.x.size != D) root.set("rotary_embedding_dim", r.x.size);
    if (flat) write_flat(root, y, p, D);
  }

  // x as [B, S, H * D], where it is that but for reshapes and transposes. Null: [B, H, S, D] is its own form.
  Value* flat_form(Value* x, const Place& p, int64_t D) {
    if (!p.heads_first) return operands_.reshaped(x, {p.B, p.S, p.H * D});
    const auto choices = choices_of(x, {p.B, p.H}, {p.B, p.H, p.S, D, false}, false);
    const Choice* flat = best_of(choices, p.H, true);
    return flat ? operands_.make(*flat, p.B, p.S, D) : nullptr;
  }

  // The result comes as [B, S, H * D]; y's users find it as it was.
  void write_flat(Node& root, Value* y, const Place& p, int64_t D) {
    root.set("num_heads", p.H);
    edit_.detach(root, 0);
    Value* flat = root.out(0);
    flat->type = Type::tensor(y->type.dtype, shape_of({p.B, p.S, p.H * D}));
    const Dims dims = {p.B, p.S, p.H, D};
    if (!p.heads_first) {
      edit_.add_making("Reshape", {flat, operands_.ints(dims)}, {y}, {}, true);
      return;
    }
    Value* heads = graph_.add_value(graph_.fresh_name(y->name + "_heads"), Type::tensor(y->type.dtype, shape_of(dims)));
    edit_.add_making("Reshape", {flat, operands_.ints(dims)}, {heads}, {}, true);
    edit_.add_making("Transpose", {heads}, {y}, {{"perm", std::vector<int64_t>{0, 2, 1, 3}}}, true);
  }

  Graph& graph_;
  Uses uses_;
  Rewriter edit_;
  OperandMaker operands_;
  std::map<std::pair<Value*, bool>, Value*> caches_;
  std::map<std::pair<int64_t, int64_t>, Value*> positions_;
};

}  // namespace

void fuse_rotary(Model& model) {
  for_each_graph(*model.graph, [](Graph& graph) {
    if (has_any(graph, {"Neg"})) RotaryFuser(graph).run();
  });
  remove_unused_nodes(*model.graph);
}

}  // namespace fretsaw
