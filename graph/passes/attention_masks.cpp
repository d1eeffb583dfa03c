// Masks of Attention: constants are read for what they say, what is computed is put into the operator's form.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "graph/passes/attention_parts.h"
#include "graph/passes/narrow_floats.h"

namespace fretsaw {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

// [b, h] from the dimensions before the last two of a mask and of the scores: those of the mask are all 1 or all whole.
bool lead_dims(const Dims& mask, const Dims& scores, const ScoreSizes& sizes, Dims& out) {
  size_t cut = 0;
  int64_t before = 1;
  while (cut < scores.size() && before < sizes.B) before *= scores[cut++];
  auto part = [&](size_t begin, size_t end, int64_t whole) -> int64_t {
    bool ones = true, all = true;
    for (size_t i = begin; i < end; ++i) ones &= mask[i] == 1, all &= mask[i] == scores[i];
    return ones ? 1 : all ? whole : -1;
  };
  if (before == sizes.B) {
    out = {part(0, cut, sizes.B), part(cut, scores.size(), sizes.H)};
    return out[0] > 0 && out[1] > 0;
  }
  const int64_t together = part(0, scores.size(), 1);  // batches and heads in one dimension
  if (together < 0) return false;
  const bool whole = count_of(mask) > 1;
  out = whole ? Dims{sizes.B, sizes.H} : Dims{1, 1};
  return true;
}

// The dimensions [b, h, s, T] of a mask that meets scores of these dimensions.
bool mask_dims(const Dims& mask, const Dims& scores, const ScoreSizes& sizes, Dims& out) {
  if (mask.size() > scores.size() || scores.size() < 3) return false;
  Dims padded(scores.size() - mask.size(), 1);
  padded.insert(padded.end(), mask.begin(), mask.end());
  const int64_t s = padded[padded.size() - 2], t = padded.back();
  if ((s != 1 && s != sizes.S) || t != sizes.T) return false;
  if (!lead_dims({padded.begin(), padded.end() - 2}, {scores.begin(), scores.end() - 2}, sizes, out)) return false;
  out.push_back(s);
  out.push_back(t);
  return true;
}

// What a constant mask does to each score: nothing, takes its key away, or something between.
enum class Effect : uint8_t { none, away, other };

struct Effects {
  std::vector<Effect> of;  // [b, h, s, T]
  bool readable = false, all_none = true, any_other = false, empty_row = false;
};

void note(Effects& effects, int64_t T) {
  for (size_t i = 0; i < effects.of.size(); i += static_cast<size_t>(T)) {
    bool away = true;
    for (size_t t = i; t < i + static_cast<size_t>(T); ++t) {
      effects.all_none &= effects.of[t] == Effect::none;
      effects.any_other |= effects.of[t] == Effect::other;
      away &= effects.of[t] == Effect::away;
    }
    effects.empty_row |= away;
  }
}

Effects effects_of(const MaskPart& part, int64_t T) {
  Effects effects;
  if (part.kind == MaskPart::Kind::added) {
    std::vector<double> numbers;
    if (!float_values(part.value, numbers)) return effects;
    for (double x : numbers) effects.of.push_back(x == 0 ? Effect::none : x * part.factor <= -1e4 ? Effect::away : Effect::other);
  } else {
    auto values = is_fixed(part.value) ? int_values(*part.value->constant) : std::nullopt;
    if (!values) return effects;
    const bool allows = part.kind == MaskPart::Kind::allowed;
    for (int64_t x : *values) effects.of.push_back((x != 0) == allows ? Effect::none : Effect::away);
  }
  effects.readable = true;
  note(effects, T);
  return effects;
}

// Whether query i sees the keys 0 to i and no others, whatever the batch and head.
bool is_causal(const Effects& effects, const Dims& dims, const ScoreSizes& sizes) {
  if (dims[2] != sizes.S || effects.any_other) return false;
  for (size_t i = 0; i < effects.of.size(); ++i) {
    const auto at = static_cast<int64_t>(i), t = at % sizes.T, s = at / sizes.T % sizes.S;
    if ((effects.of[i] == Effect::none) != (t <= s)) return false;
  }
  return true;
}

// The first [s, T] alone where all batches and heads say the same.
template <typename T>
void drop_copies(std::vector<T>& values, Dims& dims) {
  const auto each = static_cast<size_t>(dims[2] * dims[3]);
  for (size_t i = each; i < values.size(); ++i)
    if (!(values[i] == values[i - each])) return;
  values.resize(each);
  dims[0] = dims[1] = 1;
}

// The mask's own dimensions, where they mean the same as `dims` to the operator.
bool fits(const Dims& own, const Dims& dims) {
  if (own.size() < 2 || own.size() > 4) return false;
  Dims padded(4 - own.size(), 1);
  padded.insert(padded.end(), own.begin(), own.end());
  return padded == dims;
}

// Where(c, 0, -inf) added is c as a mask of booleans.
void see_through_choice(MaskPart& part) {
  const Node* where = part.value->producer;
  double yes = 0, no = 0;
  if (part.kind != MaskPart::Kind::added || !where || !where->is("Where") || part.factor <= 0) return;
  if (!scalar_value(where->input(1), yes) || !scalar_value(where->input(2), no)) return;
  if (static_dims(where->inputs[0]) != static_dims(part.value)) return;
  if ((yes != 0 || no != kNone) && (yes != kNone || no != 0)) return;
  part.kind = yes == 0 ? MaskPart::Kind::allowed : MaskPart::Kind::refused;
  part.value = where->inputs[0];
  part.fill = kNone;
}

double finite(double x, DType dtype) {
  return std::isfinite(x) ? std::max(x, -largest_of(dtype)) : x;
}

}  // namespace

