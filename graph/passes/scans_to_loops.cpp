// A Scan is a Loop whose passes take their slices by themselves.
#include <algorithm>

#include "graph/passes.h"
#include "graph/passes/loops.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

int64_t at_or_zero(const std::vector<int64_t>& numbers, size_t i) {
  return i < numbers.size() ? numbers[i] : 0;
}

class ScanRewriter {
 public:
  ScanRewriter(Rewriter& rewriter, Node& scan)
      : rewriter_(rewriter), scan_(scan), body_(scan.get_graph("body")), slices_(scan.get_int("num_scan_inputs", 0)) {}

  void run() {
    if (!is_understood()) return;
    const size_t carried = this->carried();
    Value* pass = body_->add_value(body_->fresh_name(scan_.name + "_pass"), Type::tensor(DType::int64, Shape{}));
    Value* goes_on = body_->add_value(body_->fresh_name(scan_.name + "_goes_on"), Type::tensor(DType::boolean, Shape{}));
    Value* passes = number_of_passes();
    std::vector<Node*> nodes = std::move(body_->nodes);
    body_->nodes.clear();
    take_slices(pass, passes);
    body_->outputs.insert(body_->outputs.begin(), add_inside("Identity", {goes_on})->outputs[0]);
    body_->nodes.insert(body_->nodes.end(), nodes.begin(), nodes.end());
    body_->inputs.resize(carried);
    body_->inputs.insert(body_->inputs.begin(), {pass, goes_on});
    arrange_rows();
    scan_.op = "Loop";
    scan_.inputs.resize(carried);
    scan_.inputs.insert(scan_.inputs.begin(), {passes, nullptr});
    scan_.attributes = {{"body", body_}};
  }

 private:
  size_t carried() const { return scan_.inputs.size() - static_cast<size_t>(slices_); }

  // Where the body does not fit, the runtime says so.
  bool is_understood() const {
    if (!body_ || slices_ < 1 || std::ssize(scan_.inputs) < slices_ || body_->inputs.size() != scan_.inputs.size() ||
        body_->outputs.size() < carried() || scan_.outputs.size() > body_->outputs.size())
      return false;
    const auto has_rank = [](const Value* v) { return v && v->type.is_tensor() && v->type.shape; };
    return std::all_of(scan_.inputs.begin() + static_cast<std::ptrdiff_t>(carried()), scan_.inputs.end(), has_rank) &&
           std::all_of(body_->outputs.begin() + static_cast<std::ptrdiff_t>(carried()), body_->outputs.end(), has_rank);
  }

  Value* number_of_passes() {
    Value* x = scan_.inputs[carried()];
    int64_t axis = at_or_zero(scan_.get_ints("scan_input_axes"), 0);
    if (axis < 0) axis += std::ssize(*x->type.shape);
    Value* size = rewriter_.add("Shape", {x}, {{"start", axis}, {"end", axis + 1}}, scan_.name + "_size");
    return rewriter_.add("Squeeze", {size}, {}, scan_.name + "_passes");
  }

  Node* add_inside(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes = {}) {
    const std::string name = body_->fresh_name(scan_.name + "_" + op);
    Node* node = body_->add_node(op, std::move(inputs), {name}, std::move(attributes));
    node->name = name;
    return node;
  }
  void take_slices(Value* pass, Value* passes) {
    const std::vector<int64_t> axes = scan_.get_ints("scan_input_axes"), directions = scan_.get_ints("scan_input_directions");
    Value* from_end = nullptr;
    for (size_t i = 0; i < static_cast<size_t>(slices_); ++i) {
      const bool reversed = at_or_zero(directions, i) != 0;
      if (reversed && !from_end) {
        Value* one = rewriter_.constant(make_int64(1), scan_.name + "_one");
        from_end = add_inside("Sub", {rewriter_.add("Sub", {passes, one}, {}, scan_.name + "_last"), pass})->outputs[0];
      }
      Node* slice = add_inside("Gather", {scan_.inputs[carried() + i], reversed ? from_end : pass}, {{"axis", at_or_zero(axes, i)}});
      set_output(*slice, 0, body_->inputs[carried() + i]);
    }
  }

  // A Loop stacks its rows along axis 0, in the order of its passes.
  void arrange_rows() {
    const std::vector<int64_t> axes = scan_.get_ints("scan_output_axes"), directions = scan_.get_ints("scan_output_directions");
    for (size_t o = carried(); o < scan_.outputs.size(); ++o) {
      if (!scan_.outputs[o]) continue;
      const auto rank = std::ssize(*body_->outputs[o + 1]->type.shape) + 1;
      int64_t axis = at_or_zero(axes, o - carried());
      if (axis < 0) axis += rank;
      const bool reversed = at_or_zero(directions, o - carried()) != 0;
      if (axis == 0 && !reversed) continue;
      Value* wanted = rewriter_.detach(scan_, o);
      Value* rows = scan_.outputs[o];
      if (reversed) {
        const auto numbers = [&](int64_t n) { return rewriter_.constant(make_int64s({n}), scan_.name + "_backwards"); };
        rows = add_behind("Slice", {rows, numbers(-1), numbers(INT64_MIN), numbers(0), numbers(-1)}, {}, axis == 0 ? wanted : nullptr);
      }
      if (axis == 0) continue;
      add_behind("Transpose", {rows}, {{"perm", first_moved_to(axis, rank)}}, wanted);
    }
  }
  Value* add_behind(const std::string& op, std::vector<Value*> inputs, std::vector<Attribute> attributes, Value* made) {
    Graph& graph = rewriter_.graph();
    if (!made) made = graph.add_value(graph.fresh_name(scan_.name + "_" + op));
    rewriter_.add_making(op, std::move(inputs), {made}, std::move(attributes), /*after=*/true);
    return made;
  }

  Rewriter& rewriter_;
  Node& scan_;
  GraphPtr body_;
  const int64_t slices_;
};

}  // namespace

void scans_to_loops(Graph& graph, const std::function<bool(const Node&)>& wanted) {
  for_each_graph(graph, [&](Graph& one) {
    Rewriter rewriter(one);
    rewriter.walk([&](Node& node) {
      if (node.is("Scan") && wanted(node)) ScanRewriter(rewriter, node).run();
      return true;
    });
  });
}

}  // namespace fretsaw
