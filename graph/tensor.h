// Constant tensors: bytes in memory or mapped from a file, never copied until somebody needs them otherwise.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "graph/types.h"

namespace fretsaw {

// A file mapped read-only for as long as a tensor points into it.
class MappedFile {
 public:
  static std::shared_ptr<const MappedFile> open(const std::string& path);  // throws Error naming the path
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  MappedFile() = default;
  std::string path_;
  std::span<const std::byte> bytes_;
};

// A constant. `data` is little-endian and packed as ONNX's raw_data is; strings stand in `strings` instead.
// `owner` keeps the bytes alive: a MappedFile, a vector, another tensor's owner.
struct Tensor {
  std::string name;  // as in the file; not an identity
  DType dtype = DType::undefined;
  Dims dims;
  const std::byte* data = nullptr;  // nullptr: no elements, strings, or missing
  std::shared_ptr<const void> owner;
  std::vector<std::string> strings;
  std::string missing;   // not empty: why the bytes are not there (a weight file that was left out); reading them is an error
  std::string location;  // the external file's name when the source kept the tensor outside the model, else ""
  std::shared_ptr<const MappedFile> file;  // the file that `data` points into, when it does
  uint64_t file_offset = 0;
  // For weights too large to hold (model builders): fills `bytes` with the tensor's bytes from `first` on. `data` is then null.
  std::function<void(uint64_t first, std::span<std::byte> bytes)> generate;

  int64_t count() const { return count_of(dims); }
  size_t bytes() const { return bytes_of(dtype, count()); }

  // Elements as T; throws Error when T is not the element type or the bytes are missing.
  template <typename T>
  std::span<const T> as() const {
    check_readable(sizeof(T));
    return {reinterpret_cast<const T*>(data), static_cast<size_t>(count())};
  }
  void check_readable(size_t element_bytes) const;
  bool is_missing() const { return !missing.empty(); }
};
using TensorPtr = std::shared_ptr<const Tensor>;

// New tensors that own their bytes.
std::shared_ptr<Tensor> make_tensor(DType dtype, Dims dims);  // zeros; write through mutable_data
std::byte* mutable_data(Tensor& tensor);                      // only for tensors from make_tensor
TensorPtr make_int64s(const std::vector<int64_t>& values);    // shape [n]
TensorPtr make_int64(int64_t value);                          // scalar
TensorPtr make_float(float value);                            // scalar
// The values of an integer or boolean tensor of any such type; nullopt for other types or missing bytes.
std::optional<std::vector<int64_t>> int_values(const Tensor& tensor);

}  // namespace fretsaw
