#include "graph/passes/broadcast_symbols.h"

#include <unordered_set>

namespace fretsaw {
namespace {

// Operators all of whose inputs broadcast to their one output.
bool broadcasts(const Node& node) {
  static const std::unordered_set<std::string> operators = {"Add",
                                                            "Sub",
                                                            "Mul",
                                                            "Div",
                                                            "Pow",
                                                            "Mod",
                                                            "Min",
                                                            "Max",
                                                            "Sum",
                                                            "Mean",
                                                            "Where",
                                                            "And",
                                                            "Or",
                                                            "Xor",
                                                            "Less",
                                                            "Equal",
                                                            "Greater",
                                                            "LessOrEqual",
                                                            "GreaterOrEqual",
                                                            "BitShift"};
  return node.domain.empty() && operators.contains(node.op);
}

}  // namespace

std::string BroadcastSymbols::find(const Node& node, size_t back, const std::function<std::string()>& fresh) {
  if (!broadcasts(node)) return "";
  std::set<std::string> symbols;
  for (const Value* v : node.inputs) {
    if (!v || !v->type.is_tensor() || !v->type.shape) return "";
    const Shape& shape = *v->type.shape;
    if (back >= shape.size()) continue;
    const Dim& d = shape[shape.size() - 1 - back];
    if (d.value == 1) continue;
    if (d.known() || d.symbol.empty()) return "";
    const auto it = took_part_.find(d.symbol);
    if (it == took_part_.end())
      symbols.insert(d.symbol);
    else
      symbols.insert(it->second.begin(), it->second.end());
  }
  if (symbols.size() < 2) return symbols.empty() ? "" : *symbols.begin();
  std::string& symbol = symbols_[symbols];
  if (symbol.empty()) {
    symbol = fresh();
    took_part_[symbol] = symbols;
  }
  return symbol;
}

}  // namespace fretsaw
