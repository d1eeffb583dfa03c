// TreeEnsemble of ai.onnx.ml: decision trees over the features of each row.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/machine_learning.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/parallel.h"

namespace fretsaw {
namespace {

enum class Branch : uint8_t { at_most, below, at_least, above, equal, unequal, member };
enum class Aggregate : uint8_t { average, sum, least, greatest };
enum class PostTransform : uint8_t { none, softmax, logistic, softmax_zero, probit };

std::vector<double> tensor_attribute(const Node& node, const char* name) {
  if (!node.has(name)) return {};
  const TensorPtr tensor = node.get_tensor(name);
  if (!tensor || tensor->is_missing() || tensor->dtype == DType::string || (!tensor->data && tensor->count() > 0))
    throw Error(std::string(name) + " has no numbers that can be read");
  return as_doubles(TensorView{.dtype = tensor->dtype, .dims = tensor->dims, .data = const_cast<std::byte*>(tensor->data)});
}

struct TreeNode {
  Branch mode;
  int64_t feature, true_id, false_id;
  bool true_leaf, false_leaf, missing_is_true;
  double split;
  std::vector<double> members;
};

struct Forest {
  std::vector<TreeNode> nodes;
  std::vector<int64_t> roots, leaf_targets;
  std::vector<double> leaf_weights;
  int64_t targets = 1, features = 0;
  Aggregate aggregate = Aggregate::sum;
  PostTransform post = PostTransform::none;

  explicit Forest(const Node& node) {
    targets = node.get_int("n_targets", 1);
    require(targets > 0 && targets <= 1 << 24, "n_targets is out of range");
    const int64_t aggregate_code = node.get_int("aggregate_function", 1), post_code = node.get_int("post_transform", 0);
    require(aggregate_code >= 0 && aggregate_code <= 3 && post_code >= 0 && post_code <= 4,
            "aggregate_function or post_transform is not known");
    aggregate = static_cast<Aggregate>(aggregate_code);
    post = static_cast<PostTransform>(post_code);
    roots = node.get_ints("tree_roots");
    leaf_targets = node.get_ints("leaf_targetids");
    leaf_weights = tensor_attribute(node, "leaf_weights");
    read_nodes(node);
    check();
  }

  void read_nodes(const Node& node) {
    const std::vector<int64_t> features_of = node.get_ints("nodes_featureids"), true_ids = node.get_ints("nodes_truenodeids"),
                               false_ids = node.get_ints("nodes_falsenodeids"), true_leafs = node.get_ints("nodes_trueleafs"),
                               false_leafs = node.get_ints("nodes_falseleafs"), missing = node.get_ints("nodes_missing_value_tracks_true");
    const std::vector<double> modes = tensor_attribute(node, "nodes_modes"), splits = tensor_attribute(node, "nodes_splits"),
                              members = tensor_attribute(node, "membership_values");
    const size_t count = features_of.size();
    require(true_ids.size() == count && false_ids.size() == count && true_leafs.size() == count && false_leafs.size() == count &&
                modes.size() == count && splits.size() == count && (missing.empty() || missing.size() == count),
            "the nodes_ attributes are of unequal lengths");
    size_t next_member = 0;
    for (size_t i = 0; i < count; ++i) {
      require(modes[i] >= 0 && modes[i] <= 6, "a node's mode is not known");
      nodes.push_back({.mode = static_cast<Branch>(modes[i]),
                       .feature = features_of[i],
                       .true_id = true_ids[i],
                       .false_id = false_ids[i],
                       .true_leaf = true_leafs[i] != 0,
                       .false_leaf = false_leafs[i] != 0,
                       .missing_is_true = !missing.empty() && missing[i] != 0,
                       .split = splits[i]});
      if (nodes.back().mode != Branch::member) continue;
      while (next_member < members.size() && !std::isnan(members[next_member])) nodes.back().members.push_back(members[next_member++]);
      ++next_member;
    }
  }

  void check() {
    const auto count = static_cast<int64_t>(nodes.size()), leaves = static_cast<int64_t>(leaf_weights.size());
    require(leaf_targets.size() == leaf_weights.size(), "leaf_targetids and leaf_weights are of unequal lengths");
    for (int64_t root : roots) require(root >= 0 && root < count, "a tree's root is no node");
    for (int64_t target : leaf_targets) require(target >= 0 && target < targets, "a leaf's target is out of range");
    for (const TreeNode& node : nodes) {
      require(node.true_id >= 0 && node.true_id < (node.true_leaf ? leaves : count) && node.false_id >= 0 &&
                  node.false_id < (node.false_leaf ? leaves : count),
              "a branch leads to a node or leaf that is not there");
      require(node.feature >= 0, "a feature's index is negative");
      features = std::max(features, node.feature + 1);
    }
  }

