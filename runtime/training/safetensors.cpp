// Reading and writing safetensors files.
#include "runtime/training/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "graph/errors.h"
#include "runtime/training/durable_file.h"

namespace fretsaw {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kLargestHeader = 100'000'000;  // the format's own limit
constexpr uint64_t kAlignment = 64;               // of the first tensor
constexpr char kMetadata[] = "__metadata__";

struct NamedType {
  const char* name;
  DType dtype;
};
constexpr NamedType kTypes[] = {{"F64", DType::float64},
                                {"F32", DType::float32},
                                {"F16", DType::float16},
                                {"BF16", DType::bfloat16},
                                {"I64", DType::int64},
                                {"I32", DType::int32},
                                {"I16", DType::int16},
                                {"I8", DType::int8},
                                {"U64", DType::uint64},
                                {"U32", DType::uint32},
                                {"U16", DType::uint16},
                                {"U8", DType::uint8},
                                {"F8_E4M3", DType::float8e4m3fn},
                                {"F8_E5M2", DType::float8e5m2},
                                {"BOOL", DType::boolean}};

DType type_named(const std::string& name) {
  for (const NamedType& t : kTypes)
    if (name == t.name) return t.dtype;
  return DType::undefined;
}

const char* name_in_format(DType type) {
  for (const NamedType& t : kTypes)
    if (type == t.dtype) return t.name;
  return nullptr;
}

// --- reading ---

// The header as JSON. A name that stands there twice is an error: nothing says which one counts.
Json parse_header(std::string_view text) {
  std::vector<std::set<std::string>> open;  // the keys of each object that is not closed yet
  const auto see = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key && !open.back().insert(parsed.get<std::string>()).second)
      throw Error("has the name '" + parsed.get<std::string>() + "' twice in its header");
    return true;
  };
  if (text.empty() || text[0] != '{') throw Error("is no safetensors file: its header does not begin with '{'");
  try {
    return Json::parse(text, see);
  } catch (const Json::exception& e) {
    throw Error(std::string("has a damaged header: ") + e.what());
  }
}

uint64_t header_length(std::span<const std::byte> bytes) {
  if (bytes.size() < kLengthBytes) throw Error("is too short for a safetensors file");
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > kLargestHeader) throw Error("is no safetensors file: its header would have " + std::to_string(length) + " bytes");
  if (length > bytes.size() - kLengthBytes) throw Error("ends in its header");
  return length;
}

// Bytes of a tensor; nullopt when they are more than 2^63.
std::optional<uint64_t> size_of_tensor(DType type, const std::vector<uint64_t>& shape) {
  // Any 0 makes the whole 0, however large the others are.
  if (std::find(shape.begin(), shape.end(), 0u) != shape.end()) return 0;
  uint64_t bytes = static_cast<uint64_t>(bits_of(type)) / 8;
  for (uint64_t d : shape)
    if (__builtin_mul_overflow(bytes, d, &bytes) || bytes > INT64_MAX) return std::nullopt;
  return bytes;
}

std::vector<uint64_t> numbers(const Json& entry, const char* field, const std::string& name) {
  const auto found = entry.find(field);
  if (found == entry.end() || !found->is_array()) throw Error("has no '" + std::string(field) + "' of the tensor '" + name + "'");
  std::vector<uint64_t> values;
  for (const Json& value : *found) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > INT64_MAX)
      throw Error("has a damaged '" + std::string(field) + "' of the tensor '" + name + "'");
    values.push_back(value.get<uint64_t>());
  }
  return values;
}

struct Entry {
  std::string name;
  DType dtype = DType::undefined;
  Dims dims;
  uint64_t begin = 0, end = 0;
};

Entry parse_entry(const std::string& name, const Json& json) {
  const std::string what = "the tensor '" + name + "'";
  if (!json.is_object()) throw Error("has a damaged entry of " + what);
  Entry entry{.name = name};
  const auto dtype = json.find("dtype");
  if (dtype == json.end() || !dtype->is_string()) throw Error("has no 'dtype' of " + what);
  entry.dtype = type_named(dtype->get<std::string>());
  if (entry.dtype == DType::undefined) throw Error("holds " + what + " of the type " + dtype->dump() + ", which is not supported");
  const std::vector<uint64_t> shape = numbers(json, "shape", name), offsets = numbers(json, "data_offsets", name);
  if (offsets.size() != 2 || offsets[0] > offsets[1]) throw Error("has damaged 'data_offsets' of " + what);
  entry.dims.assign(shape.begin(), shape.end());
  entry.begin = offsets[0];
  entry.end = offsets[1];
  if (size_of_tensor(entry.dtype, shape) != entry.end - entry.begin)
    throw Error("gives " + what + " " + std::to_string(entry.end - entry.begin) + " bytes, not those of its shape " +
                to_string(entry.dims));
  return entry;
}

// Sorts by place. Every byte of `size` has to belong to one tensor.
void check_places(std::vector<Entry>& entries, uint64_t size) {
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  uint64_t at = 0;
  for (const Entry& e : entries) {
    if (e.end > size) throw Error("ends inside the tensor '" + e.name + "': it is truncated");
    if (e.begin < at) throw Error("has tensors that overlap, '" + e.name + "' being one");
    if (e.begin > at) throw Error("has a hole of " + std::to_string(e.begin - at) + " bytes before the tensor '" + e.name + "'");
    at = e.end;
  }
  if (at != size) throw Error("has " + std::to_string(size - at) + " bytes behind its last tensor");
}

