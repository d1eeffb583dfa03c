// Constant nodes become initializers, at every nesting level and in every form that the operator has.
#include <onnx/onnx_pb.h>

#include <cstring>
#include <filesystem>

#include "graph/errors.h"
#include "graph/io/reading.h"
#include "graph/passes.h"
#include "graph/passes/rewrite.h"

namespace fretsaw {
namespace {

TensorPtr string_tensor(Dims dims, std::vector<std::string> strings) {
  auto t = make_tensor(DType::string, std::move(dims));
  t->strings = std::move(strings);
  return t;
}

TensorPtr float_tensor(const std::vector<float>& values) {  // shape [n]
  auto t = make_tensor(DType::float32, {static_cast<int64_t>(values.size())});
  if (!values.empty()) std::memcpy(mutable_data(*t), values.data(), values.size() * sizeof(float));
  return t;
}

TensorPtr dense_of(const Attribute& attribute, const std::string& model_path, FileCache& files) {
  onnx::AttributeProto proto;
  const auto* opaque = std::get_if<OpaqueAttribute>(&attribute.value);
  if (!opaque || !proto.ParseFromString(opaque->proto) || !proto.has_sparse_tensor())
    throw Error("the attribute 'sparse_value' holds no sparse tensor", "export the model again");
  if (!files.model_file && !model_path.empty()) files.model_file = MappedFile::open(model_path);
  return densify(proto.sparse_tensor(), std::filesystem::path(model_path).parent_path().string(), files, {});
}

// The tensor that a Constant node makes. Null: it has none of the attributes (a reference inside a function body).
TensorPtr constant_value(const Node& node, const std::string& model_path, FileCache& files) {
  for (const Attribute& a : node.attributes) {
    if (!a.refers_to.empty()) return nullptr;
    if (a.name == "value") return node.get_tensor("value");
    if (a.name == "value_int") return make_int64(node.get_int("value_int", 0));
    if (a.name == "value_ints") return make_int64s(node.get_ints("value_ints"));
    if (a.name == "value_float") return make_float(node.get_float("value_float", 0));
    if (a.name == "value_floats") return float_tensor(node.get_floats("value_floats"));
    if (a.name == "value_string") return string_tensor({}, {node.get_string("value_string", "")});
    if (a.name == "value_strings") {
      auto strings = node.get_strings("value_strings");
      return string_tensor({static_cast<int64_t>(strings.size())}, strings);
    }
    if (a.name == "sparse_value") return dense_of(a, model_path, files);
  }
  throw Error("a Constant node has no value", "export the model again").at_node(node.name, node.op);
}

}  // namespace

void constants_to_initializers(Graph& graph, const std::string& model_path) {
  FileCache files;
  for_each_graph(graph, [&](Graph& g) {
    Rewriter(g).walk([&](Node& node) {
      if (!node.is("Constant") || !node.out(0)) return true;
      TensorPtr tensor;
      try {
        tensor = constant_value(node, model_path, files);
      } catch (const Error& e) {
        throw e.at_node(node.name, node.op);
      }
      if (!tensor) return true;
      Value* v = node.outputs[0];
      v->producer = nullptr;
      v->type = Type::tensor(tensor->dtype, shape_of(tensor->dims));
      v->constant = std::move(tensor);
      return false;
    });
  });
}

void constants_to_initializers(Model& model) {
  constants_to_initializers(*model.graph, model.path);
}

}  // namespace fretsaw
