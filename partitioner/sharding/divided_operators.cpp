// One function an operator family; each ends in a node that makes the result under the source's name.
#include "partitioner/sharding/divided_operators.h"

#include <algorithm>
#include <map>

#include "graph/communication_schemas.h"
#include "graph/errors.h"

namespace fretsaw {
namespace {

class Writer {
 public:
  Writer(LocalGraph& local, const DividedNode& d) : local_(local), d_(d), node_(d.node), x_(d.inputs[0]) {
    const Cut& cut = local.forms().cut(d.strategy.cut);
    const Intervals& own = cut.parts[static_cast<size_t>(local.rank())];
    begin_ = own.empty() ? 0 : own[0].begin;
    size_ = cut.size;
    for (int r = 0; r < cut.ranks(); ++r) sizes_.push_back(cut.part_size(r));
    dim_ = local.forms().dim_of(d.strategy.inputs[0]);
  }

  // In float32 unless the type is wider.
  void softmax() {
    const DType type = x_->type.dtype;
    Value* x = cast(x_, wide(type), "wide");
    Value* largest = all_reduce(reduce("ReduceMax", x, "largest"), "max", "all_largest");
    Value* shifted = make("Sub", {x, largest}, "shifted", x->type);
    Value* powers = make("Exp", {shifted}, "powers", x->type);
    Value* total = all_reduce(reduce("ReduceSum", powers, "total"), "sum", "all_total");
    const bool log = node_.is("LogSoftmax");
    const std::vector<Value*> last =
        log ? std::vector<Value*>{shifted, make("Log", {total}, "log", total->type)} : std::vector<Value*>{powers, total};
    const char* op = log ? "Sub" : "Div";
    if (wide(type) == type) return result(op, last);
    result("Cast", {make(op, last, "result", x->type)}, {{"to", static_cast<int64_t>(type), "", ""}});
  }

  // The mean first, then the mean square of what is left: as exact as the whole axis at once. In float32 unless the type is wider.
  void layer_norm() {
    const DType type = x_->type.dtype;
    Value* centred = cast(x_, wide(type), "wide");
    if (node_.is("LayerNormalization")) centred = make("Sub", {centred, mean(centred, wide(type), "mean")}, "centred", centred->type);
    Value* square = make("Mul", {centred, centred}, "square", centred->type);
    Value* variance = mean(square, wide(type), "variance");
    Value* shifted = make("Add", {variance, real("epsilon", node_.get_float("epsilon", 1e-5F), wide(type))}, "shifted", variance->type);
    Value* deviation = make("Sqrt", {shifted}, "deviation", variance->type);
    Value* scaled = cast(make("Div", {centred, deviation}, "normal", centred->type), type, "narrow");
    const bool bias = d_.inputs.size() > 2 && d_.inputs[2];
    if (!bias) return result("Mul", {scaled, d_.inputs[1]});
    result("Add", {make("Mul", {scaled, d_.inputs[1]}, "scaled", x_->type), d_.inputs[2]});
  }

  void extreme() {
    Value* own = make(node_.op, d_.inputs, "own", node_.out(0)->type, node_.attributes);
    std::vector<Attribute> attributes = local_.group_attributes();
    attributes.push_back({"reduction", std::string(node_.is("ReduceMax") ? "max" : "min"), "", ""});
    result("AllReduce", {own}, attributes, kCommunicationDomain);
  }

  // A pending sum: this rank's mean counts as much as its part.
  void average() {
    Value* own = make(node_.op, d_.inputs, "own", node_.out(0)->type, node_.attributes);
    const double part = static_cast<double>(sizes_[static_cast<size_t>(local_.rank())]) / static_cast<double>(size_);
    result("Mul", {own, real("weight", part, node_.out(0)->type.dtype)});
  }

  void arg() {
    const bool max = node_.is("ArgMax");
    const bool last = node_.get_int("select_last_index", 0) != 0;
    Type index_type = node_.out(0)->type;
    index_type.shape = reduced(x_->type).shape;
    Value* best = reduce(max ? "ReduceMax" : "ReduceMin", x_, "best");
    Value* at = make(node_.op, {x_}, "at", index_type, {axis(), keep(), {"select_last_index", int64_t{last}, "", ""}});
    Value* global = make("Add", {at, local_.constant(name("begin"), make_int64(begin_))}, "global", index_type);
    const std::vector<int64_t> ones(sizes_.size(), 1);
    Value* bests = gather(best, ones, "bests");
    Value* globals = gather(global, ones, "globals");
    Value* winner = make(node_.op, {bests}, "winner", index_type, {axis(), keep(), {"select_last_index", int64_t{last}, "", ""}});
    if (node_.get_int("keepdims", 1) != 0) return result("GatherElements", {globals, winner}, {axis()});
    Value* place = make("GatherElements", {globals, winner}, "place", index_type, {axis()});
    result("Squeeze", {place, local_.int_list(name("axis"), {dim_})});
  }

