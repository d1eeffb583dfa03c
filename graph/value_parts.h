// Which part of a source tensor an initializer of a rank's graph is: what merging, checkpoints and seeded weights need to know.
#pragma once
#include <map>
#include <string>

#include "graph/ir.h"

namespace fretsaw {

// Writes the parts of the graph's initializers into the model's metadata ("fretsaw.parts"), as JSON by initializer name.
void record_parts(Model& model);
// What record_parts wrote; empty where nothing is cut. Throws Error when the entry is damaged.
std::map<std::string, ValuePart> recorded_parts(const Model& model);

}  // namespace fretsaw
