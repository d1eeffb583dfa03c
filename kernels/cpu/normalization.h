// What the files of the normalization family share.
#pragma once
#include <vector>

#include "kernels/kernel.h"

namespace fretsaw {

// The elements of an input of any float type.
template <typename T>
std::vector<T> elements_as(RunContext& r, size_t i);

void register_row_normalization(KernelRegistry& registry);      // LayerNormalization, RMSNormalization, LpNormalization
void register_channel_normalization(KernelRegistry& registry);  // BatchNormalization, GroupNormalization, InstanceNormalization, LRN
void register_mean_variance(KernelRegistry& registry);          // MeanVarianceNormalization

}  // namespace fretsaw
