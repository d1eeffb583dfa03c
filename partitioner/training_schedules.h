// Orders of forward and backward passes, and what is known of each: the time that ranks idle and what they keep.
#pragma once
#include <string>
#include <vector>

#include "graph/schedule.h"

namespace fretsaw {

// The plan's graphs as a schedule sees them. With n forward stages over P pipeline ranks, of V = n / P chunks each:
//   k           forward graph of stage k
//   2 n - 1 - k its backward graph; with weight gradients apart, what earlier stages wait for
//   3 n - 1 - k its weight gradients, where they are apart ("W" below); a stage that has none has rank -1 in `problem.rank_of_stage`
// Rank k % P runs all three.
struct TrainingProblem {
  ScheduleProblem problem;  // of 2 n or 3 n stages
  int forward = 1;          // n
};
// The pipeline rank that runs the graph of this number.
int rank_of_training_stage(int number, int forward, int ranks);
// The letter F, B or W of a graph's number.
char letter_of_training_stage(int number, int forward);
// The problem of a plain chain: each forward stage takes values of the one before it, each backward graph of its forward graph and of the
// backward graph after it, and weight gradients of both graphs of their stage.
TrainingProblem training_chain(int ranks, int chunks, int micro_batches, bool weights_apart);

// The schedules, on rank r of P with M micro-batches and V chunks. All run the micro-batches of a graph in their order, and any schedule
// may have W apart: those that do not speak of it run W right after B.
//
//   gpipe           all micro-batches forward, chunk by chunk, then all backward.
//   1f1b            P - 1 - r forward, then one forward and one backward in turns, then the backward ones that are left. One chunk.
//   interleaved     one forward and one backward in turns over chunks: groups of P micro-batches pass through all chunks, and
//                   2 (P - 1 - r) + (V - 1) P chunks run forward first (Narayanan et al. 2021, Megatron-LM). With one chunk it is 1f1b.
//                   Where P does not divide M, the order is that of the next multiple with the micro-batches that there are not left out:
//                   ranks idle in the last group as if it were full, and the step takes no longer than with 1f1b.
//   zero-bubble-h1  P - r forward, then B and forward in turns; W comes r micro-batches after its B, so that all ranks keep P of
//                   them, as rank 0 of 1f1b does (Qi et al. 2023). One chunk.
//   zero-bubble-h2  as h1 with 2 (P - r) - 1 forward first and W 2 r micro-batches after its B: all ranks keep up to 2 P - 1. One chunk.
//
// With fewer micro-batches than an order starts with, all are run forward first. Weight gradients that another rank's need (of a parameter
// that stages share) come right after their B in every schedule, which costs the zero-bubble ones time: they are better made in B.
//
// The lists pass verify(): they have no rendezvous deadlock. Throws Error for another name, for chunks where a schedule takes one, and for
// a problem that is not numbered as above.
Schedule make_training_schedule(const std::string& name, const TrainingProblem& problem);

// What one micro-batch takes on a rank, all its chunks together; `weight` is 0 where `backward` holds the weight gradients.
struct TrainingTimes {
  double forward_us = 1, backward_us = 1, weight_us = 1;
  double sum_us() const { return forward_us + backward_us + weight_us; }
};
// What the papers say, where values move at once. A step takes M (F + B + W) + idle_us: from a rank's first run to its last, for the rank
// where that is longest, as steps that follow one another overlap.
//
//   gpipe, 1f1b      (P - 1) (F + B + W)
//   interleaved      (P - 1) (F + B + W) / V          exact where P divides M
//   zero-bubble-h1   (P - 1) (F + B - W)              exact for M >= P; where W > F: (P - 1) B
//   zero-bubble-h2   (P - 1) (F + B - 2 W)            exact for M >= 2 P - 1; not below 0 or (P - 1) (B - F)
//
// The cases W > F and B > F are ours: the papers take the three as about equal.
struct ScheduleFormula {
  double idle_us = 0;
  bool exact = true;                // else the step is no longer than with 1f1b
  std::vector<int> peak_of_rank{};  // the most chunks of micro-batches that are alive, from F to the end of B and W
};
ScheduleFormula schedule_formula(const std::string& name, int ranks, int chunks, int micro_batches, const TrainingTimes& times);

}  // namespace fretsaw
