// That the parts of a plan which was read fit together. All throw Error naming the field that is wrong. Private to graph/.
#pragma once
#include "graph/plan.h"

namespace fretsaw {

// Numbers and kinds of graphs, as PlanGraph says; sizes and cuts of states. Needs no models.
void check_numbers(const Plan& plan);
// That the schedule respects what needs what, and does each graph of a step's end once. After check_numbers().
void check_schedule(const Plan& plan);
// That inputs, outputs, routes and states name values that the graphs have, and graphs take nothing else.
void check_references(const Plan& plan);

}  // namespace fretsaw
