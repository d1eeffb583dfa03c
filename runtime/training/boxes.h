// Boxes of tensors: parts that are an interval in each dimension.
#pragma once
#include <cstddef>
#include <span>

#include "graph/types.h"

namespace fretsaw {

struct Box {
  Dims start, shape;

  int64_t count() const { return count_of(shape); }
  bool operator==(const Box&) const = default;
};

bool lies_in(const Box& box, const Dims& whole);  // of its rank, nothing beyond it
Box intersection(const Box& a, const Box& b);     // of one rank; no elements (shape with a 0) where they don't meet
// Whether each element of a tensor of this shape is in exactly one box. All of them lie in it.
bool covers_once(const Dims& whole, std::span<const Box> boxes);

// Copies what `from` and `to` have in common. Both are packed row-major, elements of `size` bytes.
void copy_common(const Box& from, const std::byte* source, const Box& to, std::byte* target, size_t size);

}  // namespace fretsaw
