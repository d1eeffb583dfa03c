// Files that appear whole or not at all.
#pragma once
#include <string>

namespace fretsaw {

// A file under a temporary name beside its place. Unless it was put there it is removed.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string target);
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile();

  const std::string& path() const { return path_; }  // where to write
  void put_in_place();                               // renames; throws Error naming the target when that can't be done

 private:
  std::string target_, path_;
};

}  // namespace fretsaw
