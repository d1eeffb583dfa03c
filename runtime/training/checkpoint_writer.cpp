// Writing checkpoints.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "graph/errors.h"
#include "runtime/training/boxes.h"
#include "runtime/training/checkpoint.h"
#include "runtime/training/durable_file.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::string folder_name(int64_t step) {
  return fmt::format("step-{:09}", step);
}

[[noreturn]] void fail(const std::string& path, const std::error_code& error) {
  throw Error("cannot be written: " + error.message(), "check the folder, its permissions and the disk's space").in_file(path);
}

// Where a checkpoint is put that is about to be removed: under a name that counts for nothing.
fs::path hidden_name(const fs::path& folder) {
  return folder.parent_path() / ("." + folder.filename().string() + ".part" + std::to_string(::getpid()) + ".removed");
}

// Puts `folder` at `place`; what was there is afterwards under the first name, or gone. Where a file system can't exchange them there is
// the old one, none, or the new one at any moment, each whole.
void put_in_place(const std::string& folder, const std::string& place) {
  std::error_code error;
  const fs::path aside = hidden_name(place);
  const bool replaces = fs::exists(place, error);
  if (replaces) {
#ifdef SYS_renameat2
    constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE, which not every libc names
    if (::syscall(SYS_renameat2, AT_FDCWD, folder.c_str(), AT_FDCWD, place.c_str(), kExchange) == 0) return;
#endif
    fs::remove_all(aside, error);
    fs::rename(place, aside, error);
    if (error) fail(place, error);
  }
  fs::rename(folder, place, error);
  if (error) {
    std::error_code ignored;
    if (replaces) fs::rename(aside, place, ignored);
    fail(place, error);
  }
  if (replaces) fs::remove_all(aside, error);
}

// Under another name first, so that a checkpoint is never there in part.
void remove_checkpoint(const std::string& folder) {
  std::error_code error;
  const fs::path path = fs::path(folder), hidden = hidden_name(path);
  fs::rename(path, hidden, error);
  fs::remove_all(error ? path : hidden, error);  // what stays behind does no harm
}

// The folders that writers of this process fill: a number of a process comes back, in containers at once.
class LiveFolders {
 public:
  void add(const std::string& folder) {
    const std::lock_guard lock(mutex_);
    folders_.insert(key_of(folder));
  }
  void remove(const std::string& folder) {
    const std::lock_guard lock(mutex_);
    folders_.erase(key_of(folder));
  }
  bool contains(const std::string& folder) {
    const std::lock_guard lock(mutex_);
    return folders_.contains(key_of(folder));
  }

 private:
  static std::string key_of(const std::string& folder) {
    std::error_code error;
    return fs::absolute(folder, error).lexically_normal().string();
  }
  std::mutex mutex_;
  std::set<std::string> folders_;
};
LiveFolders& live_folders() {
  static LiveFolders folders;
  return folders;
}

// What a writer that is not alive any more left: ".step-000000300.part4711".
bool is_left_over(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!name.starts_with(".step-")) return false;
  const size_t part = name.find(".part");
  if (part == std::string::npos) return false;
  const long pid = std::strtol(name.c_str() + part + 5, nullptr, 10);
  if (pid == ::getpid()) return !live_folders().contains(path.string());
  return pid > 0 && ::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
}

void remove_left_overs(const std::string& root) {
  std::error_code error;
  std::vector<fs::path> left;
  for (const auto& entry : fs::directory_iterator(root, error))
    if (is_left_over(entry.path())) left.push_back(entry.path());
  for (const fs::path& path : left) fs::remove_all(path, error);
}

// The folder and those above it that are not there, each of which is on the disk afterwards.
void make_folders(const fs::path& folder) {
  std::error_code error;
  if (folder.empty() || fs::is_directory(folder, error)) return;
  make_folders(folder.parent_path());
  if (!fs::create_directory(folder, error) && error) fail(folder.string(), error);
  sync_folder(folder.parent_path().string());
}

}  // namespace

CheckpointPiece whole_piece(std::string tensor, const TensorView& view) {
  const StoredTensor stored = stored_tensor(std::move(tensor), view);
  return {stored.name, stored.dtype, stored.dims, Dims(stored.dims.size(), 0), stored.dims, stored.data};
}

