// Values in files: TensorProto, SequenceProto and OptionalProto (.pb) and .npy, as `run` reads inputs and writes outputs.
#include "tools/value_files.h"

#include <onnx/onnx-data.pb.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "graph/errors.h"
#include "runtime/tensor_values.h"

namespace fretsaw {
namespace {

std::string read_bytes(const std::string& path) {
  std::error_code error;
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = in && !std::filesystem::is_directory(path, error) ? static_cast<std::streamoff>(in.tellg()) : -1;
  if (size < 0) throw Error("can't be read", "check that it is there, and a regular file").in_file(path);
  std::string bytes(static_cast<size_t>(size), '\0');
  in.seekg(0);
  in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!in) throw Error("can't be read to its end").in_file(path);
  return bytes;
}

template <typename Proto>
Proto parse(const std::string& path, const char* what) {
  Proto proto;
  if (!proto.ParseFromString(read_bytes(path)))
    throw Error(std::string("is not a ") + what, "write it as ONNX's test data is").in_file(path);
  return proto;
}

RuntimeValue from_proto(const onnx::TensorProto& proto, const std::string& folder) {
  return value_from_tensor(*tensor_from_proto(proto, folder));
}

RuntimeValue from_proto(const onnx::OptionalProto& proto, const std::string& folder);

RuntimeValue from_proto(const onnx::SequenceProto& proto, const std::string& folder) {
  RuntimeValue value;
  value.kind = RuntimeValue::Kind::sequence;
  for (const auto& item : proto.tensor_values()) value.items.push_back(from_proto(item, folder));
  for (const auto& item : proto.sequence_values()) value.items.push_back(from_proto(item, folder));
  for (const auto& item : proto.optional_values()) value.items.push_back(from_proto(item, folder));
  if (!value.items.empty()) value.element = value.items[0].tensor.dtype;
  return value;
}

RuntimeValue from_proto(const onnx::OptionalProto& proto, const std::string& folder) {
  if (proto.has_tensor_value()) return from_proto(proto.tensor_value(), folder);
  if (proto.has_sequence_value()) return from_proto(proto.sequence_value(), folder);
  if (proto.has_optional_value()) return from_proto(proto.optional_value(), folder);
  return {};
}

// Gives an empty sequence the element type that its type names.
RuntimeValue with_element(RuntimeValue value, const Type* type) {
  while (type && type->kind == Type::Kind::optional) type = type->element.get();
  if (value.kind == RuntimeValue::Kind::sequence && value.element == DType::undefined && type && type->element)
    value.element = type->element->dtype;
  return value;
}

void fill(const RuntimeValue& value, const std::string& name, onnx::TensorProto& proto) {
  to_proto(*tensor_from_view(value.tensor), proto);
  proto.set_name(name);
}

void fill(const RuntimeValue& value, const std::string& name, onnx::SequenceProto& proto) {
  proto.set_name(name);
  proto.set_elem_type(onnx::SequenceProto::TENSOR);
  for (const RuntimeValue& item : value.items) {
    if (item.kind == RuntimeValue::Kind::sequence) {
      proto.set_elem_type(onnx::SequenceProto::SEQUENCE);
      fill(item, "", *proto.add_sequence_values());
    } else if (item.kind == RuntimeValue::Kind::tensor) {
      fill(item, "", *proto.add_tensor_values());
    } else {
      proto.set_elem_type(onnx::SequenceProto::OPTIONAL);
      proto.add_optional_values();
    }
  }
}

void fill(const RuntimeValue& value, const std::string& name, onnx::OptionalProto& proto) {
  proto.set_name(name);
  if (value.kind == RuntimeValue::Kind::tensor) {
    proto.set_elem_type(onnx::OptionalProto::TENSOR);
    fill(value, "", *proto.mutable_tensor_value());
  } else if (value.kind == RuntimeValue::Kind::sequence) {
    proto.set_elem_type(onnx::OptionalProto::SEQUENCE);
    fill(value, "", *proto.mutable_sequence_value());
  }
}

template <typename Proto>
void write_proto(const RuntimeValue& value, const std::string& name, const std::string& path) {
  Proto proto;
  fill(value, name, proto);
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (!out || !proto.SerializeToOstream(&out) || !out.flush())
    throw Error("can't be written", "check the folder and the space on its disk").in_file(path);
}

}  // namespace

RuntimeValue read_value_file(const std::string& path, const Type& type) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  try {
    if (type.kind == Type::Kind::sequence)
      return with_element(from_proto(parse<onnx::SequenceProto>(path, "SequenceProto"), folder), &type);
    if (type.kind == Type::Kind::optional)
      return with_element(from_proto(parse<onnx::OptionalProto>(path, "OptionalProto"), folder), &type);
    return value_from_tensor(*read_tensor_file(path));
  } catch (const Error& error) {
    throw error.in_file(path);
  }
}

void write_value_file(const RuntimeValue& value, const Type& type, const std::string& name, const std::string& path) {
  if (type.kind == Type::Kind::optional || value.kind == RuntimeValue::Kind::absent) {
    write_proto<onnx::OptionalProto>(value, name, path);
  } else if (value.kind == RuntimeValue::Kind::sequence) {
    write_proto<onnx::SequenceProto>(value, name, path);
  } else {
    write_proto<onnx::TensorProto>(value, name, path);
  }
}

std::string describe(const RuntimeValue& value) {
  switch (value.kind) {
    case RuntimeValue::Kind::absent:
      return "absent";
    case RuntimeValue::Kind::sequence:
      return "sequence of " + std::to_string(value.items.size());
    case RuntimeValue::Kind::tensor:
      break;
  }
  return std::string(name_of(value.tensor.dtype)) + to_string(value.tensor.dims);
}

}  // namespace fretsaw
