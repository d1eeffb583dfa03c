#include "graph/io/temporary_file.h"

#include <unistd.h>

#include <filesystem>

#include "graph/errors.h"

namespace fretsaw {
namespace fs = std::filesystem;

bool is_stream(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  return fs::exists(status) && !fs::is_regular_file(status) && !fs::is_directory(status);
}

std::string end_of_links(const std::string& path) {
  constexpr int kMostLinks = 40;  // as many as Linux follows
  if (is_stream(path)) return path;
  fs::path end = path;
  std::error_code error;
  for (int i = 0; fs::is_symlink(end, error); ++i) {
    if (i == kMostLinks) throw Error("is a symbolic link that leads to no end", "remove it, or write elsewhere").in_file(path);
    end = end.parent_path() / fs::read_symlink(end, error);
  }
  return end.string();
}

TemporaryFile::TemporaryFile(const std::string& target)
    : target_(target), place_(end_of_links(target)), path_(is_stream(place_) ? place_ : place_ + ".part" + std::to_string(::getpid())) {}

TemporaryFile::~TemporaryFile() {
  std::error_code error;
  if (!path_.empty() && path_ != place_) fs::remove(path_, error);
}

void TemporaryFile::put_in_place() {
  if (path_ == place_) return;
  std::error_code error;
  fs::rename(path_, place_, error);
  if (error) throw Error("cannot be written: " + error.message(), "check the folder and its permissions").in_file(target_);
  path_.clear();
}

}  // namespace fretsaw
