// Graphs as DOT, for Graphviz.
#pragma once
#include <string>

#include "graph/plan.h"

namespace fretsaw {

void write_dot(const Graph& graph, const std::string& path);
void write_dot(const Plan& plan, const std::string& path);  // a cluster for each stage, and the routes between them

}  // namespace fretsaw
