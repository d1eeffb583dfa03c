// The pass runner: times each pass, verifies the graph after it, prints it or leaves it out by name.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "graph/errors.h"
#include "graph/passes.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

// Whether `name` is in the comma-separated list that the environment variable holds.
bool listed(const char* variable, const std::string& name, bool all = false) {
  const char* text = std::getenv(variable);
  if (!text) return false;
  std::string list = std::string(",") + text + ",";
  return list.find("," + name + ",") != std::string::npos || (all && list == ",all,");
}

size_t count_nodes(const Model& model) {
  size_t count = 0;
  for_each_graph(*model.graph, [&](Graph& g) { count += g.nodes.size(); });
  return count;
}

void run_one(Model& model, const Pass& pass) {
  try {
    pass.run(model);
  } catch (const Error& e) {
    throw Error(e.problem() + " (pass " + pass.name + ")", e.remedy(), e.code())
        .at_node(e.node(), e.op())
        .in_file(e.file().empty() ? model.path : e.file());
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& e) {
    throw Error("pass " + pass.name + " failed: " + e.what()).in_file(model.path);
  }
  try {
    verify(*model.graph);
  } catch (const Error& e) {
    throw Error("the graph is broken after pass " + pass.name + ": " + e.problem(),
                "report this; FRETSAW_DISABLE_PASSES=" + pass.name + " leaves the pass out")
        .at_node(e.node(), e.op())
        .in_file(model.path);
  }
}

}  // namespace

void report_timing(const PassTiming& t) {
  static const bool wanted = std::getenv("FRETSAW_PASS_TIMES") != nullptr;
  if (wanted) std::fprintf(stderr, "%9.1f ms  %s: %zu nodes, was %zu\n", t.ms, t.name.c_str(), t.nodes_after, t.nodes_before);
}

std::vector<PassTiming> run_passes(Model& model, const std::vector<Pass>& passes) {
  std::vector<PassTiming> timings;
  for (const Pass& pass : passes) {
    if (listed("FRETSAW_DISABLE_PASSES", pass.name)) continue;
    PassTiming& timing = timings.emplace_back();
    timing.name = pass.name;
    timing.nodes_before = count_nodes(model);
    auto start = std::chrono::steady_clock::now();
    run_one(model, pass);
    timing.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    timing.nodes_after = count_nodes(model);
    report_timing(timing);
    if (listed("FRETSAW_PRINT_PASSES", pass.name, true))
      std::fprintf(stderr, "# after pass %s: %zu nodes, was %zu\n%s", pass.name.c_str(), timing.nodes_after, timing.nodes_before,
                   print_graph(*model.graph).c_str());
  }
  return timings;
}

}  // namespace fretsaw
