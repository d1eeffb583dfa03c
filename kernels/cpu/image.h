// Registration of the parts of the image family.
#pragma once

namespace fretsaw {
class KernelRegistry;

void register_resize(KernelRegistry& registry);    // Resize
void register_sampling(KernelRegistry& registry);  // GridSample, AffineGrid
void register_regions(KernelRegistry& registry);   // RoiAlign, MaxRoiPool, Col2Im

}  // namespace fretsaw
