// Data as a folder of batches: NAME_S.pb for each input NAME and step S.
#include <omp.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <set>

#include "graph/errors.h"
#include "graph/io.h"
#include "kernels/cpu/parallel.h"
#include "runtime/tensor_values.h"
#include "runtime/training/data.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

struct BatchFile {
  std::string name;  // of the input
  int64_t step = 0;
};
// "x_12.pb"; nullopt for other names.
std::optional<BatchFile> parse_file_name(const fs::path& path) {
  if (path.extension() != ".pb") return std::nullopt;
  const std::string stem = path.stem().string();
  const size_t bar = stem.rfind('_');
  if (bar == std::string::npos || bar == 0) return std::nullopt;
  BatchFile file{stem.substr(0, bar)};
  const char* end = stem.data() + stem.size();
  const auto [read, error] = std::from_chars(stem.data() + bar + 1, end, file.step);
  if (error != std::errc() || read != end || file.step < 0) return std::nullopt;
  return file;
}

class BatchFolder : public DataSource {
 public:
  BatchFolder(const std::string& folder, const DataOptions& options) : DataSource(folder), types_(options.types) {
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder, error)) {
      const auto file = parse_file_name(entry.path());
      if (!file) continue;
      names_.insert(file->name);
      if (!options.inputs.empty() && std::find(options.inputs.begin(), options.inputs.end(), file->name) == options.inputs.end()) continue;
      const bool added = steps_[file->step].emplace(file->name, entry.path().string()).second;
      if (!added)
        throw Error("is there twice, with another number of zeros before its step", "keep one of them").in_file(entry.path().string());
    }
    if (error) throw Error("cannot be read: " + error.message(), "check the folder and its permissions").in_file(folder);
    if (names_.empty()) throw Error("holds no file named NAME_S.pb", "name batches x_0.pb, target_0.pb, x_1.pb, ...").in_file(folder);
    check_complete();
  }

  std::vector<std::string> names() const override { return {names_.begin(), names_.end()}; }
  DataLook look(const std::string& name, int64_t) const override {
    const std::string& file = steps_.begin()->second.at(name);
    const TensorPtr tensor = read_tensor_file(file);
    return {tensor->dtype, tensor->dims, file};
  }
  int64_t epoch_size() const override { return static_cast<int64_t>(steps_.size()); }
  bool in_batches() const override { return true; }

  Batch next(int64_t batch) override {
    const auto step = std::next(steps_.begin(), position_.sample % epoch_size());
    Batch values;
    for (const auto& [name, file] : step->second) {
      const TensorPtr tensor = read_tensor_file(file);
      check_type(name, *tensor, file);
      values[name] = value_of(*tensor);
    }
    if (batch > 0) check_size(step->second, values, batch);
    if (++position_.sample >= epoch_size()) position_ = {position_.epoch + 1, 0};
    return values;
  }

 private:
  using Files = std::map<std::string, std::string>;  // name -> path

  RuntimeValue value_of(const Tensor& tensor) {
    if (tensor.dtype == DType::string || !tensor.data) return value_from_tensor(tensor);
    RuntimeValue value = room_for(tensor.dtype, tensor.dims);
    copy_in_parallel(value.tensor.data, tensor.data, tensor.bytes(), omp_get_max_threads());
    return value;
  }

  void check_type(const std::string& name, const Tensor& tensor, const std::string& file) const {
    const auto found = types_.find(name);
    if (found == types_.end() || !found->second.is_tensor()) return;
    const Type& type = found->second;
    bool fits = type.dtype == DType::undefined || type.dtype == tensor.dtype;
    if (type.shape) fits = fits && type.shape->size() == tensor.dims.size();
    for (size_t i = 0; fits && type.shape && i < tensor.dims.size(); ++i)
      fits = !(*type.shape)[i].known() || (*type.shape)[i].value == tensor.dims[i];
    if (!fits)
      throw Error("holds " + to_string(Type::tensor(tensor.dtype, shape_of(tensor.dims))) + ", and the model's input '" + name +
                      "' takes " + to_string(type),
                  "write it as the model takes it")
          .in_file(file);
  }

  void check_complete() const {
    std::map<std::string, int64_t> all;  // name -> a step that has it
    for (const auto& [step, files] : steps_)
      for (const auto& [name, file] : files) all.emplace(name, step);
    if (!steps_.empty())
      for (int64_t expected = steps_.begin()->first; const auto& [step, files] : steps_)
        if (step != expected++)
          throw Error("has batches up to " + std::to_string(expected - 2) + " and from " + std::to_string(step) + " on, and none between",
                      "number them one after the other")
              .in_file(path_);
    for (const auto& [step, files] : steps_)
      for (const auto& [name, having] : all)
        if (!files.count(name))
          throw Error("has no '" + name + "_" + std::to_string(step) + ".pb', but one of step " + std::to_string(having),
                      "every step needs a file of each input")
              .in_file(path_);
  }

  // Some value has to have as many rows: not all inputs need have a batch axis.
  static void check_size(const Files& files, const Batch& values, int64_t batch) {
    for (const auto& [name, value] : values)
      if (!value.tensor.dims.empty() && value.tensor.dims[0] == batch) return;
    const auto& [name, value] = *values.begin();
    throw Error("holds " + to_string(value.tensor.dims) + ", not a batch of " + std::to_string(batch),
                "leave the batch size out: the files decide it")
        .in_file(files.at(name));
  }

  std::set<std::string> names_;  // of all files
  std::map<int64_t, Files> steps_;
  std::map<std::string, Type> types_;
};

}  // namespace

std::unique_ptr<DataSource> open_batch_folder(const std::string& folder, const DataOptions& options) {
  return std::make_unique<BatchFolder>(folder, options);
}

}  // namespace fretsaw
