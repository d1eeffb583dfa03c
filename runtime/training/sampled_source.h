// What sources of single samples share: how samples become batches.
#pragma once
#include <utility>

#include "runtime/training/data.h"

namespace fretsaw {

class SampledSource : public DataSource {
 public:
  Batch next(int64_t batch) final;

 protected:
  SampledSource(std::string path, const DataOptions& options) : DataSource(std::move(path)), options_(options) {}
  // Memory for `batch` samples of every input, and sample `at` written to row `row` of it. `at.sample` is below epoch_size().
  virtual Batch make(int64_t batch) = 0;
  virtual void fill(Batch& values, int64_t row, const DataPosition& at) const = 0;
  // The sizes of an input's batch, of samples of these sizes. Throws Error where they have no place for the axis of the samples.
  Dims batch_dims(const std::string& name, Dims sample, int64_t batch) const;
  // How many pieces a sample has that lie apart in a batch of these sizes; piece p of row r is the one at p * batch + r.
  int64_t pieces_of_sample(const std::string& name, const Dims& batch) const;

  DataOptions options_;
};

}  // namespace fretsaw
