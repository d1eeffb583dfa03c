// Function bodies as graphs, and putting them in place of calls. Private to graph/passes.
#pragma once
#include <string>
#include <vector>

#include "graph/passes/rewrite.h"

namespace onnx {
class FunctionProto;
class NodeProto;
}  // namespace onnx

namespace fretsaw {

struct FileCache;

// A function as read: its body with attribute references left open.
struct FunctionBody {
  GraphPtr graph;                   // inputs and outputs are the function's
  std::vector<Attribute> defaults;  // of the function's attributes
  std::map<std::string, int64_t> opsets;
  std::string id;  // for messages: "domain.name"
};
// Names that the body does not make are looked up in `scope`, when given.
FunctionBody read_function(const onnx::FunctionProto& proto, Graph* scope, const std::string& folder, FileCache& files);

// The body of one call: attribute references replaced by the call's attributes (or defaults, or left out), Constant nodes turned into
// initializers, nodes brought from the function's operator set to the newest. `leave` as in upgrade_graph.
GraphPtr instantiate(const FunctionBody& function, const Node& call, const std::string& model_path,
                     const std::function<bool(const Node&)>& leave);

// The nodes that do what `call` does: copies of the instance's nodes, in order, which make the call's output values. They belong to the
// call's graph and are not yet in its node list. Values get the call's name as a prefix. A branch of an If is an instance without inputs.
std::vector<Node*> splice(const Graph& instance, Node& call);

}  // namespace fretsaw
