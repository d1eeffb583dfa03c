// Optimizers: what --optimizer says, and the graphs that update parameters.
//
//   --optimizer sgd[:lr=1e-3,momentum=0,dampening=0,nesterov=0,weight_decay=0]
//   --optimizer adam[:lr=1e-3,beta1=0.9,beta2=0.999,eps=1e-8,weight_decay=0]
//   --optimizer adamw[:lr=1e-3,beta1=0.9,beta2=0.999,eps=1e-8,weight_decay=0.01]
//   --optimizer lamb[:lr=1e-3,beta1=0.9,beta2=0.999,eps=1e-6,weight_decay=0.01]
//
// Groups of weight decay, by patterns of parameter names (name_pattern.h); of several that match, the last counts:
//
//   weight_decay@PATTERN=X              "adamw:weight_decay=0.1,weight_decay@*.embed*=0.01"
//   no_decay=PATTERN|PATTERN|...        the same as weight_decay@PATTERN=0 for each; the word 1d stands for all parameters of at most one
//                                       dimension: "adamw:weight_decay=0.1,no_decay=1d|*.wpe.weight"
//
// A pattern holds no ',': write '?' for one in a name.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

struct OptimizerSpec {
  enum class Kind : uint8_t { sgd, adam, adamw, lamb };
  struct DecayRule {
    std::string pattern;  // "1d": by rank
    double weight_decay = 0;
  };

  Kind kind = Kind::sgd;
  double lr = 1e-3;
  double momentum = 0, dampening = 0;  // of sgd
  bool nesterov = false;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  // of the others
  double weight_decay = 0;
  std::vector<DecayRule> decay_rules;

  double weight_decay_of(const std::string& parameter, size_t rank) const;
  // What is kept for each parameter, under PyTorch's names: {"momentum_buffer"}, {} without momentum, {"exp_avg", "exp_avg_sq"}.
  std::vector<std::string> states() const;
};
// Throws Error of code usage that says what is allowed.
OptimizerSpec parse_optimizer(const std::string& text);

// One parameter to train.
struct TrainedParameter {
  std::string name;                 // the source's
  Type type;                        // a float tensor of known rank. Of 16 bits: without master weights, computed in float32 and rounded
  DType gradient = DType::float32;  // the element type its gradient comes in
  DType copy = DType::undefined;    // with master weights: what the model computes in; the new value is given in that type too
  // Where this is a part of a tensor: the mesh axes that cut it, with the number of ranks. Norms of the whole are summed over them.
  std::vector<std::pair<std::string, int>> cut_over = {};
};

// What stands for one parameter in an update graph.
struct ParameterUpdate {
  std::string name;
  Value *parameter = nullptr, *gradient = nullptr;  // graph inputs, of the parameter's shape
  std::vector<Value*> states;                       // graph inputs, in the order of OptimizerSpec::states(); zeros before step 1
  Value* new_parameter = nullptr;                   // graph outputs
  std::vector<Value*> new_states;
  Value* copy = nullptr;  // graph output; null where none is wanted
};
// Scalar inputs that all parameters share.
struct UpdateScalars {
  Value* lr = nullptr;     // float32 []
  Value* step = nullptr;   // int64 []: which update this is, from 1 on. Steps that were skipped do not count
  Value* scale = nullptr;  // float32 []: what gradients are multiplied by first (gradient_scale below)
};
struct UpdateModel {
  Model model;  // types are inferred
  UpdateScalars scalars;
  std::vector<ParameterUpdate> parameters;  // in the order given
};

// The update of every parameter, a few elementwise nodes each and nothing that reads other parameters (LAMB: two norms each), so that
// an update of shards is this graph with the shardings of its inputs. With g = scale * gradient, p the parameter, w its weight decay:
//
//   sgd     g += w p;  b = momentum b + (1 - dampening) g (step 1: b = g);  d = nesterov ? g + momentum b : b;  p -= lr d
//   adam    g += w p;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
//           p -= lr / (1 - beta1^step) m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
//   adamw   p *= 1 - lr w;  then as adam with w = 0
//   lamb    m, v as adam;  u = m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps) + w p;  p -= lr r u,
//           r = |p| / |u| where both are above 0 and w is not 0, otherwise 1
//
// The first three are torch.optim's SGD, Adam and AdamW (foreach=False, amsgrad=False, maximize=False); scalars are computed in float64 as
// there. PyTorch has no LAMB: this is algorithm 2 of You et al., "Large Batch Optimization for Deep Learning" (2019), with r as in NVIDIA's
// apex and timm, which leave parameters without weight decay to Adam.
UpdateModel make_update(const OptimizerSpec& spec, const std::vector<TrainedParameter>& parameters);
// The same in a graph that has the scalars, which need not be inputs there. Adds inputs and outputs; types are still to be inferred.
std::vector<ParameterUpdate> append_updates(Graph& graph, const OptimizerSpec& spec, const std::vector<TrainedParameter>& parameters,
                                            const UpdateScalars& scalars);

// `scale` for gradients that are `divisor` times too large (samples that were summed, loss scaling) and of which `squared_sum` is the sum
// of squares over all parameters as they are. `clip` > 0: the largest global norm, as torch.nn.utils.clip_grad_norm_ does it.
//   1 / divisor * min(1, clip / (norm + 1e-6)),  norm = sqrt(squared_sum) / divisor
double gradient_scale(double squared_sum, double divisor, double clip);

}  // namespace fretsaw
