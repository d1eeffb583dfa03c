// Texts and fields of JSON files.
#include "graph/json_field.h"

#include <fmt/format.h>

#include <cctype>

namespace fretsaw {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* kRemedy = "the plan is damaged or of another version; partition the model again";

bool is_utf8(const std::string& s) {
  for (size_t i = 0; i < s.size();) {
    auto c = static_cast<unsigned char>(s[i]);
    size_t more = c < 0x80 ? 0 : (c >= 0xC2 && c < 0xE0) ? 1 : (c >= 0xE0 && c < 0xF0) ? 2 : (c >= 0xF0 && c < 0xF5) ? 3 : 4;
    if (more == 4 || i + more >= s.size()) return false;
    uint32_t code = more == 0 ? c : c & (0x3Fu >> more);
    for (size_t k = 1; k <= more; ++k) {
      auto d = static_cast<unsigned char>(s[i + k]);
      if ((d & 0xC0) != 0x80) return false;
      code = code << 6 | (d & 0x3F);
    }
    if ((more == 2 && code < 0x800) || (more == 3 && (code < 0x10000 || code > 0x10FFFF)) || (code >= 0xD800 && code < 0xE000))
      return false;
    i += more + 1;
  }
  return true;
}

}  // namespace

Json json_text(const std::string& text) {
  if (is_utf8(text)) return text;
  std::string hex;
  for (char c : text) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return Json{{"hex", hex}};
}

Field Field::at(const char* key) const {
  if (!json_.is_object()) throw wrong("is no object");
  auto it = json_.find(key);
  if (it == json_.end()) throw Error(fmt::format("field '{}' is missing", place_.empty() ? key : place_ + "." + key), kRemedy);
  return {*it, place_.empty() ? key : place_ + "." + key};
}

std::vector<Field> Field::items() const {
  if (!json_.is_array()) throw wrong("is no list");
  std::vector<Field> list;
  for (size_t i = 0; i < json_.size(); ++i) list.emplace_back(json_[i], fmt::format("{}[{}]", place_, i));
  return list;
}

int64_t Field::integer(int64_t least, int64_t most) const {
  if (!json_.is_number_integer() || (json_.is_number_unsigned() && json_.get<uint64_t>() > uint64_t{INT64_MAX}))
    throw wrong("is no integer");
  auto v = json_.get<int64_t>();
  if (v < least || v > most) throw wrong(fmt::format("is {}, which is out of range", v));
  return v;
}

double Field::number() const {
  if (!json_.is_number()) throw wrong("is no number");
  return json_.get<double>();
}

bool Field::boolean() const {
  if (!json_.is_boolean()) throw wrong("is neither true nor false");
  return json_.get<bool>();
}

std::string Field::text() const {
  if (json_.is_string()) return json_.get<std::string>();
  if (!has("hex") || !json_["hex"].is_string()) throw wrong("is no text");
  const auto& hex = json_["hex"].get_ref<const std::string&>();
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size() + 1; i += 2) {
    if (i + 1 >= hex.size() || !std::isxdigit(static_cast<unsigned char>(hex[i])) || !std::isxdigit(static_cast<unsigned char>(hex[i + 1])))
      throw wrong("is no text");
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

std::vector<std::string> Field::texts() const {
  std::vector<std::string> list;
  for (const Field& f : items()) list.push_back(f.text());
  return list;
}

std::map<std::string, int> Field::integers() const {
  if (!json_.is_object()) throw wrong("is no object");
  std::map<std::string, int> found;
  for (auto it = json_.begin(); it != json_.end(); ++it) found[it.key()] = Field(it.value(), place_ + "." + it.key()).small(0);
  return found;
}

std::map<std::string, std::string> Field::texts_by_key() const {
  if (!json_.is_object()) throw wrong("is no object");
  std::map<std::string, std::string> found;
  for (auto it = json_.begin(); it != json_.end(); ++it) found[it.key()] = Field(it.value(), place_ + "." + it.key()).text();
  return found;
}

Error Field::wrong(const std::string& what) const {
  return Error(fmt::format("field '{}' {}", place_, what), kRemedy);
}

}  // namespace fretsaw
