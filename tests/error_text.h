// What an error says.
#pragma once
#include <functional>
#include <string>

#include "graph/errors.h"

namespace fretsaw::testing_files {

// The message of the Error that `call` ends with; "" where it ends without one.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace fretsaw::testing_files
