// Operands of attention as kernels read them, and what masks do to scores. For attention.cpp and attention_gradient.cpp.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/cpu/attention_settings.h"
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/scalar_types.h"
#include "kernels/kernel.h"

namespace fretsaw {

// Rows of one head: element (b, h, s, d) stands at data[b * batch + h * head + s * row + d].
template <typename T>
struct AttentionHeads {
  const T* data = nullptr;
  int64_t B = 0, H = 0, S = 0, D = 0;
  int64_t batch = 0, head = 0, row = 0;
  StridedMatrix<T> matrix(int64_t b, int64_t h, int64_t s = 0) const { return {data + b * batch + h * head + s * row, row, 1}; }
};

// [B, H, S, D], or [B, S, H * D] when the rank is 3.
template <typename T>
AttentionHeads<T> attention_heads(const TensorView& x, int64_t heads) {
  AttentionHeads<T> out;
  out.data = x.as<T>();
  if (x.rank() == 4) {
    out.B = x.dims[0], out.H = x.dims[1], out.S = x.dims[2], out.D = x.dims[3];
    out.row = out.D, out.head = out.S * out.D, out.batch = out.H * out.head;
    return out;
  }
  require(x.rank() == 3, "an input of Attention is neither [B,H,S,D] nor [B,S,H*D]", "give it one of these shapes");
  require(heads > 0 && x.dims[2] % heads == 0, "the hidden size is no multiple of the number of heads",
          "give q_num_heads and kv_num_heads");
  out.B = x.dims[0], out.S = x.dims[1], out.H = heads, out.D = x.dims[2] / heads;
  out.head = out.D, out.row = x.dims[2], out.batch = out.S * out.row;
  return out;
}

// What is added to the scores of one query row. `full`: [B, H, S, T], to which the mask broadcasts.
template <typename T>
class AttentionBias {
 public:
  // `mask`: null for none; `valid`: how many keys of each sample count, or empty.
  AttentionBias(const AttentionSettings& s, const Dims& full, int64_t past, const TensorView* mask, std::vector<int64_t> valid)
      : causal_(s.causal), left_(s.left), right_(s.right), S_(full[2]), total_(full[3]), past_(past), valid_(std::move(valid)) {
    if (!mask) return;
    mask_ = mask;
    require(mask_->dtype == DType::boolean || mask_->dtype == dtype_of<T>(), "attn_mask is neither boolean nor of the type of Q",
            "cast it");
    require(mask_->rank() >= 1 && mask_->rank() <= 4, "attn_mask has no or more than 4 dimensions", "give it [S,T] or [B,H,S,T]");
    Dims dims = mask_->dims;
    dims.insert(dims.begin(), 4 - dims.size(), 1);
    const Dims own = strides_of(dims);
    for (size_t i = 0; i < 3; ++i) {
      require(dims[i] == 1 || dims[i] == full[i], "attn_mask does not broadcast to the scores", "give it [S,T] or [B,H,S,T]");
      strides_[i] = dims[i] == 1 ? 0 : own[i];
    }
    width_ = dims[3];
    require(width_ <= total_ || width_ == 1, "attn_mask is longer than the keys", "shorten it");
    spread_ = width_ == 1 && total_ != 1;
  }

  bool present() const { return mask_ || causal_ || left_ >= 0 || right_ >= 0 || !valid_.empty(); }

  // Adds it to the scores of query i; true when no key may be attended.
  bool add(int64_t b, int64_t h, int64_t i, T* scores) const {
    constexpr T kNone = -std::numeric_limits<T>::infinity();
    const int64_t offset = past_ > 0 || valid_.empty() ? past_ : valid_[static_cast<size_t>(b)] - S_;
    const int64_t position = i + offset;
    int64_t first = 0, last = total_;  // keys [first, last) are allowed by windows and lengths
    if (causal_) last = std::min(last, position + 1);
    if (left_ >= 0) first = std::max(first, position - left_);
    if (right_ >= 0) last = std::min(last, position + right_ + 1);
    if (!valid_.empty()) last = std::min(last, valid_[static_cast<size_t>(b)]);
    bool any = false;
    const int64_t base = b * strides_[0] + h * strides_[1] + i * strides_[2];
    for (int64_t t = 0; t < total_; ++t) {
      T added = t >= first && t < last ? T(0) : kNone;
      if (mask_ && added == T(0)) added = mask_at(base, t);
      any = any || added != kNone;
      scores[t] = added == kNone ? kNone : scores[t] + added;
    }
    return !any;
  }

 private:
  T mask_at(int64_t base, int64_t t) const {
    constexpr T kNone = -std::numeric_limits<T>::infinity();
    if (t >= width_ && !spread_) return kNone;
    const int64_t at = base + (spread_ ? 0 : t);
    if (mask_->dtype == DType::boolean) return mask_->as<bool>()[at] ? T(0) : kNone;
    return mask_->as<T>()[at];
  }

  bool causal_;
  int64_t left_, right_, S_, total_, past_;
  const TensorView* mask_ = nullptr;
  int64_t strides_[3] = {0, 0, 0}, width_ = 0;
  bool spread_ = false;
  std::vector<int64_t> valid_;
};

}  // namespace fretsaw