  static bool takes_true(const TreeNode& node, double x) {
    if (std::isnan(x) && node.missing_is_true) return true;
    switch (node.mode) {
      case Branch::at_most:
        return x <= node.split;
      case Branch::below:
        return x < node.split;
      case Branch::at_least:
        return x >= node.split;
      case Branch::above:
        return x > node.split;
      case Branch::equal:
        return x == node.split;
      case Branch::unequal:
        return x != node.split;
      case Branch::member:
        break;
    }
    return std::find(node.members.begin(), node.members.end(), x) != node.members.end();
  }

  size_t leaf_of(int64_t root, const double* row) const {
    int64_t at = root;
    for (size_t steps = 0; steps < nodes.size(); ++steps) {
      const TreeNode& node = nodes[static_cast<size_t>(at)];
      const bool taken = takes_true(node, row[node.feature]);
      at = taken ? node.true_id : node.false_id;
      if (taken ? node.true_leaf : node.false_leaf) return static_cast<size_t>(at);
    }
    throw Error("a tree runs in a circle", "every path must end in a leaf");
  }

  void predict(const double* row, double* out) const {
    const double start = aggregate == Aggregate::least      ? std::numeric_limits<double>::infinity()
                         : aggregate == Aggregate::greatest ? -std::numeric_limits<double>::infinity()
                                                            : 0;
    std::fill_n(out, targets, start);
    for (int64_t root : roots) {
      const size_t leaf = leaf_of(root, row);
      double& value = out[leaf_targets[leaf]];
      if (aggregate == Aggregate::least) {
        value = std::min(value, leaf_weights[leaf]);
      } else if (aggregate == Aggregate::greatest) {
        value = std::max(value, leaf_weights[leaf]);
      } else {
        value += leaf_weights[leaf];
      }
    }
    for (int64_t i = 0; i < targets; ++i) {
      if (aggregate == Aggregate::average && !roots.empty()) out[i] /= static_cast<double>(roots.size());
      if (std::isinf(start) && out[i] == start) out[i] = 0;  // no tree has a leaf for this target
    }
    transform(out);
  }

  void transform(double* out) const;
};

// The inverse of the normal distribution's error function (Winitzki's approximation), as the probit needs it.
double inverse_error(double x) {
  const double log_part = std::log((1 - x) * (1 + x)), a = 0.147;
  const double first = 2 / (3.14159265358979323846 * a) + log_part / 2;
  return std::copysign(std::sqrt(std::sqrt(first * first - log_part / a) - first), x);
}

void Forest::transform(double* out) const {
  double* end = out + targets;
  if (post == PostTransform::logistic) {
    std::transform(out, end, out, [](double v) { return 1 / (1 + std::exp(-v)); });
  } else if (post == PostTransform::probit) {
    std::transform(out, end, out, [](double v) { return std::sqrt(2.0) * inverse_error(2 * v - 1); });
  } else if (post == PostTransform::softmax || post == PostTransform::softmax_zero) {
    const double highest = *std::max_element(out, end);
    double sum = 0;
    for (double* v = out; v != end; ++v) {
      *v = post == PostTransform::softmax_zero && *v == 0 ? 0 : std::exp(*v - highest);
      sum += *v;
    }
    for (double* v = out; v != end && sum > 0; ++v) *v /= sum;
  }
}

CompiledKernel make_tree_ensemble(const CompileContext& c) {
  const auto forest = std::make_shared<const Forest>(c.node());
  return {[forest](RunContext& r) {
    const TensorView& x = r.input(0);  // [N, F]
    require(x.rank() == 2 && x.dims[1] >= forest->features, "the input must be [N, F] with all the features that the trees use");
    NumberReader<double> rows(x);
    TensorView& y = sized_output(r, 0, {x.dims[0], forest->targets}, x.dtype);
    NumberWriter<double> to(y);
    parallel_for(x.dims[0], 256, r.threads(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) forest->predict(rows.data() + i * x.dims[1], to.data() + i * forest->targets);
    });
    to.finish();
  }};
}

}  // namespace

void register_trees(KernelRegistry& registry) {
  registry.add({.op = "TreeEnsemble", .domain = "ai.onnx.ml", .make = make_tree_ensemble});
}

}  // namespace fretsaw
