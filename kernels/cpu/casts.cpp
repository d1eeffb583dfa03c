// Cast, CastLike and BitCast.
#include <charconv>
#include <cstring>

#include "kernels/cpu/broadcast.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/parallel.h"

namespace fretsaw {

namespace {

constexpr int64_t kChunkElements = 512;
constexpr TypeSet kCastable = types::everything | types::float8s | types::packed;

// --- numbers and text ---

// The shortest text that reads back as the same number; whole numbers keep ".0".
template <typename F>
std::string text_of_float(F value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-INF" : "INF";
  const double magnitude = std::fabs(static_cast<double>(value));
  const bool plain = magnitude == 0 || (magnitude >= 1e-4 && magnitude < 1e16);
  char buffer[64];
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, value, plain ? std::chars_format::fixed : std::chars_format::scientific).ptr;
  std::string text(buffer, end);
  return plain && text.find('.') == std::string::npos ? text + ".0" : text;
}

[[noreturn]] void throw_not_a_number(const std::string& text) {
  throw Error("the string '" + text.substr(0, 40) + "' is not a number", "cast strings that hold numbers alone");
}

double float_of_text(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  while (*end == ' ' || *end == '\n' || *end == '\t') ++end;
  if (text.empty() || *end) throw_not_a_number(text);
  return value;
}

template <typename I>
I integer_of_text(const std::string& text) {
  const char *begin = text.c_str(), *end = begin + text.size();
  if (begin != end && *begin == '+') ++begin;
  I value = 0;
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (error == std::errc() && stop == end) return value;
  double fraction = float_of_text(text);
  I converted;
  load_as<I>(DType::float64, &fraction, 0, 1, &converted);
  return converted;
}

void text_to_numbers(const std::string* x, TensorView& y, const CastRules& rules) {
  const int64_t n = y.count();
  for (int64_t i = 0; i < n; ++i) {
    switch (wide_type(y.dtype)) {
      case DType::float32:
      case DType::float64: {
        const double value = float_of_text(x[i]);
        store_from<double>(y.dtype, y.data, i, 1, &value, rules);
        break;
      }
      case DType::uint64: {
        const auto value = integer_of_text<uint64_t>(x[i]);
        store_from<uint64_t>(y.dtype, y.data, i, 1, &value, rules);
        break;
      }
      default: {
        const auto value = integer_of_text<int64_t>(x[i]);
        store_from<int64_t>(y.dtype, y.data, i, 1, &value, rules);
      }
    }
  }
}

template <typename W>
void numbers_to_text(const TensorView& x, std::string* y) {
  const int64_t n = x.count();
  for (int64_t i = 0; i < n; ++i) {
    W value;
    load_as<W>(x.dtype, x.data, i, 1, &value);
    if constexpr (std::is_floating_point_v<W>)
      y[i] = text_of_float(value);
    else if (x.dtype == DType::boolean)
      y[i] = value ? "True" : "False";
    else
      y[i] = std::to_string(value);
  }
}

// --- numbers ---

// Elements [begin, end) by way of W, which holds every number of x's type. Chunks are read whole before they are written, so that
// y may lie on x.
template <typename W>
void cast_through(const TensorView& x, TensorView& y, int64_t begin, int64_t end, const CastRules& rules) {
  W chunk[kChunkElements];
  for (; begin < end; begin += kChunkElements) {
    const int64_t n = std::min(kChunkElements, end - begin);
    load_as<W>(x.dtype, x.data, begin, n, chunk);
    store_from<W>(y.dtype, y.data, begin, n, chunk, rules);
  }
}

void cast_range(const TensorView& x, TensorView& y, int64_t begin, int64_t end, const CastRules& rules) {
  const bool apart = x.data != y.data;
  // In one step where one side is a wide type itself.
  if (apart && y.dtype == DType::float32) return load_as<float>(x.dtype, x.data, begin, end - begin, y.as<float>() + begin);
  if (apart && y.dtype == DType::int64) return load_as<int64_t>(x.dtype, x.data, begin, end - begin, y.as<int64_t>() + begin);
  if (apart && x.dtype == DType::float32) return store_from<float>(y.dtype, y.data, begin, end - begin, x.as<float>() + begin, rules);
  if (apart && x.dtype == DType::int64) return store_from<int64_t>(y.dtype, y.data, begin, end - begin, x.as<int64_t>() + begin, rules);
  switch (wide_type(x.dtype)) {
    case DType::float32:
      return cast_through<float>(x, y, begin, end, rules);
    case DType::float64:
      return cast_through<double>(x, y, begin, end, rules);
    case DType::uint64:
      return cast_through<uint64_t>(x, y, begin, end, rules);
    default:
      return cast_through<int64_t>(x, y, begin, end, rules);
  }
}

void cast(const TensorView& x, TensorView& y, const CastRules& rules, int threads) {
  const bool from_text = x.dtype == DType::string, to_text = y.dtype == DType::string;
  if (from_text && to_text) {
    for (int64_t i = 0; i < x.count(); ++i) y.as<std::string>()[i] = x.as<std::string>()[i];
  } else if (from_text) {
    text_to_numbers(x.as<std::string>(), y, rules);
  } else if (to_text) {
    switch (wide_type(x.dtype)) {
      case DType::float32:
        return numbers_to_text<float>(x, y.as<std::string>());
      case DType::float64:
        return numbers_to_text<double>(x, y.as<std::string>());
      case DType::uint64:
        return numbers_to_text<uint64_t>(x, y.as<std::string>());
      default:
        return numbers_to_text<int64_t>(x, y.as<std::string>());
    }
  } else if (x.dtype == y.dtype) {
    if (x.data != y.data) std::memcpy(y.data, x.data, x.bytes());
  } else {
    // With what the layout pads: zeros stay zeros. In groups of eight elements, so that threads never share a byte.
    const bool packed = bits_of(x.dtype) < 8 || bits_of(y.dtype) < 8;
    const int64_t count = packed ? x.count() : static_cast<int64_t>(x.bytes()) * 8 / bits_of(x.dtype);
    parallel_for((count + 7) / 8, kGrainElements / 8, threads,
                 [&](int64_t begin, int64_t end) { cast_range(x, y, begin * 8, std::min(end * 8, count), rules); });
  }
}

CastRules rules_of(const Node& node) {
  CastRules rules;
  rules.saturate = node.get_int("saturate", 1) != 0;
  const std::string mode = node.get_string("round_mode", "up");
  if (mode == "down")
    rules.rounding = ScaleRounding::down;
  else if (mode == "nearest")
    rules.rounding = ScaleRounding::nearest;
  else if (mode != "up")
    throw Error("round_mode is '" + mode + "'", "use up, down or nearest").at_node(node.name, node.op);
  return rules;
}

// The type that Cast and BitCast name, or the type of CastLike's second input.
DType target_type(const CompileContext& c) {
  const Node& node = c.node();
  const int64_t to = node.op == "CastLike" ? static_cast<int64_t>(c.input_dtype(1)) : node.get_int("to", 0);
  return to > 0 && to <= static_cast<int64_t>(DType::int2) ? static_cast<DType>(to) : DType::undefined;
}

CompiledKernel compile_cast(const CompileContext& c) {
  const CastRules rules = rules_of(c.node());
  const DType to = target_type(c);
  const size_t operands[] = {0};
  const Layout layout = bits_of(to) >= 8 ? elementwise_layout(c, operands) : Layout::plain;
  auto run = [rules, to](RunContext& r) {
    const TensorView& x = r.input(0);  // any shape
    const DType type = to == DType::undefined ? r.input(1).dtype : to;
    cast(x, r.output(0, x.dims, type, x.layout), rules, r.threads());
  };
  return {run, elementwise_input_layouts(c, operands, layout), {layout}};
}

std::string unsupported_cast(const CompileContext& c) {
  const DType from = c.input_dtype(0), to = target_type(c);
  if (from != DType::undefined && !contains(kCastable, from)) return not_supported(from);
  if (to == DType::undefined) return c.node().op == "CastLike" ? "" : "attribute to names no element type";
  return contains(kCastable, to) ? "" : not_supported(to);
}

CompiledKernel compile_bit_cast(const CompileContext& c) {
  const DType to = target_type(c);
  return {[to](RunContext& r) {
    const TensorView& x = r.input(0);
    if (bits_of(x.dtype) != bits_of(to)) {
      throw Error("a bit cast from " + std::string(name_of(x.dtype)) + " to " + std::string(name_of(to)), "use a type of the same width");
    }
    const TensorView& y = r.output(0, x.dims, to);
    if (y.data != x.data) std::memcpy(y.data, x.data, x.bytes());
  }};
}

std::string unsupported_bit_cast(const CompileContext& c) {
  const DType to = target_type(c);
  if (to == DType::undefined || bits_of(to) == 0) return "attribute to names no type of a fixed width";
  return c.input_dtype(0) == DType::string ? not_supported(DType::string) : "";
}

}  // namespace

void register_casts(KernelRegistry& registry) {
  registry.add({.op = "Cast", .make = compile_cast, .unsupported = unsupported_cast, .in_place = true});
  registry.add({.op = "CastLike", .make = compile_cast, .unsupported = unsupported_cast});
  registry.add({.op = "BitCast", .make = compile_bit_cast, .unsupported = unsupported_bit_cast, .view = true});
}

}  // namespace fretsaw
