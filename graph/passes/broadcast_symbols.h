// Symbols for dimensions that operands broadcast to, where types don't say which operand has its size there: what is broadcast of the same
// symbols has the same symbol.
//
//   x [a, 4], y [b, 4]:   s = x + y is [u, 4];   s + x is [u, 4] too, not something else
//
// So it is because broadcasting is associative and commutative, and a size broadcast with itself stays: the result is what the set of the
// symbols that took part decides.
#pragma once
#include <functional>
#include <map>
#include <set>
#include <string>
#include <unordered_map>

#include "graph/ir.h"

namespace fretsaw {

class BroadcastSymbols {
 public:
  // The symbol of the dimension of output 0 that is `back` dimensions before the last. `fresh` makes a new one. "" where the operator's
  // operands don't broadcast, or one of their sizes has no symbol and is not 1.
  std::string find(const Node& node, size_t back, const std::function<std::string()>& fresh);

 private:
  std::map<std::set<std::string>, std::string> symbols_;              // those that took part -> the result's
  std::unordered_map<std::string, std::set<std::string>> took_part_;  // and back
};

}  // namespace fretsaw