  // The best of each rank's best; as many of each as it has.
  void top_k() {
    const auto k = int_values(*node_.input(1)->constant)->at(0);
    std::vector<int64_t> kept;
    for (const int64_t size : sizes_) kept.push_back(std::min(size, k));
    std::vector<Attribute> attributes{axis()};
    for (const char* a : {"largest", "sorted"}) attributes.push_back({a, node_.get_int(a, 1), "", ""});
    const int64_t own = kept[static_cast<size_t>(local_.rank())];
    Node* mine = two_results("TopK", {x_, local_.int_list(name("own_k"), {own})}, own, attributes);
    Type index_type = mine->outputs[1]->type;
    Value* global = make("Add", {mine->outputs[1], local_.constant(name("begin"), make_int64(begin_))}, "global", index_type);
    Value* values = gather(mine->outputs[0], kept, "values");
    Value* places = gather(global, kept, "places");
    Node* best = two_results("TopK", {values, d_.inputs[1]}, k, attributes);
    if (node_.out(0)) replace(best, 0, d_.make_output(node_.out(0)));
    if (node_.out(1)) result_of(1, "GatherElements", {places, best->outputs[1]}, {axis()});
  }

  // Gather where rows are cut.
  void rows() {
    Value* index = d_.inputs[1];
    const Type& type = index->type;
    Type flags = type;
    flags.dtype = DType::boolean;
    const int64_t rows = sizes_[static_cast<size_t>(local_.rank())];
    Value *zero = integer("zero", 0, type.dtype), *length = integer("length", rows, type.dtype);
    // Negative indexes count from the end of all rows.
    Value* negative = make("Less", {index, zero}, "negative", flags);
    Value* from_end = make("Add", {index, integer("rows", size_, type.dtype)}, "from_end", type);
    Value* global = make("Where", {negative, from_end, index}, "global", type);
    Value* own = make("Sub", {global, integer("begin", begin_, type.dtype)}, "own", type);
    Value* not_before = make("GreaterOrEqual", {own, zero}, "not_before", flags);
    Value* not_after = make("Less", {own, length}, "not_after", flags);
    Value* mine = make("And", {not_before, not_after}, "mine", flags);
    Value* safe = make("Where", {mine, own, zero}, "safe", type);
    Value* taken = make("Gather", {x_, safe}, "taken", node_.out(0)->type, node_.attributes);
    // The mask's dimensions stand where the index's do in the result.
    const auto index_rank = static_cast<int64_t>(type.shape->size()), table_rank = static_cast<int64_t>(x_->type.shape->size());
    std::vector<int64_t> trailing;
    for (int64_t k = dim_ + 1; k < table_rank; ++k) trailing.push_back(index_rank + k - dim_ - 1);
    Value* mask = mine;
    if (!trailing.empty()) {
      for (size_t k = 0; k < trailing.size(); ++k) flags.shape->push_back(Dim(1));
      mask = make("Unsqueeze", {mine, local_.int_list(name("trailing"), trailing)}, "mask", flags);
    }
    result("Where", {mask, taken, local_.constant(name("nothing"), make_tensor(node_.out(0)->type.dtype, {}))});
  }

 private:
  std::string name(const char* what) const { return node_.name + "/" + what; }
  Attribute axis() const { return {"axis", int64_t{dim_}, "", ""}; }
  static Attribute keep() { return {"keepdims", int64_t{1}, "", ""}; }

  Value* make(const std::string& op, std::vector<Value*> inputs, const char* what, Type type, std::vector<Attribute> attributes = {},
              const std::string& domain = "") {
    return local_.node(op, std::move(inputs), name(what), std::move(type), std::move(attributes), domain);
  }
  void result_of(size_t output, const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {},
                 const std::string& domain = "") {
    local_.node_into(d_.make_output(node_.outputs[output]), node_.name, op, std::move(inputs), std::move(attributes), domain);
  }
  void result(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {}, const std::string& domain = "") {
    result_of(0, op, std::move(inputs), std::move(attributes), domain);
  }

