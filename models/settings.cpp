// Reading and checking model settings.
#include "models/settings.h"

#include "graph/errors.h"
#include "graph/passes.h"

namespace fretsaw {

const std::string* Settings::find(const std::string& key) {
  asked_.insert(key);
  auto it = values_.find(key);
  return it == values_.end() ? nullptr : &it->second;
}

void Settings::refuse(const std::string& key, const std::string& why) const {
  throw Error("model " + model_ + ": the setting '" + key + "' " + why, "see the keys with 'fretsaw model'", ErrorCode::usage);
}

int64_t Settings::number(const std::string& key, int64_t absent, int64_t most, int64_t least) {
  const std::string* text = find(key);
  if (!text) return absent;
  size_t used = 0;
  int64_t v = 0;
  try {
    v = std::stoll(*text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text->size() || v < least || v > most)
    refuse(key, "must be a number from " + std::to_string(least) + " to " + std::to_string(most) + ", not '" + *text + "'");
  return v;
}

Dim Settings::dimension(const std::string& key) {
  int64_t v = number(key, 0);
  return v > 0 ? Dim(v) : Dim(key);
}

DType Settings::dtype() {
  const std::string* text = find("dtype");
  if (!text || *text == "float32" || *text == "fp32") return DType::float32;
  if (*text == "float16" || *text == "fp16") return DType::float16;
  if (*text == "bfloat16" || *text == "bf16") return DType::bfloat16;
  if (*text == "float64") return DType::float64;
  refuse("dtype", "must be float32, float16, bfloat16 or float64, not '" + *text + "'");
}

uint64_t Settings::seed() {
  const std::string* text = find("seed");
  if (!text) return 0;
  try {
    size_t used = 0;
    uint64_t v = std::stoull(*text, &used);
    if (used == text->size()) return v;
  } catch (const std::exception&) {
  }
  refuse("seed", "must be a number, not '" + *text + "'");
}

int64_t Settings::opset() {
  constexpr int64_t kOldest = 17, kBfloat16 = 22;  // Conv and pooling take bfloat16 from 22 on
  const bool bfloat16 = dtype() == DType::bfloat16;
  const int64_t v = number("opset", bfloat16 ? kBfloat16 : 20, newest_opset(), kOldest);
  if (bfloat16 && v < kBfloat16)
    refuse("opset", "must be from " + std::to_string(kBfloat16) + " to " + std::to_string(newest_opset()) + " with dtype=bfloat16, not " +
                        std::to_string(v));
  return v;
}

void Settings::finish() const {
  for (const auto& [key, value] : values_)
    if (!asked_.count(key)) {
      std::string known;
      for (const std::string& k : asked_) known += (known.empty() ? "" : ", ") + k;
      throw Error("model " + model_ + " has no setting '" + key + "'", "it understands " + known, ErrorCode::usage);
    }
}

}  // namespace fretsaw
