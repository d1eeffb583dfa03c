// The graph: values and the nodes that make them. One structure serves models as read, as rewritten, and as compiled.
//
// Identity is the object, not the name: a Value or Node keeps its address for the life of its Graph. A node in a
// control-flow body may take a value of an outer graph as its input (`captures` lists them); names are made unique on writing.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "graph/sharding.h"
#include "graph/tensor.h"
#include "graph/types.h"

namespace fretsaw {

struct Graph;
struct Node;

// The rows of one dimension of a source tensor that a rank holds.
struct ValuePart {
  std::string of;        // the source tensor; empty: zeros, where another rank adds the tensor itself
  int dim = -1;          // which dimension is cut; -1: none, the whole tensor under another name
  int64_t size = 0;      // of the whole dimension
  Intervals intervals;   // what is there of it
  bool of_part = false;  // the source is itself a part, cut over another mesh axis
};

// One edge: made by a node, given from outside, or constant.
struct Value {
  std::string name;
  Type type;
  Node* producer = nullptr;               // null for inputs and initializers
  int output = 0;                         // which output of the producer
  TensorPtr constant;                     // an initializer's bytes. A value with a producer never has one
  Graph* graph = nullptr;                 // the graph it belongs to
  std::string source;                     // the source model's value this one is (a part of); empty: the same as name
  std::shared_ptr<const ValuePart> part;  // of initializers in a rank's graph: null where it is the source tensor itself
  std::string extra;                      // serialized ValueInfoProto fields with no place here (doc strings, metadata); "" mostly

  bool is_constant() const { return constant != nullptr; }
  const std::string& source_name() const { return source.empty() ? name : source; }
};

// Attribute forms fretsaw does not look into (sparse tensors, type protos) are kept as serialized AttributeProto.
struct OpaqueAttribute {
  std::string proto;
};
using GraphPtr = std::shared_ptr<Graph>;
using AttributeValue = std::variant<int64_t, float, std::string, TensorPtr, GraphPtr, std::vector<int64_t>, std::vector<float>,
                                    std::vector<std::string>, std::vector<TensorPtr>, std::vector<GraphPtr>, OpaqueAttribute>;
struct Attribute {
  std::string name;
  AttributeValue value;
  std::string refers_to;  // inside a function body: the function's attribute that stands here
  std::string doc;
};

struct Node {
  std::string name;             // unique within the model once read
  std::string op;               // "Conv"
  std::string domain;           // "" for ai.onnx
  std::vector<Value*> inputs;   // null where an optional input is left out
  std::vector<Value*> outputs;  // null where an output is not wanted
  std::vector<Attribute> attributes;
  Graph* graph = nullptr;
  std::map<std::string, std::string> metadata;  // metadata_props
  std::string overload;
  std::string extra;  // serialized NodeProto fields with no place here (doc string, device configurations)
  int group = -1;     // fusion group (see passes.h); -1: none

  const Attribute* attribute(std::string_view name) const;  // null when absent
  // The attribute's value, or the default when absent. Throws Error when it is there with another type.
  int64_t get_int(std::string_view name, int64_t absent) const;
  float get_float(std::string_view name, float absent) const;
  std::string get_string(std::string_view name, std::string_view absent) const;
  std::vector<int64_t> get_ints(std::string_view name, std::vector<int64_t> absent = {}) const;
  std::vector<float> get_floats(std::string_view name, std::vector<float> absent = {}) const;
  std::vector<std::string> get_strings(std::string_view name) const;
  TensorPtr get_tensor(std::string_view name) const;  // null when absent
  GraphPtr get_graph(std::string_view name) const;    // null when absent
  bool has(std::string_view name) const { return attribute(name) != nullptr; }
  void set(std::string_view name, AttributeValue value);
  void remove(std::string_view name);

