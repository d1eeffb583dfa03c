// A schedule's timeline as text.
#pragma once
#include <string>
#include <vector>

#include "partitioner/simulate.h"

namespace fretsaw {

// One line a rank, of a schedule that trains with `forward` forward stages: a run is its letter (F forward, B backward, W weight
// gradients), its micro-batch and, where ranks have several chunks, the chunk's letter, with dashes for what it takes longer than the
// shortest run; blanks are idle time:
//   F0 F1       B0---- B1----
//      F0 B0---- F1 B1----
// Where that takes more than `most_columns`, runs are drawn to scale in so many columns, as their letters alone.
std::vector<std::string> schedule_picture(const Simulation& simulation, int forward, int micro_batches, size_t most_columns);

// A rank's timeline as one line of `width` columns: the micro-batch's last digit while it computes, dots while it waits.
std::string timeline(const SimulatedRank& rank, double time_us, size_t width);

}  // namespace fretsaw
