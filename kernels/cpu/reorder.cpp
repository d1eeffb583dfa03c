// Reorders tensors between layouts: oneDNN for float32, loops for other types.
#include "kernels/cpu/reorder.h"

#include <cstring>
#include <map>
#include <tuple>

#include "kernels/cpu/onednn.h"

namespace fretsaw {

namespace {

// The place of element (n, c, h, w) in memory.
struct Place {
  explicit Place(const TensorView& view) : layout(view.layout), C(view.dims[1]), H(view.dims[2]), W(view.dims[3]) {
    block = layout == Layout::nChw8c ? 8 : 16;
    blocks = (C + block - 1) / block;
  }
  int64_t operator()(int64_t n, int64_t c, int64_t h, int64_t w) const {
    switch (layout) {
      case Layout::plain:
        return ((n * C + c) * H + h) * W + w;
      case Layout::nhwc:
        return ((n * H + h) * W + w) * C + c;
      default:
        return (((n * blocks + c / block) * H + h) * W + w) * block + c % block;
    }
  }
  Layout layout;
  int64_t C, H, W, block, blocks;
};

void reorder_by_loops(const TensorView& from, TensorView& to) {
  const size_t size = bytes_of(from.dtype, 1);
  std::memset(to.data, 0, to.bytes());
  const Place source(from), target(to);
  for (int64_t n = 0; n < from.dims[0]; ++n) {
    for (int64_t c = 0; c < from.dims[1]; ++c) {
      for (int64_t h = 0; h < from.dims[2]; ++h) {
        for (int64_t w = 0; w < from.dims[3]; ++w) {
          std::memcpy(to.as<char>() + target(n, c, h, w) * static_cast<int64_t>(size),
                      from.as<char>() + source(n, c, h, w) * static_cast<int64_t>(size), size);
        }
      }
    }
  }
}

}  // namespace

void reorder(const TensorView& from, TensorView& to) {
  if (from.dtype != to.dtype || from.dims != to.dims) throw Error("a reorder between unlike tensors", "this is a fault of the program");
  if (from.layout == to.layout) {
    std::memmove(to.data, from.data, from.bytes());
    return;
  }
  if (from.rank() != 4 || from.dtype == DType::string || bits_of(from.dtype) < 8) {
    throw Error("no layouts but the plain one for tensors of shape " + to_string(from.dims), "this is a fault of the program");
  }
  if (from.count() == 0) return;
  if (from.dtype != DType::float32) return reorder_by_loops(from, to);
  using Key = std::tuple<Dims, Layout, Layout>;
  thread_local std::map<Key, onednn::Reordering> known;
  auto found = known.find(Key{from.dims, from.layout, to.layout});
  if (found == known.end()) {
    if (known.size() > 256) known.clear();
    try {
      found = known.emplace(Key{from.dims, from.layout, to.layout}, onednn::Reordering(onednn::description(from), onednn::description(to)))
                  .first;
    } catch (const dnnl::error&) {
      return reorder_by_loops(from, to);
    }
  }
  found->second.run(from.data, to.data);
}

}  // namespace fretsaw