CheckpointWriter::CheckpointWriter(const std::string& root, const CheckpointState& state) : root_(root), state_(state) {
  if (state.step < 0) throw Error("a checkpoint of step " + std::to_string(state.step));
  static std::atomic<int> writers{0};
  folder_ = (fs::path(root) / fmt::format(".{}.part{}.{}", folder_name(state.step), ::getpid(), ++writers)).string();
  make_folders(fs::path(root).lexically_normal());
  live_folders().add(folder_);
  std::error_code error;
  fs::create_directory(folder_, error);
  if (!error) return;
  live_folders().remove(folder_);
  fail(root, error);
}

CheckpointWriter::~CheckpointWriter() {
  std::error_code error;
  fs::remove_all(folder_, error);
  live_folders().remove(folder_);
}

void CheckpointWriter::write(const std::string& name, const std::vector<CheckpointPiece>& pieces) {
  const std::string file = name + ".safetensors";
  std::set<std::string> keys;
  std::vector<StoredTensor> stored;
  for (const CheckpointPiece& piece : pieces) {
    std::string key = piece.tensor;
    for (int k = 1; !keys.insert(key).second; ++k) key = piece.tensor + "#" + std::to_string(k);  // another piece of the same tensor
    stored.push_back({key, piece.dtype, piece.shape, piece.data});
    const std::lock_guard lock(mutex_);
    add(file, key, piece);
  }
  {
    const std::lock_guard lock(mutex_);
    if (!files_.emplace(file, 0).second) throw Error("the checkpoint's file '" + file + "' is written twice");
  }
  const uint64_t bytes = write_safetensors((fs::path(folder_) / file).string(), std::move(stored));
  const std::lock_guard lock(mutex_);
  files_[file] = bytes;
}

void CheckpointWriter::add(const std::string& file, const std::string& key, const CheckpointPiece& piece) {
  Entry& entry = tensors_.try_emplace(piece.tensor, Entry{piece.dtype, piece.whole, {}}).first->second;
  if (entry.dtype != piece.dtype || entry.shape != piece.whole)
    throw Error("the tensor '" + piece.tensor + "' of a checkpoint has pieces of different types or shapes");
  if (!lies_in({piece.start, piece.shape}, piece.whole))
    throw Error("the tensor '" + piece.tensor + "' of a checkpoint has a piece that reaches beyond it");
  entry.pieces.push_back({file, key, piece.start, piece.shape});
}

std::string CheckpointWriter::manifest() const {
  Json files = Json::array(), tensors = Json::array();
  for (const auto& [name, bytes] : files_) files.push_back({{"name", name}, {"bytes", bytes}});
  for (const auto& [name, entry] : tensors_) {
    Json pieces = Json::array();
    std::vector<Box> boxes;
    for (const Piece& p : entry.pieces) {
      pieces.push_back({{"file", p.file}, {"key", p.key}, {"start", p.start}, {"shape", p.shape}});
      boxes.push_back({p.start, p.shape});
    }
    if (!covers_once(entry.shape, boxes)) throw Error("the tensor '" + name + "' of a checkpoint is not covered once by its pieces");
    tensors.push_back({{"name", name}, {"dtype", name_of(entry.dtype)}, {"shape", entry.shape}, {"pieces", std::move(pieces)}});
  }
  const Json json = {{"format", 1},
                     {"step", state_.step},
                     {"seed", state_.seed},
                     {"data", {{"epoch", state_.data.epoch}, {"sample", state_.data.sample}}},
                     {"more", state_.more.empty() ? Json::object() : Json(state_.more)},
                     {"files", std::move(files)},
                     {"tensors", std::move(tensors)}};
  try {
    return json.dump(1) + "\n";
  } catch (const Json::exception& e) {
    throw Error(std::string("the checkpoint's manifest can't be written: ") + e.what());
  }
}

std::string CheckpointWriter::commit(int keep) {
  const std::lock_guard lock(mutex_);
  const std::string text = manifest();
  DurableFile file((fs::path(folder_) / kManifestFile).string());
  file.write(text.data(), text.size());
  file.commit();
  const std::string place = (fs::path(root_) / folder_name(state_.step)).string();
  put_in_place(folder_, place);
  sync_folder(root_);
  if (keep > 0) {
    std::vector<std::string> all = list_checkpoints(root_);
    for (size_t i = 0; i + static_cast<size_t>(keep) < all.size(); ++i)
      if (all[i] != place) remove_checkpoint(all[i]);
  }
  remove_left_overs(root_);
  return place;
}

}  // namespace fretsaw
