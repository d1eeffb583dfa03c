// Registration of the parts of the machine-learning family.
#pragma once

namespace fretsaw {
class KernelRegistry;

void register_trees(KernelRegistry& registry);       // TreeEnsemble
void register_optimizers(KernelRegistry& registry);  // Adagrad, Adam, Momentum of ai.onnx.preview.training

}  // namespace fretsaw
