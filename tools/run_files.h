// The files that `run` writes: outputs with their description, and traces.
#pragma once
#include <string>
#include <vector>

#include "graph/plan.h"
#include "runtime/session.h"
#include "tools/json_output.h"

namespace fretsaw {

// {"name", "dtype", "shape"} of a value as it came out; a sequence has the shapes of its items as "items".
Json value_json(const std::string& name, const Type& type, const RuntimeValue& value);
// Whether the file's name is the prefix, a number and ".pb".
bool is_numbered(const std::string& file, const std::string& prefix);
// Removes the folder's numbered files, except those of the numbers below `count`.
void remove_earlier_files(const std::string& folder, const std::string& prefix, size_t count);
// output_K.pb and outputs.json, and no output_K.pb of an earlier run beside them. Each file appears whole, outputs.json last.
void write_outputs(const Plan& plan, const std::vector<RuntimeValue>& outputs, const std::string& folder);
// Chrome's trace format: open it in Perfetto or chrome://tracing.
void write_trace(const std::vector<TraceEvent>& events, const std::string& path);

}  // namespace fretsaw
