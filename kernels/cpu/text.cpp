// Operators on strings: StringConcat, StringSplit, StringNormalizer, RegexFullMatch, TfIdfVectorizer.
#include <algorithm>
#include <clocale>
#include <cwctype>
#include <map>
#include <memory>
#include <unordered_set>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/regex.h"

namespace fretsaw {
namespace {

const std::string* strings_of(const TensorView& view) {
  require(view.dtype == DType::string, "the input must hold strings");
  return view.as<const std::string>();
}

CompiledKernel make_string_concat(const CompileContext&) {
  return {[](RunContext& r) {
    const TensorView &a = r.input(0), &b = r.input(1);
    const std::string *left = strings_of(a), *right = strings_of(b);
    const Dims dims = broadcast_dims(a.dims, b.dims);
    auto* out = sized_output(r, 0, dims, DType::string).as<std::string>();
    const int64_t count = count_of(dims);
    for (int64_t i = 0; i < count; ++i) {
      int64_t rest = i, at_a = 0, at_b = 0, stride_a = 1, stride_b = 1;
      for (size_t k = 0; k < dims.size(); ++k) {  // k counts from the back
        const int64_t index = rest % dims[dims.size() - 1 - k];
        rest /= dims[dims.size() - 1 - k];
        if (k < a.rank()) at_a += (a.dims[a.rank() - 1 - k] == 1 ? 0 : index) * stride_a, stride_a *= a.dims[a.rank() - 1 - k];
        if (k < b.rank()) at_b += (b.dims[b.rank() - 1 - k] == 1 ? 0 : index) * stride_b, stride_b *= b.dims[b.rank() - 1 - k];
      }
      out[i] = left[at_a] + right[at_b];
    }
  }};
}

// The parts between runs of white space; after `most` cuts the rest stays whole.
std::vector<std::string> split_at_spaces(const std::string& text, int64_t most) {
  constexpr const char* kSpaces = " \t\n\v\f\r";
  std::vector<std::string> parts;
  size_t at = text.find_first_not_of(kSpaces);
  while (at != std::string::npos) {
    if (static_cast<int64_t>(parts.size()) == most) {
      parts.push_back(text.substr(at, text.find_last_not_of(kSpaces) + 1 - at));
      break;
    }
    const size_t end = text.find_first_of(kSpaces, at);
    parts.push_back(text.substr(at, end - at));
    at = text.find_first_not_of(kSpaces, end);
  }
  return parts;
}

std::vector<std::string> split_at(const std::string& text, const std::string& delimiter, int64_t most) {
  std::vector<std::string> parts;
  size_t at = 0;
  for (;;) {
    const size_t end = static_cast<int64_t>(parts.size()) == most ? std::string::npos : text.find(delimiter, at);
    parts.push_back(text.substr(at, end - at));
    if (end == std::string::npos) return parts;
    at = end + delimiter.size();
  }
}

CompiledKernel make_string_split(const CompileContext& c) {
  const std::string delimiter = c.node().get_string("delimiter", "");
  const int64_t most = c.node().get_int("maxsplit", -1);
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);
    const std::string* text = strings_of(x);
    std::vector<std::vector<std::string>> parts;
    size_t widest = 0;
    for (int64_t i = 0; i < x.count(); ++i) {
      parts.push_back(delimiter.empty() ? split_at_spaces(text[i], most) : split_at(text[i], delimiter, most));
      widest = std::max(widest, parts.back().size());
    }
    if (r.wants_output(0)) {
      Dims dims = x.dims;
      dims.push_back(static_cast<int64_t>(widest));
      auto* out = sized_output(r, 0, dims, DType::string).as<std::string>();
      for (const auto& each : parts) {
        for (size_t k = 0; k < widest; ++k) *out++ = k < each.size() ? each[k] : std::string();
      }
    }
    if (!r.wants_output(1)) return;
    auto* counts = sized_output(r, 1, x.dims, DType::int64).as<int64_t>();
    for (const auto& each : parts) *counts++ = static_cast<int64_t>(each.size());
  }};
}

enum class CaseChange { none, lower, upper };