Value* MaskMaker::add(const std::string& op, std::vector<Value*> inputs, Type type, std::vector<Attribute> attributes) {
  Value* v = edit_.add(op, std::move(inputs), std::move(attributes), "attention_mask");
  v->type = std::move(type);
  return v;
}

Value* MaskMaker::number(double x, DType dtype) {
  Value* v = edit_.constant(float_tensor(dtype, {}, {x}), "attention_fill");
  v->type = Type::tensor(dtype, Shape());
  return v;
}

Value* MaskMaker::shaped(Value* value, const Dims& dims) {
  if (fits(*static_dims(value), dims)) return value;
  return add("Reshape", {value, edit_.constant(make_int64s(dims), "attention_mask_dims")}, Type::tensor(value->type.dtype, shape_of(dims)));
}

// A constant that says something else than "causal" or nothing stays a constant, as small as it can be. False: its bytes are not there.
bool MaskMaker::take_constant(const MaskPart& part, const Dims& dims, const ScoreSizes& sizes, Pieces& pieces) {
  Effects effects = effects_of(part, sizes.T);
  if (!effects.readable || effects.all_none) return effects.readable;
  if (is_causal(effects, dims, sizes)) return pieces.causal = true;
  Dims small = dims;
  if (part.kind == MaskPart::Kind::added || (effects.empty_row && part.fill != kNone)) {
    std::vector<double> numbers;
    if (part.kind == MaskPart::Kind::added)
      float_values(part.value, numbers);
    else
      for (Effect e : effects.of) numbers.push_back(e == Effect::none ? 0 : part.fill);
    for (double& x : numbers) x *= part.kind == MaskPart::Kind::added ? part.factor : 1;
    drop_copies(numbers, small);
    const bool as_it_is = part.kind == MaskPart::Kind::added && part.factor == 1 && small == dims &&
                          part.value->constant->dtype == sizes.dtype && fits(part.value->constant->dims, dims);
    pieces.added.push_back(as_it_is ? part.value : edit_.constant(float_tensor(sizes.dtype, small, numbers), part.value->name));
    return true;
  }
  drop_copies(effects.of, small);
  auto tensor = make_tensor(DType::boolean, small);
  for (size_t i = 0; i < effects.of.size(); ++i) mutable_data(*tensor)[i] = std::byte{effects.of[i] == Effect::none};
  pieces.allowed.push_back(edit_.constant(tensor, part.value->name));
  return true;
}

