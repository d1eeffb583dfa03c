// The families of CPU kernels; each registers its operators. Add a line here and in registry.cpp for a new family.
#pragma once

namespace fretsaw {
class KernelRegistry;

void register_elementwise(KernelRegistry& registry);   // unary, binary, variadic, comparison, logical, bitwise, Where, Clip
void register_reductions(KernelRegistry& registry);    // Reduce*, ArgMax, ArgMin, CumSum, CumProd
void register_casts(KernelRegistry& registry);         // Cast, CastLike, BitCast
void register_quantization(KernelRegistry& registry);  // QuantizeLinear family
void register_reshaping(KernelRegistry& registry);     // Reshape, Flatten, Squeeze, Unsqueeze, Identity, Shape, Size, Transpose, ...
void register_movement(KernelRegistry& registry);      // Concat, Split, Slice, Pad, Tile, Expand, DepthToSpace, Trilu, ...
void register_indexing(KernelRegistry& registry);      // Gather*, Scatter*, OneHot, NonZero, Compress, ...
void register_sorting(KernelRegistry& registry);       // TopK, Unique, NonMaxSuppression, ...
void register_generators(KernelRegistry& registry);  // Constant, ConstantOfShape, Range, EyeLike, windows, Random*, Dropout, Bernoulli, ...
void register_sequences(KernelRegistry& registry);   // Sequence*, Split/ConcatFromSequence, Optional*
void register_text(KernelRegistry& registry);        // String*, RegexFullMatch, TfIdfVectorizer, ...
void register_image(KernelRegistry& registry);       // Resize, GridSample, AffineGrid, RoiAlign, MaxRoiPool, Col2Im, ...
void register_signal(KernelRegistry& registry);      // DFT, STFT, MelWeightMatrix
void register_machine_learning(KernelRegistry& registry);  // ai.onnx.ml, ai.onnx.preview.training
void register_convolution(KernelRegistry& registry);       // Conv, ConvTranspose, DeformConv, ConvInteger, QLinearConv
void register_matmul(KernelRegistry& registry);            // MatMul, Gemm, Einsum, MatMulInteger, QLinearMatMul, Det
void register_pooling(KernelRegistry& registry);           // *Pool, Global*Pool, LpPool, MaxUnpool
void register_normalization(
    KernelRegistry& registry);                    // BatchNormalization, LayerNormalization, Group, Instance, RMS, LRN, LpNormalization, MVN
void register_softmax(KernelRegistry& registry);  // Softmax, LogSoftmax, Hardmax, losses
void register_attention(KernelRegistry& registry);  // Attention, RotaryEmbedding, LinearAttention
void register_recurrent(KernelRegistry& registry);  // LSTM, GRU, RNN
void register_gradients(KernelRegistry& registry);  // the gradient operators of ai.fretsaw

}  // namespace fretsaw
