// Regular expressions with RE2's syntax and its promise: time linear in the text, whatever the pattern.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fretsaw {

class Regex {
 public:
  // Throws Error when the pattern is not a regular expression, uses what such automata can't do, or is too large.
  explicit Regex(const std::string& pattern);
  bool full_match(std::string_view text) const;  // UTF-8

  struct Range {
    uint32_t first, last;
  };
  struct Step {
    enum class Kind : uint8_t { characters, fork, jump, text_start, text_end, word_boundary, no_word_boundary, accept };
    Kind kind = Kind::accept;
    bool negated = false;            // of `characters`: all but the ranges
    std::vector<Range> ranges = {};  // of `characters`
    int next = -1, other = -1;       // indexes of steps; `other` of a fork
  };

 private:
  void add_threads(std::vector<int>& threads, std::vector<uint32_t>& seen, uint32_t mark, int start, size_t at,
                   const std::vector<uint32_t>& text) const;
  std::vector<Step> steps_;
};

// Appends the program of a pattern.
void compile_regex(const std::string& pattern, std::vector<Regex::Step>& steps);

// Unicode code points of UTF-8 text; a byte that is no UTF-8 stands for itself.
std::vector<uint32_t> code_points(std::string_view text);
std::string utf8(const std::vector<uint32_t>& points);

}  // namespace fretsaw
