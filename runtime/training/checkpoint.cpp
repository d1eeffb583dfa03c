// Reading checkpoints, and finding them.
#include "runtime/training/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "graph/errors.h"
#include "runtime/training/boxes.h"

namespace fretsaw {

namespace fs = std::filesystem;
using Json = nlohmann::json;

namespace {

constexpr const char* kDamaged = "remove this checkpoint, or name another one's folder";

DType dtype_named(const std::string& name) {
  for (int i = 1; i <= static_cast<int>(DType::int2); ++i)
    if (name_of(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  throw Error("names an element type '" + name + "' that is not known");
}

// The step in "step-000000200"; nullopt for other names.
std::optional<int64_t> step_of(const std::string& name) {
  constexpr std::string_view kStart = "step-";
  int64_t step = 0;
  if (!name.starts_with(kStart)) return std::nullopt;
  const char* end = name.data() + name.size();
  const auto [read, error] = std::from_chars(name.data() + kStart.size(), end, step);
  return error == std::errc() && read == end && step >= 0 ? std::optional(step) : std::nullopt;
}

// A field that must be a number from 0 on.
int64_t count_at(const Json& json, const std::string& field) {
  const Json& value = json.at(field);
  if (!value.is_number_unsigned() || value.get<uint64_t>() > INT64_MAX) throw Error("has a damaged field '" + field + "': " + value.dump());
  return value.get<int64_t>();
}

Json read_json(const std::string& path) {
  std::error_code error;
  if (!fs::exists(path, error)) throw Error("is missing: the checkpoint is not complete");
  const auto file = MappedFile::open(path);
  const auto* text = reinterpret_cast<const char*>(file->bytes().data());
  return Json::parse(text, text + file->bytes().size());
}

// "key 'step' not found", without the library's "[json.exception.out_of_range.403] " before it.
std::string what_of(const Json::exception& e) {
  const std::string text = e.what();
  const size_t end = text.find("] ");
  return end == std::string::npos ? text : text.substr(end + 2);
}

// The folders in `root` that are named as checkpoints, by step.
std::vector<std::string> step_folders(const std::string& root) {
  std::vector<std::pair<int64_t, std::string>> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root, error))
    if (const auto step = step_of(entry.path().filename().string())) found.emplace_back(*step, entry.path().string());
  std::sort(found.begin(), found.end());
  std::vector<std::string> folders;
  for (auto& [step, folder] : found) folders.push_back(std::move(folder));
  return folders;
}

bool has_manifest(const std::string& folder) {
  std::error_code error;
  return fs::exists(fs::path(folder) / kManifestFile, error);
}

}  // namespace

// Reads a manifest, field by field. Json's own errors name the field that is missing or of the wrong type.
class ManifestReader {
 public:
  explicit ManifestReader(Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  void read(const Json& json) {
    const int64_t format = count_at(json, "format");
    if (format != 1) throw Error("has the format " + std::to_string(format), "this version of fretsaw reads format 1");
    checkpoint_.state_.step = count_at(json, "step");
    if (!json.at("seed").is_number_unsigned()) throw Error("has a damaged field 'seed': " + json.at("seed").dump());
    checkpoint_.state_.seed = json.at("seed").get<uint64_t>();
    checkpoint_.state_.data = {count_at(json.at("data"), "epoch"), count_at(json.at("data"), "sample")};
    checkpoint_.state_.more = json.at("more").get<std::map<std::string, std::string>>();
    for (const Json& file : json.at("files")) add_file(file.at("name").get<std::string>(), file.at("bytes").get<uint64_t>());
    for (const Json& tensor : json.at("tensors")) add_tensor(tensor);
  }

 private:
  void add_file(const std::string& name, uint64_t bytes) {
    if (name.empty() || name.find('/') != std::string::npos) throw Error("names a file '" + name + "' that is not in its folder");
    const std::string path = (fs::path(checkpoint_.folder_) / name).string();
    std::error_code error;
    const uint64_t size = fs::file_size(path, error);
    if (error) throw Error("is missing: the checkpoint is not complete").in_file(path);
    if (size != bytes)
      throw Error("has " + std::to_string(size) + " bytes for " + std::to_string(bytes) + ": the checkpoint is not complete").in_file(path);
    files_[name] = read_safetensors(path);
  }

  void add_tensor(const Json& json) {
    const auto name = json.at("name").get<std::string>();
    Checkpoint::Entry entry{dtype_named(json.at("dtype").get<std::string>()), json.at("shape").get<Dims>(), {}};
    std::vector<Box> boxes;
    for (const Json& piece : json.at("pieces")) {
      const Box box{piece.at("start").get<Dims>(), piece.at("shape").get<Dims>()};
      const TensorPtr tensor = find(piece.at("file").get<std::string>(), piece.at("key").get<std::string>());
      if (tensor->dtype != entry.dtype || tensor->dims != box.shape || !lies_in(box, entry.shape))
        throw Error("does not fit what the files have of the tensor '" + name + "'");
      entry.pieces.push_back({tensor, box.start});
      boxes.push_back(box);
    }
    if (!covers_once(entry.shape, boxes)) throw Error("has not every part of the tensor '" + name + "' once");
    if (!checkpoint_.tensors_.emplace(name, std::move(entry)).second) throw Error("has the tensor '" + name + "' twice");
  }

  TensorPtr find(const std::string& file, const std::string& key) const {
    const auto known = files_.find(file);
    if (known == files_.end()) throw Error("speaks of a file '" + file + "' that it does not list");
    const auto tensor = known->second.tensors.find(key);
    if (tensor == known->second.tensors.end()) throw Error("speaks of a tensor '" + key + "' that is not in '" + file + "'");
    return tensor->second;
  }

  Checkpoint& checkpoint_;
  std::map<std::string, SafetensorsFile> files_;
};

Checkpoint Checkpoint::open(const std::string& folder) {
  const std::string path = (fs::path(folder) / kManifestFile).string();
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  try {
    ManifestReader(checkpoint).read(read_json(path));
  } catch (const Json::parse_error&) {
    throw Error("is damaged: it is cut off, or no JSON", kDamaged).in_file(path);
  } catch (const Json::exception& e) {
    throw Error("is damaged: " + what_of(e), kDamaged).in_file(path);
  } catch (const Error& e) {
    throw(e.remedy().empty() ? Error(e.problem(), kDamaged, e.code()).in_file(e.file()) : e).in_file(path);
  }
  return checkpoint;
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : tensors_) names.push_back(name);
  return names;
}

const Checkpoint::Entry& Checkpoint::find(const std::string& tensor) const {
  const auto entry = tensors_.find(tensor);
  if (entry == tensors_.end())
    throw Error("the checkpoint has no tensor '" + tensor + "'", "resume a run of the same model and optimizer").in_file(folder_);
  return entry->second;
}

TensorPtr Checkpoint::read(const std::string& tensor) const {
  const Entry& entry = find(tensor);
  if (entry.pieces.size() == 1) return entry.pieces[0].tensor;
  return read(tensor, Dims(entry.shape.size(), 0), entry.shape);
}

TensorPtr Checkpoint::read(const std::string& tensor, const Dims& start, const Dims& shape) const {
  const Entry& entry = find(tensor);
  const Box wanted{start, shape};
  if (!lies_in(wanted, entry.shape))
    throw Error(
        "the tensor '" + tensor + "' of the checkpoint is " + to_string(entry.shape) + ": the part that is wanted reaches beyond it",
        "resume a run of the same model")
        .in_file(folder_);
  auto part = make_tensor(entry.dtype, shape);
  part->name = tensor;
  const size_t size = static_cast<size_t>(bits_of(entry.dtype)) / 8;
  for (const Piece& piece : entry.pieces)
    if (piece.tensor->data) copy_common({piece.start, piece.tensor->dims}, piece.tensor->data, wanted, mutable_data(*part), size);
  return part;
}

std::vector<std::string> list_checkpoints(const std::string& root) {
  std::vector<std::string> folders = step_folders(root);
  std::erase_if(folders, [](const std::string& folder) { return !has_manifest(folder); });
  return folders;
}

std::vector<std::string> checkpoints_after(const std::string& root, int64_t step) {
  std::vector<std::string> newer;
  for (const std::string& folder : list_checkpoints(root)) {
    if (step_of(fs::path(folder).filename().string()).value_or(0) <= step) continue;
    try {
      Checkpoint::open(folder);
      newer.push_back(folder);
    } catch (const Error&) {  // nobody would resume from it
    }
  }
  return newer;
}

Checkpoint open_newest_checkpoint(const std::string& path, std::vector<std::string>& notes) {
  if (has_manifest(path) || step_of(fs::path(path).filename().string())) return Checkpoint::open(path);
  std::vector<std::string> folders = step_folders(path);
  for (; !folders.empty(); folders.pop_back()) {
    try {
      return Checkpoint::open(folders.back());
    } catch (const Error& e) {
      notes.push_back("a checkpoint is left out: " + std::string(e.what()));
    }
  }
  throw Error("holds no checkpoint that can be read", notes.empty() ? "name the folder that --checkpoint wrote to" : notes.front())
      .in_file(path);
}

}  // namespace fretsaw
