// Writing models: weights inline, or in one external file; all under temporary names until everything is written.
#include <fcntl.h>
#include <fmt/format.h>
#include <google/protobuf/arena.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl.h>
#include <onnx/onnx_pb.h>

#include <cstring>
#include <filesystem>
#include <optional>

#include "graph/errors.h"
#include "graph/io.h"
#include "graph/io/external_writer.h"
#include "graph/io/temporary_file.h"

namespace fretsaw {
namespace fs = std::filesystem;
namespace {

std::vector<const Tensor*> outer_weights(const Graph& graph) {
  std::vector<const Tensor*> tensors;
  for (const Value& v : graph.all_values())
    if (v.constant && !v.producer) tensors.push_back(v.constant.get());
  return tensors;
}

void add_entry(onnx::TensorProto& proto, const char* key, const std::string& value) {
  auto* entry = proto.add_external_data();
  entry->set_key(key);
  entry->set_value(value);
}

void set_external(onnx::TensorProto& proto, const std::string& location, uint64_t offset, size_t bytes) {
  proto.set_data_location(onnx::TensorProto::EXTERNAL);
  add_entry(proto, "location", location);
  add_entry(proto, "offset", std::to_string(offset));
  add_entry(proto, "length", std::to_string(bytes));
}

void refuse_own_source(const std::vector<const Tensor*>& tensors, const fs::path& target) {
  std::error_code error;
  for (const Tensor* t : tensors)
    if (t->file && fs::equivalent(t->file->path(), target, error))
      throw Error("would overwrite the file that the weights are read from", "write to another name").in_file(target.string());
}

// They need a file whose bytes can be mapped, and a folder for it.
void refuse_weights_in_streams(const std::string& model, const std::string& weights) {
  for (const std::string& path : {model, weights})
    if (is_stream(path))
      throw Error("is a device, FIFO or socket, and weights of this size lie in a file beside the model's", "write to a regular file")
          .in_file(path);
}

void serialize(const onnx::ModelProto& proto, const std::string& path) {
  int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) throw Error(std::string("cannot be written: ") + std::strerror(errno), "check the folder and its permissions").in_file(path);
  google::protobuf::io::FileOutputStream stream(fd);
  bool ok;
  {
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    ok = proto.SerializeToCodedStream(&coded);
  }
  ok = stream.Close() && ok;
  if (!ok)
    throw Error("cannot be written: the disk may be full, or the model over 2 GiB", "free space, or store weights externally")
        .in_file(path);
}

}  // namespace

void write_model(const Model& model, const std::string& path, const WriteOptions& options) {
  std::vector<const Tensor*> tensors = outer_weights(*model.graph);
  fs::path target(path);
  refuse_own_source(tensors, target);
  constexpr uint64_t kMostInline = uint64_t{1} << 30;  // well below what one file may hold
  uint64_t total = 0, present = 0;
  bool missing = false;
  for (const Tensor* t : tensors) {
    if (t->bytes() >= kExternalFrom) total += t->bytes();
    if (!t->is_missing()) present += t->bytes();
    missing |= t->is_missing();
  }
  // Beside weights that are missing there is no external file; what is there (tables of indexes) then stands in the model's.
  const bool keep_inline = missing && present <= kMostInline;
  const bool external = missing || (total > 0 && (total > options.external_above || options.external_above == 0));
  google::protobuf::Arena arena;  // a large graph is millions of small messages
  onnx::ModelProto& proto = *google::protobuf::Arena::CreateMessage<onnx::ModelProto>(&arena);
  to_proto(model, proto, !external || keep_inline);
  std::string data_name = options.external_name.empty() ? target.filename().string() + ".data" : options.external_name;
  TemporaryFile model_file(path);
  std::optional<TemporaryFile> data_file;
  std::string data_path = (target.parent_path() / data_name).string();
  if (external) {
    refuse_own_source(tensors, data_path);
    if (!missing) refuse_weights_in_streams(path, data_path);
    data_file.emplace(data_path);
    ExternalWriter writer(data_file->path());
    uint64_t planned = 0;  // where a weight that is missing would lie
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& t = *tensors[i];
      if (t.dtype == DType::string || t.bytes() < kExternalFrom) {
        if (t.is_missing()) set_external(*proto.mutable_graph()->mutable_initializer(static_cast<int>(i)), data_name, 0, t.bytes());
        continue;
      }
      if (keep_inline && !t.is_missing()) continue;
      uint64_t offset = t.is_missing() ? planned : writer.append(t);
      planned = aligned_offset(offset + t.bytes(), t.bytes());
      set_external(*proto.mutable_graph()->mutable_initializer(static_cast<int>(i)), data_name, offset, t.bytes());
    }
    writer.finish();
    if (missing) data_file.reset();
  }
  serialize(proto, model_file.path());
  if (data_file) data_file->put_in_place();
  model_file.put_in_place();
}

}  // namespace fretsaw
