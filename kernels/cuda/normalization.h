// What the files of the normalization family share.
#pragma once
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/fold_plan.h"

namespace fretsaw::cuda {

// Where the channel and the group of an element of X [N, C, cells] (or nhwc: [N, cells, C]) are found.
struct ChannelPlace {
  WideDivider cells, channels, image, group;  // image: C * cells; group: channels of a group
  int64_t groups = 1;                         // of an image

  ChannelPlace(int64_t C, int64_t cell_count, int64_t group_count)
      : cells(cell_count), channels(C), image(C * cell_count), group(C / group_count), groups(group_count) {}

  struct Found {
    int64_t channel, group;
  };
  template <bool kLast>  // whether channels are the last dimension in memory
  FRETSAW_HOST_DEVICE Found find(int64_t i) const {
    if constexpr (kLast) {
      const int64_t pixel = channels.quotient(i), channel = i - pixel * channels.divisor;
      return {channel, image.quotient(i) * groups + group.quotient(channel)};
    } else {
      const int64_t plane = cells.quotient(i), n = channels.quotient(plane);
      return {plane - n * channels.divisor, group.quotient(plane)};
    }
  }
};

// Layouts of a kernel that takes X as nhwc where it is offered so, and leaves Y likewise.
void follow_layout(const CompileContext& c, CompiledKernel& kernel);

std::string refuse_other_norm_types(const CompileContext& c);    // X a float, and the other inputs of its type
std::string refuse_other_float_inputs(const CompileContext& c);  // all inputs floats of any types

void register_row_normalization(KernelRegistry& registry);    // LayerNormalization, RMSNormalization
void register_group_normalization(KernelRegistry& registry);  // Group, Instance, MeanVarianceNormalization
void register_batch_normalization(KernelRegistry& registry);  // BatchNormalization
void register_local_normalization(KernelRegistry& registry);  // LRN, LpNormalization

}  // namespace fretsaw::cuda
