// The registry of all CPU kernels.
#include "kernels/cpu/families.h"
#include "kernels/kernel.h"

namespace fretsaw {

const KernelRegistry& cpu_kernels() {
  static const KernelRegistry registry = [] {
    KernelRegistry r;
    for (auto add : {register_elementwise, register_reductions, register_casts,         register_quantization,     register_reshaping,
                     register_movement,    register_indexing,   register_sorting,       register_generators,       register_sequences,
                     register_text,        register_image,      register_signal,        register_machine_learning, register_convolution,
                     register_matmul,      register_pooling,    register_normalization, register_softmax,          register_attention,
                     register_recurrent,   register_gradients}) {
      add(r);
    }
    return r;
  }();
  return registry;
}

}  // namespace fretsaw
