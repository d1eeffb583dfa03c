// ONNX's test data folders: reading their files and comparing results with them.
#pragma once
#include <string>
#include <vector>

#include "graph/types.h"
#include "kernels/tensor_view.h"

namespace fretsaw::testing {

// The files prefix_0.pb, prefix_1.pb, ... of a folder, in order.
std::vector<std::string> data_files(const std::string& folder, const std::string& prefix);
// A TensorProto, SequenceProto or OptionalProto file, as the type says.
RuntimeValue read_value(const std::string& path, const Type& type);

struct Tolerance {
  double relative = 1e-3, absolute = 1e-5;
};
// "" when equal: integers, booleans and strings exactly, floats within absolute + relative * |wanted|; otherwise a few words why not.
std::string difference(const RuntimeValue& got, const RuntimeValue& wanted, Tolerance tolerance = {});

}  // namespace fretsaw::testing
