// Files that appear whole or not at all.
#pragma once
#include <string>

namespace fretsaw {

// Whether the path leads to a device, FIFO or socket: what is written to as it is.
bool is_stream(const std::string& path);
// The file that the path's symbolic links lead to, there or not; a stream keeps its path. Throws Error naming the path of links in a
// circle.
std::string end_of_links(const std::string& path);

// A file under a temporary name beside its place, which is that at the end of links. Unless it was put there it is removed.
// A stream has no other name: what is written goes there at once.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& target);
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile();

  const std::string& path() const { return path_; }  // where to write
  void put_in_place();                               // renames; throws Error naming the target when that can't be done

 private:
  std::string target_, place_, path_;
};

}  // namespace fretsaw
