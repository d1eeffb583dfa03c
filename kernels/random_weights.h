// Weights that are made up: uniform numbers, each decided by a key and its element's place in the source tensor alone. Every cut of a
// tensor and every device has the same ones.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "graph/ir.h"

namespace fretsaw {

// What Tensor::generate holds for such weights. A device that finds it there (`generate.target<RandomWeights>()`) makes the numbers itself.
// Matrices and filters lie around 0 by their fan-in, vectors (biases, scales, variances) between 0.5 and 1; indexes and flags are 0.
class RandomWeights {
 public:
  // `key` stands for the seed and the source tensor. `part`: which elements of it a tensor of `dims` holds; null: all.
  RandomWeights(uint64_t key, DType dtype, const Dims& dims, const ValuePart* part = nullptr);
  void operator()(uint64_t first, std::span<std::byte> bytes) const;  // the tensor's bytes from `first` on

  // Neighbouring elements of a block, in the tensor and in its source.
  struct Run {
    int64_t here = 0, in_source = 0, count = 0;
  };
  uint64_t key() const { return key_; }
  DType dtype() const { return dtype_; }
  bool random() const;  // false: a type whose elements are 0
  float low() const { return low_; }
  float span() const { return span_; }  // the numbers are low + span * [0, 1)
  // The tensor is blocks of `block` elements, which begin `source_block` elements apart in the source; `runs` are those of each.
  int64_t blocks() const { return blocks_; }
  int64_t block() const { return block_; }
  int64_t source_block() const { return source_block_; }
  const std::vector<Run>& runs() const { return runs_; }

 private:
  void make(int64_t begin, int64_t end, std::byte* to) const;
  template <typename T, typename Make>
  void fill(int64_t begin, int64_t end, T* to, const Make& make) const;
  template <typename Visit>
  void for_each_run(int64_t begin, int64_t end, const Visit& visit) const;

  uint64_t key_;
  DType dtype_;
  float low_ = 0, span_ = 0;
  int64_t blocks_ = 1, block_ = 0, source_block_ = 0;
  std::vector<Run> runs_;
};

}  // namespace fretsaw
