#include "graph/io/temporary_file.h"

#include <unistd.h>

#include <filesystem>

#include "graph/errors.h"

namespace fretsaw {

TemporaryFile::TemporaryFile(std::string target) : target_(std::move(target)), path_(target_ + ".part" + std::to_string(::getpid())) {}

TemporaryFile::~TemporaryFile() {
  std::error_code error;
  if (!path_.empty()) std::filesystem::remove(path_, error);
}

void TemporaryFile::put_in_place() {
  std::error_code error;
  std::filesystem::rename(path_, target_, error);
  if (error) throw Error("cannot be written: " + error.message(), "check the folder and its permissions").in_file(target_);
  path_.clear();
}

}  // namespace fretsaw
