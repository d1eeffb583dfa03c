// The safetensors format (github.com/huggingface/safetensors):
//
//   8 bytes   N, little-endian
//   N bytes   JSON: {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {"KEY": "TEXT"}}, spaces
//   the rest  the tensors' bytes, row-major and little-endian; offsets count from here. Every byte belongs to exactly one tensor
#pragma once
#include <map>
#include <string>
#include <vector>

#include "graph/tensor.h"
#include "kernels/tensor_view.h"

namespace fretsaw {

struct SafetensorsFile {
  std::map<std::string, TensorPtr> tensors;  // mapped from the file
  std::map<std::string, std::string> metadata;
};

// Throws Error naming the file for anything that is not as above: lengths, types, offsets that overlap, leave holes or reach past the end.
SafetensorsFile read_safetensors(const std::string& path);

// What is to be written; `data` is host memory, row-major.
struct StoredTensor {
  std::string name;
  DType dtype = DType::undefined;
  Dims dims;
  const void* data = nullptr;
};
StoredTensor stored_tensor(std::string name, const TensorView& view);  // throws Error unless it is plain host memory

// Appears whole or not at all, and is on the disk when this returns. The tensors' bytes are aligned to their elements. Throws Error for
// names that are not UTF-8, given twice or "__metadata__", for types without a name in the format (strings, 4 bits and fewer), and when
// the file can't be written. Returns the file's bytes.
uint64_t write_safetensors(const std::string& path, std::vector<StoredTensor> tensors,
                           const std::map<std::string, std::string>& metadata = {});

}  // namespace fretsaw
