// One rank's graph while it is put together: the forms that each value is there in, and the nodes that make one form from another.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/ir.h"
#include "partitioner/sharding/search.h"
#include "partitioner/sharding/strategies.h"

namespace fretsaw {

class LocalGraph {
 public:
  // Names of the source's values are kept for the forms that its nodes leave.
  LocalGraph(const Graph& source, const FormTable& forms, int rank);

  Graph& graph() { return *graph_; }
  GraphPtr take() { return std::move(graph_); }
  int rank() const { return rank_; }
  const FormTable& forms() const { return forms_; }

  // The source's type with the dimension that the form cuts as long as this rank's part.
  Type local_type(const Type& type, Form form) const;
  // A new value that stands for `source` in the form; `make` says under which name.
  Value* add(const Value* source, Form form);
  // The value is now there in this form, and `current`: later conversions start from it.
  void define(const Value* source, Form form, Value* local);
  Form current(const Value* source) const;
  bool is_defined(const Value* source) const { return places_.count(source) > 0; }
  bool is_output(const Value* source) const { return outputs_.count(source) > 0; }
  // The value in the form that is needed; communication and slicing are added where it is not there yet.
  Value* get(const Value* source, Form form);

  // --- constants and small nodes ---
  Value* constant(const std::string& name, TensorPtr tensor);
  Value* int_list(const std::string& name, const std::vector<int64_t>& values);
  Value* node(const std::string& op, std::vector<Value*> inputs, const std::string& name, Type type, std::vector<Attribute> attributes = {},
              const std::string& domain = "");
  // The same for a value that is there already.
  void node_into(Value* output, const std::string& node_name, const std::string& op, std::vector<Value*> inputs,
                 std::vector<Attribute> attributes = {}, const std::string& domain = "");
  // Attributes of a collective over the axis.
  std::vector<Attribute> group_attributes() const;
  // Parts of one dimension from all ranks, one after the other.
  Value* gathered(Value* from, int dim, const std::vector<int64_t>& sizes, const std::string& name, Type type);
  // An integer vector with some of its elements replaced; a constant stays one.
  Value* with_elements(Value* vector, int64_t size, const std::map<int64_t, int64_t>& elements);

 private:
  struct Place {
    Form current = kWhole;
    std::vector<std::pair<Form, Value*>> forms;
  };
  Value* convert(const Value* source, Value* from, Form have, Form need);
  Value* all_reduce(const Value* source, Value* from);
  Value* reduce_scatter(const Value* source, Value* from, Form need);
  Value* all_gather(const Value* source, Value* from, Form have);
  Value* slice(const Value* source, Value* from, Form have, Form need);
  Value* once(const Value* source, Value* from);
  Value* pad(const Value* source, Value* from, Form have);
  Value* pick(Value* from, int dim, const std::vector<int64_t>& indexes, const std::string& name, Type type, bool as_slice);
  Value* named(const Value* source, Form form, Value* made);

  const FormTable& forms_;
  int rank_;
  GraphPtr graph_;
  std::unordered_map<const Value*, Place> places_;
  std::unordered_map<const Value*, bool> outputs_;  // of the source graph
};

}  // namespace fretsaw
