// Which outputs of a node are bytes of its input, so that nothing has to be done for them.
#include <algorithm>

#include "runtime/program.h"

namespace fretsaw {
namespace {

constexpr size_t kPartAlignment = 64;  // bytes; kernels read vectors

// A view of known shape.
bool shares_all(const Node& node, const Slot& source) {
  if (!node.out(0) || node.outputs.size() != 1) return false;
  const Slot slot = slot_of_type(node.out(0)->type, Slot::Place::pool);
  if (!slot.fixed || !source.fixed || slot.dtype == DType::string || source.dtype == DType::string) return false;
  return bytes_of(slot.dtype, slot.dims, Layout::plain) == bytes_of(source.dtype, source.dims, Layout::plain);
}

// A Split whose parts lie one behind the other in its input.
std::vector<size_t> offsets_of_parts(const Node& node, const Slot& source) {
  if (!source.fixed || source.dtype == DType::string || bits_of(source.dtype) % 8 != 0 || source.dims.empty()) return {};
  const auto rank = static_cast<int64_t>(source.dims.size());
  const int64_t axis = node.get_int("axis", 0), outer = axis < 0 ? axis + rank : axis;
  if (std::any_of(source.dims.begin(), source.dims.begin() + outer, [](int64_t d) { return d != 1; })) return {};
  std::vector<size_t> offsets;
  size_t offset = 0;
  for (const Value* out : node.outputs) {
    if (!out) return {};
    const Slot slot = slot_of_type(out->type, Slot::Place::pool);
    if (!slot.fixed || offset % kPartAlignment != 0) return {};
    offsets.push_back(offset);
    offset += bytes_of(slot.dtype, slot.dims, Layout::plain);
  }
  if (offset != bytes_of(source.dtype, source.dims, Layout::plain)) return {};
  return offsets;
}

}  // namespace

std::vector<size_t> offsets_in_input(const Node& node, bool view, const Slot& source) {
  if (view && shares_all(node, source)) return {0};
  return node.is("Split") ? offsets_of_parts(node, source) : std::vector<size_t>();
}

}  // namespace fretsaw