  static DType wide(DType type) { return type == DType::float64 ? type : DType::float32; }
  Type reduced(Type type) const {
    (*type.shape)[static_cast<size_t>(dim_)] = Dim(1);
    return type;
  }
  // Over the dimension that is cut, which stays with size 1.
  Value* reduce(const char* op, Value* x, const char* what) {
    return make(op, {x, local_.int_list(name(what) + "/axis", {dim_})}, what, reduced(x->type), {keep()});
  }
  Value* all_reduce(Value* x, const char* reduction, const char* what) {
    std::vector<Attribute> attributes = local_.group_attributes();
    attributes.push_back({"reduction", std::string(reduction), "", ""});
    return make("AllReduce", {x}, what, x->type, attributes, kCommunicationDomain);
  }
  Value* mean(Value* x, DType type, const char* what) {
    const std::string sum = std::string(what) + "_sum", total = std::string(what) + "_total";
    Value* all = all_reduce(reduce("ReduceSum", x, sum.c_str()), "sum", total.c_str());
    return make("Div", {all, real((std::string(what) + "_count").c_str(), static_cast<double>(size_), type)}, what, all->type);
  }
  Value* gather(Value* x, const std::vector<int64_t>& sizes, const char* what) {
    Type type = x->type;
    int64_t total = 0;
    for (const int64_t n : sizes) total += n;
    (*type.shape)[static_cast<size_t>(dim_)] = Dim(total);
    return local_.gathered(x, dim_, sizes, name(what), std::move(type));
  }
  Value* cast(Value* x, DType to, const char* what) {
    if (x->type.dtype == to) return x;
    Type type = x->type;
    type.dtype = to;
    return make("Cast", {x}, what, type, {{"to", static_cast<int64_t>(to), "", ""}});
  }
  Value* real(const char* what, double value, DType type) {
    if (type == DType::float64) {
      auto t = make_tensor(DType::float64, {});
      *reinterpret_cast<double*>(mutable_data(*t)) = value;
      return local_.constant(name(what), t);
    }
    Value* single = local_.constant(name(what), make_float(static_cast<float>(value)));
    return cast(single, type, (std::string(what) + "_narrow").c_str());
  }
  Value* integer(const char* what, int64_t value, DType type) {
    if (type != DType::int32) return local_.constant(name(what), make_int64(value));
    auto t = make_tensor(DType::int32, {});
    *reinterpret_cast<int32_t*>(mutable_data(*t)) = static_cast<int32_t>(value);
    return local_.constant(name(what), t);
  }
  // TopK, with `k` elements in the dimension that is cut.
  Node* two_results(const std::string& op, std::vector<Value*> inputs, int64_t k, std::vector<Attribute> attributes) {
    Graph& graph = local_.graph();
    Type type = inputs[0]->type;
    (*type.shape)[static_cast<size_t>(dim_)] = Dim(k);
    Node* n =
        graph.add_node(op, std::move(inputs), {graph.fresh_name(name("top")), graph.fresh_name(name("top_places"))}, std::move(attributes));
    n->outputs[0]->type = type;
    type.dtype = DType::int64;
    n->outputs[1]->type = type;
    return n;
  }
  static void replace(Node* n, size_t output, Value* v) {
    n->outputs[output]->producer = nullptr;
    n->outputs[output] = v;
    v->producer = n;
    v->output = static_cast<int>(output);
  }

  LocalGraph& local_;
  const DividedNode& d_;
  const Node& node_;
  Value* x_;
  int64_t begin_ = 0, size_ = 0;  // of this rank's part; of all
  std::vector<int64_t> sizes_;    // of each rank's part
  int dim_ = 0;
};

}  // namespace

void emit_divided(LocalGraph& local, const DividedNode& divided) {
  static const std::map<std::string, void (Writer::*)()> writers = {
      {"Softmax", &Writer::softmax},
      {"LogSoftmax", &Writer::softmax},
      {"LayerNormalization", &Writer::layer_norm},
      {"RMSNormalization", &Writer::layer_norm},
      {"ReduceMax", &Writer::extreme},
      {"ReduceMin", &Writer::extreme},
      {"ReduceMean", &Writer::average},
      {"ArgMax", &Writer::arg},
      {"ArgMin", &Writer::arg},
      {"TopK", &Writer::top_k},
      {"Gather", &Writer::rows},
  };
  const auto found = writers.find(divided.node.op);
  if (found == writers.end() || !divided.node.domain.empty())
    throw Error("has no form for parts of its axis", "this is a fault of fretsaw").at_node(divided.node.name, divided.node.op);
  Writer writer(local, divided);
  (writer.*found->second)();
}

}  // namespace fretsaw
