// What `fretsaw check` finds in a file.
#pragma once
#include <string>
#include <vector>

#include "graph/io.h"

namespace fretsaw {

struct CheckedFile {
  std::vector<Finding> findings;
  std::vector<std::string> notes;  // of reading
};
// check_model of the file; a graph that can't be put together (a cycle, an undefined name) is a finding, too. Throws Error when the file
// can't be read or parsed.
CheckedFile check_file(const std::string& path);

}  // namespace fretsaw
