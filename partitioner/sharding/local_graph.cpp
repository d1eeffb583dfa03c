// Conversions between forms as nodes: collectives where ranks must talk, slices and zeros where they need not.
#include "partitioner/sharding/local_graph.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "graph/communication_schemas.h"
#include "graph/errors.h"

namespace fretsaw {
namespace {

TensorPtr flag(bool value) {
  auto t = make_tensor(DType::boolean, {});
  *mutable_data(*t) = static_cast<std::byte>(value);
  return t;
}

}  // namespace

LocalGraph::LocalGraph(const Graph& source, const FormTable& forms, int rank)
    : forms_(forms), rank_(rank), graph_(std::make_shared<Graph>()) {
  graph_->name = source.name;
  graph_->extra = source.extra;
  for (const Value& v : source.all_values()) graph_->fresh_name(v.name);
  for (const Value* v : source.outputs) outputs_[v] = true;
}

Type LocalGraph::local_type(const Type& type, Form form) const {
  Type local = type;
  if (forms_.is_cut(form) && local.shape)
    (*local.shape)[static_cast<size_t>(forms_.dim_of(form))] = Dim(forms_.cut_of(form).part_size(rank_));
  return local;
}

// An output of the graph keeps its name where it is whole, every other value where it is made.
Value* LocalGraph::add(const Value* source, Form form) {
  const bool keeps_name = form == kWhole || !outputs_.count(source);
  Value* v = graph_->add_value(keeps_name ? source->name : graph_->fresh_name(source->name + "/part"), local_type(source->type, form));
  v->source = source->source_name();
  return v;
}

void LocalGraph::define(const Value* source, Form form, Value* local) {
  Place& place = places_[source];
  place.current = form;
  place.forms.push_back({form, local});
}

Form LocalGraph::current(const Value* source) const {
  const auto it = places_.find(source);
  return it == places_.end() ? kWhole : it->second.current;
}

Value* LocalGraph::get(const Value* source, Form form) {
  Place& place = places_.at(source);
  for (const auto& [have, value] : place.forms)
    if (have == form) return value;
  const Form have = place.current;
  Value* from = nullptr;
  for (const auto& [f, value] : place.forms)
    if (f == have) from = value;
  Value* made = convert(source, from, have, form);
  Place& after = places_.at(source);
  after.forms.push_back({form, made});
  after.current = form_after(conversion(forms_, have, form), have, form);
  return made;
}

Value* LocalGraph::constant(const std::string& name, TensorPtr tensor) {
  Value* v = graph_->add_constant(graph_->fresh_name(name), std::move(tensor));
  v->type = Type::tensor(v->constant->dtype, shape_of(v->constant->dims));
  return v;
}

Value* LocalGraph::int_list(const std::string& name, const std::vector<int64_t>& values) {
  return constant(name, make_int64s(values));
}

Value* LocalGraph::node(const std::string& op, std::vector<Value*> inputs, const std::string& name, Type type,
                        std::vector<Attribute> attributes, const std::string& domain) {
  Node* n = graph_->add_node(op, std::move(inputs), {graph_->fresh_name(name)}, std::move(attributes), domain);
  n->outputs[0]->type = std::move(type);
  return n->outputs[0];
}

void LocalGraph::node_into(Value* output, const std::string& node_name, const std::string& op, std::vector<Value*> inputs,
                           std::vector<Attribute> attributes, const std::string& domain) {
  Node* n = graph_->add_node(op, std::move(inputs), {}, std::move(attributes), domain);
  n->name = node_name;
  n->outputs = {output};
  output->producer = n;
  output->output = 0;
}

Value* LocalGraph::with_elements(Value* vector, int64_t size, const std::map<int64_t, int64_t>& elements) {
  if (elements.empty()) return vector;
  const bool is_input = std::find(graph_->inputs.begin(), graph_->inputs.end(), vector) != graph_->inputs.end();
  if (vector->constant && !is_input)  // an input's constant is a default that a caller may override
    if (auto values = int_values(*vector->constant)) {
      for (const auto& [at, value] : elements) values->at(static_cast<size_t>(at)) = value;
      return int_list(vector->name + "/local", *values);
    }
  auto chosen = make_tensor(DType::boolean, {size});
  std::vector<int64_t> values(static_cast<size_t>(size), 0);
  for (const auto& [at, value] : elements) {
    mutable_data(*chosen)[at] = std::byte{1};
    values[static_cast<size_t>(at)] = value;
  }
  Value* mask = constant(vector->name + "/cut", chosen);
  return node("Where", {mask, int_list(vector->name + "/sizes", values), vector}, vector->name + "/local", vector->type);
}

Value* LocalGraph::convert(const Value* source, Value* from, Form have, Form need) {
  switch (conversion(forms_, have, need)) {
    case Conversion::none:
      return from;
    case Conversion::all_reduce:
      return named(source, kWhole, all_reduce(source, from));
    case Conversion::reduce_scatter:
      return named(source, need, reduce_scatter(source, from, need));
    case Conversion::all_gather:
      return named(source, kWhole, all_gather(source, from, have));
    case Conversion::slice:
      return named(source, need, slice(source, from, have, need));
    case Conversion::once:
      return named(source, need, once(source, from));
    case Conversion::pad:
      return named(source, need, pad(source, from, have));
    case Conversion::reduce_slice:
    case Conversion::gather_slice: {
      Value* whole = get(source, kWhole);
      return need == kPending ? named(source, need, once(source, whole)) : named(source, need, slice(source, whole, kWhole, need));
    }
  }
  throw Error("a conversion is not known", "this is a fault of fretsaw");
}

Value* LocalGraph::named(const Value* source, Form form, Value* made) {
  made->source = source->source_name();
  made->type = local_type(source->type, form);
  if (form == kWhole && outputs_.count(source)) made->name = source->name;  // the name was kept free for it
  return made;
}

std::vector<Attribute> LocalGraph::group_attributes() const {
  return {{"axis", forms_.axis(), "", ""}, {"group_size", int64_t{forms_.ranks()}, "", ""}};
}

Value* LocalGraph::all_reduce(const Value* source, Value* from) {
  std::vector<Attribute> attributes = group_attributes();
  attributes.push_back({"reduction", std::string("sum"), "", ""});
  return node("AllReduce", {from}, source->name + "/reduced", source->type, attributes, kCommunicationDomain);
}

namespace {

void add_sizes(std::vector<Attribute>& attributes, const std::vector<int64_t>& sizes, int dim, int rank) {
  const bool uneven = std::any_of(sizes.begin(), sizes.end(), [&](int64_t n) { return n != sizes.front(); });
  attributes.push_back({"tensor_axis", int64_t{dim}, "", ""});
  attributes.push_back({"sizes", sizes, "", ""});
  attributes.push_back({"uneven", int64_t{uneven}, "", ""});
  attributes.push_back({"index", int64_t{rank}, "", ""});
}

std::vector<int64_t> part_sizes(const Cut& cut) {
  std::vector<int64_t> sizes;
  for (int r = 0; r < cut.ranks(); ++r) sizes.push_back(cut.part_size(r));
  return sizes;
}

// The indexes of all parts, one rank's after the other's.
std::vector<int64_t> by_rank(const Cut& cut) {
  std::vector<int64_t> indexes;
  for (const Intervals& part : cut.parts)
    for (const Interval& i : part)
      for (int64_t k = i.begin; k < i.end; ++k) indexes.push_back(k);
  return indexes;
}

}  // namespace

Value* LocalGraph::gathered(Value* from, int dim, const std::vector<int64_t>& sizes, const std::string& name, Type type) {
  std::vector<Attribute> attributes = group_attributes();
  add_sizes(attributes, sizes, dim, rank_);
  return node("AllGather", {from}, name, std::move(type), attributes, kCommunicationDomain);
}

Value* LocalGraph::reduce_scatter(const Value* source, Value* from, Form need) {
  const Cut& cut = forms_.cut_of(need);
  const int dim = forms_.dim_of(need);
  if (!cut.in_order()) from = pick(from, dim, by_rank(cut), source->name + "/by_rank", source->type, false);
  std::vector<Attribute> attributes = group_attributes();
  attributes.push_back({"reduction", std::string("sum"), "", ""});
  add_sizes(attributes, part_sizes(cut), dim, rank_);
  return node("ReduceScatter", {from}, source->name + "/scattered", local_type(source->type, need), attributes, kCommunicationDomain);
}

Value* LocalGraph::all_gather(const Value* source, Value* from, Form have) {
  const Cut& cut = forms_.cut_of(have);
  const int dim = forms_.dim_of(have);
  const std::vector<int64_t> arrived = by_rank(cut);
  Type type = source->type;
  (*type.shape)[static_cast<size_t>(dim)] = Dim(static_cast<int64_t>(arrived.size()));
  Value* all = gathered(from, dim, part_sizes(cut), source->name + "/gathered", type);
  if (cut.in_order()) return all;
  std::vector<int64_t> place(static_cast<size_t>(cut.size), -1);
  for (size_t k = arrived.size(); k-- > 0;) place[static_cast<size_t>(arrived[k])] = static_cast<int64_t>(k);
  return pick(all, dim, place, source->name + "/in_order", source->type, false);
}

Value* LocalGraph::slice(const Value* source, Value* from, Form have, Form need) {
  const Cut& cut = forms_.cut_of(need);
  const int dim = forms_.dim_of(need);
  auto places = [&](size_t r) {
    const Intervals whole{{0, cut.size}};
    return places_within(have == kWhole ? whole : forms_.cut_of(have).parts[r], cut.parts[r]);
  };
  bool as_slice = true;  // the same for every rank, so that their graphs have the same nodes
  for (size_t r = 0; r < cut.parts.size(); ++r) {
    const std::vector<int64_t> p = places(r);
    as_slice &= p.empty() || p.back() - p.front() + 1 == static_cast<int64_t>(p.size());
  }
  return pick(from, dim, places(static_cast<size_t>(rank_)), source->name + "/cut", local_type(source->type, need), as_slice);
}

Value* LocalGraph::pick(Value* from, int dim, const std::vector<int64_t>& indexes, const std::string& name, Type type, bool as_slice) {
  if (!as_slice)
    return node("Gather", {from, int_list(name + "/indexes", indexes)}, name, std::move(type), {{"axis", int64_t{dim}, "", ""}});
  const int64_t begin = indexes.empty() ? 0 : indexes.front(), end = indexes.empty() ? 0 : indexes.back() + 1;
  return node("Slice", {from, int_list(name + "/begin", {begin}), int_list(name + "/end", {end}), int_list(name + "/axis", {dim})}, name,
              std::move(type));
}

Value* LocalGraph::once(const Value* source, Value* from) {
  Value* zero = constant(source->name + "/zero", make_tensor(source->type.dtype, {}));
  return node("Where", {constant(source->name + "/mine", flag(rank_ == 0)), from, zero}, source->name + "/once", source->type);
}

Value* LocalGraph::pad(const Value* source, Value* from, Form have) {
  const Cut& cut = forms_.cut_of(have);
  const Intervals& own = cut.parts[static_cast<size_t>(rank_)];
  const int64_t begin = own.empty() ? 0 : own[0].begin, end = own.empty() ? 0 : own[0].end;
  Value* pads = int_list(source->name + "/pads", {begin, cut.size - end});
  Value* zero = constant(source->name + "/zero", make_tensor(source->type.dtype, {}));
  return node("Pad", {from, pads, zero, int_list(source->name + "/axis", {forms_.dim_of(have)})}, source->name + "/padded", source->type);
}

}  // namespace fretsaw
