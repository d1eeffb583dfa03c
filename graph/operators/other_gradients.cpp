// Gradients of operators of which few have one: what makes values, rotary embeddings, and results without floats.
#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "graph/communication_schemas.h"
#include "graph/operators/gradient_rules.h"
#include "graph/operators/gradient_terms.h"

namespace fretsaw {
namespace {

// Turned back by the same angles.
std::vector<Value*> rotary_gradient(GradientContext& c) {
  if (c.wants(1) || c.wants(2)) c.refuse("there is no gradient for the tables of cosines and sines", "freeze them");
  std::vector<Value*> found = c.none();
  std::vector<Value*> operands = {c.of_output(), c.input(1), c.add("Neg", {c.input(2)})};
  if (c.input(3)) operands.push_back(c.input(3));
  found[0] = c.add("RotaryEmbedding", operands, c.attributes({"interleaved", "num_heads", "rotary_embedding_dim"}));
  return found;
}

// From the operands alone: what is kept between forward and backward pass are they, and no probabilities.
std::vector<Value*> attention_rule(GradientContext& c) {
  std::vector<Value*> operands = {c.of_output(), c.input(0), c.input(1), c.input(2)};
  if (c.input(3)) operands.push_back(c.input(3));
  const std::vector<Value*> made =
      c.add_several("AttentionGrad", operands, {c.wants(0), c.wants(1), c.wants(2)},
                    c.attributes({"scale", "softcap", "is_causal", "q_num_heads", "kv_num_heads", "left_window_size", "right_window_size"}),
                    kCommunicationDomain);
  std::vector<Value*> found = c.none();
  std::copy(made.begin(), made.end(), found.begin());
  return found;
}

// The transform is linear: y = F x of length L, or with `inverse` y = F' x / L, F' being F turned and conjugated. So dx = F' g, which is L
// times the inverse transform of g, or dx = F g / L; cut or filled with zeros to the length of x as x was to L.
class DftGradient {
 public:
  explicit DftGradient(GradientContext& c)
      : c_(c), shape_(c.known_shape(c.input(0))), inverse_(flag("inverse")), onesided_(flag("onesided")) {
    const auto axis = c.constant_ints(2), length = c.constant_ints(1);
    if ((c.input(2) && !axis) || (c.input(1) && !length)) c.refuse("its gradient needs a constant axis and length");
    axis_ = c.axis(axis ? axis->at(0) : -2, shape_.size());
    if (!shape_[axis_].known() || !shape_.back().known()) c.refuse("its gradient needs to know the length of the signal");
    in_ = shape_[axis_].value;
    length_ = length ? length->at(0) : inverse_ && onesided_ ? 2 * (in_ - 1) : in_;
  }

  Value* make() {
    Value* g = c_.of_output();
    const double all = static_cast<double>(length_);
    int64_t made = length_;  // along the axis
    if (!inverse_) {
      if (onesided_) g = resized(g, length_ / 2 + 1, length_);
      g = Term(c_, transformed(g, true, false)) * all;
    } else if (!onesided_) {
      g = Term(c_, transformed(g, false, false)) * (1 / all);
    } else {  // what stands for two conjugates counts twice
      made = length_ / 2 + 1;
      std::vector<double> counts(static_cast<size_t>(made), 2 / all);
      counts.front() = 1 / all;
      if (length_ % 2 == 0) counts.back() = 1 / all;
      std::vector<int64_t> dims(shape_.size() - axis_, 1);
      dims[0] = made;
      Value* each = c_.add("Reshape", {c_.numbers(counts, g->type.dtype), c_.integers(dims)});
      g = c_.add("Mul", {transformed(g, false, true), each});
    }
    if (shape_.back().value == 1) g = slice(g, shape_.size() - 1, 1);
    return resized(g, made, in_);
  }

 private:
  bool flag(const char* name) const { return c_.node().get_int(name, 0) != 0; }
  Value* transformed(Value* g, bool inverse, bool onesided) {
    return c_.add("DFT", {g, c_.integer(length_), c_.integer(static_cast<int64_t>(axis_))},
                  {{"inverse", int64_t{inverse}}, {"onesided", int64_t{onesided}}});
  }
  Value* slice(Value* v, size_t axis, int64_t end) {
    return c_.add("Slice", {v, c_.integers({0}), c_.integers({end}), c_.integers({static_cast<int64_t>(axis)})});
  }
  Value* resized(Value* v, int64_t from, int64_t to) {
    if (from >= to) return from == to ? v : slice(v, axis_, to);
    std::vector<int64_t> pads(2 * shape_.size(), 0);
    pads[shape_.size() + axis_] = to - from;
    return c_.add("Pad", {v, c_.integers(pads)});
  }

