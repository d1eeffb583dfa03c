// Models from ONNX's text form, and the operators of a graph as one line.
#pragma once
#include <onnx/defs/parser.h>

#include <string>

#include "graph/errors.h"
#include "graph/io/reading.h"
#include "graph/passes.h"

namespace fretsaw::testing {

inline Model parse_model(const std::string& text) {
  onnx::ModelProto proto;
  onnx::OnnxParser parser(text.c_str());
  auto status = parser.Parse(proto);
  if (!status.IsOK()) throw Error("the text of the model does not parse: " + status.ErrorMessage());
  FileCache files;
  return model_from_proto(proto, "", files, {});
}

// A model of one operator set with this body: parse_model(11, "g (float[2] x) => (float[2] y) { y = Relu(x) }").
inline Model parse_model(int opset, const std::string& graph) {
  return parse_model("<ir_version: 8, opset_import: [\"\" : " + std::to_string(opset) + "]>\n" + graph);
}

// "Conv Relu If{Add}{Sub}"
inline std::string ops(const Graph& graph) {
  std::string text;
  for (const Node* node : graph.nodes) {
    text += (text.empty() ? "" : " ") + (node->domain.empty() ? "" : node->domain + ".") + node->op;
    for (const GraphPtr& body : bodies(*node)) text += "{" + ops(*body) + "}";
  }
  return text;
}

inline const Node& only(const Graph& graph, const std::string& op) {
  const Node* found = nullptr;
  for (const Node* node : graph.nodes)
    if (node->op == op) {
      if (found) throw Error("the graph has several nodes with the operator " + op);
      found = node;
    }
  if (!found) throw Error("the graph has no node with the operator " + op);
  return *found;
}

}  // namespace fretsaw::testing
