// Standard architectures as ONNX models of any size, with seeded random weights.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

struct ModelInfo {
  std::string name;               // "resnet50"
  std::string summary;            // one line
  std::vector<std::string> keys;  // what --set understands, e.g. "layers"
};
std::vector<ModelInfo> list_models();
// Builds a model by name; a setting that the model does not know, or a value that does not fit, throws Error (code usage).
// Weights are generated while they are written: building a model of any size takes little memory.
Model build_model(const std::string& name, const std::map<std::string, std::string>& settings);

}  // namespace fretsaw
