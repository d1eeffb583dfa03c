// Training data: folders of batches, arrays of samples, files of tokens.
//
//   DIR with NAME_S.pb    batches: x_0.pb, target_0.pb, x_1.pb, ... One file for each input and step, TensorProtos (or .npy inside)
//   DIR with NAME.npy     arrays: x.npy, target.npy, ... Axis 0 counts the samples, wherever a batch has them; mapped, not read
//   FILE.bin              tokens: uint16, one after the other, as nanoGPT's prepare.py writes them
//   DIR with train.bin    the same: nanoGPT's folder
//
// NAMEs are the model's inputs.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/memory.h"

namespace fretsaw {

struct DataOptions {
  uint64_t seed = 0;
  // Arrays: in another order every epoch, by seed and epoch. Tokens: windows at random places, otherwise one behind the other. Folders of
  // batches come in their order always.
  bool shuffle = true;
  // A batch that reaches the end of an epoch goes on with the next one; false: it is smaller instead (for evaluation).
  bool wrap = true;
  std::vector<std::string> inputs;                            // files of other names are not looked at; empty: all are
  std::map<std::string, Type> types;                          // of inputs; of folders of batches, every file is held to them
  std::map<std::string, int> sample_axes;                     // of inputs: the axis of a batch that counts samples; 0 where it is not said
  int64_t sequence = 0;                                       // of tokens: the length S of a window
  std::string tokens = "x", next_tokens = "target";           // of tokens: the inputs that they go to
  DType token_type = DType::int64, next_type = DType::int64;  // int64 or int32
};

// What there is for an input in a batch.
struct DataLook {
  DType dtype = DType::undefined;
  Dims dims;
  std::string file;
};

// Where the next batch begins. With seed and options it says all that is to come.
struct DataPosition {
  int64_t epoch = 0;
  int64_t sample = 0;  // how many of the epoch have been; of a folder of batches: files
  bool operator==(const DataPosition&) const = default;
};

using Batch = std::map<std::string, RuntimeValue>;  // by input; each owns its memory

class DataSource {
 public:
  virtual ~DataSource() = default;

  virtual std::vector<std::string> names() const = 0;  // the inputs that it has values for, sorted
  // Of a name that it has. `batch` samples, of a folder of batches those of the first one.
  virtual DataLook look(const std::string& name, int64_t batch) const = 0;
  virtual int64_t epoch_size() const = 0;            // samples of an epoch; of a folder of batches: its batches
  virtual bool in_batches() const { return false; }  // whether it is a folder of batches
  // The next `batch` samples. A folder of batches gives the next batch: `batch` is 0 or its size. Throws Error naming the file and what is
  // wrong with it.
  virtual Batch next(int64_t batch) = 0;

  const std::string& path() const { return path_; }
  const DataPosition& position() const { return position_; }
  // Throws Error when the source has no such place.
  void seek(const DataPosition& position);

 protected:
  explicit DataSource(std::string path) : path_(std::move(path)) {}
  // A tensor of a batch, its elements still to be written, in memory that earlier batches have let go of.
  RuntimeValue room_for(DType dtype, const Dims& dims);

  std::string path_;
  DataPosition position_;

 private:
  BufferPool pool_{std::make_shared<AllocationCount>()};
};

// Throws Error naming the path: what was found there, and what is allowed.
std::unique_ptr<DataSource> open_data(const std::string& path, const DataOptions& options);
std::unique_ptr<DataSource> open_batch_folder(const std::string& folder, const DataOptions& options = {});
std::unique_ptr<DataSource> open_arrays(const std::string& folder, const DataOptions& options);
std::unique_ptr<DataSource> open_tokens(const std::string& file, const DataOptions& options);

// Throws Error naming the first of a model's inputs that the source has no values for. What it has beyond them is ignored.
void check_names(const DataSource& source, const std::vector<std::string>& inputs);
// Throws Error naming the file whose elements have another type than the input by that name takes.
void check_types(const DataSource& source, const std::map<std::string, DType>& inputs);
void keep_inputs(Batch& batch, const std::vector<std::string>& inputs);  // and nothing beyond them

}  // namespace fretsaw
