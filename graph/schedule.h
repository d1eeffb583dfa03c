// Schedules are data: a list of actions for each rank, and a verifier that proves one sound.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace fretsaw {

// What a rank does, in the order of its list:
//   forward  waits for the receives of its micro-batch, then runs the stage's forward graph
//   recv     posts the receive of all values that `stage` takes from stage `peer`; it does not wait
//   send     starts sending all values that stage `peer` takes from `stage`; the buffers stay in use until the free
//   free     waits for the sends of the micro-batch, then drops what the stage kept for it
// A value that goes to another stage of the same rank needs no send and no receive.
struct Action {
  enum class Kind : uint8_t { forward, backward, weight, send, recv, reduce, step, free };
  Kind kind = Kind::forward;
  int stage = 0;  // the stage that acts: the sender of a send, the receiver of a recv
  int micro_batch = 0;
  int peer = -1;  // send: the stage it goes to; recv: the stage it comes from; else -1
  bool operator==(const Action&) const = default;
};
// "0F1" stage 0, forward, micro-batch 1; likewise B (backward), W (weight gradients), G (reduce gradients), U (optimizer step).
// "0S1>2" sends to stage 2; "2R1<0" receives from stage 0; "0D1" frees (drops) micro-batch 1.
std::string to_string(const Action& action);
Action parse_action(const std::string& text);  // throws Error

struct Schedule {
  std::string name;                        // "gpipe"
  std::vector<std::vector<Action>> ranks;  // one list a pipeline rank (ranks of other mesh axes follow the same list)
};

// What the schedule must respect: stage -> stages it needs values from (direct routes; skips included).
struct ScheduleProblem {
  int stages = 1;
  int micro_batches = 1;
  std::vector<std::vector<int>> needs;  // for each stage, ascending
  std::vector<int> rank_of_stage;       // -1: no graph has this number, and nothing needs it
};
// Throws Error naming the first action that is wrong: a value used before it is made, a send with no receive, a rendezvous
// deadlock (even if every send waited until its receive is posted), something done twice or never, something used after it was freed.
void verify(const Schedule& schedule, const ScheduleProblem& problem);

}  // namespace fretsaw
