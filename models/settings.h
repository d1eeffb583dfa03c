// The --set key=value settings of a model builder, checked.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>

#include "graph/types.h"

namespace fretsaw {

class Settings {
 public:
  Settings(std::string model, const std::map<std::string, std::string>& values) : model_(std::move(model)), values_(values) {}

  // The positive number of a key, or its default. Throws Error (usage) when it is no number from `least` to `most`.
  int64_t number(const std::string& key, int64_t absent, int64_t most = int64_t{1} << 31, int64_t least = 1);
  Dim dimension(const std::string& key);  // symbolic, named like the key, unless set
  DType dtype();                          // float32, float16, bfloat16 or float64
  uint64_t seed();
  int64_t opset();      // 17 to the newest this build knows; 20 unless set; with bfloat16 from 22
  void finish() const;  // throws Error naming a key that nothing asked for
  [[noreturn]] void refuse(const std::string& key, const std::string& why) const;

 private:
  const std::string* find(const std::string& key);

  std::string model_;
  const std::map<std::string, std::string>& values_;
  std::set<std::string> asked_;
};

}  // namespace fretsaw
