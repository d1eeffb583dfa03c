// The file of --log: a line of JSON for each step.
#include "tools/train_log.h"

#include <cerrno>
#include <cstring>

#include "graph/errors.h"

namespace fretsaw {

TrainLog::TrainLog(const std::string& path, bool append) : path_(path) {
  if (path.empty()) return;
  file_.reset(std::fopen(path.c_str(), append ? "a" : "w"));
  if (!file_) fail();
}

void TrainLog::write(const Json& line) {
  if (!file_) return;
  const std::string text = line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size() || std::fflush(file_.get()) != 0) fail();
}

void TrainLog::fail() const {
  const std::string reason = errno != 0 ? std::string(": ") + std::strerror(errno) : "";
  throw Error("cannot be written" + reason, "check --log, its permissions and the disk's space").in_file(path_);
}

}  // namespace fretsaw
