// JSON as the command prints it: fields in the order they were given, bad UTF-8 in names replaced.
#include "tools/json_output.h"

#include <cmath>
#include <cstdio>

namespace fretsaw {

std::string dump(const Json& object) {
  return object.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

void print_json(const Json& object) {
  const std::string text = dump(object) + "\n";
  std::fwrite(text.data(), 1, text.size(), stdout);
}

Json json_of(const Shape& shape) {
  Json out = Json::array();
  for (const Dim& dim : shape) {
    if (dim.known()) {
      out.push_back(dim.value);
    } else if (!dim.symbol.empty()) {
      out.push_back(dim.symbol);
    } else {
      out.push_back(nullptr);
    }
  }
  return out;
}

Json json_of(const Dims& dims) {
  return json_of(shape_of(dims));
}

std::string dtype_text(const Type& type) {
  return type.is_tensor() ? std::string(name_of(type.dtype)) : to_string(type);
}

Json json_of(const std::vector<CommunicationCount>& counts) {
  Json out = Json::array();
  for (const CommunicationCount& c : counts) out.push_back({{"op", c.op}, {"axis", c.axis}, {"count", c.count}, {"bytes", c.bytes}});
  return out;
}

Json json_of(const std::vector<RankReport>& ranks) {
  Json out = Json::array();
  for (const RankReport& r : ranks) {
    out.push_back({{"rank", r.rank},
                   {"stages", r.stages},
                   {"device", r.device},
                   {"weight_bytes", r.weight_bytes},
                   {"peak_bytes", r.peak_bytes},
                   {"busy_ms", r.busy_ms},
                   {"busy_share", std::isfinite(r.busy_share) ? r.busy_share : 0.0}});
    if (r.device != "cpu") out.back()["host_nodes"] = r.host_nodes;
  }
  return out;
}

}  // namespace fretsaw
