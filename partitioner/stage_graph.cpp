// Copies a stage's part of the graph and puts Recv and Send nodes at its borders.
#include "partitioner/stage_graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "graph/annotations.h"
#include "graph/communication_schemas.h"
#include "graph/value_parts.h"

namespace fretsaw {
namespace {

constexpr int64_t kLeastIrVersion = 10;  // the first with node metadata, which keeps fusion groups

class StageBuilder {
 public:
  StageBuilder(const Model& model, StageParts& parts, int stage)
      : parts_(parts), model_(std::make_shared<Model>()), graph_(std::make_shared<Graph>()) {
    model_->ir_version = std::max(model.ir_version, kLeastIrVersion);
    model_->opsets = model.opsets;
    model_->opsets[kCommunicationDomain] = 1;
    model_->metadata = model.metadata;
    model_->functions = model.functions;
    model_->graph = graph_;
    graph_->name = fmt::format("stage{}", stage);
  }

  std::shared_ptr<Model> build() {
    for (Value* v : parts_.inputs) graph_->inputs.push_back(copy(v));
    for (Border& b : parts_.receives) copy(b.value);
    for (Node* n : parts_.nodes)
      for (Value* v : n->outputs)
        if (v) copy(v);
    for (Node* n : parts_.nodes) add_node(*n);
    for (Value* v : parts_.outputs) graph_->outputs.push_back(copy(v));
    for (Border& b : parts_.sends) add_send(b);
    std::vector<Node*> body;
    body.swap(graph_->nodes);
    for (Border& b : parts_.receives) add_receive(b);
    graph_->nodes.insert(graph_->nodes.end(), body.begin(), body.end());
    record_parts(*model_);
    return model_;
  }

 private:
  // The value in this graph; weights come along when first used.
  Value* copy(Value* v) {
    auto it = copies_.find(v);
    if (it != copies_.end()) return it->second;
    Value* w = graph_->add_value(v->name, v->type);
    w->source = v->source;
    w->constant = v->constant;
    w->part = v->part;
    copies_[v] = w;
    return w;
  }

  void add_node(const Node& node) {
    Node* n = graph_->add_node_object();
    n->name = node.name;
    n->op = node.op;
    n->domain = node.domain;
    n->metadata = node.metadata;
    n->overload = node.overload;
    n->group = node.group;
    for (Value* v : node.inputs) n->inputs.push_back(v ? copy(v) : nullptr);
    for (Value* v : captures(node)) copy(v);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      Value* w = node.outputs[i] ? copy(node.outputs[i]) : nullptr;
      n->outputs.push_back(w);
      if (!w) continue;
      w->producer = n;
      w->output = static_cast<int>(i);
    }
    for (const Attribute& a : node.attributes) n->attributes.push_back({a.name, copy_attribute(a.value), a.refers_to, a.doc});
    graph_->nodes.push_back(n);
  }

  GraphPtr copy_body(const Graph& body) {
    GraphPtr copied = clone(body, &copies_);  // what it uses from outside is found in the map
    copied->parent = graph_.get();
    remove_annotations(*copied);  // they name configurations of the source
    return copied;
  }
  AttributeValue copy_attribute(const AttributeValue& value) {
    if (const auto* g = std::get_if<GraphPtr>(&value)) return copy_body(**g);
    if (const auto* gs = std::get_if<std::vector<GraphPtr>>(&value)) {
      std::vector<GraphPtr> list;
      for (const GraphPtr& g : *gs) list.push_back(copy_body(*g));
      return list;
    }
    return value;
  }

  void set_border(Node* node, const Border& b) {
    node->set("axis", std::string("pipeline"));
    node->set("peer", int64_t{b.peer});
    node->set("tag", int64_t{b.tag});
    if (b.channels_last) node->set("channels_last", int64_t{1});
  }
  void add_send(Border& b) {
    b.name = graph_->fresh_name(fmt::format("send:{}>{}", b.value->name, b.peer));
    Value* inside = copies_.at(b.value);
    Node* node = graph_->add_node("Send", {inside}, {b.name}, {}, kCommunicationDomain);
    set_border(node, b);
    node->outputs[0]->type = b.value->type;
    node->outputs[0]->source = b.value->source_name();
    graph_->outputs.push_back(node->outputs[0]);
  }
  void add_receive(Border& b) {
    b.name = graph_->fresh_name("recv:" + b.value->name);
    Value* outside = graph_->add_value(b.name, b.value->type);
    outside->source = b.value->source_name();
    graph_->inputs.push_back(outside);
    Value* inside = copies_.at(b.value);
    Node* node = graph_->add_node_object();
    node->name = outside->name;
    node->op = "Recv";
    node->domain = kCommunicationDomain;
    node->inputs = {outside};
    node->outputs = {inside};
    inside->producer = node;
    inside->output = 0;
    set_border(node, b);
    graph_->nodes.push_back(node);
  }

  StageParts& parts_;
  std::shared_ptr<Model> model_;
  GraphPtr graph_;
  std::unordered_map<const Value*, Value*> copies_;
};

std::string name_of(const std::vector<Border>& borders, int tag) {
  for (const Border& b : borders)
    if (b.tag == tag) return b.name;
  return "";
}

}  // namespace

std::string StageParts::name_of_send(int tag) const {
  return name_of(sends, tag);
}
std::string StageParts::name_of_receive(int tag) const {
  return name_of(receives, tag);
}

std::shared_ptr<Model> build_stage_graph(const Model& model, StageParts& parts, int stage) {
  return StageBuilder(model, parts, stage).build();
}

}  // namespace fretsaw
