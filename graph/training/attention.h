// Attention while a model is trained.
#pragma once
#include <unordered_set>

#include "graph/ir.h"
#include "graph/passes.h"

namespace fretsaw {

struct TrainedAttentionOptions {
  std::unordered_set<const Value*> learned;             // initializers that training changes: nothing is read off their numbers
  decltype(InferOptions::evaluate) evaluate = nullptr;  // runs a node on constants (scales and masks that exporters compute); null: none is
};

// Attention from products, masks and softmax in the main graph (fuse_attention of graph/passes.h) before the graph is differentiated, so
// that backward passes get AttentionGrad. Where the graph's inputs have a symbolic first dimension, the batch, sizes that are multiples of
// it may be unknown; all others must be numbers. Attention whose probabilities are dropped out stays as it is. Returns how many it made.
// Types must be known, and are known afterwards.
int fuse_trained_attention(Model& model, const TrainedAttentionOptions& options = {});

}  // namespace fretsaw
