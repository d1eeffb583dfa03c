// What the parts of the reader share. Private to graph/io and the passes that read protos.
#pragma once
#include <map>
#include <memory>
#include <string>

#include "graph/errors.h"
#include "graph/io.h"

namespace onnx {
class GraphProto;
class SparseTensorProto;
}  // namespace onnx

namespace fretsaw {

// The file parses, and what it says is no graph: an undefined name, a value made twice, a cycle.
class StructureError : public Error {
 public:
  explicit StructureError(const Error& error) : Error(error) {}
};

// The files that tensors are mapped from, each mapped once.
struct FileCache {
  std::shared_ptr<const MappedFile> model_file;
  std::map<std::string, std::shared_ptr<const MappedFile>> external;
};
TensorPtr tensor_from_proto(const onnx::TensorProto& proto, const std::string& folder, FileCache& files, const ReadOptions& options);
// A sparse tensor, with its zeros.
TensorPtr densify(const onnx::SparseTensorProto& proto, const std::string& folder, FileCache& files, const ReadOptions& options);

// Consumes the proto.
Model model_from_proto(onnx::ModelProto& proto, const std::string& folder, FileCache& files, const ReadOptions& options);

// A graph as the proto says, with nodes sorted; names that its nodes use and it does not make are looked up in `parent` and its parents.
// Attributes with a ref_attr_name are kept in Attribute::refers_to.
GraphPtr graph_from_proto(const onnx::GraphProto& proto, Graph* parent, const std::string& folder);
// The same for protos that hold bytes mapped from `files.model_file` (functions of a model).
GraphPtr graph_from_proto(const onnx::GraphProto& proto, Graph* parent, const std::string& folder, FileCache& files);

}  // namespace fretsaw
