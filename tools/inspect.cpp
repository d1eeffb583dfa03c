// fretsaw inspect: what a model or a plan holds and costs.
#include <CLI/App.hpp>
#include <algorithm>
#include <cstdio>
#include <optional>

#include "graph/catalogue.h"
#include "graph/io.h"
#include "graph/passes.h"
#include "graph/sizes.h"
#include "kernels/cuda/devices.h"
#include "runtime/host_nodes.h"
#include "tools/commands.h"
#include "tools/dot.h"
#include "tools/execution.h"
#include "tools/json_output.h"
#include "tools/model_summary.h"
#include "tools/options.h"
#include "tools/plan_summary.h"
#include "tools/text.h"
#include "tools/training_summary.h"

namespace fretsaw {
namespace {

struct Settings {
  std::string path, dot, device = "cpu";
  std::vector<std::string> shapes;
  bool json = false, nodes = false;
};

std::vector<std::string> names_of(const std::vector<Value*>& values) {
  std::vector<std::string> names;
  for (const Value* value : values) names.push_back(value ? value->name : "");
  return names;
}

Json ends_json(const std::vector<Value*>& values) {
  Json out = Json::array();
  for (const Value* value : values)
    out.push_back({{"name", value->name},
                   {"dtype", dtype_text(value->type)},
                   {"shape", value->type.shape ? json_of(*value->type.shape) : Json(nullptr)}});
  return out;
}

Json nodes_json(const Graph& graph) {
  Json out = Json::array();
  for (const Node* node : graph.nodes) {
    Json types = Json::array();
    for (const Value* value : node->outputs) types.push_back(value ? to_string(value->type) : "");
    out.push_back({{"name", node->name},
                   {"op", op_title(*node)},
                   {"inputs", names_of(node->inputs)},
                   {"outputs", names_of(node->outputs)},
                   {"types", types},
                   {"flops", flops_of(*node)}});
  }
  return out;
}

void print_nodes(const Graph& graph) {
  Table table({"node", "operator", "inputs", "outputs", ">flops"});
  for (const Node* node : graph.nodes) {
    std::vector<std::string> outputs;
    for (const Value* value : node->outputs) outputs.push_back(value ? value->name + ": " + to_string(value->type) : "-");
    table.add({node->name, op_title(*node), join(names_of(node->inputs), " "), join(outputs, " "), human_count(flops_of(*node))});
  }
  std::printf("\n");
  table.print();
}

void print_model(const Model& model, const ModelSummary& summary) {
  std::vector<std::string> opsets;
  for (const auto& [domain, version] : model.opsets)
    opsets.push_back((domain.empty() ? "ai.onnx" : domain) + " " + std::to_string(version));
  Table facts({"model", model.path});
  facts.add({"nodes", std::to_string(summary.nodes)});
  facts.add({"opset", join(opsets, ", ") + " (IR " + std::to_string(model.ir_version) + ")"});
  facts.add({"parameters",
             human_count(static_cast<double>(summary.parameters)) + ", " + human_bytes(static_cast<double>(summary.parameter_bytes))});
  facts.add({"flops", human_count(summary.flops)});
  facts.add({"activations", human_bytes(static_cast<double>(summary.activation_bytes)) + ", at most " +
                                human_bytes(static_cast<double>(summary.peak_activation_bytes)) + " at once"});
  for (const Value* value : model.graph->inputs) facts.add({"input", value->name + ": " + to_string(value->type)});
  for (const Value* value : model.graph->outputs) facts.add({"output", value->name + ": " + to_string(value->type)});
  facts.print();
  std::printf("\n");
  Table ops({"operator", ">nodes"});
  std::vector<std::pair<int64_t, std::string>> sorted;
  for (const auto& [op, count] : summary.ops) sorted.emplace_back(-count, op);
  std::sort(sorted.begin(), sorted.end());
  for (const auto& [count, op] : sorted) ops.add({op, std::to_string(-count)});
  ops.print();
}

// What a GPU has no kernel for, with numbers in place of the symbolic dimensions; nothing is said where the device is the CPU.
std::vector<HostFallback> host_nodes(const Model& model, const DimSizes& sizes, const Settings& settings) {
  if (settings.device == "cpu") return {};
  return nodes_without_kernel(with_sizes(model, sizes), kernels_of_cuda_devices());
}

Json json_of(const std::vector<HostFallback>& nodes) {
  Json out = Json::array();
  for (const HostFallback& f : nodes) out.push_back({{"node", f.node}, {"op", f.op}, {"reason", f.reason}});
  return out;
}

void print_host_nodes(const std::vector<HostFallback>& nodes, const Settings& settings) {
  if (settings.device == "cpu") return;
  if (nodes.empty()) {
    std::printf("\n%s has a kernel for every node\n", settings.device.c_str());
    return;
  }
  std::printf("\n");
  Table table({"on the host", "operator", "why"});
  for (const HostFallback& f : nodes) table.add({f.node, f.op, f.reason});
  table.print();
}

void inspect_model(const Settings& settings) {
  Model model = read_model(settings.path, {.allow_missing_weights = true});
  set_input_shapes(model, parse_shapes(settings.shapes));
  infer_shapes(model);
  const ModelSummary summary = summarise(model);
  const std::vector<HostFallback> on_host = host_nodes(model, {}, settings);
  if (!settings.dot.empty()) write_dot(*model.graph, settings.dot);
  if (!settings.json) {
    print_model(model, summary);
    print_host_nodes(on_host, settings);
    if (settings.nodes) print_nodes(*model.graph);
    if (!summary.notes.empty()) std::printf("\n");
    return print_notes(summary.notes);
  }
  Json opset;
  for (const auto& [domain, version] : model.opsets) opset[domain] = version;
  Json out = {{"nodes", summary.nodes},
              {"ops", summary.ops},
              {"opset", opset},
              {"ir_version", model.ir_version},
              {"parameters", summary.parameters},
              {"parameter_bytes", summary.parameter_bytes},
              {"flops", summary.flops},
              {"activation_bytes", summary.activation_bytes},
              {"peak_activation_bytes", summary.peak_activation_bytes},
              {"inputs", ends_json(model.graph->inputs)},
              {"outputs", ends_json(model.graph->outputs)},
              {"notes", summary.notes}};
  if (settings.device != "cpu") out["host_nodes"] = json_of(on_host);
  if (settings.nodes) out["node_list"] = nodes_json(*model.graph);
  print_json(out);
}

void inspect_plan(const Settings& settings) {
  std::optional<TrainingPlanFile> training;
  if (is_training_plan(settings.path)) training = read_training_plan(settings.path, /*structure_only_weights=*/true);
  Plan plan = training ? *training->training.plan : read_plan(settings.path, /*structure_only_weights=*/true);
  if (!settings.shapes.empty()) plan.notes.push_back("--shape has nothing to do in a plan: its shapes were fixed when it was made");
  if (!settings.dot.empty()) write_dot(plan, settings.dot);
  const DimSizes sizes = micro_batch_sizes(plan);
  if (settings.json) {
    Json out = plan_json(plan);
    if (training) out["training"] = training_json(*training);
    for (size_t i = 0; i < plan.graphs.size(); ++i) {
      const Model& model = *plan.graphs[i].model;
      if (settings.device != "cpu") out["graphs"][i]["host_nodes"] = json_of(host_nodes(model, sizes, settings));
      if (settings.nodes) out["graphs"][i]["node_list"] = nodes_json(*model.graph);
    }
    return print_json(out);
  }
  if (training) print_training(*training);
  print_plan(plan);
  if (!settings.nodes && settings.device == "cpu") return;
  for (const PlanGraph& graph : plan.graphs) {
    std::printf("\n%s", graph.file.c_str());
    print_host_nodes(host_nodes(*graph.model, sizes, settings), settings);
    if (settings.nodes) print_nodes(*graph.model->graph);
  }
}

}  // namespace

void add_inspect(CLI::App& app, Outcome&) {
  auto settings = std::make_shared<Settings>();
  CLI::App* command = app.add_subcommand("inspect", "Show what a model or a plan holds and costs");
  command->add_option("model", settings->path, "An ONNX file or a plan folder")->required();
  command->add_flag("--json", settings->json, "Print one JSON object");
  command->add_flag("--nodes", settings->nodes, "List every node");
  command->add_option("--dot", settings->dot, "Write the graph for Graphviz to this file");
  add_repeated(*command, "--shape", settings->shapes, "NAME=D,D,...: fix an input's dimensions");
  command->add_option("--device", settings->device, "cuda: list the nodes that GPUs have no kernel for");
  command->callback([settings] {
    check_device(settings->device);
    is_plan_folder(settings->path) ? inspect_plan(*settings) : inspect_model(*settings);
  });
}

}  // namespace fretsaw
