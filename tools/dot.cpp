// Graphs as DOT, for Graphviz.
#include "tools/dot.h"

#include <fstream>
#include <sstream>

#include "graph/errors.h"
#include "tools/model_summary.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

// Text as a DOT string, its parts on lines of their own: any bytes may stand in a name, none ends the string.
std::string quoted(const std::vector<std::string>& parts) {
  std::string out = "\"";
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out += "\\n";
    for (const char c : one_line(parts[i])) {
      if (c == '"' || c == '\\') out += '\\';
      out += c;
    }
  }
  return out + "\"";
}

// Nodes have numbers for identifiers; names stand in labels only.
class Writer {
 public:
  explicit Writer(std::string indent) : indent_(std::move(indent)) {}

  void graph(const Graph& graph, const std::string& prefix, std::ostream& out) {
    int number = 0;
    for (const Value* input : graph.inputs) {
      const std::string id = prefix + "i" + std::to_string(number++);
      ids_[input] = id;
      line(out, id + " [shape=ellipse, label=" + quoted({input->name, to_string(input->type)}) + "];");
    }
    number = 0;
    for (const Node* node : graph.nodes) {
      const std::string id = prefix + "n" + std::to_string(number++);
      line(out, id + " [shape=box, label=" + quoted({op_title(*node), node->name}) + "];");
      for (const Value* value : node->outputs)
        if (value) ids_[value] = id;
    }
    number = 0;
    for (const Node* node : graph.nodes) {
      const std::string id = prefix + "n" + std::to_string(number++);
      for (const Value* value : node->inputs) edge(value, id, out);
      for (const Value* value : captures(*node)) edge(value, id, out);
    }
    number = 0;
    for (const Value* output : graph.outputs) {
      const std::string id = prefix + "o" + std::to_string(number++);
      line(out, id + " [shape=ellipse, label=" + quoted(std::vector<std::string>{output->name}) + "];");
      edge(output, id, out);
      output_ids_[output->name] = id;
    }
  }

  std::string id_of_input(const Graph& graph, const std::string& name) const {
    for (const Value* input : graph.inputs)
      if (input->name == name) return ids_.at(input);
    return "";
  }
  std::string id_of_output(const std::string& name) const {
    const auto found = output_ids_.find(name);
    return found == output_ids_.end() ? "" : found->second;
  }

 private:
  void line(std::ostream& out, const std::string& text) { out << indent_ << text << "\n"; }
  void edge(const Value* value, const std::string& to, std::ostream& out) {
    const auto from = ids_.find(value);
    if (from != ids_.end()) line(out, from->second + " -> " + to + " [label=" + quoted({value->name, to_string(value->type)}) + "];");
  }

  std::string indent_;
  std::unordered_map<const Value*, std::string> ids_;
  std::unordered_map<std::string, std::string> output_ids_;
};

void write_file(const std::string& text, const std::string& path) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (!out || !(out << text) || !out.flush()) throw Error("can't be written", "check the folder and the space on its disk").in_file(path);
}

}  // namespace

void write_dot(const Graph& graph, const std::string& path) {
  std::ostringstream out;
  out << "digraph model {\n";
  Writer("  ").graph(graph, "", out);
  out << "}\n";
  write_file(out.str(), path);
}

void write_dot(const Plan& plan, const std::string& path) {
  std::ostringstream out;
  out << "digraph plan {\n";
  std::vector<Writer> writers;
  for (size_t i = 0; i < plan.graphs.size(); ++i) {
    out << "  subgraph cluster_" << i << " {\n    label=" << quoted(std::vector<std::string>{plan.graphs[i].file}) << ";\n";
    writers.emplace_back("    ");
    writers.back().graph(*plan.graphs[i].model->graph, "g" + std::to_string(i) + "_", out);
    out << "  }\n";
  }
  for (const Route& route : plan.routes) {
    std::string from, to;
    for (size_t i = 0; i < plan.graphs.size(); ++i) {
      if (plan.graphs[i].stage == route.from_stage && from.empty()) from = writers[i].id_of_output(route.from_name);
      if (plan.graphs[i].stage == route.to_stage && to.empty()) to = writers[i].id_of_input(*plan.graphs[i].model->graph, route.to_name);
    }
    if (!from.empty() && !to.empty())
      out << "  " << from << " -> " << to << " [style=dashed, label=" << quoted(std::vector<std::string>{route.source}) << "];\n";
  }
  out << "}\n";
  write_file(out.str(), path);
}

}  // namespace fretsaw