// Changes case by the tables of a locale.
class CaseChanger {
 public:
  explicit CaseChanger(const std::string& name) : locale_(newlocale(LC_CTYPE_MASK, name.c_str(), nullptr)) {
    if (!locale_) locale_ = newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
    if (!locale_) locale_ = newlocale(LC_CTYPE_MASK, "C", nullptr);
  }
  ~CaseChanger() {
    if (locale_) freelocale(locale_);
  }
  CaseChanger(const CaseChanger&) = delete;
  CaseChanger& operator=(const CaseChanger&) = delete;

  std::string changed(const std::string& text, CaseChange change) const {
    if (change == CaseChange::none || !locale_) return text;
    std::vector<uint32_t> points = code_points(text);
    for (uint32_t& p : points) {
      p = static_cast<uint32_t>(change == CaseChange::lower ? towlower_l(static_cast<wint_t>(p), locale_)
                                                            : towupper_l(static_cast<wint_t>(p), locale_));
    }
    return utf8(points);
  }

 private:
  locale_t locale_;
};

CompiledKernel make_string_normalizer(const CompileContext& c) {
  const std::string action = c.node().get_string("case_change_action", "NONE");
  require(action == "NONE" || action == "LOWER" || action == "UPPER", "case_change_action must be NONE, LOWER or UPPER");
  const CaseChange change = action == "LOWER" ? CaseChange::lower : action == "UPPER" ? CaseChange::upper : CaseChange::none;
  const auto changer = std::make_shared<const CaseChanger>(c.node().get_string("locale", "en_US.UTF-8"));
  const CaseChange compared = c.node().get_int("is_case_sensitive", 0) != 0 ? CaseChange::none : CaseChange::lower;
  std::unordered_set<std::string> stop_words;
  for (const std::string& word : c.node().get_strings("stopwords")) stop_words.insert(changer->changed(word, compared));
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);  // [C] or [1, C]
    const std::string* text = strings_of(x);
    require(x.rank() == 1 || (x.rank() == 2 && x.dims[0] == 1), "the input must be [C] or [1, C]");
    std::vector<std::string> kept;
    for (int64_t i = 0; i < x.count(); ++i) {
      if (!stop_words.contains(changer->changed(text[i], compared))) kept.push_back(changer->changed(text[i], change));
    }
    if (kept.empty()) kept.emplace_back();  // ONNX: one empty string stands for nothing left
    Dims dims = x.dims;
    dims.back() = static_cast<int64_t>(kept.size());
    std::copy(kept.begin(), kept.end(), sized_output(r, 0, dims, DType::string).as<std::string>());
  }};
}

CompiledKernel make_regex_full_match(const CompileContext& c) {
  const auto regex = std::make_shared<const Regex>(c.node().get_string("pattern", ""));
  return {[regex](RunContext& r) {
    const TensorView& x = r.input(0);
    const std::string* text = strings_of(x);
    auto* out = sized_output(r, 0, x.dims, DType::boolean).as<uint8_t>();
    for (int64_t i = 0; i < x.count(); ++i) out[i] = regex->full_match(text[i]) ? 1 : 0;
  }};
}

// The n-grams of a TfIdfVectorizer over words of type T.
template <typename T>
struct NgramTable {
  struct Entry {
    int64_t column;
    float weight;
  };
  std::map<std::vector<T>, Entry> entries;
  int64_t columns = 0, shortest = 1, longest = 1, most_skips = 0;
  bool counts = true, weighted = false;  // TF counts, IDF weighs, TFIDF does both

  NgramTable(const Node& node, const std::vector<T>& pool) {
    shortest = node.get_int("min_gram_length", 1);
    longest = node.get_int("max_gram_length", 1);
    most_skips = node.get_int("max_skip_count", 0);
    require(shortest >= 1 && longest >= shortest && longest <= 1 << 16 && most_skips >= 0 && most_skips <= 1 << 30,
            "the n-gram lengths or the skip count are out of range");
    const std::string mode = node.get_string("mode", "");
    require(mode == "TF" || mode == "IDF" || mode == "TFIDF", "the mode must be TF, IDF or TFIDF");
    counts = mode != "IDF";
    weighted = mode != "TF";
    fill(node, pool);
  }

