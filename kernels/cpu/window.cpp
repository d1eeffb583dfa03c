// Reads the geometry of convolutions and poolings.
#include "kernels/cpu/window.h"

#include <algorithm>
#include <limits>

#include "graph/errors.h"

namespace fretsaw {

namespace {

Dims read_list(const Node& node, const char* name, size_t size, int64_t absent, int64_t least) {
  Dims values = node.get_ints(name);
  if (values.empty()) values.assign(size, absent);
  if (values.size() != size) {
    throw Error(std::string("attribute ") + name + " has " + std::to_string(values.size()) + " entries, not " + std::to_string(size),
                "give one for each spatial dimension");
  }
  for (int64_t v : values) {
    if (v < least || v > std::numeric_limits<int32_t>::max()) {
      throw Error(std::string("attribute ") + name + " has the value " + std::to_string(v), "it must be at least " + std::to_string(least));
    }
  }
  return values;
}

}  // namespace

Window read_window(const Node& node, size_t spatial_rank, Dims kernel) {
  if (spatial_rank == 0 || spatial_rank > 8) throw Error("a tensor without spatial dimensions", "give it the shape [N,C,D1,...]");
  Window w;
  const Dims attribute = node.get_ints("kernel_shape");
  if (kernel.empty()) {
    if (attribute.empty()) throw Error("attribute kernel_shape is missing", "give it");
    kernel = read_list(node, "kernel_shape", spatial_rank, 1, 1);
  } else if (!attribute.empty() && attribute != kernel) {
    throw Error("attribute kernel_shape is " + to_string(attribute) + ", the weights have " + to_string(kernel), "make them equal");
  }
  w.kernel = std::move(kernel);
  if (w.kernel.size() != spatial_rank) {
    throw Error("a kernel of shape " + to_string(w.kernel) + " for " + std::to_string(spatial_rank) + " spatial dimensions",
                "make the ranks equal");
  }
  w.strides = read_list(node, "strides", spatial_rank, 1, 1);
  w.dilations = read_list(node, "dilations", spatial_rank, 1, 1);
  const Dims pads = read_list(node, "pads", 2 * spatial_rank, 0, 0);
  w.pads_begin.assign(pads.begin(), pads.begin() + static_cast<int64_t>(spatial_rank));
  w.pads_end.assign(pads.begin() + static_cast<int64_t>(spatial_rank), pads.end());
  w.auto_pad = node.get_string("auto_pad", "NOTSET");
  if (w.auto_pad.empty()) w.auto_pad = "NOTSET";
  if (w.auto_pad != "NOTSET" && w.auto_pad != "VALID" && w.auto_pad != "SAME_UPPER" && w.auto_pad != "SAME_LOWER") {
    throw Error("attribute auto_pad is '" + w.auto_pad + "'", "use NOTSET, VALID, SAME_UPPER or SAME_LOWER");
  }
  return w;
}

void resolve_padding(Window& w, const Dims& spatial) {
  if (w.auto_pad == "NOTSET") return;
  for (size_t i = 0; i < w.rank(); ++i) {
    w.pads_begin[i] = w.pads_end[i] = 0;
    if (w.auto_pad == "VALID") continue;
    const int64_t outputs = (spatial[i] + w.strides[i] - 1) / w.strides[i];
    const int64_t total = std::max<int64_t>(0, (outputs - 1) * w.strides[i] + w.extent(i) - spatial[i]);
    const int64_t less = total / 2, more = total - less;
    w.pads_begin[i] = w.auto_pad == "SAME_UPPER" ? less : more;
    w.pads_end[i] = total - w.pads_begin[i];
  }
}

Dims output_spatial(const Window& w, const Dims& spatial, bool ceil_mode) {
  if (spatial.size() != w.rank()) throw Error("the input has the wrong number of spatial dimensions", "make it fit the kernel");
  Dims out(w.rank());
  for (size_t i = 0; i < w.rank(); ++i) {
    const int64_t room = spatial[i] + w.pads_begin[i] + w.pads_end[i] - w.extent(i);
    if (room < 0 && ceil_mode && -room < w.strides[i]) {  // one window, which goes beyond the end
      out[i] = 1;
      continue;
    }
    if (room < 0) {
      throw Error("a window of " + std::to_string(w.extent(i)) + " on a padded input of " +
                      std::to_string(spatial[i] + w.pads_begin[i] + w.pads_end[i]),
                  "use a smaller kernel or more padding");
    }
    out[i] = room / w.strides[i] + 1;
    if (ceil_mode && room % w.strides[i] != 0 && out[i] * w.strides[i] < spatial[i] + w.pads_begin[i]) ++out[i];
  }
  return out;
}

}  // namespace fretsaw
