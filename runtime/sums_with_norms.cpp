// Recognises a sum over ranks with the addition and the norm that follow it, and runs them as one step.
#include "runtime/sums_with_norms.h"

#include <algorithm>

#include "graph/communication_schemas.h"
#include "runtime/collectives.h"

namespace fretsaw {
namespace {

using Unit = std::vector<const Node*>;

// The three nodes as the kernel sees them.
struct Joined {
  const Node *sum = nullptr, *add = nullptr, *norm = nullptr;
  int64_t rows = 0, n = 0;
  DType dtype = DType::undefined;

  const Value* residual() const { return add->input(add->input(0) == sum->out(0) ? 1 : 0); }
  const Value* scale() const { return norm->input(1); }
};

std::optional<Dims> static_dims(const Value* v) {
  if (!v) return std::nullopt;
  if (v->constant) return v->constant->dims;
  if (!v->type.is_tensor() || !v->type.shape || !is_static(*v->type.shape)) return std::nullopt;
  return dims_of(*v->type.shape);
}
DType dtype_of(const Value* v) {
  return v->constant ? v->constant->dtype : v->type.dtype;
}

// The sum's rows, when the addition and the norm are of whole rows, without broadcasting.
bool read_rows(Joined& j) {
  const std::optional<Dims> dims = static_dims(j.sum->out(0)), residual = static_dims(j.residual()), scale = static_dims(j.scale());
  if (!dims || dims->empty() || residual != dims || !scale || !j.scale()->constant) return false;
  j.dtype = dtype_of(j.sum->out(0)), j.n = dims->back();
  if (j.n < 1 || count_of(*dims) < 1 || scale->empty() || scale->back() != j.n || count_of(*scale) != j.n) return false;
  j.rows = count_of(*dims) / j.n;
  const int64_t axis = j.norm->get_int("axis", -1), rank = static_cast<int64_t>(dims->size());
  const bool last = axis == -1 || axis == rank - 1, wide = j.norm->get_int("stash_type", 1) == static_cast<int64_t>(DType::float32);
  const auto of_type = [&](const Value* v) { return dtype_of(v) == j.dtype; };
  return last && wide && of_type(j.residual()) && of_type(j.scale()) && of_type(j.add->out(0)) && of_type(j.norm->out(0));
}

class Joiner {
 public:
  Joiner(std::vector<Unit>& steps, const HostNodes& host, const Consumers& consumers, const std::unordered_set<const Value*>& graph_outputs,
         RankContext& rank)
      : steps_(steps), host_(host), consumers_(consumers), graph_outputs_(graph_outputs), rank_(rank) {}

  void run() {
    size_t latest = steps_.size();  // an AllReduce after which nothing has communicated
    for (size_t i = 0; i < steps_.size(); ++i) {
      if (latest < i && joins(steps_[latest], steps_[i])) {
        steps_[i].insert(steps_[i].begin(), steps_[latest].front());
        steps_[latest].clear();
        latest = steps_.size();
      } else if (is_sum(steps_[i])) {
        latest = i;
      } else if (std::any_of(steps_[i].begin(), steps_[i].end(), [](const Node* n) { return is_control_flow(*n) || communicates(*n); })) {
        latest = steps_.size();
      }
    }
    std::erase_if(steps_, [](const Unit& step) { return step.empty(); });
  }

 private:
  bool is_sum(const Unit& step) const {
    const Node& node = *step.front();
    if (step.size() != 1 || node.op != "AllReduce" || node.inputs.size() != 1 || node.domain != kCommunicationDomain) return false;
    const RankContext::Group* group = rank_.group(node.get_string("axis", ""));
    return group && group->devices && node.get_string("reduction", "sum") == "sum" && node.get_int("channels_last", 0) == 0;
  }
  bool joins(const Unit& sum, const Unit& step) const {
    if (step.size() != 2 || !step[0]->is("Add") || !step[1]->is("RMSNormalization") || host_.nodes.count(step[0])) return false;
    Joined j;
    j.sum = sum.front(), j.add = step[0], j.norm = step[1];
    const Value* total = j.sum->out(0);
    if (j.norm->input(0) != j.add->out(0) || graph_outputs_.count(total)) return false;
    const auto users = consumers_.find(total);
    if (users == consumers_.end() || users->second.size() != 1 || users->second.front() != j.add) return false;
    if (std::count(j.add->inputs.begin(), j.add->inputs.end(), total) != 1 || j.norm->outputs.size() != 1) return false;
    return read_rows(j) && rank_.group(j.sum->get_string("axis", ""))->devices->joins_norm(j.rows, j.n, j.dtype);
  }

  std::vector<Unit>& steps_;
  const HostNodes& host_;
  const Consumers& consumers_;
  const std::unordered_set<const Value*>& graph_outputs_;
  RankContext& rank_;
};

// Which of the step's inputs or outputs the value is; -1 where it is none.
int place_of(const std::vector<const Value*>& values, const Value* v) {
  const auto found = std::find(values.begin(), values.end(), v);
  return found == values.end() ? -1 : static_cast<int>(found - values.begin());
}

}  // namespace

void join_norms_to_sums(std::vector<std::vector<const Node*>>& steps, const HostNodes& host, const Consumers& consumers,
                        const std::unordered_set<const Value*>& graph_outputs, RankContext& rank) {
  Joiner(steps, host, consumers, graph_outputs, rank).run();
}

CompiledKernel make_sum_with_norm(const CompileContext& c, RankContext& rank) {
  Joined j;
  j.sum = c.nodes[0], j.add = c.nodes[1], j.norm = c.nodes[2];
  if (!read_rows(j)) throw Error("a sum with a norm has other shapes than when it was recognised", "report this as a fault");
  CompiledKernel kernel = make_collective(c, rank);  // checks the sum's attributes
  const Dims dims = *static_dims(j.sum->out(0));
  SumWithNorm sum{j.rows, j.n, j.dtype, static_cast<float>(j.norm->get_float("epsilon", 1e-5f))};
  const int residual = place_of(c.inputs, j.residual()), scale = place_of(c.inputs, j.scale());
  const int total = place_of(c.outputs, j.add->out(0)), y = place_of(c.outputs, j.norm->out(0));
  if (y < 0) throw Error("nobody takes the norm of a sum", "report this as a fault");
  kernel.run = [=, &rank, axis = j.sum->get_string("axis", ""), op = j.sum->op](RunContext& r) mutable {
    const auto data = [&](int i) { return r.input(static_cast<size_t>(i)).data; };
    const auto made = [&](int i) { return i < 0 ? nullptr : r.output(static_cast<size_t>(i), dims, sum.dtype).data; };
    sum.in = data(0), sum.residual = data(residual), sum.scale = data(scale);
    sum.sum = made(total), sum.y = made(y);
    RankContext::Group& group = *rank.group(axis);
    CollectiveCall call(rank, group, op, r.input(0).bytes());
    group.devices->sum_with_norm(sum);
  };
  return kernel;
}

}  // namespace fretsaw
