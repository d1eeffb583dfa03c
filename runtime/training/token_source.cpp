// Data as tokens: one long row of uint16, cut into windows of S, each with the same window one token later as its target.
//
//   tokens a b c d e f g, S = 3       x: a b c   target: b c d       x: d e f   target: e f g
#include <algorithm>
#include <cstring>

#include "graph/errors.h"
#include "graph/tensor.h"
#include "kernels/cpu/random.h"
#include "runtime/training/sample_order.h"
#include "runtime/training/sampled_source.h"

namespace fretsaw {
namespace {

class TokenSource : public SampledSource {
 public:
  TokenSource(const std::string& file, const DataOptions& options)
      : SampledSource(file, options), file_(MappedFile::open(file)), length_(options.sequence) {
    if (length_ < 1) throw Error("needs the length of a sequence", "give it (--sequence)", ErrorCode::usage).in_file(file);
    if (file_->bytes().size() % sizeof(uint16_t) != 0)
      throw Error("has an odd number of bytes, so it is no file of uint16 tokens", "write it as nanoGPT's prepare.py does").in_file(file);
    count_ = static_cast<int64_t>(file_->bytes().size() / sizeof(uint16_t));
    if (count_ <= length_)
      throw Error("holds " + std::to_string(count_) + " tokens, too few for a sequence of " + std::to_string(length_) + " and one more",
                  "choose a shorter sequence")
          .in_file(file);
  }

  std::vector<std::string> names() const override {
    std::vector<std::string> names = {options_.tokens, options_.next_tokens};
    std::sort(names.begin(), names.end());
    return names;
  }
  DataLook look(const std::string& name, int64_t batch) const override {
    return {name == options_.tokens ? options_.token_type : options_.next_type, batch_dims(name, {length_}, batch), path_};
  }
  // As many windows as fit side by side, in random order or not.
  int64_t epoch_size() const override { return (count_ - 1) / length_; }

 protected:
  Batch make(int64_t batch) override {
    return {{options_.tokens, room_for(options_.token_type, batch_dims(options_.tokens, {length_}, batch))},
            {options_.next_tokens, room_for(options_.next_type, batch_dims(options_.next_tokens, {length_}, batch))}};
  }

  void fill(Batch& values, int64_t row, const DataPosition& at) const override {
    const int64_t first = options_.shuffle ? random_place(at) : at.sample * length_;
    for (const std::string& name : {options_.tokens, options_.next_tokens}) {
      RuntimeValue& value = values.at(name);
      const int64_t from = first + (name == options_.tokens ? 0 : 1), batch = value.tensor.count() / length_;
      const bool apart = pieces_of_sample(name, value.tensor.dims) > 1;
      if (value.tensor.dtype == DType::int32)
        copy_as<int32_t>(from, value, apart ? row : row * length_, apart ? batch : 1);
      else
        copy_as<int64_t>(from, value, apart ? row : row * length_, apart ? batch : 1);
    }
  }

 private:
  // Any of the count_ - length_ places, by seed and the number of the sample among all of the run.
  int64_t random_place(const DataPosition& at) const {
    const auto bits = Philox(mixed_key(options_.seed, static_cast<uint64_t>(at.epoch))).block(static_cast<uint64_t>(at.sample));
    const uint64_t number = uint64_t{bits[0]} << 32 | bits[1];
    return static_cast<int64_t>(number % static_cast<uint64_t>(count_ - length_));
  }

  template <typename T>
  void copy_as(int64_t first, RuntimeValue& value, int64_t begin, int64_t step) const {
    T* out = value.tensor.as<T>() + begin;
    const std::byte* tokens = file_->bytes().data() + static_cast<size_t>(first) * sizeof(uint16_t);
    for (int64_t i = 0; i < length_; ++i) {
      uint16_t token;
      std::memcpy(&token, tokens + static_cast<size_t>(i) * sizeof token, sizeof token);
      out[i * step] = token;
    }
  }

  std::shared_ptr<const MappedFile> file_;
  int64_t length_, count_ = 0;
};

}  // namespace

std::unique_ptr<DataSource> open_tokens(const std::string& file, const DataOptions& options) {
  if (options.tokens == options.next_tokens)
    throw Error("tokens and the next tokens go to one input, '" + options.tokens + "'", "name two", ErrorCode::usage);
  return std::make_unique<TokenSource>(file, options);
}

}  // namespace fretsaw
