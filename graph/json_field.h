// Reading JSON that may be damaged: every value knows its place. Private to graph/.
#pragma once
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "graph/errors.h"

namespace fretsaw {

// Text as a JSON string, or where it is not UTF-8 as {"hex": "..."}.
nlohmann::ordered_json json_text(const std::string& text);

// A JSON value with its place, so that errors can say which field is wrong. All readers throw Error naming it.
class Field {
 public:
  Field(const nlohmann::ordered_json& json, std::string place) : json_(json), place_(std::move(place)) {}

  Field at(const char* key) const;  // which must be there
  bool has(const char* key) const { return json_.is_object() && json_.contains(key); }
  bool is_null() const { return json_.is_null(); }
  bool is_number() const { return json_.is_number_integer(); }
  std::vector<Field> items() const;
  int64_t integer(int64_t least, int64_t most = INT64_MAX) const;
  int small(int least) const { return static_cast<int>(integer(least, 1 << 24)); }
  double number() const;
  bool boolean() const;
  std::string text() const;  // as json_text() makes it
  std::vector<std::string> texts() const;
  std::map<std::string, int> integers() const;
  std::map<std::string, std::string> texts_by_key() const;
  Error wrong(const std::string& what) const;

 private:
  const nlohmann::ordered_json& json_;
  std::string place_;
};

}  // namespace fretsaw
