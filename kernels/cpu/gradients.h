// What the files of the gradient operators (graph/gradient_operators.h) share.
#pragma once
#include "graph/communication_schemas.h"
#include "kernels/cpu/through_float.h"
#include "kernels/kernel.h"

namespace fretsaw {

inline void add_gradient(KernelRegistry& registry, const char* op, CompiledKernel (*make)(const CompileContext&)) {
  registry.add({.op = op, .domain = kCommunicationDomain, .make = make});
}

void register_summing_gradients(KernelRegistry& registry);      // gradients.cpp: SumTo, GatherGrad
void register_convolution_gradients(KernelRegistry& registry);  // ConvGradInput, ConvGradWeight
void register_deformable_gradient(KernelRegistry& registry);    // convolution_deformable.cpp: DeformConvGrad
void register_pooling_gradients(KernelRegistry& registry);      // MaxPoolGrad, AveragePoolGrad
void register_normalization_gradients(
    KernelRegistry& registry);                                 // BatchNormalizationGrad, LayerNormalizationGrad, RMSNormalizationGrad, ...
void register_attention_gradient(KernelRegistry& registry);    // AttentionGrad
void register_recurrent_gradients(KernelRegistry& registry);   // LSTMGrad, GRUGrad, RNNGrad
void register_cross_entropy(KernelRegistry& registry);         // CrossEntropy, CrossEntropyGrad
void register_squared_sum(KernelRegistry& registry);           // SquaredSum
void register_sampling_gradient(KernelRegistry& registry);     // GridSampleGrad
void register_regions_gradient(KernelRegistry& registry);      // RoiAlignGrad, MaxRoiPoolGrad
void register_cumulative_gradient(KernelRegistry& registry);   // CumProdGrad
void register_determinant_gradient(KernelRegistry& registry);  // DetGrad
void register_linear_attention_gradient(KernelRegistry& registry);  // LinearAttentionGrad
void register_loss_gradients(KernelRegistry& registry);             // SoftmaxCrossEntropyLossGrad, NegativeLogLikelihoodLossGrad

}  // namespace fretsaw
