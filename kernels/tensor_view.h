// Tensors as kernels see them: typed, shaped views of memory somebody else owns.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "graph/types.h"

namespace fretsaw {

// How a 4-D activation lies in memory. Blocked layouts pad the channels up to a whole block with zeros.
enum class Layout : uint8_t {
  plain,    // row-major as the dimensions say: [N, C, H, W]
  nhwc,     // [N, H, W, C]
  nChw8c,   // [N, ceil(C/8), H, W, 8]
  nChw16c,  // [N, ceil(C/16), H, W, 16]
};
size_t bytes_of(DType type, const Dims& dims, Layout layout);

// Which memory: the machine's, or that of the rank's device.
enum class Memory : uint8_t { host, device };

struct TensorView {
  DType dtype = DType::undefined;
  Dims dims;             // the logical shape, whatever the layout
  void* data = nullptr;  // for strings: an array of std::string
  Layout layout = Layout::plain;
  Memory memory = Memory::host;

  int64_t count() const { return count_of(dims); }
  size_t bytes() const { return bytes_of(dtype, dims, layout); }
  size_t rank() const { return dims.size(); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
  template <typename T>
  std::span<T> span() const {
    return {static_cast<T*>(data), static_cast<size_t>(count())};
  }
};

// What an edge holds while a program runs: a tensor, a sequence, or nothing (an empty optional). A full optional is its content.
struct RuntimeValue {
  enum class Kind : uint8_t { absent, tensor, sequence };
  Kind kind = Kind::absent;
  TensorView tensor;
  std::shared_ptr<void> owner;       // keeps `tensor.data` alive where no arena does
  std::vector<RuntimeValue> items;   // of a sequence
  DType element = DType::undefined;  // of a sequence, also when it is empty
};

// An owned tensor (zeros; empty strings).
RuntimeValue make_value(DType dtype, Dims dims);

}  // namespace fretsaw
