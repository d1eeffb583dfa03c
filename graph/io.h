// Reading and writing ONNX files.
#pragma once
#include <functional>
#include <string>

#include "graph/ir.h"

namespace onnx {
class ModelProto;
class TensorProto;
class TypeProto;
}  // namespace onnx

namespace fretsaw {

struct ReadOptions {
  bool allow_missing_weights = false;  // a missing external file leaves `Tensor::missing` set instead of an error (--structure-only)
};
// Reads a model of IR 3 to the newest. Weights stay in their files, mapped. Throws Error naming the file and what is wrong: not an ONNX
// file, truncated, a cycle, an undefined name, an external path outside the folder, a range past the end of a file.
Model read_model(const std::string& path, const ReadOptions& options = {});
// Whether the model, as far as the operator schemas and inference tell, is sound: each finding a line "error|warning", node, tensor, rule,
// message. The types of values change while it runs and are put back.
struct Finding {
  std::string severity;  // "error" or "warning"
  std::string node, tensor, rule, message;
};
std::vector<Finding> check_model(Model& model);

struct WriteOptions {
  // Bytes above which weights go to an external file FILE.data; 0: all of at least 1 KiB do, SIZE_MAX: none does.
  size_t external_above = size_t{1} << 30;
  std::string external_name;  // the external file's name; "": the model file's name + ".data"
};
// Writes to a temporary name and renames. Never overwrites a file that a tensor of the model is mapped from (throws Error).
void write_model(const Model& model, const std::string& path, const WriteOptions& options = {});

// --- ONNX test data: TensorProto, SequenceProto and OptionalProto files, and .npy ---
TensorPtr read_tensor_file(const std::string& path);  // .pb TensorProto or .npy, by content
void write_tensor_file(const Tensor& tensor, const std::string& path);

// --- conversions to libonnx's classes, for shape inference and checks ---
// without weights: initializers of the outermost graph of at least kExternalFrom bytes have their type and shape only.
void to_proto(const Model& model, onnx::ModelProto& proto, bool with_weights);
inline constexpr size_t kExternalFrom = 1024;  // smaller tensors are always stored in the model file
void to_proto(const Tensor& tensor, onnx::TensorProto& proto);
void to_proto(const Type& type, onnx::TypeProto& proto);
Type type_from_proto(const onnx::TypeProto& proto);
TensorPtr tensor_from_proto(const onnx::TensorProto& proto, const std::string& folder, const ReadOptions& options = {});

}  // namespace fretsaw
