// Values in files: TensorProto, SequenceProto and OptionalProto (.pb) and .npy, as `run` reads inputs and writes outputs.
#pragma once
#include <string>

#include "graph/io.h"
#include "kernels/tensor_view.h"

namespace fretsaw {

// The file's content as a value of this type: a sequence or optional type calls for a SequenceProto or OptionalProto.
RuntimeValue read_value_file(const std::string& path, const Type& type);
// Writes a value as ONNX's test data has it. `name` goes into the file. An optional type makes an OptionalProto.
void write_value_file(const RuntimeValue& value, const Type& type, const std::string& name, const std::string& path);

// "float32[2,3]", "seq of 3", "absent"
std::string describe(const RuntimeValue& value);

}  // namespace fretsaw
