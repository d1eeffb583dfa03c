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

// Puts `folder` at `place`; what was there is afterwards under the first name, or gone.
void put_in_place(const std::string& folder, const std::string& place) {
  std::error_code error;
  if (fs::exists(place, error)) {
#ifdef SYS_renameat2
    constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE, which not every libc names
    if (::syscall(SYS_renameat2, AT_FDCWD, folder.c_str(), AT_FDCWD, place.c_str(), kExchange) == 0) return;
#endif
    fs::remove_all(place, error);  // a file system that can't exchange
    if (error) fail(place, error);
  }
  fs::rename(folder, place, error);
  if (error) fail(place, error);
}

// Under another name first, so that a checkpoint is never there in part.
void remove_checkpoint(const std::string& folder) {
  std::error_code error;
  const fs::path path = fs::path(folder);
  const fs::path hidden = path.parent_path() / ("." + path.filename().string() + ".part" + std::to_string(::getpid()) + ".removed");
  fs::rename(path, hidden, error);
  fs::remove_all(error ? path : hidden, error);  // what stays behind does no harm
}

// What a writer that is not alive any more left: ".step-000000300.part4711".
bool is_left_over(const std::string& name) {
  if (!name.starts_with(".step-")) return false;
  const size_t part = name.find(".part");
  if (part == std::string::npos) return false;
  const long pid = std::strtol(name.c_str() + part + 5, nullptr, 10);
  return pid > 0 && ::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
}

void remove_left_overs(const std::string& root) {
  std::error_code error;
  std::vector<fs::path> left;
  for (const auto& entry : fs::directory_iterator(root, error))
    if (is_left_over(entry.path().filename().string())) left.push_back(entry.path());
  for (const fs::path& path : left) fs::remove_all(path, error);
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
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) fail(folder_, error);
}

CheckpointWriter::~CheckpointWriter() {
  std::error_code error;
  fs::remove_all(folder_, error);
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
  DurableFile file((fs::path(folder_) / "manifest.json").string());
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
