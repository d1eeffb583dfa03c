// What the files of the gradient operators (graph/gradient_operators.h) share.
#pragma once
#include "graph/communication_schemas.h"
#include "kernels/cuda/cuda.h"

namespace fretsaw::cuda {

// The reason to refuse the node unless these inputs (those that it has) are floats of 16, 32 or 64 bits, all of the first one's type.
std::string refuse_mixed_floats(const CompileContext& c, std::initializer_list<size_t> inputs);
// Asks for the plain layout, or where one of the images `inputs` is offered channels last, for that, of them and of output 0.
void take_images(const CompileContext& c, std::initializer_list<size_t> inputs, CompiledKernel& kernel);

void register_gradients(KernelRegistry& registry);                     // all of them
void register_summing_gradients(KernelRegistry& registry);             // gradients_sums.cu: SumTo, GatherGrad
void register_convolution_gradients(KernelRegistry& registry);         // convolution_gradients.cpp: ConvGradInput, ConvGradWeight
void register_pooling_gradients(KernelRegistry& registry);             // gradients_pooling.cu: MaxPoolGrad, AveragePoolGrad
void register_batch_normalization_gradient(KernelRegistry& registry);  // normalization_training.cu: BatchNormalizationGrad
void register_row_normalization_gradients(
    KernelRegistry& registry);                                // gradients_rows.cu: LayerNormalizationGrad, RMSNormalizationGrad, ...
void register_squared_sum(KernelRegistry& registry);          // squared_sum.cu: SquaredSum
void register_cross_entropy(KernelRegistry& registry);        // cross_entropy.cu: CrossEntropy, CrossEntropyGrad
void register_attention_gradient(KernelRegistry& registry);   // attention_gradient.cpp: AttentionGrad
void register_recurrent_gradients(KernelRegistry& registry);  // recurrent_gradients.cpp: LSTMGrad, GRUGrad, RNNGrad
void register_loss_gradients(KernelRegistry& registry);       // gradients_losses.cu: SoftmaxCrossEntropyLossGrad, ...
void register_sampling_gradient(KernelRegistry& registry);    // gradients_sampling.cu: GridSampleGrad
void register_regions_gradient(KernelRegistry& registry);     // gradients_regions.cu: RoiAlignGrad
void register_deformable_gradient(KernelRegistry& registry);  // convolution_deformable_gradient.cu: DeformConvGrad

}  // namespace fretsaw::cuda
