// What a plan holds and costs: the counts behind `inspect PLAN` and `partition`.
#pragma once
#include "graph/plan.h"
#include "tools/json_output.h"

namespace fretsaw {

// The object of the CLI contract.
Json plan_json(const Plan& plan);
// The same as tables for people, to stdout.
void print_plan(const Plan& plan);

}  // namespace fretsaw
