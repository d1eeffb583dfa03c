// Where the command train is to write.
#include "tools/train_targets.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>

#include "graph/errors.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const std::string& target, const std::string& option, const std::string& why, const std::string& remedy) {
  throw Error(option + " cannot be written: " + why, remedy).in_file(target);
}

void check_writable(const fs::path& path, const std::string& target, const std::string& option) {
  if (::access(path.c_str(), W_OK) != 0)
    refuse(target, option, "'" + path.string() + "': " + std::strerror(errno), "check the permissions, or write elsewhere");
}

void check_file(const std::string& option, const std::string& target, const std::vector<std::string>& sources) {
  if (target.empty()) return;
  std::error_code error;
  const fs::path path(target), folder = path.parent_path().empty() ? fs::path(".") : path.parent_path();
  if (!fs::is_directory(folder, error))
    refuse(target, option, "there is no folder '" + folder.string() + "'", "make it, or write elsewhere");
  if (fs::is_directory(path, error)) refuse(target, option, "it is a folder", "name a file");
  check_writable(option == "--log" && fs::exists(path, error) ? path : folder, target, option);  // others get the name when they are whole
  for (const std::string& source : sources)
    for (const std::string& written : {target, target + ".data"})
      if (fs::exists(written, error) && fs::equivalent(written, source, error))
        refuse(target, option, "the model is read from '" + source + "'", "write to another file");
}

void check_folder(const std::string& option, const std::string& target) {
  if (target.empty()) return;
  std::error_code error;
  fs::path there = fs::absolute(target, error).lexically_normal();
  while (!fs::exists(there, error) && there.has_relative_path()) there = there.parent_path();
  if (!fs::is_directory(there, error)) refuse(target, option, "'" + there.string() + "' is no folder", "name a folder");
  check_writable(there, target, option);
}

}  // namespace

std::vector<std::string> files_of(const Model& model) {
  std::set<std::string> files = {model.path};
  for (const Value* v : model.graph->initializers())
    if (v->constant->file) files.insert(v->constant->file->path());
  files.erase("");
  return {files.begin(), files.end()};
}

void check_train_targets(const TrainSettings& s, const std::vector<std::string>& sources) {
  check_file("--export", s.export_path, sources);
  check_file("--trace", s.trace, sources);
  check_file("--log", s.log, sources);
  check_folder("--checkpoint", s.checkpoints);
  check_folder("--save-gradients", s.save_gradients);
}

}  // namespace fretsaw
