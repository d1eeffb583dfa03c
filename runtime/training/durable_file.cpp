// Files that are on the disk, whole, or not there.
#include "runtime/training/durable_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "graph/errors.h"

namespace fretsaw {
namespace {

constexpr size_t kLargestWrite = size_t{1} << 30;  // Linux writes 2 GiB at most at once

[[noreturn]] void fail(const std::string& path) {
  throw Error(std::string("cannot be written: ") + std::strerror(errno), "check the folder, its permissions and the disk's space")
      .in_file(path);
}

}  // namespace

DurableFile::DurableFile(const std::string& path) : path_(path), temporary_(path) {
  file_ = ::open(temporary_.path().c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) fail(path_);
}

DurableFile::~DurableFile() {
  if (file_ >= 0) ::close(file_);
}

void DurableFile::write(const void* bytes, size_t count) {
  const auto* at = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t written = ::write(file_, at, std::min(count, kLargestWrite));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path_);
    at += written;
    count -= static_cast<size_t>(written);
  }
}

void DurableFile::commit() {
  if (::fsync(file_) != 0) fail(path_);
  if (::close(std::exchange(file_, -1)) != 0) fail(path_);
  temporary_.put_in_place();
  sync_folder(std::filesystem::path(path_).parent_path().string());
}

void sync_folder(const std::string& folder) {
  const std::string path = folder.empty() ? "." : folder;
  const int file = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) fail(path);
  const int result = ::fsync(file);
  const int error = errno;
  ::close(file);
  errno = error;
  if (result != 0 && error != EINVAL) fail(path);  // EINVAL: a file system that can't
}

}  // namespace fretsaw
