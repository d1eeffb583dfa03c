// The catalogue: all families' records, looked up by name and domain.
#include "graph/catalogue.h"

#include <unordered_map>

#include "graph/operators/rule_builder.h"

namespace fretsaw {
namespace {

std::vector<OperatorRecord> collect() {
  std::vector<OperatorRecord> all;
  for (auto family :
       {elementwise_operators, reduction_operators, contraction_operators, convolution_operators, normalisation_operators,
        movement_operators, reshape_operators, indexing_operators, attention_operators, recurrent_operators, quantization_operators,
        image_operators, signal_operators, generation_operators, control_operators, communication_operators, gradient_operators})
    for (OperatorRecord& record : family()) all.push_back(std::move(record));
  return all;
}

const std::string& key_of(const std::string& name, const std::string& domain, std::string& buffer) {
  if (domain.empty()) return name;
  buffer = domain + "::" + name;
  return buffer;
}

}  // namespace

const std::vector<OperatorRecord>& all_operators() {
  static const std::vector<OperatorRecord> records = collect();
  return records;
}

const OperatorRecord* find_operator(const std::string& name, const std::string& domain) {
  static const auto index = [] {
    std::unordered_map<std::string, const OperatorRecord*> map;
    std::string buffer;
    for (const OperatorRecord& r : all_operators()) map.emplace(key_of(r.name, r.domain, buffer), &r);
    return map;
  }();
  std::string buffer;
  auto it = index.find(key_of(name, domain == "ai.onnx" ? "" : domain, buffer));
  return it == index.end() ? nullptr : it->second;
}

double flops_of(const Node& node) {
  double total = 0;
  for (const GraphPtr& body : bodies(node))
    if (body)
      for (const Node* inner : body->nodes) total += flops_of(*inner);
  const OperatorRecord* record = find_operator(node.op, node.domain);
  if (record && record->flops) total += record->flops(node);
  return total;
}

Role role_of(const Node& node) {
  const OperatorRecord* record = find_operator(node.op, node.domain);
  return record ? record->role : Role::other;
}

}  // namespace fretsaw
