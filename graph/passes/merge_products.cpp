// Products of one value with several constant matrices become one product, and a Split.
//
//   q = x Wq + bq, k = x Wk, v = x Wv + bv   ->   q, k, v = Split(x [Wq|Wk|Wv] + [bq|0|bv])
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "graph/passes.h"
#include "graph/passes/patterns.h"
#include "graph/passes/strided_view.h"
#include "graph/tensor_bytes.h"

namespace fretsaw {
namespace {

// One of the products: x [..., K] times weight [K, N], or [N, K], and perhaps a bias.
struct Product {
  Node* node = nullptr;    // MatMul or Gemm
  Node* adding = nullptr;  // the Add after a MatMul that makes the result
  Value* weight = nullptr;
  Value* bias = nullptr;  // of N elements
  int64_t N = 0;
  Value* result() const { return (adding ? adding : node)->out(0); }
  Node* last() const { return adding ? adding : node; }
};

// Also where the bytes are still to be made.
bool is_matrix(const Value* v) {
  return is_fixed(v) && v->constant->dims.size() == 2 && (v->constant->data || v->constant->generate) &&
         bits_of(v->constant->dtype) % 8 == 0;
}

bool is_vector(const Value* v, int64_t size) {
  if (!is_fixed(v) || !v->constant->data || v->constant->count() != size) return false;
  return v->constant->dims.empty() ? false : v->constant->dims.back() == size;
}

class ProductMerger {
 public:
  ProductMerger(Graph& graph, const MergeProductsOptions& options, MergedWeights* kept)
      : graph_(graph), options_(options), kept_(kept), uses_(graph), edit_(graph) {}

  void run() {
    find();
    for (auto& [key, products] : found_) merge(products);
    if (splits_.empty()) return;
    edit_.walk([&](Node& node) {
      if (gone_.count(&node)) return false;
      if (auto it = splits_.find(&node); it != splits_.end()) write_split(node, it->second);
      return true;
    });
    for (Node* node : graph_.nodes)
      if (groups_.count(node->group)) node->group = -1;
  }

 private:
  // The number of the input, in order of use, and the form: products that agree in both can be merged.
  using Key = std::pair<size_t, std::string>;

  void find() {
    std::map<const Value*, size_t> order;
    for (Node* node : graph_.nodes) {
      Product p;
      std::string form;
      if (!describe(*node, p, form)) continue;
      const size_t at = order.try_emplace(node->inputs[0], order.size()).first->second;
      found_[Key{at, form}].push_back(p);
    }
  }

  bool describe(Node& node, Product& p, std::string& form) const {
    const bool gemm = node.is("Gemm");
    if ((!gemm && !node.is("MatMul")) || !node.input(0) || !is_matrix(node.input(1))) return false;
    if (!static_dims(node.inputs[0]) || !static_dims(node.out(0)) || uses_.only_user(node.inputs[1]) != &node) return false;
    p.node = &node;
    p.weight = node.inputs[1];
    const bool turned = gemm && node.get_int("transB", 0) != 0;
    p.N = p.weight->constant->dims[turned ? 0 : 1];
    form = turned ? "turned" : "straight";
    form += " " + std::string(name_of(p.weight->constant->dtype));
    if (gemm) {
      if (node.get_int("transA", 0) != 0 || node.get_float("alpha", 1) != 1 || node.get_float("beta", 1) != 1) return false;
      form += " gemm";
      p.bias = node.input(2);
      return !p.bias || is_vector(p.bias, p.N);
    }
    if (static_dims(node.inputs[0])->size() < 2) return false;
    Node* user = uses_.only_user(node.out(0));
    if (!user || !user->is("Add")) return true;
    Value* other = user->inputs[user->inputs[0] == node.out(0) ? 1 : 0];
    if (!is_vector(other, p.N) || other->constant->dtype != p.weight->constant->dtype) return true;
    if (static_dims(user->out(0)) != static_dims(node.out(0))) return true;
    p.bias = other;
    p.adding = user;
    return true;
  }

  // Whether one of the products alone leaves most of a device idle: then one launch for all is worth the copies of the Split.
  bool pays(const std::vector<Product>& products) const {
    if (products.size() < 2) return false;
    const Dims x = *static_dims(products[0].node->inputs[0]);
    const int64_t M = count_of(x) / std::max<int64_t>(x.back(), 1);
    return std::all_of(products.begin(), products.end(),
                       [&](const Product& p) { return ((M + 127) / 128) * ((p.N + 127) / 128) <= options_.tiles; });
  }

  void merge(std::vector<Product>& products) {
    if (!pays(products)) return;
    const bool turned = products[0].node->get_int("transB", 0) != 0;
    const bool biased = std::any_of(products.begin(), products.end(), [](const Product& p) { return p.bias != nullptr; });
    std::vector<TensorPtr> weights, biases;
    for (const Product& p : products) {
      weights.push_back(p.weight->constant);
      biases.push_back(p.bias ? p.bias->constant : zeros(p.N, p.weight->constant->dtype));
    }
    Product& first = products[0];
    Node& node = *first.node;
    node.inputs[1] = constant(kept_joined(weights, turned ? 0 : 1), first.weight->name);
    if (biased) bias_of_all(first, constant(joined(biases, 0, /*vectors=*/true), "merged_bias"));
    for (const Product& p : products) {
      for (const Node* n : {p.node, p.adding})
        if (n) groups_.insert(n->group);
      if (&p != &first) {
        gone_[p.node] = true;
        if (p.adding) gone_[p.adding] = true;
      }
    }
    groups_.erase(-1);
    splits_[&node] = {products, biased};
  }

