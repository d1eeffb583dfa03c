// Constant tensors and the files they are mapped from.
#include "graph/tensor.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "graph/errors.h"

namespace fretsaw {

static_assert(std::endian::native == std::endian::little, "raw_data is little-endian; a big-endian host needs byte swaps in graph/io");

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe without a writer must not stop us
  if (fd < 0) throw Error(std::string("cannot be opened: ") + std::strerror(errno), "check the path and its permissions").in_file(path);
  struct stat st = {};
  if (::fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    ::close(fd);
    throw Error("is not a regular file", "name a file").in_file(path);
  }
  std::shared_ptr<MappedFile> file(new MappedFile);
  file->path_ = path;
  auto size = static_cast<size_t>(st.st_size);
  if (size > 0) {
    void* p = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    int error = errno;
    ::close(fd);
    if (p == MAP_FAILED) throw Error(std::string("cannot be mapped: ") + std::strerror(error)).in_file(path);
    file->bytes_ = {static_cast<const std::byte*>(p), size};
  } else {
    ::close(fd);
  }
  return file;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

void Tensor::check_readable(size_t element_bytes) const {
  if (is_missing()) throw Error("the bytes of tensor '" + name + "' are not there: " + missing, "put the weight file beside the model");
  if (bits_of(dtype) != static_cast<int>(element_bytes * 8))
    throw Error("tensor '" + name + "' holds " + std::string(name_of(dtype)) + ", which is not of " + std::to_string(element_bytes) +
                " bytes");
  if (data == nullptr && count() > 0) throw Error("tensor '" + name + "' has no bytes in memory");
}

std::shared_ptr<Tensor> make_tensor(DType dtype, Dims dims) {
  auto t = std::make_shared<Tensor>();
  t->dtype = dtype;
  t->dims = std::move(dims);
  if (dtype == DType::string) {
    t->strings.resize(static_cast<size_t>(t->count()));
    return t;
  }
  size_t bytes = t->bytes();
  if (bytes > 0) {
    std::shared_ptr<std::byte[]> owner(new std::byte[bytes]());
    t->data = owner.get();
    t->owner = owner;
  }
  return t;
}

std::byte* mutable_data(Tensor& tensor) {
  return const_cast<std::byte*>(tensor.data);
}

TensorPtr make_int64s(const std::vector<int64_t>& values) {
  auto t = make_tensor(DType::int64, {static_cast<int64_t>(values.size())});
  if (!values.empty()) std::memcpy(mutable_data(*t), values.data(), values.size() * sizeof(int64_t));
  return t;
}

TensorPtr make_int64(int64_t value) {
  auto t = make_tensor(DType::int64, {});
  std::memcpy(mutable_data(*t), &value, sizeof value);
  return t;
}

TensorPtr make_float(float value) {
  auto t = make_tensor(DType::float32, {});
  std::memcpy(mutable_data(*t), &value, sizeof value);
  return t;
}

namespace {

template <typename T>
std::vector<int64_t> widen(const Tensor& tensor) {
  std::vector<int64_t> values(static_cast<size_t>(tensor.count()));
  for (size_t i = 0; i < values.size(); ++i) {
    T v;  // raw bytes in a file need not be aligned
    std::memcpy(&v, tensor.data + i * sizeof(T), sizeof(T));
    values[i] = static_cast<int64_t>(v);
  }
  return values;
}

}  // namespace

std::optional<std::vector<int64_t>> int_values(const Tensor& tensor) {
  if (tensor.is_missing() || (tensor.data == nullptr && tensor.count() > 0)) return std::nullopt;
  switch (tensor.dtype) {
    case DType::int64:
      return widen<int64_t>(tensor);
    case DType::int32:
      return widen<int32_t>(tensor);
    case DType::int16:
      return widen<int16_t>(tensor);
    case DType::int8:
      return widen<int8_t>(tensor);
    case DType::uint64:
      return widen<uint64_t>(tensor);
    case DType::uint32:
      return widen<uint32_t>(tensor);
    case DType::uint16:
      return widen<uint16_t>(tensor);
    case DType::uint8:
    case DType::boolean:
      return widen<uint8_t>(tensor);
    default:
      return std::nullopt;
  }
}

}  // namespace fretsaw