  void fill(const Node& node, const std::vector<T>& pool) {
    const std::vector<int64_t> starts = node.get_ints("ngram_counts"), indexes = node.get_ints("ngram_indexes");
    const std::vector<float> weights = node.get_floats("weights");
    require(weights.empty() || weights.size() == indexes.size(), "there must be one weight for each n-gram");
    for (int64_t index : indexes) require(index >= 0 && index < int64_t{1} << 40, "one of ngram_indexes is out of range");
    size_t ngram = 0;
    for (size_t n = 1; n <= starts.size(); ++n) {
      const int64_t begin = starts[n - 1], end = n < starts.size() ? starts[n] : static_cast<int64_t>(pool.size());
      require(begin >= 0 && end >= begin && end <= static_cast<int64_t>(pool.size()) && (end - begin) % static_cast<int64_t>(n) == 0,
              "ngram_counts do not divide the pool");
      for (int64_t at = begin; at < end; at += static_cast<int64_t>(n), ++ngram) {
        require(ngram < indexes.size(), "ngram_indexes must have one index for each n-gram");
        const std::vector<T> words(pool.begin() + at, pool.begin() + at + static_cast<int64_t>(n));
        entries[words] = {indexes[ngram], weights.empty() ? 1.0f : weights[ngram]};
      }
    }
    for (int64_t index : indexes) columns = std::max(columns, index + 1);
  }

  void count_row(const T* row, int64_t length, float* out) const {
    std::vector<T> words;
    for (int64_t distance = 1; distance <= std::min(most_skips + 1, std::max<int64_t>(length, 1)); ++distance) {
      for (int64_t n = shortest; n <= longest; ++n) {
        if ((n - 1) * distance >= length) break;
        if (n == 1 && distance > 1) continue;  // single words skip nothing
        for (int64_t start = 0; start + (n - 1) * distance < length; ++start) {
          words.clear();
          for (int64_t k = 0; k < n; ++k) words.push_back(row[start + k * distance]);
          const auto found = entries.find(words);
          if (found == entries.end()) continue;
          const float value = weighted ? found->second.weight : 1.0f;
          float& sum = out[found->second.column];
          sum = counts ? sum + value : value;
        }
      }
    }
  }

  void run(RunContext& r, const T* words) const {
    const TensorView& x = r.input(0);  // [C] or [N, C]
    require(x.rank() == 1 || x.rank() == 2, "the input must be [C] or [N, C]");
    Dims dims = x.dims;
    dims.back() = columns;
    TensorView& y = sized_output(r, 0, dims, DType::float32);
    std::fill_n(y.as<float>(), y.count(), 0.0f);
    const int64_t length = x.dims.back(), rows = x.rank() == 2 ? x.dims[0] : 1;
    if (columns == 0) return;
    for (int64_t row = 0; row < rows; ++row) count_row(words + row * length, length, y.as<float>() + row * columns);
  }
};

CompiledKernel make_tf_idf_vectorizer(const CompileContext& c) {
  if (c.node().has("pool_strings")) {
    const auto table = std::make_shared<const NgramTable<std::string>>(c.node(), c.node().get_strings("pool_strings"));
    return {[table](RunContext& r) { table->run(r, strings_of(r.input(0))); }};
  }
  const auto table = std::make_shared<const NgramTable<int64_t>>(c.node(), c.node().get_ints("pool_int64s"));
  return {[table](RunContext& r) {
    const std::vector<int64_t> words = r.input_ints(0);
    table->run(r, words.data());
  }};
}

}  // namespace

void register_text(KernelRegistry& registry) {
  registry.add({.op = "StringConcat", .make = make_string_concat});
  registry.add({.op = "StringSplit", .make = make_string_split});
  registry.add({.op = "StringNormalizer", .make = make_string_normalizer});
  registry.add({.op = "RegexFullMatch", .make = make_regex_full_match});
  registry.add({.op = "TfIdfVectorizer", .make = make_tf_idf_vectorizer});
}

}  // namespace fretsaw
