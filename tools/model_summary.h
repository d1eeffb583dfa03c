// What a model holds and costs: the counts behind `inspect MODEL`.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

struct ModelSummary {
  int64_t nodes = 0;                   // as in the file, bodies of control flow not counted
  std::map<std::string, int64_t> ops;  // operator (with its domain, unless it is ONNX's) -> nodes
  int64_t parameters = 0;              // elements of all initializers
  int64_t parameter_bytes = 0;
  double flops = 0;
  int64_t activation_bytes = 0;       // every value that a node makes and another takes
  int64_t peak_activation_bytes = 0;  // the most of them alive at once in file order
  std::vector<std::string> notes;
};
// `model` is the model as read with the types of its values inferred. Unknown dimensions count as 1, which a note says.
ModelSummary summarise(const Model& model);

// Bytes of a value of this type, unknown dimensions as 1; 0 for what is no tensor.
int64_t bytes_of_type(const Type& type);
// Element bytes of a shape given by a file may overflow; these saturate.
int64_t saturating_bytes(DType type, const Dims& dims);
std::string op_title(const Node& node);  // "Conv", "ai.fretsaw.Send"

}  // namespace fretsaw
