// Data as arrays: NAME.npy for each input, whose axis 0 counts the samples.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>

#include "graph/errors.h"
#include "graph/io.h"
#include "runtime/training/sample_order.h"
#include "runtime/training/sampled_source.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

class ArraySource : public SampledSource {
 public:
  ArraySource(const std::string& folder, const DataOptions& options) : SampledSource(folder, options) {
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder, error)) {
      const std::string name = entry.path().stem().string();
      if (entry.path().extension() != ".npy") continue;
      names_.insert(name);
      if (options.inputs.empty() || std::find(options.inputs.begin(), options.inputs.end(), name) != options.inputs.end())
        add(entry.path());
    }
    if (error) throw Error("cannot be read: " + error.message(), "check the folder and its permissions").in_file(folder);
    if (names_.empty()) throw Error("holds no .npy file", "write arrays as x.npy and target.npy").in_file(folder);
  }

  std::vector<std::string> names() const override { return {names_.begin(), names_.end()}; }
  DataLook look(const std::string& name, int64_t batch) const override {
    const Tensor& array = *arrays_.at(name);
    return {array.dtype, batch_dims(name, sample_of(array), batch), (fs::path(path_) / (name + ".npy")).string()};
  }
  int64_t epoch_size() const override { return samples_; }

 protected:
  Batch make(int64_t batch) override {
    Batch values;
    for (const auto& [name, array] : arrays_) values[name] = room_for(array->dtype, batch_dims(name, sample_of(*array), batch));
    return values;
  }

  void fill(Batch& values, int64_t row, const DataPosition& at) const override {
    int64_t sample = at.sample;
    if (options_.shuffle) sample = shuffled_index(sample, samples_, mixed_key(options_.seed, static_cast<uint64_t>(at.epoch)));
    for (auto& [name, value] : values) {
      const Tensor& array = *arrays_.at(name);
      const size_t bytes = array.bytes() / static_cast<size_t>(samples_);
      if (bytes == 0) continue;
      const int64_t pieces = pieces_of_sample(name, value.tensor.dims), rows = value.tensor.count() / (array.count() / samples_);
      const size_t each = bytes / static_cast<size_t>(pieces);
      for (int64_t p = 0; p < pieces; ++p)
        std::memcpy(static_cast<std::byte*>(value.tensor.data) + static_cast<size_t>(p * rows + row) * each,
                    array.data + static_cast<size_t>(sample) * bytes + static_cast<size_t>(p) * each, each);
    }
  }

 private:
  static Dims sample_of(const Tensor& array) { return {array.dims.begin() + 1, array.dims.end()}; }

  void add(const fs::path& path) {
    const TensorPtr array = read_tensor_file(path.string());
    if (array->dims.empty()) throw Error("holds a single number", "axis 0 of an array counts the samples").in_file(path.string());
    if (array->dims[0] == 0) throw Error("holds no samples", "write at least one").in_file(path.string());
    if (!arrays_.empty() && array->dims[0] != samples_)
      throw Error("holds " + std::to_string(array->dims[0]) + " samples, but '" + arrays_.begin()->first + ".npy' holds " +
                      std::to_string(samples_),
                  "all arrays of a folder need as many")
          .in_file(path.string());
    samples_ = array->dims[0];
    arrays_[path.stem().string()] = array;
  }

  std::set<std::string> names_;  // of all files
  std::map<std::string, TensorPtr> arrays_;
  int64_t samples_ = 0;
};

}  // namespace

std::unique_ptr<DataSource> open_arrays(const std::string& folder, const DataOptions& options) {
  return std::make_unique<ArraySource>(folder, options);
}

}  // namespace fretsaw
