// Tensor files: TensorProto (.pb) and numpy's .npy.
#include <onnx/onnx_pb.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "graph/errors.h"
#include "graph/io.h"
#include "graph/io/reading.h"
#include "graph/io/temporary_file.h"
#include "graph/io/wire.h"

namespace fretsaw {
namespace {

constexpr char kNpyMagic[] = "\x93NUMPY";

struct NpyType {
  const char* code;
  DType dtype;
};
constexpr NpyType kNpyTypes[] = {{"<f4", DType::float32},   {"<f8", DType::float64},    {"<f2", DType::float16}, {"<i8", DType::int64},
                                 {"<i4", DType::int32},     {"<i2", DType::int16},      {"|i1", DType::int8},    {"<u8", DType::uint64},
                                 {"<u4", DType::uint32},    {"<u2", DType::uint16},     {"|u1", DType::uint8},   {"|b1", DType::boolean},
                                 {"<c8", DType::complex64}, {"<c16", DType::complex128}};

// The text after 'key': in the header's dictionary.
std::string npy_field(const std::string& header, const std::string& key) {
  size_t at = header.find("'" + key + "':");
  if (at == std::string::npos) throw Error("is a .npy file without '" + key + "' in its header", "write it again with numpy.save");
  at += key.size() + 3;
  while (at < header.size() && header[at] == ' ') ++at;
  return header.substr(at);
}

// The quoted type of a field, as '>f4'; of a record just that.
std::string npy_type_text(const std::string& descr) {
  const size_t end = descr.empty() || descr[0] != '\'' ? std::string::npos : descr.find('\'', 1);
  return end == std::string::npos ? "structure" : descr.substr(0, end + 1);
}

Dims npy_shape(const std::string& text) {
  Dims dims;
  if (text.empty() || text[0] != '(') throw Error("is a .npy file with a damaged shape");
  const char* p = text.c_str() + 1;
  while (*p && *p != ')') {
    char* end;
    long long v = std::strtoll(p, &end, 10);
    if (end == p || v < 0) throw Error("is a .npy file with a damaged shape");
    dims.push_back(v);
    p = end;
    while (*p == ',' || *p == ' ') ++p;
  }
  return dims;
}

// The first axis is the fastest in the file, the last one in memory.
TensorPtr from_fortran_order(const Tensor& file) {
  auto t = make_tensor(file.dtype, file.dims);
  const size_t rank = t->dims.size(), size = static_cast<size_t>(bits_of(t->dtype)) / 8;
  std::vector<int64_t> strides(rank, 1), at(rank, 0);
  for (size_t i = 1; i < rank; ++i) strides[i] = strides[i - 1] * t->dims[i - 1];
  int64_t from = 0;
  for (int64_t to = 0; to < t->count(); ++to) {
    std::memcpy(mutable_data(*t) + static_cast<size_t>(to) * size, file.data + static_cast<size_t>(from) * size, size);
    for (size_t axis = rank; axis-- > 0;) {
      from += strides[axis];
      if (++at[axis] < t->dims[axis]) break;
      from -= strides[axis] * t->dims[axis];
      at[axis] = 0;
    }
  }
  return t;
}

TensorPtr read_npy(std::shared_ptr<const MappedFile> file) {
  auto bytes = file->bytes();
  const auto* raw = reinterpret_cast<const unsigned char*>(bytes.data());
  if (bytes.size() < 12) throw Error("is a .npy file that ends in its header");
  size_t length = raw[8] | raw[9] << 8, start = 10;
  if (raw[6] >= 2) {
    length |= static_cast<size_t>(raw[10]) << 16 | static_cast<size_t>(raw[11]) << 24;
    start = 12;
  }
  if (start + length > bytes.size()) throw Error("is a .npy file that ends in its header");
  std::string header(reinterpret_cast<const char*>(raw) + start, length);
  std::string descr = npy_field(header, "descr");
  auto t = std::make_shared<Tensor>();
  for (const NpyType& type : kNpyTypes)
    if (descr.size() > 2 && descr.compare(1, descr.find('\'', 1) - 1, type.code) == 0) t->dtype = type.dtype;
  if (t->dtype == DType::undefined)
    throw Error("is a .npy file of the type " + npy_type_text(descr) + ", which is not supported", "convert it to little-endian numbers");
  t->dims = npy_shape(npy_field(header, "shape"));
  if (t->bytes() > bytes.size() - start - length)
    throw Error("is a .npy file with fewer bytes than its shape needs", "the file is truncated");
  t->data = bytes.data() + start + length;
  t->owner = t->file = file;
  t->file_offset = start + length;
  return npy_field(header, "fortran_order").starts_with("True") && t->dims.size() > 1 ? from_fortran_order(*t) : t;
}

// Many bytes of elements stay in the file.
bool parse(std::span<const std::byte> bytes, onnx::TensorProto& proto) {
  try {
    return !bytes.empty() && proto.ParseFromString(strip_tensor(bytes));
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

TensorPtr read_tensor_file(const std::string& path) {
  try {
    auto file = MappedFile::open(path);
    auto bytes = file->bytes();
    if (bytes.size() > 6 && std::memcmp(bytes.data(), kNpyMagic, 6) == 0) return read_npy(file);
    onnx::TensorProto proto;
    if (!parse(bytes, proto))
      throw Error("is neither a TensorProto nor a .npy file", "write it with onnx.numpy_helper.from_array or numpy.save");
    FileCache files;
    files.model_file = file;
    return tensor_from_proto(proto, std::filesystem::path(path).parent_path().string(), files, {});
  } catch (const Error& e) {
    throw e.in_file(path);
  }
}

void write_tensor_file(const Tensor& tensor, const std::string& path) {
  onnx::TensorProto proto;
  to_proto(tensor, proto);
  TemporaryFile file(path);
  std::ofstream out(file.path(), std::ios::binary);
  bool ok = out && proto.SerializeToOstream(&out);
  out.close();
  if (!ok || !out) throw Error("cannot be written", "check the folder, its permissions and the disk's space").in_file(path);
  file.put_in_place();
}

}  // namespace fretsaw
