// Cutting a sequence of units into stages so that the slowest stage is as fast as it can be.
//
//   units    a  b  c  d          values  a->b 4 bytes, a->d 2, b->c 8, c->d 1
//   2 stages: |a b|c d| sends 8 + 2, |a b c|d| sends 1 + 2, |a|b c d| sends 4 + 2
//
// A stage's cost is its units' time and the time to send what later stages take from it. For a fixed end, cost and memory only shrink when
// the start moves right: so for a limit T, the best start for an end is the rightmost one that can be reached, one sweep finds all ends
// that can be reached with k stages, and a search over T finds the optimum in O(units * stages) a step.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

namespace fretsaw {

// A value that units after the one that makes it use.
struct CutValue {
  int made_by = 0, last_used_by = 0;  // units
  int64_t bytes = 0;
};
struct CutProblem {
  int stages = 1;
  std::vector<double> time_us;            // of each unit, in an order that is legal to run
  std::vector<std::vector<int>> weights;  // of each unit: numbers of weights, each once
  std::vector<int64_t> weight_bytes;      // of each weight
  std::vector<CutValue> values;
  double link_bytes_per_us = 1, link_latency_us = 0;
  std::optional<int64_t> memory_bytes;  // weights and the most activations alive at once, of each stage
};
struct StageCut {
  std::vector<int> ends;  // of each stage: one past its last unit
  double slowest_us = 0;  // time and sending of the slowest stage
};
// nullopt: no cut has so many stages, none of them empty, within the memory.
std::optional<StageCut> find_cut(const CutProblem& problem);
// The least memory for each stage with which a cut exists; stages must not exceed units.
int64_t least_memory_bytes(const CutProblem& problem);

}  // namespace fretsaw