  static TensorPtr zeros(int64_t N, DType dtype) { return make_tensor(dtype, {N}); }

  Value* constant(TensorPtr tensor, const std::string& name) {
    const Type type = Type::tensor(tensor->dtype, shape_of(tensor->dims));
    Value* v = edit_.constant(std::move(tensor), name + "_merged");
    v->type = type;
    return v;
  }

  void bias_of_all(Product& first, Value* bias) {
    if (first.node->is("Gemm")) {
      first.node->inputs.resize(3);
      first.node->inputs[2] = bias;
    } else {
      biases_[first.node] = bias;
    }
    if (first.adding) gone_[first.adding] = true;
  }

  TensorPtr kept_joined(const std::vector<TensorPtr>& parts, size_t axis) {
    if (!kept_) return joined(parts, axis);
    std::vector<TensorPtr> key = parts;
    if (axis == 0) key.push_back(nullptr);  // the same matrices may be joined the other way too
    TensorPtr& tensor = (*kept_)[key];
    if (!tensor) tensor = joined(parts, axis);
    return tensor;
  }

  static TensorPtr joined_later(const std::vector<TensorPtr>& parts, const Dims& dims, size_t rows) {
    auto tensor = std::make_shared<Tensor>();
    tensor->dtype = parts[0]->dtype;
    tensor->dims = dims;
    tensor->generate = JoinedTensors{parts, rows};
    return tensor;
  }

  // Matrices joined along `axis`, 0 or the last; or the elements of `vectors` behind each other.
  static TensorPtr joined(const std::vector<TensorPtr>& parts, size_t axis, bool vectors = false) {
    Dims dims = parts[0]->dims;
    if (vectors) dims = {0};
    dims[axis] = 0;
    for (const TensorPtr& p : parts) dims[axis] += vectors ? p->count() : p->dims[axis];
    const size_t rows = axis == 0 ? 1 : static_cast<size_t>(dims[0]);
    if (std::any_of(parts.begin(), parts.end(), [](const TensorPtr& p) { return p->generate != nullptr; }))
      return joined_later(parts, dims, rows);
    auto tensor = make_tensor(parts[0]->dtype, dims);
    const size_t row_bytes = tensor->bytes() / std::max<size_t>(rows, 1);
    auto copy = [&](size_t begin, size_t end) {
      for (size_t r = begin; r < end; ++r) {
        std::byte* to = mutable_data(*tensor) + r * row_bytes;
        for (const TensorPtr& p : parts) {
          const size_t bytes = p->bytes() / rows;
          if (bytes) std::memcpy(to, p->data + r * bytes, bytes);
          to += bytes;
        }
      }
    };
    const size_t threads =
        tensor->bytes() < (size_t{8} << 20) ? 1 : std::min<size_t>(rows, std::max(1U, std::thread::hardware_concurrency()));
    std::vector<std::thread> others;
    for (size_t t = 1; t < threads; ++t) others.emplace_back([&, t] { copy(rows * t / threads, rows * (t + 1) / threads); });
    copy(0, rows / threads);
    for (std::thread& t : others) t.join();
    return tensor;
  }

  struct Merged {
    std::vector<Product> products;
    bool biased = false;
  };

  void write_split(Node& node, const Merged& merged) {
    std::vector<Value*> results;
    int64_t N = 0;
    std::vector<int64_t> sizes;
    for (const Product& p : merged.products) {
      p.result()->producer = nullptr;
      results.push_back(p.result());
      sizes.push_back(p.N);
      N += p.N;
    }
    Shape shape = *results[0]->type.shape;
    shape.back() = N;
    const Type type = Type::tensor(results[0]->type.dtype, shape);
    auto fresh = [&](const std::string& name) { return graph_.add_value(graph_.fresh_name(name), type); };
    Value* made = fresh(node.out(0)->name + "_merged");
    set_output(node, 0, made);
    if (auto bias = biases_.find(&node); bias != biases_.end()) {
      Value* sum = fresh(made->name + "_biased");
      edit_.add_making("Add", {made, bias->second}, {sum}, {}, true);
      made = sum;
    }
    Value* parts = constant(make_int64s(sizes), "split");
    edit_.add_making("Split", {made, parts}, results, {{"axis", static_cast<int64_t>(shape.size()) - 1}}, true);
  }

  Graph& graph_;
  const MergeProductsOptions& options_;
  MergedWeights* kept_;
  Uses uses_;
  Rewriter edit_;
  std::map<Key, std::vector<Product>> found_;
  std::map<const Node*, Merged> splits_;
  std::map<const Node*, Value*> biases_;
  std::map<const Node*, bool> gone_;
  std::set<int> groups_;
};

}  // namespace

void merge_products(Model& model, const MergeProductsOptions& options, MergedWeights* kept) {
  for_each_graph(*model.graph, [&](Graph& graph) {
    if (has_any(graph, {"MatMul", "Gemm"})) ProductMerger(graph, options, kept).run();
  });
  remove_unused_nodes(*model.graph);
}

}  // namespace fretsaw
