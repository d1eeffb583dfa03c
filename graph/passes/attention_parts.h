// The parts that fuse_attention.cpp puts together: what stands between the two matrix products, and the masks found there. Private to
// graph/passes.
#pragma once
#include <map>
#include <optional>
#include <vector>

#include "graph/passes/rewrite.h"
#include "graph/passes/strided_view.h"

namespace fretsaw {

// One mask on the way from the scores to the softmax.
struct MaskPart {
  enum class Kind { added, allowed, refused };
  Kind kind = Kind::added;
  Value* value = nullptr;  // added: floats; allowed, refused: booleans that are true where a key may, or may not, be attended
  double factor = 1;       // of what is added
  double fill = 0;         // what scores become where a key is not allowed
  Dims scores;             // [..., S, T]: the dimensions of the scores where the mask meets them
  bool operator==(const MaskPart&) const = default;
};

// probabilities [..., S, T] = softmax(cap(scale * product) + masks), with nothing else using what lies between.
struct AttentionScores {
  Node* product = nullptr;  // MatMul of queries and transposed keys
  double scale = 1;
  double softcap = 0;             // 0: none
  bool float32_softmax = false;   // the softmax's input was cast to float32
  std::vector<MaskPart> masks;    // the last first
  std::vector<Node*> nodes;       // everything between, the product too
  std::optional<Dims> four_dims;  // of a value on the way that has the form [B, H, S, T]
};
// Nullopt when `probabilities`, the first input of `user`, is no such thing.
std::optional<AttentionScores> find_scores(Value* probabilities, Node& user, const Uses& uses);

// The sizes of one attention: batches, heads, queries, keys.
struct ScoreSizes {
  int64_t B = 1, H = 1, S = 1, T = 1;
  DType dtype = DType::float32;  // of queries, keys and values
};
// A mask as the operator takes it.
struct AttentionMask {
  Value* value = nullptr;  // null: none
  bool causal = false;
};

// Makes the masks of one graph; what several layers share is made once.
class MaskMaker {
 public:
  explicit MaskMaker(Rewriter& edit) : edit_(edit) {}
  // Nullopt when they can't be said in the operator's terms.
  std::optional<AttentionMask> make(const std::vector<MaskPart>& parts, const ScoreSizes& sizes);

 private:
  struct Pieces {
    bool causal = false;
    std::vector<Value*> allowed, added;  // four dimensions or fewer, in the element type of the queries
  };
  struct Known {
    std::vector<MaskPart> parts;
    ScoreSizes sizes;
    std::optional<AttentionMask> mask;
  };
  bool take(MaskPart part, const ScoreSizes& sizes, Pieces& pieces);
  bool take_constant(const MaskPart& part, const Dims& dims, const ScoreSizes& sizes, Pieces& pieces);
  Value* added_value(const MaskPart& part, const Dims& dims, DType dtype);
  Value* shaped(Value* value, const Dims& dims);
  Value* add(const std::string& op, std::vector<Value*> inputs, Type type, std::vector<Attribute> attributes = {});
  Value* number(double x, DType dtype);
  std::optional<AttentionMask> make_new(const std::vector<MaskPart>& parts, const ScoreSizes& sizes);

  Rewriter& edit_;
  std::vector<Known> known_;
};

}  // namespace fretsaw
