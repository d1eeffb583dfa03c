// The pass runner, and the passes that partitioning and running share.
#pragma once
#include <functional>
#include <map>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "graph/io.h"
#include "graph/ir.h"

namespace fretsaw {

struct Pass {
  std::string name;  // "inline-functions"
  std::function<void(Model&)> run;
};
struct PassTiming {
  std::string name;
  double ms = 0;
  size_t nodes_before = 0, nodes_after = 0;
};
// Runs passes in order, times each and verifies the graph after it. FRETSAW_DISABLE_PASSES="a,b" leaves passes out,
// FRETSAW_PRINT_PASSES="a,b" (or "all") prints the graph after them to stderr.
// FRETSAW_PASS_TIMES=1 prints the times.
std::vector<PassTiming> run_passes(Model& model, const std::vector<Pass>& passes);
void report_timing(const PassTiming& timing);  // to stderr, when FRETSAW_PASS_TIMES asks for it
std::string print_graph(const Graph& graph);   // one line a node: "%y: float32[2,3] = Add(%a, %b) {axis=1}"

// --- normalise: one form of every operator (each is a Pass) ---
// Reading is lossless; these bring any model to the newest opset, with functions inlined and Constant nodes as initializers.
std::vector<Pass> normalise_passes();
void inline_functions(Model& model);  // graph/passes/inline_functions.cpp
void constants_to_initializers(Model& model);
void upgrade_opset(Model& model);      // graph/passes/upgrade_opset.cpp: opset 7 and later to newest_opset()
void remove_identities(Model& model);  // Identity, Dropout in inference mode with no mask, Cast to the same type
// An If whose condition is known, by a constant or by shape arithmetic, becomes its branch (graph/passes/inline_branches.cpp).
void inline_branches(Model& model);
// Sequences whose elements are known by their places become those tensors (graph/passes/unpack_sequences.cpp).
void unpack_sequences(Model& model);
// Loops and Scans whose number of passes is known, by a constant, shape arithmetic or a condition that counts, become their passes, with
// the sequences and branches of these (graph/passes/unroll_loops.cpp). Those that end by other conditions stay, and those for which there
// are not nodes enough.
struct UnrollOptions {
  int64_t most_nodes = 50000;  // that all passes of the model's loops may have together
};
void unroll_loops(Model& model, const UnrollOptions& options = {});
// Lists that all passes of a loop append one tensor of one size to, and that are taken as tensors behind it, become the loop's stacked rows
// (graph/passes/stack_lists.cpp).
void stack_lists(Model& model);
// Scans that are wanted become Loops, whose passes gather their slices (graph/passes/scans_to_loops.cpp). Needs inferred
// types.
void scans_to_loops(Graph& graph, const std::function<bool(const Node&)>& wanted);
// Gathers that take one place each of an axis become one Split (graph/passes/split_gathers.cpp).
void split_gathers(Model& model);
// A node without a kernel whose operator ONNX defines by a function body is replaced by that body, again and again. Needs inferred types.
void decompose_to_functions(Model& model, const std::function<bool(const Node&)>& has_kernel);
int64_t newest_opset();  // the ai.onnx version every later pass and kernel sees

// --- patterns: what exporters wrote in pieces becomes the operator it was (graph/passes/fuse_*.cpp, fold_batch_norm.cpp) ---
// LayerNormalization, RMSNormalization, Gelu (erf and tanh), Swish, HardSwish, Mish; BatchNormalization goes into the Conv before it.
// Names of the results are kept. Types are inferred first where a pattern needs them.
std::vector<Pass> pattern_passes();

// --- fusion groups (graph/passes/mark_groups.cpp) ---
// Marks nodes that run as one kernel with the same Node::group: a contraction (Conv, MatMul, Gemm, ConvTranspose) and the elementwise
// nodes after it whose only input from the group is the one before, each result used once. Both the whole model and a cut one run these.
// A group is written to files as node metadata "fretsaw.group"; a graph that has the marks keeps them.
void mark_groups(Model& model);

// --- shapes (graph/passes/infer_shapes.cpp) ---
// Fills the types of all values from those of inputs and initializers, by ONNX's own inference, with the values of small
// integer tensors propagated (symbolic elements too). Types in the file are hints that are overwritten; where inference knows
// less than a hint of the same rank, the hint's symbols stay.
struct InferOptions {
  // Called for a node all of whose inputs are known: may return its outputs, which are then known too (true).
  std::function<bool(const Node&, const std::vector<TensorPtr>& inputs, std::vector<TensorPtr>& outputs)> evaluate;
  bool keep_hints = true;                     // false: types in the file are not believed at all (the runtime's choice)
  bool name_unknown = false;                  // dimensions of which nothing is known get symbols, so that arithmetic on them can cancel
  std::function<bool(const Node&)> distrust;  // of the outputs of these nodes only the element types are believed
};
// One element of an integer tensor: a number, a symbolic expression, or (neither) unknown.
struct ShapeElement {
  std::optional<int64_t> value;
  std::string symbol;
  bool operator==(const ShapeElement&) const = default;
};
struct ShapeFacts {
  // What is known of small integer tensors (shape arithmetic), element by element: constants too.
  std::unordered_map<const Value*, std::vector<ShapeElement>> contents;
  // Values with a producer that are fully known: by shape arithmetic, or by `evaluate`.
  std::unordered_map<const Value*, TensorPtr> known;
  std::unordered_set<const Value*> constants;  // initializers that no caller can override
  std::vector<Finding> faults;                 // nodes whose inputs do not fit, by ONNX's inference; their outputs stay unknown
};
ShapeFacts infer_shapes(Model& model, const InferOptions& options = {});
// graph/passes/input_shapes.cpp: gives graph inputs fixed shapes ("--shape NAME=D,D"). Throws Error for an unknown name or a rank that
// differs.
void set_input_shapes(Model& model, const std::map<std::string, Dims>& shapes);
// One round of inline_branches with what is known; false: there was nothing to do.
bool inline_branches(Model& model, const ShapeFacts& facts);
// Replaces shape arithmetic whose result is fully known by constants (ints only; no kernels needed).
int fold_shape_arithmetic(Model& model, const ShapeFacts& facts);
// Scales of Resize that constants and known sizes tell become constants (graph/passes/fold_scales.cpp). False: there were none.
bool fold_scales(Model& model, const ShapeFacts& facts);
// Inference, and both of these until nothing changes.
void fold_shapes(Model& model);

// --- element types (graph/passes/set_precision.cpp) ---
struct PrecisionOptions {
  std::set<std::string> keep;  // graph inputs and outputs by name that stay float32, with a Cast inside
  // Large constants are converted when their bytes are asked for (Tensor::generate), not now by all cores.
  bool lazy = false;
};
// Turns the float32 parts of a model into `type`, float16 or bfloat16: constants, values, the attributes that name a type, bodies. What
// is float64, integer or of 16 bits stays. float32 remains, with Casts around it: in operators that have no form for the type, quantised
// scales, Range, windows and transforms of signals, and in arithmetic on indexes (floats that come from integers alone, until they meet
// the model's own). The graph's inputs and outputs that are not kept have the type afterwards, so that stages of one model fit each
// other. Types are inferred first.
void set_precision(Model& model, DType type, const PrecisionOptions& options = {});

// --- for devices: patterns in a specialised graph (static shapes, constants folded), after a model was cut ---
// Each needs inferred types and leaves them inferred; groups that lose a node are taken apart.
// Attention from products, softmax and masks (graph/passes/fuse_attention.cpp), in the form [B, S, H * D] where transposes go with it.
// `batch` is the number that stands for a batch that is open: no multiple of it becomes a number of heads. 0: there is none.
void fuse_attention(Model& model, int64_t batch = 0);
// RotaryEmbedding from x * cos + rotated(x) * sin (graph/passes/fuse_rotary.cpp); before fuse_attention.
void fuse_rotary(Model& model);
// Products of one value with several constant matrices become one and a Split (graph/passes/merge_products.cpp), where each alone is
// small: `tiles` is the largest number of 128 x 128 blocks that its result may have.
struct MergeProductsOptions {
  int64_t tiles = 64;
};
// Joined matrices by their parts: one that outlives the pass is shared by all graphs that are made from one template.
using MergedWeights = std::map<std::vector<TensorPtr>, TensorPtr>;
void merge_products(Model& model, const MergeProductsOptions& options = {}, MergedWeights* kept = nullptr);
// Transposes that only move dimensions of 1 become Reshapes, which are views (graph/passes/recognise_for_devices.cpp).
void transposes_to_reshapes(Model& model);
// Attention that reads and writes through views (graph/device_operators.h), where that saves Transposes, Splits and the like
// (graph/passes/stride_attention.cpp).
void stride_attention(Model& model);
// Transposes of rows move across products to where attention can take them (graph/passes/turn_rows.cpp); before stride_attention.
void turn_rows(Model& model);
// Reshapes of a product's rows move behind the elementwise operators that follow, so that these can run with it
// (graph/passes/sink_reshapes.cpp).
void sink_reshapes(Model& model);
// Products read transposed matrices where they lie, and leave their results transposed (graph/passes/turn_products.cpp); before
// sink_reshapes.
void turn_products(Model& model);
// Rotary embeddings of neighbouring parts of one row become one (graph/passes/join_rotations.cpp); after merge_products.
void join_rotations(Model& model);
// All of them, in their order.
void recognise_for_devices(Model& model, MergedWeights* kept = nullptr);

}  // namespace fretsaw
