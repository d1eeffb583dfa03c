// Files that are on the disk, whole, or not there.
#pragma once
#include <cstddef>
#include <memory>
#include <string>

#include "graph/io/temporary_file.h"

namespace fretsaw {

// A file under a temporary name beside its place; `commit` puts it there once its bytes are on the disk. All throw Error naming the file.
class DurableFile {
 public:
  explicit DurableFile(const std::string& path);
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;
  ~DurableFile();

  void write(const void* bytes, size_t count);
  void commit();  // fsync, rename, fsync of the folder

 private:
  std::string path_;
  TemporaryFile temporary_;
  int file_ = -1;
};

void sync_folder(const std::string& folder);  // names in it, new or gone, are on the disk

}  // namespace fretsaw
