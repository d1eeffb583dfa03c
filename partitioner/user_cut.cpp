// Turns named values into an assignment of nodes to stages.
#include "partitioner/user_cut.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "graph/errors.h"

namespace fretsaw {
namespace {

// The fewest single-character changes that turn one name into another, up to 64 characters of each.
size_t distance(std::string a, std::string b) {
  a.resize(std::min<size_t>(a.size(), 64));
  b.resize(std::min<size_t>(b.size(), 64));
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t corner = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, corner + (a[i - 1] != b[j - 1])});
      corner = above;
    }
  }
  return row[b.size()];
}

class UserCut {
 public:
  UserCut(const GraphIndex& index, const Graph& source) : index_(index), source_(source) {
    for (size_t i = 0; i < index.nodes.size(); ++i)
      for (const Value* v : index.nodes[i]->outputs)
        if (v) makers_.try_emplace(v->source_name(), static_cast<int>(i));
  }

  // Puts the nodes that the named value depends on, and that have no stage yet, into `stage`.
  void assign(const std::string& name, int stage, std::vector<int>& stage_of) {
    auto maker = makers_.find(name);
    if (maker != makers_.end()) return assign_ancestors({maker->second}, stage, stage_of);
    const Value* value = find_in_source(name);
    if (!value)
      throw Error(fmt::format("--cut names '{}', and there is no such value{}", name, similar(name)), "name a value of the model",
                  ErrorCode::usage);
    if (!value->producer)
      throw Error(fmt::format("--cut names '{}', which no node makes", name), "name the result of a node", ErrorCode::usage);
    std::vector<int> nodes;
    for (const std::string& made : made_before(value)) {
      auto it = makers_.find(made);
      if (it != makers_.end()) nodes.push_back(it->second);
    }
    assign_ancestors(nodes, stage, stage_of);
  }

 private:
  void assign_ancestors(std::vector<int> open, int stage, std::vector<int>& stage_of) const {
    while (!open.empty()) {
      auto i = static_cast<size_t>(open.back());
      open.pop_back();
      if (stage_of[i] >= 0) continue;
      stage_of[i] = stage;
      for (int p : index_.producers[i])
        if (p >= 0) open.push_back(p);
    }
  }

  const Value* find_in_source(const std::string& name) const {
    for (const Value& v : source_.all_values())
      if (v.name == name) return &v;
    return nullptr;
  }

  // The names of everything in the source that the value depends on, itself included.
  std::vector<std::string> made_before(const Value* value) const {
    std::vector<std::string> names;
    std::vector<const Value*> open{value};
    std::unordered_set<const Node*> seen;
    while (!open.empty()) {
      const Node* node = open.back()->producer;
      open.pop_back();
      if (!node || node->graph != &source_ || !seen.insert(node).second) continue;
      for (const Value* v : node->outputs)
        if (v) names.push_back(v->name);
      for (const Value* v : node->inputs)
        if (v) open.push_back(v);
      for (const Value* v : captures(*node)) open.push_back(v);
    }
    return names;
  }

  std::string similar(const std::string& name) const {
    std::vector<std::pair<size_t, std::string>> near;
    for (const Node* node : source_.nodes)
      for (const Value* v : node->outputs) {
        if (!v || near.size() > 200000) continue;
        size_t d = distance(name, v->name);
        if (d <= std::max<size_t>(2, name.size() / 3)) near.push_back({d, v->name});
      }
    if (near.empty()) return "";
    std::stable_sort(near.begin(), near.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::string text = " (did you mean ";
    for (size_t i = 0; i < std::min<size_t>(3, near.size()); ++i) text += (i ? ", '" : "'") + near[i].second + "'";
    return text + "?)";
  }

  const GraphIndex& index_;
  const Graph& source_;
  std::unordered_map<std::string, int> makers_;  // source name -> position of the node
};

}  // namespace

StageAssignment user_assignment(const GraphIndex& index, const Graph& source, const std::vector<std::vector<std::string>>& cuts,
                                const std::vector<int>& order, std::vector<char> copied) {
  StageAssignment a;
  a.stages = static_cast<int>(cuts.size()) + 1;
  a.order = order;
  a.stage_of.assign(index.nodes.size(), -1);
  UserCut user(index, source);
  for (size_t k = 0; k < cuts.size(); ++k)
    for (const std::string& name : cuts[k]) user.assign(name, static_cast<int>(k), a.stage_of);
  for (int& s : a.stage_of)
    if (s < 0) s = a.stages - 1;
  std::vector<int> all(static_cast<size_t>(a.stages), 0), own(all);
  for (size_t i = 0; i < a.stage_of.size(); ++i) {
    ++all[static_cast<size_t>(a.stage_of[i])];
    own[static_cast<size_t>(a.stage_of[i])] += !copied[i];
  }
  for (size_t s = 0; s < all.size(); ++s)
    if (all[s] == 0)
      throw Error(
          s < cuts.size()
              ? fmt::format("--cut {} leaves stage {} empty: the stages before it make its values already", fmt::join(cuts[s], ","), s)
              : fmt::format("--cut {} leaves the last stage empty: nothing comes after it", fmt::join(cuts.back(), ",")),
          "name the cuts in running order, each after the one before", ErrorCode::usage);
  // A stage that would hold nothing but copies keeps them as its own.
  if (std::find(own.begin(), own.end(), 0) == own.end())
    for (size_t i = 0; i < copied.size(); ++i)
      if (copied[i]) a.stage_of[i] = -1;
  return a;
}

}  // namespace fretsaw
