// Parts of weights as a metadata entry.
#include "graph/value_parts.h"

#include <memory>
#include <nlohmann/json.hpp>

#include "graph/errors.h"

namespace fretsaw {
namespace {

using Json = nlohmann::json;
constexpr const char* kKey = "fretsaw.parts";

}  // namespace

void record_parts(Model& model) {
  Json parts = Json::object();
  for (const Value* v : model.graph->initializers()) {
    if (!v->part) continue;
    Json intervals = Json::array();
    for (const Interval& i : v->part->intervals) intervals.push_back({i.begin, i.end});
    parts[v->name] = {
        {"of", v->part->of}, {"dim", v->part->dim}, {"size", v->part->size}, {"intervals", intervals}, {"of_part", v->part->of_part}};
  }
  if (!parts.empty()) model.metadata[kKey] = parts.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::map<std::string, ValuePart> recorded_parts(const Model& model) {
  std::map<std::string, ValuePart> parts;
  const auto entry = model.metadata.find(kKey);
  if (entry == model.metadata.end()) return parts;
  try {
    const Json json = Json::parse(entry->second);
    for (const auto& [name, j] : json.items()) {
      ValuePart part{j.at("of").get<std::string>(), j.at("dim").get<int>(), j.at("size").get<int64_t>(), {}};
      part.of_part = j.value("of_part", false);
      for (const Json& i : j.at("intervals")) part.intervals.push_back({i.at(0).get<int64_t>(), i.at(1).get<int64_t>()});
      parts[name] = std::move(part);
    }
  } catch (const Json::exception& e) {
    throw Error(std::string("the metadata entry fretsaw.parts can't be read: ") + e.what(), "partition the model again")
        .in_file(model.path);
  }
  return parts;
}

}  // namespace fretsaw
