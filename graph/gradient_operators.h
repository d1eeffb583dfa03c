// The gradient operators of the domain ai.fretsaw: what ONNX has no operator for, or none that is fast.
//
//   SumTo(x, shape) -> y                    x summed over what a tensor of this shape was broadcast along to x's shape
//   GatherGrad(dY, indices, shape) -> dX    dX [a, v, b] of zeros, dX[.., indices[i..], ..] += dY [a, i..., b]; attribute axis
//   ConvGradInput(dY, W, shape) -> dX       of Y = Conv(X, W); Conv's attributes
//   ConvGradWeight(dY, X) -> dW             likewise; kernel_shape must be there
//   MaxPoolGrad(dY, X) -> dX                the first of the largest in a window, or the last NaN, takes it all; MaxPool's attributes
//   AveragePoolGrad(dY, shape) -> dX        AveragePool's attributes
//   BatchNormalizationGrad(dY, X, scale) -> dX, dScale, dB     by the batch's own statistics; attribute epsilon
//   LayerNormalizationGrad(dY, X, scale) -> dX, LayerNormalizationGradScale(dY, X) -> dScale, in the shape of the rows (X's dimensions
//     from `axis` on); RMSNormalizationGrad and RMSNormalizationGradScale likewise; attributes axis, epsilon
//   AttentionGrad(dY, Q, K, V, mask) -> dQ, dK, dV    Attention's attributes, of which those of outputs that it can leave out and the
//     precision of its softmax are not there; no cache, no lengths. The mask may be left out
//   LSTMGrad(X, W, R, B, sequence_lens, initial_h, initial_c, P, Y, dY, dY_h, dY_c) -> dX, dW, dR, dB, dinitial_h, dinitial_c, dP
//   GRUGrad, RNNGrad(X, W, R, B, sequence_lens, initial_h, Y, dY, dY_h) -> dX, dW, dR, dB, dinitial_h
//     the forward operator's inputs, of which it need not have all, its Y, and the gradients of its results, of which at least one is
//     there; its attributes. Beyond the bound of `clip` the derivative is 0
//   GridSampleGrad(dY, X, grid) -> dX, dgrid           GridSample's attributes; where a border clamps, a point has no gradient
//   DeformConvGrad(dY, X, W, offset, mask) -> dX, dW, doffset, dmask    DeformConv's attributes; the mask may be left out
//   RoiAlignGrad(dY, X, rois, batch_indices) -> dX     RoiAlign's attributes; regions have no gradient
//   MaxRoiPoolGrad(dY, X, rois) -> dX                  the first of the largest in a bin takes it all; MaxRoiPool's attributes
//   CumProdGrad(dY, X, axis) -> dX                     CumProd's attributes; nothing is divided, so zeros are as good as other numbers
//   DetGrad(dY, X) -> dX                               dY times the cofactors of X, also where X has no inverse
//   LinearAttentionGrad(query, key, value, past_state, decay, beta, dY, dpresent_state) -> dquery, dkey, dvalue, dpast_state, ddecay,
//     dbeta    LinearAttention's inputs, of which it need not have all, and the gradients of its results, of which at least one is there
//   SoftmaxCrossEntropyLossGrad, NegativeLogLikelihoodLossGrad(dLoss, scores, labels, weights) -> dScores; the loss's attributes
//   CrossEntropy(scores, target) -> loss, lse    for each row of scores [N, C] and its class t, target int64 [N]:
//     lse = log(sum(e^scores)), loss = lse - (1 - E) scores[t] - E mean(scores), both float32 [N], with attributes label_smoothing E
//     and ignore_index (targets whose loss is 0)
//   CrossEntropyGrad(dLoss, scores, target, lse) -> dScores    dLoss (e^(scores - lse) - (1 - E) at t - E / C); likewise
//   SquaredSum(x...) -> sum                            the squares of all elements of all tensors, added up, float32 []
//   DropoutMask(shape, samples, counter) -> mask      true with probability 1 - ratio, by the element's index in the whole batch alone:
//     shape int64 [r] of the mask, whose dimension 0 is the samples at hand times a number of rows each; samples int64 [2]: the first of
//     them in the batch, and how many they are; counter int64 [] is another in every step; attributes ratio, and key (int) of the node
//   RandomAt(shape, samples, counter, limits) -> numbers    likewise random numbers, float32: uniform from 0 to 1, or with the attribute
//     normal = 1 of mean 0 and deviation 1. With `limits`, one number or one for each element, 1 where the number is below it, otherwise 0
//
// `shape` is that of dX, an int64 tensor. The gradient of a scale is an operator of its own, since what the stage before waits for (dX)
// does not need it.
#pragma once

namespace fretsaw {

// Registers their schemas (version 1) with libonnx. register_communication_schemas does.
void register_gradient_schemas();

}  // namespace fretsaw
