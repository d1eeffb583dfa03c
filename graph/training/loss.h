// Losses: what --loss says, and the nodes that compute it behind a model's output.
//
//   --loss softmax_cross_entropy[:ignore_index=K,label_smoothing=E]    classes on the LAST axis of the output
//   --loss mse | l1 | bce_with_logits                                  element by element
//   --loss output[:NAME]                                               a scalar output of the model is the loss
//
// All take reduction=mean|sum (mean without it); all but `output` take output=NAME, which output of the model the loss is of (the first
// without it): "mse:output=y,reduction=sum", "output:total_loss,reduction=sum".
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

struct LossSpec {
  enum class Kind : uint8_t { softmax_cross_entropy, mse, l1, bce_with_logits, output };
  enum class Reduction : uint8_t { mean, sum };
  Kind kind = Kind::softmax_cross_entropy;
  Reduction reduction = Reduction::mean;
  std::optional<int64_t> ignore_index;  // targets that count for nothing, of softmax_cross_entropy
  double label_smoothing = 0;           // of softmax_cross_entropy, in [0, 1]
  std::string output;                   // the model's output; "": the first
};
// Throws Error of code usage that says what is allowed.
LossSpec parse_loss(const std::string& text);

// The graph output that the loss is of. Throws Error naming the outputs that there are.
Value* loss_output(const Graph& graph, const LossSpec& spec);

// The batch that a loss of the kind `output` is the mean over: axis `axis` of the graph input `input` ("": the first input with an axis).
struct LossBatch {
  std::string input;
  int axis = 0;
  // Where the output is the sum over those targets that are not `ignored`: of these it is to be the mean (split_own_loss).
  Value* targets = nullptr;
  int64_t ignored = 0;
};
// A model whose loss, the first output, is the mean of a SoftmaxCrossEntropyLoss or NegativeLogLikelihoodLoss that ignores targets: parts
// of a batch count differently many, so the node is made to give their sum. LossBatch for append_loss; without targets where there is no
// such node or its targets have weights.
LossBatch split_own_loss(Graph& graph, const LossSpec& spec);
// Where such means over targets are terms of a loss that is to be made from parts of a batch, these are means over samples only if no
// target is ignored: exporters write ignore_index=-100 whether there are such targets or not. Those that would ignore a negative number are
// made to fail on it, and returned. Types must be inferred again.
std::vector<const Node*> demand_all_targets(Graph& graph, const LossSpec& spec);

// A micro-batch's part of the loss. Micro-batches and data ranks add up `sum` and `count`; the loss of the whole batch is then
// sum / count, or the sum itself with reduction=sum, whatever was ignored where and however uneven the parts are. So a gradient is that of
// `sum`, divided by loss_divisor(the whole count).
struct LossValues {
  Value* target = nullptr;  // the graph input that was added; null for the kind `output`
  Value* sum = nullptr;     // float32 [] (float64 where the output is): the losses of all that counts, added
  Value* count = nullptr;   // int64 []: how many those are
  Value* loss = nullptr;    // like `sum`: sum / count, or the sum. 0 where nothing counts (PyTorch: NaN)
};

// How a softmax cross-entropy is written: as `rows`, CrossEntropy of ai.fretsaw, which reads the output once and as it is, where that has
// at most 32 bits and a known number of classes; or in `operators` that can be divided along the classes.
enum class LossForm : uint8_t { operators, rows };

// Adds the input "target", the nodes, and the outputs "loss_sum", "loss_count" and "loss" (the first free names of that kind). The model is
// normalised (passes.h) and has its final precision: half-precision outputs are taken to float32 first, and so are the sums.
// Leaves inferred types.
//
//   softmax_cross_entropy   output [..., C], target int64 [...] in 0 to C - 1 or ignore_index; others are an error when run.
//                           -(1 - E) log p[target] - E mean(log p), log p = LogSoftmax(output), as torch.nn.functional.cross_entropy;
//                           the mean is over the targets that are not ignored
//   mse                     output [...], target of its shape: (output - target)^2, over all elements
//   l1                      |output - target|
//   bce_with_logits         target t in [0, 1]: t softplus(-output) + (1 - t) softplus(output): no cancellation, its gradient is
//                           sigmoid(output) - t everywhere
//   output                  a float output of one element. With reduction=mean it is taken for the mean over the samples of the batch: it
//                           counts as many times as there are samples
//
// Throws Error naming the output that is not there or has not the shape or type for the loss.
LossValues append_loss(Model& model, const LossSpec& spec, const LossBatch& batch = {}, LossForm form = LossForm::operators);

// What the gradient of `sum` over the whole batch is divided by: the whole count, or 1 with reduction=sum. Never 0.
double loss_divisor(const LossSpec& spec, int64_t count);

}  // namespace fretsaw
