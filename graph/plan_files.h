// Files of a plan's folder beside its graphs. Private to graph/.
#pragma once
#include <map>
#include <string>

#include "graph/plan.h"

namespace fretsaw {

inline constexpr const char* kStatesFile = "states.onnx";  // an initializer for each state that does not begin with zeros

// write_plan() with further text files, by their names.
void write_plan_files(const Plan& plan, const std::map<std::string, std::string>& texts, const std::string& folder,
                      const WritePlanOptions& options);

}  // namespace fretsaw