  Value* input(size_t i) const { return i < inputs.size() ? inputs[i] : nullptr; }  // null when left out
  Value* out(size_t i) const { return i < outputs.size() ? outputs[i] : nullptr; }
  bool is(std::string_view op_type) const { return op == op_type && domain.empty(); }
};

// A graph owns its nodes and values. `nodes` is in execution order after reading.
struct Graph {
  std::string name;
  std::vector<Value*> inputs;   // in file order. From IR 4 on an initializer listed here has a default: `constant` is set
  std::vector<Value*> outputs;  // the same value may stand here twice
  std::vector<Node*> nodes;
  Graph* parent = nullptr;  // the graph of the control-flow node, for bodies
  std::string extra;        // serialized GraphProto fields with no place here

  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  Value* add_value(std::string name, Type type = {});
  Value* add_constant(std::string name, TensorPtr tensor);
  // Adds at the end of `nodes`, with fresh output values of these names.
  Node* add_node(std::string op, std::vector<Value*> inputs, std::vector<std::string> output_names, std::vector<Attribute> attributes = {},
                 std::string domain = "");
  Node* add_node_object();  // empty, not in `nodes`
  // `name`, or `name_1`, `name_2`, ... : the first that no value or node of this graph or its parents and bodies made through this graph
  // uses.
  std::string fresh_name(const std::string& name);

  std::vector<Value*> initializers() const;  // all constants, in the order of their making
  const std::deque<Value>& all_values() const { return values_; }
  std::deque<Value>& all_values() { return values_; }

 private:
  std::deque<Value> values_;
  std::deque<Node> nodes_;
  std::unordered_map<std::string, int> used_names_;
};

// A function of the model (IR 8 and later), kept as read: bodies are graphs whose inputs are the function's.
struct Function {
  std::string domain, name, overload;
  std::string proto;  // serialized FunctionProto
};

struct Model {
  std::string path;  // where it was read from; "" when made in memory
  int64_t ir_version = 0;
  std::map<std::string, int64_t> opsets;  // domain -> version, "" for ai.onnx
  std::map<std::string, std::string> metadata;
  std::vector<Function> functions;
  std::string extra;   // serialized ModelProto fields with no place here (producer, configuration, training info, ...)
  std::string digest;  // of the model file's bytes, "xxh3:..." ("" when made in memory)
  GraphPtr graph;
  std::vector<std::string> notes;  // what reading or normalising decided that a user should know
};

// --- questions about graphs ---
// For each value of `graph`: the nodes that use it, directly or inside their bodies, each once, in node order.
// Graph outputs are not listed.
using Consumers = std::unordered_map<const Value*, std::vector<Node*>>;
Consumers consumers_of(const Graph& graph);
// The values of outer graphs that the bodies of `node` use, each once, in order of first use. Empty for a node without bodies.
std::vector<Value*> captures(const Node& node);
std::vector<GraphPtr> bodies(const Node& node);
// What a node needs: its inputs that are there, then `captures`. Each as often as it stands there.
std::vector<Value*> operands(const Node& node);
// Replaces a value in the inputs of a node and in its bodies.
void replace_operand(Node& node, Value* from, Value* to);
// Replaces every use of `from` (in nodes, their bodies and graph outputs) by `to`.
void replace_uses(Graph& graph, Value* from, Value* to);
// Orders nodes so that producers come before users, keeping the given order where it is legal. Throws Error listing a cycle. True when the
// order changed.
bool sort_nodes(Graph& graph);
// Removes nodes none of whose outputs is used, and unused initializers. Returns how many nodes went.
int remove_dead_nodes(Graph& graph);
// Checks the structure: producers, orders, ownership. Throws Error naming the first fault.
void verify(const Graph& graph);
// A deep copy: bodies too; constants share their bytes. `mapping`, when given, receives old value -> new value.
GraphPtr clone(const Graph& graph, std::unordered_map<const Value*, Value*>* mapping = nullptr);
Model clone(const Model& model);

}  // namespace fretsaw
