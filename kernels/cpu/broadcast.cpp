// Layouts and shapes of broadcasting elementwise kernels.
#include "kernels/cpu/broadcast.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/element_copy.h"

namespace fretsaw {

namespace {

int64_t block_of(Layout layout) {
  return layout == Layout::nChw8c ? 8 : layout == Layout::nChw16c ? 16 : 1;
}

bool is_single(const Dims& dims) {
  return std::all_of(dims.begin(), dims.end(), [](int64_t d) { return d == 1; });
}

// [C, 1, 1] or [1, C, 1, 1]
bool is_channel_vector(const Dims& dims, int64_t channels) {
  if (dims.size() != 3 && dims.size() != 4) return false;
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] != (i == dims.size() - 3 ? channels : 1)) return false;
  }
  return true;
}

enum class Fit : uint8_t { none, as_is, reordered };

// How an operand can be taken by a kernel that works in `layout` on outputs of this shape.
Fit fit_of(const Dims& dims, const Dims& out, Layout layout) {
  if (is_single(dims) && (dims.size() < 4 || out[1] != 1)) return Fit::as_is;
  if (layout == Layout::nhwc) {
    if (dims.size() == 4) return Fit::reordered;
    return is_channel_vector(dims, out[1]) ? Fit::as_is : Fit::none;
  }
  if (is_channel_vector(dims, out[1]) && out[1] % block_of(layout) == 0) return Fit::as_is;
  return dims.size() == 4 && dims[1] == out[1] ? Fit::reordered : Fit::none;
}

}  // namespace

Dims broadcast_all(std::span<const Dims> shapes) {
  Dims out;
  for (const Dims& dims : shapes) out = broadcast_dims(out, dims);
  return out;
}

Layout elementwise_layout(const CompileContext& c, std::span<const size_t> inputs) {
  std::vector<Dims> shapes;
  for (size_t i : inputs) {
    std::optional<Dims> dims = c.input_dims(i);
    if (!dims || bits_of(c.input_dtype(i)) < 8) return Layout::plain;
    shapes.push_back(std::move(*dims));
  }
  const Dims out = broadcast_all(shapes);
  if (out.size() != 4) return Layout::plain;
  Layout layout = Layout::plain;
  for (size_t k = 0; k < inputs.size() && layout == Layout::plain; ++k) {
    if (shapes[k] == out && inputs[k] < c.offered.size()) layout = c.offered[inputs[k]];
  }
  if (layout == Layout::plain) return layout;
  for (const Dims& dims : shapes) {
    if (fit_of(dims, out, layout) == Fit::none) return Layout::plain;
  }
  return layout;
}

std::vector<Layout> elementwise_input_layouts(const CompileContext& c, std::span<const size_t> inputs, Layout layout) {
  std::vector<Layout> layouts(c.inputs.size(), Layout::plain);
  if (layout == Layout::plain) return layouts;
  std::vector<Dims> shapes;
  for (size_t i : inputs) shapes.push_back(*c.input_dims(i));
  const Dims out = broadcast_all(shapes);
  for (size_t k = 0; k < inputs.size(); ++k) {
    if (fit_of(shapes[k], out, layout) == Fit::reordered) layouts[inputs[k]] = layout;
  }
  return layouts;
}

Dims physical_dims(const Dims& dims, Layout layout) {
  if (layout == Layout::plain) return dims;
  const int64_t block = block_of(layout);
  if (layout == Layout::nhwc) return {dims[0], dims[2], dims[3], dims[1]};
  return {dims[0], (dims[1] + block - 1) / block, dims[2], dims[3], block};
}

Dims physical_operand(const TensorView& x, Layout layout) {
  if (x.layout != Layout::plain || layout == Layout::plain) return physical_dims(x.dims, x.layout);
  const int64_t count = x.count();
  if (count == 1 || layout == Layout::nhwc) return {count};
  return {count / block_of(layout), 1, 1, block_of(layout)};  // a vector along the channels, whole blocks of it
}

void clear_padding(TensorView& y) {
  const int64_t block = block_of(y.layout);
  if (block == 1 || y.dims[1] % block == 0) return;
  const int64_t blocks = (y.dims[1] + block - 1) / block, used = y.dims[1] % block, pixels = y.dims[2] * y.dims[3];
  const auto each = static_cast<int64_t>(bits_of(y.dtype)) / 8;
  for (int64_t n = 0; n < y.dims[0]; ++n) {
    char* last = y.as<char>() + ((n + 1) * blocks - 1) * pixels * block * each;  // [H, W, block]
    for (int64_t p = 0; p < pixels; ++p) std::memset(last + (p * block + used) * each, 0, static_cast<size_t>((block - used) * each));
  }
}

}  // namespace fretsaw
