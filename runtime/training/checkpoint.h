// Checkpoints: folders of logical tensors that another mesh can load.
//
//   ROOT/step-000000200/manifest.json      what the run needs to go on, and where each tensor is
//   ROOT/step-000000200/rank0.safetensors  a file for each rank that writes
//   ROOT/.step-000000300.part4711/         being written; renamed once all of it is on the disk
//
// manifest.json:
//   {"format": 1, "step": 200, "seed": 7, "data": {"epoch": 1, "sample": 64}, "more": {"KEY": "TEXT"},
//    "files": [{"name": "rank0.safetensors", "bytes": 4096}],
//    "tensors": [{"name": "fc.weight", "dtype": "float32", "shape": [4, 8],
//                 "pieces": [{"file": "rank0.safetensors", "key": "fc.weight", "start": [0, 0], "shape": [2, 8]}, ...]}]}
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "graph/tensor.h"
#include "runtime/training/data.h"
#include "runtime/training/safetensors.h"

namespace fretsaw {

// The file in a checkpoint's folder that says what is in it.
inline constexpr const char* kManifestFile = "manifest.json";

// Everything but tensors.
struct CheckpointState {
  int64_t step = 0;                         // steps that are done, those that were skipped too
  uint64_t seed = 0;                        // with the step, the random state: generators are counter-based
  DataPosition data;                        // of the next batch
  std::map<std::string, std::string> more;  // what else its writer wants to find again (the loss scale, options)
};

// A box of a logical tensor: elements start .. start + shape in each dimension.
struct CheckpointPiece {
  std::string tensor;  // "fc.weight", "exp_avg:fc.weight": the writer's choice
  DType dtype = DType::undefined;
  Dims whole;                  // the logical tensor's shape
  Dims start, shape;           // of the box
  const void* data = nullptr;  // host memory, row-major
};
// A whole tensor in plain host memory.
CheckpointPiece whole_piece(std::string tensor, const TensorView& view);

// Writes one checkpoint. Removed again unless committed.
class CheckpointWriter {
 public:
  CheckpointWriter(const std::string& root, const CheckpointState& state);  // makes `root` where it is not there
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;
  ~CheckpointWriter();

  // One file, "NAME.safetensors"; ranks may write at once, each its own. What several ranks hold is written by one of them.
  void write(const std::string& name, const std::vector<CheckpointPiece>& pieces);
  // Throws Error naming a tensor that the pieces do not cover exactly. Then the checkpoint is there, in place of one of the same step;
  // with `keep` > 0 all but so many of the newest go, and so does what writers that died left. Returns its folder.
  std::string commit(int keep);

 private:
  struct Piece {
    std::string file, key;
    Dims start, shape;
  };
  struct Entry {
    DType dtype;
    Dims shape;
    std::vector<Piece> pieces;
  };
  void add(const std::string& file, const std::string& key, const CheckpointPiece& piece);
  std::string manifest() const;

  std::string root_, folder_;
  CheckpointState state_;
  std::mutex mutex_;  // of what follows
  std::map<std::string, Entry> tensors_;
  std::map<std::string, uint64_t> files_;  // name -> bytes
};

// A checkpoint to read. All is checked when it is opened: the manifest, every file's size and header, that pieces cover their tensors.
class Checkpoint {
 public:
  // A checkpoint's folder. Throws Error naming the file and what is wrong with it.
  static Checkpoint open(const std::string& folder);

  const std::string& folder() const { return folder_; }
  const CheckpointState& state() const { return state_; }
  std::vector<std::string> names() const;  // sorted
  bool has(const std::string& tensor) const { return tensors_.count(tensor) > 0; }
  const Dims& shape(const std::string& tensor) const { return find(tensor).shape; }
  // The whole tensor, mapped where it is in one piece; or a box of it, whatever the pieces were. Threads may read at once. Throws Error
  // naming a tensor that is not there.
  TensorPtr read(const std::string& tensor) const;
  TensorPtr read(const std::string& tensor, const Dims& start, const Dims& shape) const;

 private:
  struct Piece {
    TensorPtr tensor;
    Dims start;
  };
  struct Entry {
    DType dtype = DType::undefined;
    Dims shape;
    std::vector<Piece> pieces;
  };
  const Entry& find(const std::string& tensor) const;

  std::string folder_;
  CheckpointState state_;
  std::map<std::string, Entry> tensors_;
  friend class ManifestReader;
};

// The folders of checkpoints in `root`, by step, oldest first: complete ones, as far as their names tell. Empty where there is no `root`.
std::vector<std::string> list_checkpoints(const std::string& root);
// Those of them that can be read, of steps beyond this one.
std::vector<std::string> checkpoints_after(const std::string& root, int64_t step);
// The newest one that can be read: of `path` if it is a checkpoint, otherwise in the folder `path`. `notes` says which newer ones are
// damaged, and how. Throws Error when there is none.
Checkpoint open_newest_checkpoint(const std::string& path, std::vector<std::string>& notes);

}  // namespace fretsaw
