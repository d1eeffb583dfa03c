// TensorProto to Tensor and back: inline data in all its forms, external files, bytes mapped from the model's own file.
#include <fmt/format.h>
#include <onnx/onnx_pb.h>

#include <cstring>
#include <filesystem>

#include "graph/errors.h"
#include "graph/io.h"
#include "graph/io/reading.h"
#include "graph/io/wire.h"

namespace fretsaw {
namespace fs = std::filesystem;
namespace {

// Copies one repeated field, an element of the proto to one of U.
template <typename U, typename Field>
void narrow(const Field& field, Tensor& t, int64_t per_element = 1) {
  auto want = static_cast<int64_t>(bytes_of(t.dtype, t.count()) / sizeof(U));
  if (field.size() != want && !(field.empty() && want == 0))
    throw Error(fmt::format("tensor '{}' of shape {} needs {} values and has {}", t.name, to_string(t.dims), want / per_element,
                            field.size() / per_element),
                "the file is damaged");
  auto* out = reinterpret_cast<U*>(mutable_data(t));
  for (int64_t i = 0; i < want; ++i) out[i] = static_cast<U>(field[static_cast<int>(i)]);
}

void fill_from_typed_fields(const onnx::TensorProto& proto, Tensor& t) {
  switch (t.dtype) {
    case DType::float32:
    case DType::complex64:
      return narrow<float>(proto.float_data(), t);
    case DType::float64:
    case DType::complex128:
      return narrow<double>(proto.double_data(), t);
    case DType::int64:
      return narrow<int64_t>(proto.int64_data(), t);
    case DType::uint64:
      return narrow<uint64_t>(proto.uint64_data(), t);
    case DType::uint32:
      return narrow<uint32_t>(proto.uint64_data(), t);
    case DType::int32:
      return narrow<int32_t>(proto.int32_data(), t);
    case DType::int16:
    case DType::uint16:
    case DType::float16:
    case DType::bfloat16:
      return narrow<uint16_t>(proto.int32_data(), t);
    default:  // one byte each, or packed into bytes
      return narrow<uint8_t>(proto.int32_data(), t);
  }
}

// "OFFSET LENGTH" of a kMappedKey entry, checked against the file.
void map_from_model_file(const std::string& place, Tensor& t, const FileCache& files) {
  uint64_t offset = 0, length = 0;
  if (std::sscanf(place.c_str(), "%lu %lu", &offset, &length) != 2 || !files.model_file)
    throw Error("tensor '" + t.name + "' has a damaged place");
  auto bytes = files.model_file->bytes();
  if (offset > bytes.size() || length > bytes.size() - offset)
    throw Error("tensor '" + t.name + "' has a place outside the file", "the file is damaged");
  if (length != t.bytes())
    throw Error(fmt::format("tensor '{}' {}{} needs {} bytes and has {}", t.name, name_of(t.dtype), to_string(t.dims), t.bytes(), length),
                "the file is damaged");
  t.data = bytes.data() + offset;
  t.owner = t.file = files.model_file;
  t.file_offset = offset;
}

// The external file of `location`, which must lie in the model's folder.
fs::path safe_path(const std::string& location, const std::string& folder, const std::string& tensor) {
  fs::path relative(location);
  auto refuse = [&](const std::string& why) {
    throw Error(fmt::format("tensor '{}' names the external file '{}', which {}", tensor, location, why),
                "external files must lie in the model's folder");
  };
  if (location.empty()) throw Error("tensor '" + tensor + "' is external and names no location", "the file is damaged");
  if (location.find('\0') != std::string::npos) refuse("holds a zero byte");
  if (relative.is_absolute()) refuse("is an absolute path");
  for (const fs::path& part : relative)
    if (part == "..") refuse("climbs out with '..'");
  std::error_code error;
  fs::path base = fs::weakly_canonical(folder.empty() ? fs::path(".") : fs::path(folder), error);
  fs::path full = fs::weakly_canonical(base / relative, error);
  if (error) refuse("cannot be resolved: " + error.message());
  auto inside = std::mismatch(base.begin(), base.end(), full.begin(), full.end());
  if (inside.first != base.end()) refuse("is a link out of the model's folder");
  return full;
}

uint64_t number(const std::string& text, const std::string& key, const std::string& tensor) {
  size_t used = 0;
  uint64_t v = 0;
  try {
    v = std::stoull(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text.size() || text[0] == '-')
    throw Error(fmt::format("tensor '{}' has the {} '{}', which is no number", tensor, key, text), "the file is damaged");
  return v;
}

void map_external(const onnx::TensorProto& proto, Tensor& t, const std::string& folder, FileCache& files, const ReadOptions& options) {
  std::string location;
  uint64_t offset = 0;
  std::optional<uint64_t> length;
  for (const auto& entry : proto.external_data()) {
    if (entry.key() == "location") location = entry.value();
    if (entry.key() == "offset") offset = number(entry.value(), "offset", t.name);
    if (entry.key() == "length") length = number(entry.value(), "length", t.name);
  }
  t.location = location;
  t.file_offset = offset;
  fs::path path = safe_path(location, folder, t.name);
  if (length && *length < t.bytes())
    throw Error(fmt::format("tensor '{}' {}{} needs {} bytes and its external length is {}", t.name, name_of(t.dtype), to_string(t.dims),
                            t.bytes(), *length),
                "the file is damaged");
  auto& file = files.external[path.string()];
  if (!file) {
    std::error_code error;
    if (!fs::exists(path, error)) {
      if (options.allow_missing_weights) {
        t.missing = "the external file '" + location + "' does not exist";
        return;
      }
      throw Error(fmt::format("tensor '{}' is stored in '{}', which does not exist", t.name, location),
                  "put the weight file beside the model, or partition with --structure-only");
    }
    file = MappedFile::open(path.string());
  }
  auto bytes = file->bytes();
  if (offset > bytes.size() || t.bytes() > bytes.size() - offset)
    throw Error(
        fmt::format("tensor '{}' needs bytes {} to {} of '{}', which has {}", t.name, offset, offset + t.bytes(), location, bytes.size()),
        "the weight file is shorter than the model says");
  t.data = bytes.data() + offset;
  t.owner = t.file = file;
}

}  // namespace

TensorPtr tensor_from_proto(const onnx::TensorProto& proto, const std::string& folder, FileCache& files, const ReadOptions& options) {
  auto shape_only = std::make_shared<Tensor>();
  Tensor& head = *shape_only;
  head.name = proto.name();
  head.dtype = static_cast<DType>(proto.data_type());
  if (proto.data_type() <= 0 || name_of(head.dtype) == "undefined" || proto.data_type() > 255)
    throw Error(fmt::format("tensor '{}' has the data type {}, which ONNX does not define", proto.name(), proto.data_type()),
                "the file is damaged or newer than this build");
  head.dims.assign(proto.dims().begin(), proto.dims().end());
  if (proto.has_segment()) throw Error("tensor '" + head.name + "' is stored in segments", "write it again in one piece");
  int64_t count = head.count();  // throws on negative or overflowing dimensions
  if (head.dtype == DType::string) {
    if (proto.string_data_size() != count)
      throw Error("tensor '" + head.name + "' does not have as many strings as its shape says", "the file is damaged");
    head.strings.assign(proto.string_data().begin(), proto.string_data().end());
    return shape_only;
  }
  for (const auto& entry : proto.external_data())
    if (entry.key() == kMappedKey) {
      map_from_model_file(entry.value(), head, files);
      return shape_only;
    }
  if (proto.data_location() == onnx::TensorProto::EXTERNAL) {
    map_external(proto, head, folder, files, options);
    return shape_only;
  }
  if (proto.has_raw_data()) {
    if (proto.raw_data().size() != head.bytes())
      throw Error(fmt::format("tensor '{}' {}{} needs {} bytes and has {}", head.name, name_of(head.dtype), to_string(head.dims),
                              head.bytes(), proto.raw_data().size()),
                  "the file is damaged");
    auto t = make_tensor(head.dtype, head.dims);
    t->name = head.name;
    if (!proto.raw_data().empty()) std::memcpy(mutable_data(*t), proto.raw_data().data(), proto.raw_data().size());
    return t;
  }
  // Typed fields hold a value each: a shape that claims more than the file has is refused before memory is taken for it.
  int64_t stored = int64_t{proto.float_data_size()} + proto.int32_data_size() + proto.int64_data_size() + proto.double_data_size() +
                   proto.uint64_data_size();
  if (count > 0 && static_cast<int64_t>(head.bytes()) > stored * 8)
    throw Error(fmt::format("tensor '{}' {}{} needs {} bytes and has {} values", head.name, name_of(head.dtype), to_string(head.dims),
                            head.bytes(), stored),
                "the file is damaged");
  auto t = make_tensor(head.dtype, head.dims);
  t->name = head.name;
  fill_from_typed_fields(proto, *t);
  return t;
}

TensorPtr tensor_from_proto(const onnx::TensorProto& proto, const std::string& folder, const ReadOptions& options) {
  FileCache files;
  return tensor_from_proto(proto, folder, files, options);
}

TensorPtr densify(const onnx::SparseTensorProto& proto, const std::string& folder, FileCache& files, const ReadOptions& options) {
  TensorPtr values = tensor_from_proto(proto.values(), folder, files, options);
  TensorPtr indexes = tensor_from_proto(proto.indices(), folder, files, options);
  auto fault = [&](const std::string& what) { throw Error("sparse tensor '" + values->name + "' " + what, "the file is damaged"); };
  Dims dims(proto.dims().begin(), proto.dims().end());
  auto places = int_values(*indexes);
  int64_t n = values->count(), rank = static_cast<int64_t>(dims.size());
  bool linear = indexes->dims.size() == 1;
  if (!places || values->dims.size() != 1 || values->dtype == DType::string || bits_of(values->dtype) < 8 || values->is_missing())
    fault("has values or indexes of a form that is not supported");
  if (indexes->count() != (linear ? n : n * rank)) fault("does not have one index for each value");
  if (bytes_of(values->dtype, count_of(dims)) > (size_t{1} << 32)) fault("is too large to be made dense");
  auto dense = make_tensor(values->dtype, dims);
  dense->name = values->name;
  auto size = static_cast<size_t>(bits_of(values->dtype) / 8);
  for (int64_t i = 0; i < n; ++i) {
    int64_t at = linear ? (*places)[static_cast<size_t>(i)] : 0;
    for (int64_t d = 0; !linear && d < rank; ++d) {
      int64_t k = (*places)[static_cast<size_t>(i * rank + d)];
      if (k < 0 || k >= dims[static_cast<size_t>(d)]) fault("has an index outside its shape");
      at = at * dims[static_cast<size_t>(d)] + k;
    }
    if (at < 0 || at >= dense->count()) fault("has an index outside its shape");
    std::memcpy(mutable_data(*dense) + static_cast<size_t>(at) * size, values->data + static_cast<size_t>(i) * size, size);
  }
  return dense;
}

void to_proto(const Tensor& t, onnx::TensorProto& proto) {
  proto.set_name(t.name);
  proto.set_data_type(static_cast<int32_t>(t.dtype));
  for (int64_t d : t.dims) proto.add_dims(d);
  if (t.dtype == DType::string) {
    for (const std::string& s : t.strings) proto.add_string_data(s);
    return;
  }
  size_t bytes = t.bytes();
  if (t.is_missing()) t.check_readable(static_cast<size_t>(bits_of(t.dtype)) / 8);
  std::string* raw = proto.mutable_raw_data();
  if (t.generate) {
    raw->resize(bytes);
    t.generate(0, {reinterpret_cast<std::byte*>(raw->data()), bytes});
  } else if (bytes > 0) {
    raw->assign(reinterpret_cast<const char*>(t.data), bytes);
  }
}

}  // namespace fretsaw
