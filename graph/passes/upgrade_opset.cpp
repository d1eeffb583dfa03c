// Brings graphs of older operator sets to the newest: looks up the rules of each node and applies them in order of version.
#include <onnx/defs/schema.h>

#include <algorithm>
#include <cstring>

#include "graph/errors.h"
#include "graph/passes.h"
#include "graph/passes/upgrade.h"

namespace fretsaw {

const Shape* Upgrade::shape_of(const Value* value) const {
  if (!value) return nullptr;
  if (auto it = shapes.find(value); it != shapes.end()) return &it->second;
  bool certain = !value->producer && value->type.is_tensor() && value->type.shape;
  return certain ? &*value->type.shape : nullptr;
}

void Upgrade::set_input(size_t index, Value* value) {
  if (node.inputs.size() <= index) node.inputs.resize(index + 1, nullptr);
  node.inputs[index] = value;
}

Value* Upgrade::ints(const std::vector<int64_t>& values, const std::string& name) {
  Value* out = node.out(0);
  return edit.constant(make_int64s(values), (out ? out->name : node.name) + "_" + name);
}

void Upgrade::ints_to_input(const std::string& name, size_t index) {
  const Attribute* a = node.attribute(name);
  if (!a) return;
  const auto* one = std::get_if<int64_t>(&a->value);
  set_input(index, ints(one ? std::vector<int64_t>{*one} : node.get_ints(name), name));
  node.remove(name);
}

Value* Upgrade::float_like(float number, const Value* like, const std::string& name) {
  Value* out = node.out(0);
  std::string full = (out ? out->name : node.name) + "_" + name;
  DType type = types.of(like);
  if (type == DType::float64) {
    auto t = make_tensor(type, {});
    double wide = number;
    std::memcpy(mutable_data(*t), &wide, sizeof wide);
    return edit.constant(t, full);
  }
  if (type == DType::float32) return edit.constant(make_float(number), full);
  // Another type, or one that is not known yet: it is cast to where the model runs.
  return edit.add("CastLike", {edit.constant(make_float(number), full), const_cast<Value*>(like)}, {}, full + "_cast");
}

namespace {

using Rows = std::vector<UpgradeRow>;

// All rows, by operator, each operator's in order of version.
const std::unordered_map<std::string, Rows>& rows_by_operator() {
  static const auto table = [] {
    std::unordered_map<std::string, Rows> all;
    for (auto rows : {early_upgrades(), shape_upgrades(), normalization_upgrades(), image_upgrades()})
      for (const UpgradeRow& row : rows) all[row.op].push_back(row);
    for (auto& [op, rows] : all)
      std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.version < b.version; });
    return all;
  }();
  return table;
}

using Shapes = std::unordered_map<const Value*, Shape>;

class Upgrader {
 public:
  Upgrader(int64_t from, const std::function<bool(const Node&)>& leave, const Shapes& shapes)
      : from_(from), leave_(leave), shapes_(shapes) {}

  void run(Graph& graph) {
    Rewriter edit(graph);
    edit.walk([&](Node& node) {
      for (const GraphPtr& body : bodies(node)) run(*body);
      if (!node.domain.empty() || (leave_ && leave_(node))) return true;
      types_.add(node);  // before the outputs move to other nodes
      bool stays;
      try {
        stays = upgrade(node, edit);
      } catch (const Error& e) {
        throw e.at_node(node.name, node.op);
      }
      while (!node.inputs.empty() && !node.inputs.back()) node.inputs.pop_back();
      types_.add(node);
      return stays;
    });
  }

 private:
  // Applies the rules of one node. False: the node goes.
  bool upgrade(Node& node, Rewriter& edit) {
    Upgrade u{node, edit, types_, shapes_, from_};
    // A rule may change the operator (Upsample becomes Resize): the rows of the new one go on where the old ones ended.
    int64_t done = from_;
    for (bool again = true; again;) {
      again = false;
      auto found = rows_by_operator().find(node.op);
      if (found == rows_by_operator().end()) break;
      for (const UpgradeRow& row : found->second) {
        if (row.version <= done) continue;
        std::string op = node.op;
        row.rule(u);
        if (u.drop) return false;
        if (node.op == op) continue;
        done = row.version;
        again = true;
        break;
      }
    }
    return true;
  }

  int64_t from_;
  const std::function<bool(const Node&)>& leave_;
  const Shapes& shapes_;
  ElementTypes types_;
};

// Whether a rule will ask for the shape of a value that a node makes.
bool needs_shapes(Graph& graph, int64_t from) {
  bool needed = false;
  for_each_graph(graph, [&](Graph& g) {
    for (const Node* node : g.nodes) {
      bool softmax = node->is("Softmax") || node->is("LogSoftmax") || node->is("Hardmax");
      needed |= from < 13 && softmax && node->get_int("axis", 1) != -1;
      needed |= from < 21 && node->is("GroupNormalization");
      needed |= from < 7 && (node->has("axis") || node->is("PRelu"));
    }
  });
  return needed;
}

// Shapes by inference alone: those in the file are not believed, and are put back.
Shapes certain_shapes(Model& model) {
  std::vector<std::pair<Value*, Type>> before;
  for_each_graph(*model.graph, [&](Graph& g) {
    for (Value& v : g.all_values()) before.emplace_back(&v, v.type);
  });
  infer_shapes(model, {.evaluate = nullptr, .keep_hints = false});
  Shapes shapes;
  for (auto& [value, type] : before) {
    if (value->type.is_tensor() && value->type.shape) shapes[value] = *value->type.shape;
    value->type = type;
  }
  return shapes;
}

void check_opset(int64_t from) {
  if (from > newest_opset())
    throw Error("the model uses operator set " + std::to_string(from) + ", newer than " + std::to_string(newest_opset()) +
                    ", the newest this build knows",
                "export it with an older opset, or build fretsaw with a newer libonnx");
  if (from < 1) throw Error("the model uses operator set " + std::to_string(from) + ", which does not exist", "export the model again");
}

}  // namespace

int64_t newest_opset() {
  static const int64_t version = onnx::OpSchemaRegistry::DomainToVersionRange::Instance().Map().at("").second;
  return version;
}

void upgrade_graph(Graph& graph, int64_t from, const std::function<bool(const Node&)>& leave) {
  check_opset(from);
  if (from < newest_opset()) Upgrader(from, leave, {}).run(graph);
}

void upgrade_model(Model& model, const std::function<bool(const Node&)>& leave) {
  if (auto alias = model.opsets.find("ai.onnx"); alias != model.opsets.end()) {
    model.opsets.try_emplace("", alias->second);
    model.opsets.erase("ai.onnx");
  }
  for_each_graph(*model.graph, [](Graph& g) {
    for (Node* node : g.nodes)
      if (node->domain == "ai.onnx") node->domain.clear();
  });
  auto version = model.opsets.find("");
  if (version != model.opsets.end()) {
    int64_t from = version->second;
    check_opset(from);
    Shapes shapes;
    if (needs_shapes(*model.graph, from)) shapes = certain_shapes(model);
    if (from < newest_opset()) Upgrader(from, leave, shapes).run(*model.graph);
  }
  model.opsets[""] = newest_opset();
}

void upgrade_opset(Model& model) {
  upgrade_model(model, nullptr);
}

}  // namespace fretsaw
