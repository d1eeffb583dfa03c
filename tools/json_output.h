// JSON as the command prints it: fields in the order they were given, bad UTF-8 in names replaced.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "graph/types.h"
#include "runtime/session.h"

namespace fretsaw {

using Json = nlohmann::ordered_json;

void print_json(const Json& object);  // to stdout
std::string dump(const Json& object);
Json json_of(const Shape& shape);  // numbers, symbols as strings, null for unknown dimensions
Json json_of(const Dims& dims);
std::string dtype_text(const Type& type);  // "float32", or "seq(float32[?])" for what is no tensor
Json json_of(const std::vector<CommunicationCount>& counts);
Json json_of(const std::vector<RankReport>& ranks);

}  // namespace fretsaw
