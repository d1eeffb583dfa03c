// Finding the batch axis of every value, and making a batch that is baked into a file symbolic.
//
// A model may be run in micro-batches when running it on some samples gives exactly those samples' part of the result. The
// analysis proves that: it follows the batch axis from the inputs through the operators' factor rules. For every value it knows
//
//   - that it does not depend on the batch at all (weights, masks made from constants),
//   - or which dimension holds the batch, and where in it: dimension = outer * batch * inner ([batch*heads, s, d]: inner = heads),
//   - or that samples are mixed in it, and by which node.
//
// Where a value that does not depend on the batch meets one that does along the batch axis (a mask [4,1,s,s] written for a
// batch of 4), its rows must be equal; that is proved from the constant's bytes, or from the operators that made it.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/dim_product.h"
#include "graph/ir.h"
#include "partitioner/partition.h"

namespace fretsaw {

struct MixedCause {
  const Node* node = nullptr;
  std::string why;  // "the batch axis is reduced here"
  // What the mixed value still is: a "sum" or a "mean" over the samples, "other" when it is proved to be neither, "" when that is not
  // known.
  std::string partial;
};

// An index that finds its own sample: sample * step + rest, 0 <= rest < below. The samples' own numbers 0, 1, 2, ... have step 1 and
// below 1.
struct SampleIndex {
  DimProduct step = 0;  // 0: not such an index
  DimProduct below = 1;
  bool operator==(const SampleIndex&) const = default;
  bool found() const { return !(step == DimProduct(0)); }
};

// Where the batch is in a value. The default: nowhere.
struct BatchAxis {
  int axis = -1;
  DimProduct outer = 1, inner = 1;  // the dimension is outer * batch * inner, the slowest first
  bool uniform = false;             // the same for every sample
  // For index tensors: what the columns of the last dimension find. One entry stands for all columns; empty: no column finds samples.
  std::vector<SampleIndex> sample_index;
  std::shared_ptr<const MixedCause> mixed;  // not null: samples are mixed
  bool unknown_shape = false;               // of mixed values: which dimensions the batch is in is not known

  bool holds_batch() const { return axis >= 0; }
  bool same_place(const BatchAxis& other) const { return axis == other.axis && outer == other.outer && inner == other.inner; }
};

class BatchRewriter;
struct BatchFacts {
  int64_t batch = -1;                                // the batch the file is written for; -1: symbolic
  std::string symbol;                                // the name of the batch dimension in the symbolic model
  std::vector<std::pair<Value*, int>> inputs;        // the inputs that hold the batch, and their axes
  std::unordered_map<const Value*, BatchAxis> axes;  // only of values that depend on the batch
  std::map<std::string, MergeRule> outputs;          // how each output's parts come together
  std::map<std::string, MixedCause> unproved;        // outputs whose merge was declared, and is neither proved nor disproved
  std::vector<std::string> notes;
  std::vector<std::function<void(BatchRewriter&)>> edits;  // what make_batch_symbolic does
};

// The batch axes of all values. `batch_axes` says the axis of inputs by name, -1: none; without it it is the first one, or where that mixes
// samples, a later one whose size is open. `merges` says how outputs without a batch axis come together. The types of all values must have
// been inferred. Call it when the batch is to be divided: it throws an Error that names the node when samples are mixed in an output, and
// an Error when no input has a batch. A file that is fixed at batch 1 has facts with batch 1, every output merged by "same", and nothing
// else.
BatchFacts analyse_batch(Model& model, const std::map<std::string, int>& batch_axes, const std::map<std::string, MergeRule>& merges);
// Rewrites the model so that it takes any number of samples up to the one it was written for, and infers types again. Adds notes to the
// model.
void make_batch_symbolic(Model& model, const BatchFacts& facts);

}  // namespace fretsaw
