// Which kind of data a path holds, and what all kinds share.
#include "runtime/training/data.h"

#include <algorithm>
#include <filesystem>

#include "graph/errors.h"
#include "runtime/training/sampled_source.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

constexpr char kAllowed[] =
    "data is a folder of NAME_0.pb, NAME_1.pb, ..., a folder of NAME.npy, or a file of tokens NAME.bin, with the model's inputs as NAMEs";

bool holds(const std::string& folder, const std::string& ending) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (entry.path().extension() == ending) return true;
  return false;
}

std::unique_ptr<DataSource> open_folder(const std::string& folder, const DataOptions& options) {
  const bool batches = holds(folder, ".pb"), arrays = holds(folder, ".npy");
  const std::string tokens = (fs::path(folder) / "train.bin").string();
  if (batches && arrays) throw Error("holds both .pb and .npy files", "keep batches and arrays in folders of their own").in_file(folder);
  if (batches) return open_batch_folder(folder, options);
  if (arrays) return open_arrays(folder, options);
  std::error_code error;
  if (fs::exists(tokens, error)) return open_tokens(tokens, options);
  throw Error("holds no training data", kAllowed).in_file(folder);
}

}  // namespace

std::unique_ptr<DataSource> open_data(const std::string& path, const DataOptions& options) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) throw Error("does not exist", kAllowed).in_file(path);
  if (fs::is_directory(status)) return open_folder(path, options);
  if (fs::path(path).extension() == ".bin") return open_tokens(path, options);
  throw Error("is no training data", kAllowed).in_file(path);
}

RuntimeValue DataSource::room_for(DType dtype, const Dims& dims) {
  RuntimeValue value;
  make_pooled(pool_, value, dtype, dims);
  return value;
}

void DataSource::seek(const DataPosition& position) {
  if (position.epoch < 0 || position.sample < 0 || position.sample > epoch_size())
    throw Error("has no sample " + std::to_string(position.sample) + " to go on with: an epoch has " + std::to_string(epoch_size()),
                "is it the data that the checkpoint was made with?")
        .in_file(path_);
  position_ = position;
}

Batch SampledSource::next(int64_t batch) {
  if (batch < 1)
    throw Error("a batch of " + std::to_string(batch) + " samples", "give a batch size of at least 1 (--batch)", ErrorCode::usage)
        .in_file(path_);
  const auto begin_epoch = [&] {
    if (position_.sample >= epoch_size()) position_ = {position_.epoch + 1, 0};
  };
  begin_epoch();
  if (!options_.wrap) batch = std::min(batch, epoch_size() - position_.sample);
  Batch values = make(batch);
  for (int64_t row = 0; row < batch; ++row) {
    begin_epoch();
    fill(values, row, position_);
    ++position_.sample;
  }
  begin_epoch();
  return values;
}

Dims SampledSource::batch_dims(const std::string& name, Dims sample, int64_t batch) const {
  const auto at = options_.sample_axes.find(name);
  const int axis = at == options_.sample_axes.end() ? 0 : at->second;
  if (axis > std::ssize(sample))
    throw Error("has samples of " + std::to_string(sample.size()) + " dimensions for '" + name + "', whose batch has them along axis " +
                    std::to_string(axis),
                "write samples of the shape that the model takes, without that axis")
        .in_file(path_);
  sample.insert(sample.begin() + axis, batch);
  return sample;
}

int64_t SampledSource::pieces_of_sample(const std::string& name, const Dims& batch) const {
  const auto at = options_.sample_axes.find(name);
  const int axis = at == options_.sample_axes.end() ? 0 : at->second;
  return count_of(Dims(batch.begin(), batch.begin() + axis));
}

void check_names(const DataSource& source, const std::vector<std::string>& inputs) {
  const std::vector<std::string> names = source.names();
  std::string known;
  for (const std::string& name : names) known += (known.empty() ? "'" : ", '") + name + "'";
  for (const std::string& input : inputs)
    if (std::find(names.begin(), names.end(), input) == names.end())
      throw Error("has nothing for the input '" + input + "'", known.empty() ? "it has nothing at all" : "it has " + known)
          .in_file(source.path());
}

void check_types(const DataSource& source, const std::map<std::string, DType>& inputs) {
  for (const auto& [input, wanted] : inputs) {
    const DataLook look = source.look(input, 1);
    if (look.dtype == wanted || wanted == DType::undefined) continue;
    throw Error(
        "holds " + std::string(name_of(look.dtype)) + ", and the model's input '" + input + "' takes " + std::string(name_of(wanted)),
        "write it in that type")
        .in_file(look.file);
  }
}

void keep_inputs(Batch& batch, const std::vector<std::string>& inputs) {
  std::erase_if(batch, [&](const auto& one) { return std::find(inputs.begin(), inputs.end(), one.first) == inputs.end(); });
}

}  // namespace fretsaw
