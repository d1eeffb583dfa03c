// The cache on disk: one file for each entry, named by the hash of its key, written under another name and renamed.
#include "kernels/cuda/disk_cache.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace fretsaw::cuda {
namespace {

namespace fs = std::filesystem;

// An empty path: there is no place for a cache.
fs::path cache_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return fs::path(value ? value : "");
  };
  if (const fs::path own = variable("FRETSAW_CACHE"); !own.empty()) return own;
  if (const fs::path shared = variable("XDG_CACHE_HOME"); !shared.empty()) return shared / "fretsaw";
  const fs::path home = variable("HOME");
  return home.empty() ? home : home / ".cache" / "fretsaw";
}

std::string digest(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

fs::path file_of(std::string_view kind, std::string_view key) {
  const fs::path folder = cache_folder();
  return folder.empty() ? folder : folder / std::string(kind) / digest(key);
}

}  // namespace

// A file is the content's digest, 32 characters, and the content: one that was cut short is found out.
std::optional<std::string> read_cache(std::string_view kind, std::string_view key) {
  const fs::path path = file_of(kind, key);
  if (path.empty()) return std::nullopt;
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.size() < 32) return std::nullopt;
  std::string content = text.substr(32);
  if (text.compare(0, 32, digest(content)) != 0) return std::nullopt;
  return content;
}

void write_cache(std::string_view kind, std::string_view key, std::string_view content) {
  static std::atomic<unsigned> count{0};
  const fs::path path = file_of(kind, key);
  if (path.empty()) return;
  std::error_code failed;
  fs::create_directories(path.parent_path(), failed);
  const fs::path draft = path.string() + fmt::format(".{}.{}", getpid(), count++);
  std::ofstream file(draft, std::ios::binary);
  file << digest(content) << content;
  file.close();
  if (file)
    fs::rename(draft, path, failed);
  else
    failed = std::make_error_code(std::errc::io_error);
  if (failed) fs::remove(draft, failed);
}

}  // namespace fretsaw::cuda
