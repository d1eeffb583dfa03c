// Where the command train is to write.
#include "tools/train_targets.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>

#include "graph/errors.h"
#include "graph/io/temporary_file.h"
#include "tools/run_files.h"

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

void check_file(const std::string& option, const std::string& target) {
  if (target.empty()) return;
  std::error_code error;
  const fs::path path = end_of_links(target), folder = path.parent_path().empty() ? fs::path(".") : path.parent_path();
  if (!fs::is_directory(folder, error))
    refuse(target, option, "there is no folder '" + folder.string() + "'", "make it, or write elsewhere");
  if (fs::is_directory(path, error)) refuse(target, option, "it is a folder", "name a file");
  const bool in_place = is_stream(target) || (option == "--log" && fs::exists(path, error));  // others get the name when they are whole
  check_writable(in_place ? path : folder, target, option);
}

void check_folder(const std::string& option, const std::string& target) {
  if (target.empty()) return;
  std::error_code error;
  fs::path there = fs::absolute(target, error).lexically_normal();
  while (!fs::exists(there, error) && there.has_relative_path()) there = there.parent_path();
  if (!fs::is_directory(there, error)) refuse(target, option, "'" + there.string() + "' is no folder", "name a folder");
  check_writable(there, target, option);
}

// --- what would be written over ---

struct Output {
  std::string option, path;
  fs::path place;  // whole, without links
};

fs::path place_of(const std::string& path) {
  std::error_code error;
  fs::path whole = fs::absolute(end_of_links(path), error);
  if (const fs::path known = fs::weakly_canonical(whole, error); !error) whole = known;
  return whole.has_filename() ? whole : whole.parent_path();
}

std::vector<Output> outputs_of(const TrainSettings& s) {
  std::vector<Output> outputs;
  for (const auto& [option, path] : {std::pair<std::string, std::string>{"--export", s.export_path},
                                     {"--export", s.export_path.empty() ? "" : s.export_path + ".data"},
                                     {"--trace", s.trace},
                                     {"--log", s.log},
                                     {"--checkpoint", s.checkpoints},
                                     {"--save-gradients", s.save_gradients},
                                     {"--save-plan", s.save_plan}})
    if (!path.empty() && !is_stream(path)) outputs.push_back({option, path, place_of(path)});
  return outputs;
}

bool is_same(const fs::path& a, const fs::path& b) {
  std::error_code error;
  return a == b || fs::equivalent(a, b, error);
}

// Whether the output is that file, or a folder in which a file of that name is its own. Checkpoints keep to folders of their own in theirs.
bool takes(const Output& output, const fs::path& file) {
  if (is_same(output.place, file)) return true;
  if (output.option == "--save-gradients") return file.parent_path() == output.place && is_numbered(file.filename().string(), "");
  if (output.option != "--save-plan") return false;
  return std::mismatch(output.place.begin(), output.place.end(), file.begin(), file.end()).first == output.place.end();
}

// A file, or those in a folder whose names end in one of `endings`; without any, all of them.
void add_files(const std::string& path, const std::set<std::string>& endings, std::vector<std::string>& files) {
  std::error_code error;
  if (fs::is_regular_file(path, error)) files.push_back(path);
  for (const auto& entry : fs::directory_iterator(path, error))
    if (entry.is_regular_file(error) && (endings.empty() || endings.contains(entry.path().extension().string())))
      files.push_back(entry.path().string());
}

void refuse_to_take(const std::vector<std::string>& files, const std::string& what, const std::vector<Output>& outputs) {
  if (outputs.empty()) return;
  for (const std::string& file : files)
    for (const fs::path place = place_of(file); const Output& output : outputs)
      if (takes(output, place)) refuse(output.path, output.option, what + " is read from '" + file + "'", "write elsewhere");
}

void refuse_same_places(const std::vector<Output>& outputs) {
  for (const Output& one : outputs)
    for (const Output& other : outputs)
      if (one.option != other.option && takes(other, one.place))
        refuse(one.path, one.option, other.option + " writes there too", "write elsewhere");
}

}  // namespace

std::vector<std::string> files_of(const Model& model) {
  std::set<std::string> files = {model.path};
  for (const Value* v : model.graph->initializers())
    if (v->constant->file) files.insert(v->constant->file->path());
  files.erase("");
  return {files.begin(), files.end()};
}

void check_train_targets(const TrainSettings& s, std::vector<std::string> sources) {
  check_file("--export", s.export_path);
  check_file("--trace", s.trace);
  check_file("--log", s.log);
  check_folder("--checkpoint", s.checkpoints);
  check_folder("--save-gradients", s.save_gradients);
  std::vector<Output> outputs = outputs_of(s);
  refuse_same_places(outputs);
  std::vector<std::string> data;
  for (const std::string& path : {s.data, s.eval}) add_files(path, {".pb", ".npy", ".bin"}, data);
  refuse_to_take(data, "the data", outputs);
  std::erase_if(outputs, [](const Output& output) { return output.option == "--save-plan"; });  // writing a plan looks at it
  add_files(s.path, {}, sources);
  refuse_to_take(sources, "the model", outputs);
}

}  // namespace fretsaw
