// Writes the external weight file of a model as a stream: no tensor is ever held in memory for it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "graph/tensor.h"

namespace fretsaw {

// Tensors are laid one after another at aligned offsets, ready to map: pages for large ones, cache lines for the rest.
//
//   ExternalWriter out("m.onnx.data");
//   uint64_t offset = out.append(*tensor);   // mapped, in memory or generated
//   out.finish();
class ExternalWriter {
 public:
  explicit ExternalWriter(const std::string& path);  // replaces a file of that name; throws Error
  ~ExternalWriter();                                 // without finish() the file is left incomplete
  ExternalWriter(const ExternalWriter&) = delete;
  ExternalWriter& operator=(const ExternalWriter&) = delete;

  // Bytes of a tensor that is mapped from a file are copied by the kernel, file to file. Throws Error naming the tensor when its bytes
  // are missing or can't be written.
  uint64_t append(const Tensor& tensor);
  void finish();
  uint64_t size() const { return end_; }

 private:
  void write_at(uint64_t offset, const std::byte* data, size_t bytes);
  void copy_mapped(const Tensor& tensor, uint64_t offset);
  void generate(const Tensor& tensor, uint64_t offset);
  void flush();
  int source(const std::string& path);

  std::string path_;
  int file_ = -1;
  uint64_t end_ = 0;                    // where the next tensor may start
  std::vector<std::byte> buffer_;       // small tensors are written together
  uint64_t buffer_offset_ = 0;          // where the buffer's bytes go
  std::map<std::string, int> sources_;  // files that weights are copied from, opened once
};

// The offset at or after `end` at which a tensor of this size is laid.
uint64_t aligned_offset(uint64_t end, size_t bytes);

}  // namespace fretsaw