  GradientContext& c_;
  const Shape shape_;
  bool inverse_, onesided_;
  size_t axis_ = 0;
  int64_t in_ = 0, length_ = 0;
};

std::vector<Value*> dft_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  found[0] = DftGradient(c).make();
  return found;
}

// Frames of the signal times the window are transformed. What flows back to a frame, by the transform's rule, is added up where the frames
// overlap.
std::vector<Value*> stft_gradient(GradientContext& c) {
  if (c.wants(2)) c.refuse("there is no gradient for the window", "freeze it");
  std::vector<Value*> found = c.none();
  const Shape &signal = c.known_shape(c.input(0)), *window = c.input(2) ? c.shape(c.input(2)) : nullptr;
  const auto step = c.constant_ints(1), given = c.constant_ints(3);
  const bool by_window = !c.input(3) && window && window->size() == 1 && window->front().known();
  if (!step || signal.size() < 2 || !signal[1].known() || (!given && !by_window))
    c.refuse("its gradient needs a constant step and length of frames, and to know the length of the signal");
  const int64_t length = given ? given->at(0) : window->front().value, parts = signal.size() == 3 ? signal[2].value : 1;
  Value* g = c.of_output();  // [batch, frames, bins, 2]
  if (c.node().get_int("onesided", 1) != 0 && length > 1)
    g = c.add("Pad", {g, c.integers({0, 0, 0, 0, 0, 0, length - (length / 2 + 1), 0})});
  g = Term(c, c.add("DFT", {g, c.integer(length), c.integer(2)}, {{"inverse", int64_t{1}}})) * static_cast<double>(length);
  if (c.input(2)) g = c.add("Mul", {g, c.add("Unsqueeze", {c.input(2), c.integers({1})})});
  if (parts == 1) g = c.add("Slice", {g, c.integers({0}), c.integers({1}), c.integers({3})});
  g = c.add("Transpose", {g}, {{"perm", std::vector<int64_t>{0, 3, 2, 1}}});
  Value* frames = c.add("Reshape", {g, c.integers({0, parts * length, -1})});
  Value* sums =
      c.add("Col2Im", {frames, c.integers({signal[1].value}), c.integers({length})}, {{"strides", std::vector<int64_t>{step->at(0)}}});
  found[0] = c.reshape_like(c.add("Transpose", {sums}, {{"perm", std::vector<int64_t>{0, 2, 1}}}), c.input(0));
  return found;
}

// start + i delta, as many as come before the limit
std::vector<Value*> range_gradient(GradientContext& c) {
  std::vector<Value*> found = c.none();
  Term g(c, c.of_output());
  auto sum = [](const Term& x) { return x.made("ReduceSum", {x}, {{"keepdims", int64_t{0}}}); };
  if (c.wants(0)) found[0] = sum(g);
  if (c.wants(2)) {
    Value* count = c.add("Size", {g}, {}, DType::int64);
    Value* index = c.add("Range", {c.integer(0), count, c.integer(1)}, {}, DType::int64);
    found[2] = sum(g * as_number({&c, index}, g));
  }
  return found;
}

std::vector<Value*> det_gradient(GradientContext& c) {
  return only_first(c, c.add_own("DetGrad", {c.of_output(), c.input(0)}));
}

// From the operands alone: the states of all steps are made once more.
std::vector<Value*> linear_attention_gradient(GradientContext& c) {
  const std::string rule = c.node().get_string("update_rule", "gated_delta");
  std::vector<Value*> operands;
  std::vector<bool> wanted;
  for (size_t i = 0; i < 6; ++i) {
    const bool used = (i != 4 || rule.rfind("gated", 0) == 0) && (i != 5 || rule == "delta" || rule == "gated_delta");
    operands.push_back(used ? c.input(i) : nullptr);
    wanted.push_back(used && c.wants(i));
  }
  for (size_t o : {0, 1}) operands.push_back(c.of_output(o));
  if (!operands.back()) operands.pop_back();
  std::vector<Value*> found = c.add_several("LinearAttentionGrad", operands, wanted,
                                            c.attributes({"update_rule", "scale", "q_num_heads", "kv_num_heads"}), kCommunicationDomain);
  found.resize(c.node().inputs.size());
  return found;
}

}  // namespace

GradientRule attention_gradient(const std::string& name) {
  if (name == "Attention") return attention_rule;
  if (name == "LinearAttention") return linear_attention_gradient;
  return name == "RotaryEmbedding" ? rotary_gradient : nullptr;
}

// What the others make depends on sizes and settings alone.
GradientRule generation_gradient(const std::string& name) {
  return name == "Range" ? range_gradient : zero_gradient;
}

GradientRule signal_gradient(const std::string& name) {
  static const std::unordered_set<std::string> windows = {"MelWeightMatrix", "HannWindow", "HammingWindow", "BlackmanWindow"};
  if (name == "DFT") return dft_gradient;
  if (name == "STFT") return stft_gradient;
  if (name == "Det") return det_gradient;
  return windows.count(name) ? zero_gradient : nullptr;
}

GradientRule no_float_gradient(const std::string& name) {
  static const std::unordered_set<std::string> names = {"SequenceEmpty",    "SequenceLength",  "OptionalHasElement", "StringSplit",
                                                        "StringNormalizer", "TfIdfVectorizer", "StringConcat",       "RegexFullMatch"};
  return names.count(name) ? zero_gradient : nullptr;
}

std::vector<OperatorRecord> with_gradients(std::vector<OperatorRecord> records, GradientRule (*rule)(const std::string&)) {
  for (OperatorRecord& record : records) record.gradient = rule(record.name);
  return records;
}

}  // namespace fretsaw
