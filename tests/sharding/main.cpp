// Every sharding that a strategy allows, of the nodes of ONNX's own node tests, against the whole: sharding_cases FOLDER [NAME...].
//
// Each node's strategies are tried one at a time on 2, 3 and 4 ranks, all other nodes run whole. Fails when a result differs, when a graph
// that a rank runs is not sound, or when fewer operators were divided than the last time.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "graph/io.h"
#include "graph/passes.h"
#include "partitioner/partition.h"
#include "partitioner/sharding/rewrite.h"
#include "partitioner/sharding/strategies.h"
#include "runtime/session.h"
#include "tests/node_tests/worker.h"
#include "tools/compare.h"
#include "tools/inputs.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks[] = {2, 3, 4};
constexpr size_t kLeastOperators = 142;  // that some strategy divides; may only grow (without CastLike, which is a Cast by then)

std::string describe(const Node& node, const NodeStrategies& own, const Strategy& s, int ranks) {
  std::string what = node.op + " on " + std::to_string(ranks) + " ranks, ";
  if (s.factor >= 0) return what + "factor " + own.rule.factors[static_cast<size_t>(s.factor)].name + " of " + to_string(own.rule);
  return what + (s.kind == Strategy::Kind::segments ? "segments" : s.kind == Strategy::Kind::linear ? "pending sums" : "a measure");
}

// The plan with one node divided.
std::shared_ptr<const Plan> divided(const Plan& whole, const Model& model, const Strategies& strategies, size_t node, size_t strategy) {
  std::vector<int> chosen(model.graph->nodes.size(), 0);
  chosen[node] = static_cast<int>(strategy);
  const int ranks = strategies.forms.ranks();
  const std::unordered_map<const Value*, Form> no_pins;
  OuterParts of_one_axis;
  auto plan = std::make_shared<Plan>(whole);
  plan->mesh.tensor = ranks;
  plan->graphs.clear();
  for (int t = 0; t < ranks; ++t) {
    PlanGraph graph = whole.graphs.front();
    graph.coordinates = {{"tensor", t}};
    graph.model = std::make_shared<Model>(local_model(model, {strategies, chosen, no_pins}, t, of_one_axis));
    for (const Finding& f : check_model(*graph.model))
      if (f.severity == "error") throw std::runtime_error("rank " + std::to_string(t) + ": " + f.message);
    plan->graphs.push_back(std::move(graph));
  }
  return plan;
}

std::string differing_output(const std::vector<RuntimeValue>& got, const std::vector<RuntimeValue>& want, const Plan& plan) {
  for (size_t i = 0; i < want.size(); ++i) {
    const Type& type = plan.outputs[i].type;
    const bool exact = type.is_tensor() && !is_float(type.dtype);
    const double range = type.is_tensor() && (type.dtype == DType::float16 || type.dtype == DType::bfloat16) ? 1e-2 : 2e-5;
    const Difference d = compare(got[i], want[i], exact ? Tolerance{} : Tolerance{.range_tol = range});
    if (!d.ok) return "output " + std::to_string(i) + ": " + d.why;
  }
  return "";
}

// "" or what is wrong; "divided: OP" where a strategy divided something.
std::string run_case(const fs::path& folder) {
  try {
    const Plan whole = partition(read_model((folder / "model.onnx").string()), {});
    Model model = clone(*whole.graphs.front().model);
    infer_shapes(model);
    const auto inputs = read_input_folder(whole, (folder / "test_data_set_0").string());
    Session reference(std::make_shared<const Plan>(whole), {.threads = 1});
    const std::vector<RuntimeValue> want = reference.run(inputs);
    std::set<std::string> operators;
    for (const int ranks : kRanks) {
      const Strategies strategies = find_strategies(*model.graph, {.ranks = ranks, .all = true});
      for (size_t i = 0; i < model.graph->nodes.size(); ++i) {
        const NodeStrategies& own = strategies.nodes[i];
        const Node& node = *model.graph->nodes[i];
        for (size_t k = 1; k < own.all.size(); ++k) {
          std::string wrong;
          try {
            const auto plan = divided(whole, model, strategies, i, k);
            wrong = differing_output(Session(plan, {.threads = 1}).run(inputs), want, whole);
          } catch (const std::exception& error) {
            wrong = error.what();
          }
          if (!wrong.empty()) return describe(node, own, own.all[k], ranks) + ": " + wrong;
          if (own.all[k].share < 1) operators.insert(node.op);
        }
      }
    }
    std::string text = "divided:";
    for (const std::string& op : operators) text += " " + op;
    return text;
  } catch (const std::exception& error) {
    return std::string("skipped: ") + error.what();  // the whole model does not run: node_tests tells of it
  }
}

int run(const std::string& folder, std::vector<std::string> names) {
  const bool all = names.empty();
  if (all)
    for (const auto& entry : fs::directory_iterator(folder))
      if (fs::exists(entry.path() / "model.onnx")) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  std::set<std::string> operators;
  size_t wrong = 0, skipped = 0;
  for (const auto& [name, outcome] : run_in_workers(
           names, [&](const std::string& name) { return run_case(fs::path(folder) / name); }, std::chrono::seconds(120))) {
    if (outcome.starts_with("divided:")) {
      std::istringstream words(outcome.substr(8));
      for (std::string op; words >> op;) operators.insert(op);
    } else if (outcome.starts_with("skipped:")) {
      ++skipped;
    } else {
      ++wrong;
      std::printf("%s: %s\n", name.c_str(), outcome.c_str());
    }
  }
  std::string list;
  for (const std::string& op : operators) list += " " + op;
  std::printf("divided:%s\n", list.c_str());
  std::printf("sharding cases: %zu of %zu as the whole, %zu skipped as they do not run whole; %zu operators divided\n",
              names.size() - wrong - skipped, names.size(), skipped, operators.size());
  if (const char* results = std::getenv("FRETSAW_TEST_RESULTS"); results && all)
    std::ofstream(fs::path(results) / "sharding_cases.json")
        << nlohmann::json({{"passed", names.size() - wrong - skipped}, {"failed", wrong}});
  return wrong == 0 && (!all || operators.size() >= kLeastOperators) ? 0 : 1;
}

}  // namespace
}  // namespace fretsaw

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: sharding_cases FOLDER [NAME...]\n");
    return 2;
  }
  try {
    return fretsaw::run(argv[1], {argv + 2, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sharding_cases: %s\n", error.what());
    return 1;
  }
}