Value* MaskMaker::added_value(const MaskPart& part, const Dims& dims, DType dtype) {
  Value* v = part.value;
  const Dims own = *static_dims(v);
  if (v->type.dtype != dtype) v = add("Cast", {v}, Type::tensor(dtype, shape_of(own)), {{"to", static_cast<int64_t>(dtype)}});
  if (part.factor != 1) v = add("Mul", {v, number(part.factor, dtype)}, Type::tensor(dtype, shape_of(own)));
  return shaped(v, dims);
}

bool MaskMaker::take(MaskPart part, const ScoreSizes& sizes, Pieces& pieces) {
  see_through_choice(part);
  auto own = static_dims(part.value);
  Dims dims;
  if (!own || !mask_dims(*own, part.scores, sizes, dims)) return false;
  if (part.value->constant && take_constant(part, dims, sizes, pieces)) return true;
  if (part.kind == MaskPart::Kind::added) {
    if (!is_float(part.value->type.dtype)) return false;
    pieces.added.push_back(added_value(part, dims, sizes.dtype));
    return true;
  }
  Value* v = part.value;
  const Type floats = Type::tensor(sizes.dtype, shape_of(*own));
  if (part.fill != kNone) {
    // Where no key of a query is allowed, all have the same weight; with booleans they would have none.
    Value *zero = number(0, sizes.dtype), *fill = number(finite(part.fill, sizes.dtype), sizes.dtype);
    const bool allows = part.kind == MaskPart::Kind::allowed;
    pieces.added.push_back(shaped(add("Where", {v, allows ? zero : fill, allows ? fill : zero}, floats), dims));
    return true;
  }
  if (part.kind == MaskPart::Kind::refused) v = add("Not", {v}, Type::tensor(DType::boolean, shape_of(*own)));
  pieces.allowed.push_back(shaped(v, dims));
  return true;
}

std::optional<AttentionMask> MaskMaker::make_new(const std::vector<MaskPart>& parts, const ScoreSizes& sizes) {
  Pieces pieces;
  for (const MaskPart& part : parts)
    if (!take(part, sizes, pieces)) return std::nullopt;
  auto joined = [&](const std::string& op, const std::vector<Value*>& values, DType dtype) -> Value* {
    Value* all = nullptr;
    for (Value* v : values) {
      if (!all) {
        all = v;
        continue;
      }
      Dims dims(4, 1);
      for (const Value* one : {all, v}) {
        const Dims own = *static_dims(one);
        for (size_t i = 0; i < own.size(); ++i) dims[4 - own.size() + i] = std::max(dims[4 - own.size() + i], own[i]);
      }
      all = add(op, {all, v}, Type::tensor(dtype, shape_of(dims)));
    }
    return all;
  };
  AttentionMask mask;
  mask.causal = pieces.causal;
  Value *allowed = joined("And", pieces.allowed, DType::boolean), *added = joined("Add", pieces.added, sizes.dtype);
  mask.value = added ? added : allowed;
  if (allowed && added) {
    pieces.added = {
        add("Where", {allowed, number(0, sizes.dtype), number(kNone, sizes.dtype)}, Type::tensor(sizes.dtype, allowed->type.shape)), added};
    mask.value = joined("Add", pieces.added, sizes.dtype);
  }
  return mask;
}

std::optional<AttentionMask> MaskMaker::make(const std::vector<MaskPart>& parts, const ScoreSizes& sizes) {
  for (const Known& known : known_) {
    const ScoreSizes& k = known.sizes;
    if (known.parts == parts && k.B == sizes.B && k.H == sizes.H && k.S == sizes.S && k.T == sizes.T && k.dtype == sizes.dtype)
      return known.mask;
  }
  known_.push_back({parts, sizes, make_new(parts, sizes)});
  return known_.back().mask;
}

}  // namespace fretsaw
