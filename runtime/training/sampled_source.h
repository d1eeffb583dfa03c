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

  DataOptions options_;
};

}  // namespace fretsaw
