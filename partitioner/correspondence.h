// Which node and operand of a normalised graph stands for one of the source's: by the names of results, which rewrites keep.
//
//   source  Identity a -> b, MatMul b, w -> c       normalised  MatMul a, w -> c       MatMul's b is operand 0; Identity's a is, too
//   source  Sub, Pow, ... of one normalisation      normalised  LayerNormalization     what they take of x is operand 0
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

struct OperandPlace {
  bool output = false;
  size_t index = 0;
};

class Correspondence {
 public:
  Correspondence(const Graph& source, const Graph& normalised);

  // The node that makes one of the node's results, or where there is none the first after it whose result is left; null: none is.
  const Node* node_of(const Node* source) const;
  bool is_direct(const Node* source) const;  // makes one of its results
  // Where an operand of the source's node, by name, stands in `node_of` it: several places where it is used twice.
  std::vector<OperandPlace> places_of(const Node& source, const std::string& tensor) const;

 private:
  const Node* maker_of(const Node* source) const;
  std::unordered_map<std::string, const Node*> makers_;  // source name of a result -> node
  std::unordered_map<const Node*, const Node*> nodes_;   // of the source -> of the normalised graph
};

}  // namespace fretsaw
