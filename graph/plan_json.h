// plan.json as text: everything of a plan but its graphs' models. Private to graph/.
#pragma once
#include <string>

#include "graph/plan.h"

namespace fretsaw {

std::string plan_to_json(const Plan& plan);
// `graphs` have no models yet, and `initial` of a state that has one is a tensor whose bytes are missing. Throws Error naming the field
// that is missing or wrong.
Plan plan_from_json(const std::string& text);

}  // namespace fretsaw
