// Gradients of operators that pick or place elements by index.
#include <unordered_map>

#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"

namespace fretsaw {
namespace {

// Rows that several indices name get the sum.
std::vector<Value*> gather_gradient(GradientContext& c) {
  return only_first(
      c, c.add_own("GatherGrad", {c.of_output(), c.input(1), c.shape_value(c.input(0))}, {{"axis", c.node().get_int("axis", 0)}}));
}

std::vector<Attribute> with_reduction(std::vector<Attribute> attributes, const char* reduction) {
  attributes.push_back({"reduction", std::string(reduction)});
  return attributes;
}

// The gradient added up in zeros, in float32 at least: a sum of many in 16 bits comes to a stop.
Value* added_up(GradientContext& c, const char* scatter, Value* indices, const std::vector<Attribute>& attributes) {
  const auto formula = [&](const Term& g) {
    return g.made(scatter, {c.zeros_like(c.input(0), g.value->type.dtype), indices, g}, attributes);
  };
  return in_float32(formula, Term(c, c.of_output()));
}

std::vector<Value*> gather_elements_gradient(GradientContext& c) {
  return only_first(c, added_up(c, "ScatterElements", c.input(1), with_reduction(c.attributes({"axis"}), "add")));
}

// The indices of a GatherND with the places along its batch dimensions written in front of each tuple.
Value* whole_tuples(GradientContext& c) {
  Value* indices = c.input(1);
  const int64_t batches = c.node().get_int("batch_dims", 0);
  if (batches == 0) return indices;
  const size_t rank = c.rank(indices);
  const std::vector<Attribute> all_but_last = {{"start", int64_t{0}}, {"end", int64_t{-1}}};
  Value* rows = c.add("Concat", {c.add("Shape", {indices}, all_but_last, DType::int64), c.integers({1})}, {{"axis", int64_t{0}}});
  std::vector<Value*> columns;
  for (int64_t d = 0; d < batches; ++d) {
    std::vector<int64_t> along(rank, 1);
    along[static_cast<size_t>(d)] = -1;
    Value* end = c.add("Squeeze", {c.size_value(indices, d), c.integers({0})});
    Value* places = c.add("Range", {c.integer(0), end, c.integer(1)}, {}, DType::int64);
    columns.push_back(c.add("Expand", {c.add("Reshape", {places, c.integers(along)}), rows}));
  }
  columns.push_back(indices);
  return c.add("Concat", columns, {{"axis", int64_t{-1}}});
}

std::vector<Value*> gather_nd_gradient(GradientContext& c) {
  return only_first(c, added_up(c, "ScatterND", whole_tuples(c), {{"reduction", std::string("add")}}));
}

// What both of the data and its updates get, by a formula of the gradient and them, computed in float32 at least.
template <typename Formula>
std::vector<Value*> of_data_and_updates(GradientContext& c, const Formula& formula) {
  std::vector<Value*> found = c.none();
  const DType type = c.of_output()->type.dtype, wide = bits_of(type) < 32 ? DType::float32 : type;
  const auto widened = [&](Value* x) { return cast_to(wide, Term(c, x)); };
  const auto [of_data, of_updates] = formula(widened(c.of_output()), widened(c.input(0)), widened(c.input(2)));
  if (c.wants(0)) found[0] = cast_to(type, of_data);
  if (c.wants(2)) found[2] = cast_to(type, of_updates);
  return found;
}
// The largest or smallest of the data and its updates: the gradient goes to those that are, in equal parts.
std::vector<Value*> scatter_extreme_gradient(GradientContext& c, const char* scatter, const char* gather) {
  Value* indices = c.input(1);
  const std::vector<Attribute> axis = c.attributes({"axis"});
  return of_data_and_updates(c, [&](const Term& g, const Term& data, const Term& updates) {
    const Term y = cast_to(g.value->type.dtype, Term(c, c.output(0)));
    const Term there = y.made(gather, {y, indices}, axis);
    const Term kept = as_number(data == y, g), taken = as_number(updates == there, g);
    const Term part = g / kept.made(scatter, {kept, indices, taken}, with_reduction(axis, "add"));
    return std::pair(part * kept, part.made(gather, {part, indices}, axis) * taken);
  });
}

// The product of the data and its updates: each gets the product of the others, which is 0 where another one is, and for the only 0 that
// of all that are not.
std::vector<Value*> scatter_product_gradient(GradientContext& c, const char* scatter, const char* gather) {
  Value* indices = c.input(1);
  const std::vector<Attribute> axis = c.attributes({"axis"});
  return of_data_and_updates(c, [&](const Term& g, const Term& data, const Term& updates) {
    const auto without_zeros = [](const Term& x) { return where(x == 0, 1, x); };
    const Term factors = without_zeros(data), more = without_zeros(updates), zeros = as_number(data == 0, g);
    const Term all = g * factors.made(scatter, {factors, indices, more}, with_reduction(axis, "mul"));
    const Term none = zeros.made(scatter, {zeros, indices, as_number(updates == 0, g)}, with_reduction(axis, "add"));
    const auto share = [](const Term& whole, const Term& zeros_there, const Term& own, const Term& factor) {
      return where(zeros_there == as_number(own == 0, own), whole / factor, 0);
    };
    const auto there = [&](const Term& x) { return x.made(gather, {x, indices}, axis); };
    return std::pair(share(all, none, data, factors), share(there(all), there(none), updates, more));
  });
}

// The data, overwritten or added to by the updates. Of updates to one place the last stays, but all get the gradient, as in PyTorch.
std::vector<Value*> scatter_gradient(GradientContext& c, const char* scatter, const char* gather) {
  std::vector<Value*> found = c.none();
  const std::string reduction = c.node().get_string("reduction", "none");
  if (reduction == "max" || reduction == "min") return scatter_extreme_gradient(c, scatter, gather);
  if (reduction == "mul") return scatter_product_gradient(c, scatter, gather);
  if (reduction != "none" && reduction != "add") c.refuse("there is no gradient for the reduction '" + reduction + "'");
  Value *g = c.of_output(), *indices = c.input(1);
  if (c.wants(0)) found[0] = reduction == "add" ? g : c.add(scatter, {g, indices, c.zeros_like(c.input(2))}, c.attributes({"axis"}));
  if (c.wants(2)) found[2] = c.add(gather, {g, indices}, c.attributes({"axis"}));
  return found;
}
std::vector<Value*> scatter_elements_gradient(GradientContext& c) {
  return scatter_gradient(c, "ScatterElements", "GatherElements");
}
std::vector<Value*> scatter_nd_gradient(GradientContext& c) {
  return scatter_gradient(c, "ScatterND", "GatherND");
}

std::vector<Value*> topk_gradient(GradientContext& c) {
  if (!c.of_output()) return c.none();
  std::vector<Attribute> axis = {{"axis", c.node().get_int("axis", -1)}};
  Value* indices = c.output(1, DType::int64);
  return only_first(c, c.add("ScatterElements", {c.zeros_like(c.input(0)), indices, c.of_output()}, axis));
}

// The sum runs the other way.
std::vector<Value*> cumsum_gradient(GradientContext& c) {
  std::vector<Attribute> attributes = c.attributes({"exclusive"});
  if (c.node().get_int("reverse", 0) == 0) attributes.push_back({"reverse", int64_t{1}});
  return only_first(c, c.add("CumSum", {c.of_output(), c.input(1)}, attributes));
}

std::vector<Value*> cumprod_gradient(GradientContext& c) {
  return only_first(c, c.add_own("CumProdGrad", {c.of_output(), c.input(0), c.input(1)}, c.attributes({"exclusive", "reverse"})));
}

// values [off, on]: each gets the sum of g where it stands
std::vector<Value*> one_hot_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  if (!c.wants(2)) return found;
  Term g(c, c.of_output());
  Value* flags = c.numbers({0, 1}, g.value->type.dtype);
  Term on = g.made("OneHot", {c.input(0), c.input(1), flags}, c.attributes({"axis"}));
  auto sum = [&](const Term& x) { return x.made("Reshape", {x.made("ReduceSum", {x}, {{"keepdims", int64_t{0}}}), c.integers({1})}); };
  found[2] = c.add("Concat", {sum(g * (1.0 - on)), sum(g * on)}, {{"axis", int64_t{0}}});
  return found;
}

// The gradient of slices that lay at these places along the axis; of the flattened tensor where the node has no axis.
std::vector<Value*> slices_gradient(GradientContext& c, Value* places) {
  if (c.node().has("axis"))
    return only_first(c, c.add_own("GatherGrad", {c.of_output(), places, c.shape_value(c.input(0))}, c.attributes({"axis"})));
  Value* size = c.add("Reshape", {c.add("Size", {c.input(0)}, {}, DType::int64), c.integers({1})}, {}, DType::int64);
  Value* flat = c.add_own("GatherGrad", {c.of_output(), places, size}, {{"axis", int64_t{0}}});
  return only_first(c, c.reshape_like(flat, c.input(0)));
}

// Those where the condition holds.
std::vector<Value*> compress_gradient(GradientContext& c) {
  return slices_gradient(c, c.add("Squeeze", {c.add("NonZero", {c.input(1)}, {}, DType::int64), c.integers({0})}, {}, DType::int64));
}

// Y[k] = X[indices[k]]: of equal ones the first gets the gradient.
std::vector<Value*> unique_gradient(GradientContext& c) {
  return c.of_output() ? slices_gradient(c, c.output(1, DType::int64)) : c.none();
}

// The cache, overwritten by the update from each sample's write index on.
std::vector<Value*> tensor_scatter_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Value *g = c.of_output(), *update = c.input(1), *starts = c.input(2);
  const size_t rank = c.rank(c.input(0)), axis = c.axis(c.node().get_int("axis", -2), rank);
  const auto at = static_cast<int64_t>(axis);
  if (c.wants(0)) {
    std::vector<Value*> operands = {g, c.zeros_like(update)};
    if (starts) operands.push_back(starts);
    found[0] = c.add("TensorScatter", operands, c.attributes({"axis", "mode"}));
  }
  if (!c.wants(1)) return found;
  Value* length = c.size_value(update, at);
  if (!starts) {
    found[1] = c.add("Slice", {g, c.integers({0}), length, c.integers({at})});
    return found;
  }
  std::vector<int64_t> samples(rank, 1), steps(rank, 1);
  samples[0] = steps[axis] = -1;
  Value* end = c.add("Squeeze", {length, c.integers({0})});
  Value* along = c.add("Reshape", {c.add("Range", {c.integer(0), end, c.integer(1)}, {}, DType::int64), c.integers(steps)});
  Value* places = c.add("Add", {c.add("Reshape", {starts, c.integers(samples)}), along});
  if (c.node().get_string("mode", "linear") == "circular") places = c.add("Mod", {places, c.size_value(c.input(0), at)});
  found[1] = c.add("GatherElements", {g, c.expand_like(places, update)}, {{"axis", at}});
  return found;
}

}  // namespace

GradientRule indexing_gradient(const std::string& name) {
  static const std::unordered_map<std::string, GradientRule> rules = {
      {"Gather", gather_gradient},
      {"GatherElements", gather_elements_gradient},
      {"GatherND", gather_nd_gradient},
      {"Scatter", scatter_elements_gradient},
      {"ScatterElements", scatter_elements_gradient},
      {"ScatterND", scatter_nd_gradient},
      {"TopK", topk_gradient},
      {"CumSum", cumsum_gradient},
      {"CumProd", cumprod_gradient},
      {"OneHot", one_hot_gradient},
      {"Compress", compress_gradient},
      {"Unique", unique_gradient},
      {"TensorScatter", tensor_scatter_gradient},
      // Indices, and draws.
      {"Multinomial", zero_gradient},
      {"NonZero", zero_gradient},
      {"NonMaxSuppression", zero_gradient},
  };
  auto it = rules.find(name);
  return it == rules.end() ? nullptr : it->second;
}

}  // namespace fretsaw
