// Where DeformConv reads its image: for the operator and its gradients.
#pragma once
#include "kernels/cpu/deformation.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/element_packs.cuh"

namespace fretsaw::cuda {

// Where a tap reads. `moved`: the first of its offsets, [2, cells].
template <typename T>
__device__ Spot<WideOf<T>> moved_spot(const Deformation& d, Spot<WideOf<T>> first, int tap, int64_t cell, const T* moved) {
  return spot_of<WideOf<T>>(d, first, tap, widen(moved[cell]), widen(moved[d.cells() + cell]));
}

}  // namespace fretsaw::cuda
