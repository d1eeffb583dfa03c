// The rewrites that make_batch_symbolic applies: operands cut to rows, shapes with the batch put in while the model runs.
#include <algorithm>
#include <cstring>

#include "graph/errors.h"
#include "partitioner/batch_analysis.h"

namespace fretsaw {
namespace {

// The first `rows` rows along `dim` of a constant.
TensorPtr first_rows_of(const Tensor& t, size_t dim, int64_t rows) {
  Dims dims = t.dims;
  int64_t before = 1, after = 1, size = dims[dim];
  for (size_t d = 0; d < dims.size(); ++d) (d < dim ? before : after) *= d == dim ? 1 : dims[d];
  dims[dim] = rows;
  auto result = make_tensor(t.dtype, dims);
  int64_t row_bytes = after * bits_of(t.dtype) / 8;
  for (int64_t b = 0; b < before; ++b)
    std::memcpy(mutable_data(*result) + b * rows * row_bytes, t.data + b * size * row_bytes, static_cast<size_t>(rows * row_bytes));
  return result;
}

bool can_copy(const Tensor& t) {
  return t.dtype != DType::string && bits_of(t.dtype) >= 8 && !t.is_missing() && t.data;
}

}  // namespace

Value* BatchRewriter::constant(Node& before, const std::vector<int64_t>& values, const std::string& name) {
  return before.graph->add_constant(before.graph->fresh_name(name), make_int64s(values));
}

Value* BatchRewriter::add(Node& before, const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes, Type type,
                          const std::string& name) {
  Graph& graph = *before.graph;
  Node* node = graph.add_node_object();
  node->name = graph.fresh_name(name);
  node->op = op;
  node->inputs = std::move(inputs);
  node->attributes = std::move(attributes);
  Value* out = graph.add_value(graph.fresh_name(name + "/out"), std::move(type));
  out->producer = node;
  node->outputs = {out};
  before_[&before].push_back(node);
  return out;
}

Value* BatchRewriter::batch_of(Node& before, Value* like, int like_dim) {
  std::vector<Attribute> attributes = {{"start", int64_t{like_dim}, "", ""}, {"end", int64_t{like_dim + 1}, "", ""}};
  return add(before, "Shape", {like}, std::move(attributes), Type::tensor(DType::int64, Shape{Dim(1)}), "batch_size");
}

Value* BatchRewriter::narrowed(Node& before, Value* value, size_t dim, int64_t rows) {
  if (value->constant && can_copy(*value->constant)) {
    auto key = std::make_tuple(value, dim, rows);
    auto [it, fresh] = narrowed_.emplace(key, nullptr);
    if (fresh)
      it->second = value->graph->add_constant(value->graph->fresh_name(value->name + "/rows"), first_rows_of(*value->constant, dim, rows));
    return it->second;
  }
  Type type = value->type;
  if (type.shape) (*type.shape)[dim] = Dim(rows);
  return add(
      before, "Slice",
      {value, constant(before, {0}, "starts"), constant(before, {rows}, "ends"), constant(before, {static_cast<int64_t>(dim)}, "axes")}, {},
      std::move(type), value->name + "/rows");
}

void BatchRewriter::first_rows(Node& node, size_t operand, size_t dim, int64_t inner) {
  node.inputs[operand] = narrowed(node, node.inputs[operand], dim, inner);
}

void BatchRewriter::equal_rows(Node& node, size_t operand, size_t dim, int64_t inner, Value* like, int like_dim) {
  Value* value = node.inputs[operand];
  Value* rows = narrowed(node, value, dim, inner);
  Value* batch = batch_of(node, like, like_dim);
  size_t rank = value->type.shape->size();
  std::vector<Value*> parts;
  if (dim > 0) parts.push_back(constant(node, std::vector<int64_t>(dim, 1), "ones"));
  parts.push_back(batch);
  if (dim + 1 < rank) parts.push_back(constant(node, std::vector<int64_t>(rank - dim - 1, 1), "ones"));
  Value* shape = batch;
  if (parts.size() > 1)
    shape = add(node, "Concat", parts, {{"axis", int64_t{0}, "", ""}}, Type::tensor(DType::int64, Shape{Dim(static_cast<int64_t>(rank))}),
                value->name + "/repeats");
  Type type = value->type;
  (*type.shape)[dim] = inner == 1 ? Dim(facts_.symbol) : dim_of(DimProduct(inner) * DimProduct(facts_.symbol));
  node.inputs[operand] = add(node, inner == 1 ? "Expand" : "Tile", {rows, shape}, {}, std::move(type), value->name + "/batch");
}

void BatchRewriter::leading_rows(Node& node, size_t operand, size_t dim, int64_t inner, Value* like, int like_dim) {
  Value* value = node.inputs[operand];
  Value* end = batch_of(node, like, like_dim);
  if (inner != 1)
    end = add(node, "Mul", {end, constant(node, {inner}, "rows")}, {}, Type::tensor(DType::int64, Shape{Dim(1)}), "batch_rows");
  Type type = value->type;
  (*type.shape)[dim] = inner == 1 ? Dim(facts_.symbol) : dim_of(DimProduct(inner) * DimProduct(facts_.symbol));
  node.inputs[operand] =
      add(node, "Slice", {value, constant(node, {0}, "starts"), end, constant(node, {static_cast<int64_t>(dim)}, "axes")}, {},
          std::move(type), value->name + "/batch");
}

void BatchRewriter::set_constant(Node& node, size_t operand, const std::vector<int64_t>& values) {
  if (node.inputs.size() <= operand) node.inputs.resize(operand + 1, nullptr);
  const Value* old = node.inputs[operand];
  node.inputs[operand] = constant(node, values, (old ? old->name : node.name) + "/any_batch");
}

void BatchRewriter::shape_element(Node& node, size_t operand, size_t k, size_t length, int64_t times, Value* like, int like_dim) {
  Value* shape = node.inputs[operand];
  Value* element = batch_of(node, like, like_dim);
  Type one = Type::tensor(DType::int64, Shape{Dim(1)});
  if (times != 1) element = add(node, "Mul", {element, constant(node, {times}, "times")}, {}, one, "batch_rows");
  std::vector<Value*> parts;
  auto part = [&](size_t first, size_t last) {
    if (first >= last) return;
    Type type = Type::tensor(DType::int64, Shape{Dim(static_cast<int64_t>(last - first))});
    parts.push_back(
        add(node, "Slice",
            {shape, constant(node, {static_cast<int64_t>(first)}, "starts"), constant(node, {static_cast<int64_t>(last)}, "ends")}, {},
            std::move(type), shape->name + "/part"));
  };
  part(0, k);
  parts.push_back(element);
  part(k + 1, length);
  node.inputs[operand] = parts.size() == 1
                             ? element
                             : add(node, "Concat", parts, {{"axis", int64_t{0}, "", ""}},
                                   Type::tensor(DType::int64, Shape{Dim(static_cast<int64_t>(length))}), shape->name + "/any_batch");
}

void BatchRewriter::finish() {
  std::unordered_map<Graph*, bool> touched;
  for (auto& [node, added] : before_) touched[node->graph] = true;
  for (auto& [graph, _] : touched) {
    std::vector<Node*> order;
    for (Node* node : graph->nodes) {
      if (auto it = before_.find(node); it != before_.end()) order.insert(order.end(), it->second.begin(), it->second.end());
      order.push_back(node);
    }
    graph->nodes = std::move(order);
  }
}

}  // namespace fretsaw