TensorPtr tensor_of(const Entry& entry, const std::shared_ptr<const MappedFile>& file, uint64_t data_begin) {
  const std::byte* data = file->bytes().data() + data_begin + entry.begin;
  if (reinterpret_cast<uintptr_t>(data) % (static_cast<size_t>(bits_of(entry.dtype)) / 8) != 0) {  // legal, but not for `Tensor::as`
    auto copy = make_tensor(entry.dtype, entry.dims);
    copy->name = entry.name;
    if (copy->bytes() > 0) std::memcpy(mutable_data(*copy), data, copy->bytes());
    return copy;
  }
  auto tensor = std::make_shared<Tensor>();
  tensor->name = entry.name;
  tensor->dtype = entry.dtype;
  tensor->dims = entry.dims;
  tensor->owner = tensor->file = file;
  tensor->file_offset = data_begin + entry.begin;
  if (entry.end > entry.begin) tensor->data = data;
  return tensor;
}

std::map<std::string, std::string> parse_metadata(const Json& json) {
  if (!json.is_object()) throw Error("has damaged metadata");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : json.items()) {
    if (!value.is_string()) throw Error("has metadata '" + key + "' that is no text");
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

SafetensorsFile read(const std::shared_ptr<const MappedFile>& file) {
  const std::span<const std::byte> bytes = file->bytes();
  const uint64_t length = header_length(bytes), data_begin = kLengthBytes + length;
  const Json header = parse_header({reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length});
  SafetensorsFile content;
  std::vector<Entry> entries;
  for (const auto& [name, json] : header.items()) {
    if (name == kMetadata) {
      content.metadata = parse_metadata(json);
    } else {
      entries.push_back(parse_entry(name, json));
    }
  }
  check_places(entries, bytes.size() - data_begin);
  for (const Entry& e : entries) content.tensors[e.name] = tensor_of(e, file, data_begin);
  return content;
}

// --- writing ---

uint64_t bytes_of(const StoredTensor& tensor) {
  return fretsaw::bytes_of(tensor.dtype, count_of(tensor.dims));
}

void check_writable(const std::vector<StoredTensor>& tensors) {
  std::set<std::string> names;
  for (const StoredTensor& t : tensors) {
    if (t.name == kMetadata || !names.insert(t.name).second)
      throw Error("can't be written: the tensor name '" + t.name + "' is " + (t.name == kMetadata ? "the format's own" : "given twice"));
    if (!name_in_format(t.dtype))
      throw Error("can't be written: the format has no type for the tensor '" + t.name + "' of " + std::string(name_of(t.dtype)));
    if (!t.data && bytes_of(t) > 0) throw Error("can't be written: the tensor '" + t.name + "' has no bytes");
  }
}

// The header, filled with spaces so that the tensors begin aligned.
std::string header_of(const std::vector<StoredTensor>& tensors, const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  uint64_t at = 0;
  for (const StoredTensor& t : tensors) {
    header[t.name] = {{"dtype", name_in_format(t.dtype)}, {"shape", t.dims}, {"data_offsets", {at, at + bytes_of(t)}}};
    at += bytes_of(t);
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception&) {
    throw Error("can't be written: a tensor's name is not UTF-8, as the format wants it");
  }
  text.append((kAlignment - (kLengthBytes + text.size()) % kAlignment) % kAlignment, ' ');
  if (text.size() > kLargestHeader) throw Error("can't be written: its header would be too large for the format");
  return text;
}

}  // namespace

namespace {

// With what to do about it, where nothing is said yet.
[[noreturn]] void fail(const Error& error, const char* remedy, const std::string& path) {
  throw(error.remedy().empty() ? Error(error.problem(), remedy, error.code()).in_file(error.file()) : error).in_file(path);
}

}  // namespace

SafetensorsFile read_safetensors(const std::string& path) {
  try {
    return read(MappedFile::open(path));
  } catch (const Error& e) {
    fail(e, "is it a whole safetensors file? Copy or write it again", path);
  }
}

StoredTensor stored_tensor(std::string name, const TensorView& view) {
  if (view.memory != Memory::host || view.layout != Layout::plain)
    throw Error("the value '" + name + "' is not plain host memory", "report this as a fault");
  return {std::move(name), view.dtype, view.dims, view.data};
}

uint64_t write_safetensors(const std::string& path, std::vector<StoredTensor> tensors, const std::map<std::string, std::string>& metadata) {
  try {
    check_writable(tensors);
    // Large elements first, as the format's own writer has it: all are aligned then.
    std::stable_sort(tensors.begin(), tensors.end(),
                     [](const StoredTensor& a, const StoredTensor& b) { return bits_of(a.dtype) > bits_of(b.dtype); });
    const std::string header = header_of(tensors, metadata);
    const uint64_t length = header.size();
    uint64_t written = kLengthBytes + length;
    DurableFile file(path);
    file.write(&length, sizeof length);
    file.write(header.data(), header.size());
    for (const StoredTensor& t : tensors) {
      file.write(t.data, bytes_of(t));
      written += bytes_of(t);
    }
    file.commit();
    return written;
  } catch (const Error& e) {
    fail(e, "give the model's initializers other names, or keep them in a type that the format has", path);
  }
}

}  // namespace fretsaw
