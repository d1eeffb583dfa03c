// The operators of the domain ai.fretsaw.device: what only graphs that were specialised for a device have.
//
//   Y = StridedAttention(Q, K, V, mask)
//
// is ONNX's Attention without caches, whose operands and result are views of tensors of any shape: element (b, h, s, d) of Q stands at
// q_offset + b * q_strides[0] + h * q_strides[1] + s * q_strides[2] + d, likewise those of K, V and Y. Q, K and V are often one tensor,
// the product that made all three.
#pragma once
#include "graph/ir.h"

namespace fretsaw {

inline constexpr const char* kDeviceDomain = "ai.fretsaw.device";

// Registers the schema of StridedAttention (version 1) with libonnx, so that its shape inference knows it. May be called from any thread,
// as often as one likes.
void register_device_schemas();

// Whether an Attention has a strided form: one without caches, lengths and scores.
bool has_strided_form(const Node& attention);

// The elements [batches, heads, rows, width] of an operand of attention in a tensor; those of a row are neighbours.
struct HeadsView {
  int64_t batches = 0, heads = 0, rows = 0, width = 0;
  int64_t offset = 0;                    // of the first element
  int64_t batch = 0, head = 0, row = 0;  // elements from one to the next
  int64_t last() const;                  // the offset of the last element; -1 where there is none
  bool operator==(const HeadsView&) const = default;
};
// [batches, heads, rows, width] in row-major order.
HeadsView dense_view(int64_t batches, int64_t heads, int64_t rows, int64_t width);

struct AttentionViews {
  HeadsView q, k, v, y;
  Dims shape;  // of Y, which `y` covers
};
// What a StridedAttention says. Throws Error when its attributes do not fit each other; whether they fit the tensors is for kernels to see.
AttentionViews read_attention_views(const Node& node);
void write_attention_views(Node& node, const AttentionViews& views);

}  // namespace fretsaw
