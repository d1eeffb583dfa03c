// From pattern to program: a recursive descent over the regular expression that appends the steps of each part.
#include <algorithm>

#include "graph/errors.h"
#include "kernels/cpu/regex.h"

namespace fretsaw {

namespace {

using Step = Regex::Step;
using Range = Regex::Range;
using Kind = Step::Kind;
constexpr uint32_t kLastPoint = 0x10FFFF;
constexpr size_t kMostSteps = 20000;
constexpr int kMostRepeats = 1000;
constexpr int kMostNesting = 200;

bool is_word(uint32_t c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

// A set of characters as it is being read.
struct CharacterSet {
  bool negated = false;
  std::vector<Range> ranges;

  void add(uint32_t first, uint32_t last) { ranges.push_back({first, last}); }
  void add_complement(std::vector<Range> of) {
    std::sort(of.begin(), of.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
    uint32_t next = 0;
    for (const Range& range : of) {
      if (range.first > next) add(next, range.first - 1);
      next = std::max(next, range.last + 1);
    }
    if (next <= kLastPoint) add(next, kLastPoint);
  }
};

// Recursive descent over the pattern; each part appends its steps and leaves by falling through to the step after them.
class Compiler {
 public:
  Compiler(const std::string& pattern, std::vector<Step>& steps) : text_(code_points(pattern)), steps_(steps) {}

  void compile() {
    alternatives();
    if (at_ < text_.size()) fail("it has a closing parenthesis without an opening one");
    emit({.kind = Kind::accept});
  }

 private:
  [[noreturn]] static void fail(const std::string& why) { throw Error("the pattern is no regular expression: " + why); }
  bool more() const { return at_ < text_.size(); }
  bool at(uint32_t c, size_t ahead = 0) const { return at_ + ahead < text_.size() && text_[at_ + ahead] == c; }
  bool take(uint32_t c) { return at(c) && ++at_; }

  int emit(Step step) {
    if (steps_.size() >= kMostSteps) throw Error("the pattern is too large", "use fewer or smaller repetitions");
    step.next = step.next >= 0 ? step.next : static_cast<int>(steps_.size()) + 1;
    steps_.push_back(std::move(step));
    return static_cast<int>(steps_.size()) - 1;
  }
  int here() const { return static_cast<int>(steps_.size()); }

  // Moves steps [first, end) by one to put `step` before them.
  void insert_before(int first, Step step) {
    for (size_t i = static_cast<size_t>(first); i < steps_.size(); ++i) {
      ++steps_[i].next;
      if (steps_[i].other >= 0) ++steps_[i].other;
    }
    emit({});
    std::rotate(steps_.begin() + first, steps_.end() - 1, steps_.end());
    steps_[static_cast<size_t>(first)] = std::move(step);
  }

  void alternatives() {
    if (++depth_ > kMostNesting) fail("it is nested too deeply");
    const int start = here();
    std::vector<int> exits;
    sequence();
    int branch = start;
    while (take('|')) {
      exits.push_back(emit({.kind = Kind::jump}));
      insert_before(branch, {.kind = Kind::fork, .next = branch + 1, .other = here() + 1});
      ++exits.back();
      branch = here();
      sequence();
    }
    for (int exit : exits) steps_[static_cast<size_t>(exit)].next = here();
    --depth_;
  }

  void sequence() {
    while (more() && !at('|') && !at(')')) {
      const int start = here();
      const bool repeatable = atom();
      if (repeatable) quantifiers(start);
    }
  }

  // True when the atom may be repeated.
  bool atom() {
    const uint32_t c = text_[at_++];
    switch (c) {
      case '(':
        return group();
      case '[':
        set();
        return true;
      case '.':
        emit_set(any_character());
        return true;
      case '^':
        emit({.kind = Kind::text_start});
        return true;
      case '$':
        emit({.kind = Kind::text_end});
        return true;
      case '*':
      case '+':
      case '?':
        fail("a repetition stands without anything to repeat");
      case '\\':
        escape();
        return true;
      default:
        emit_character(c);
        return true;
    }
  }

  CharacterSet any_character() const {
    CharacterSet set;
    set.negated = !dot_all_;
    if (dot_all_) set.add(0, kLastPoint);
    if (!dot_all_) set.add('\n', '\n');
    return set;
  }

  void emit_character(uint32_t c) {
    CharacterSet set;
    set.add(c, c);
    emit_set(std::move(set));
  }

  void emit_set(CharacterSet set) {
    if (ignore_case_) {
      const std::vector<Range> as_read = set.ranges;
      for (const Range& range : as_read) {
        const auto overlap = [&](uint32_t first, uint32_t last, int shift) {
          const uint32_t from = std::max(range.first, first), to = std::min(range.last, last);
          if (from <= to)
            set.add(static_cast<uint32_t>(static_cast<int>(from) + shift), static_cast<uint32_t>(static_cast<int>(to) + shift));
        };
        overlap('a', 'z', -32);
        overlap('A', 'Z', 32);
      }
    }
    emit({.kind = Kind::characters, .negated = set.negated, .ranges = std::move(set.ranges)});
  }

  // After "(": a capturing or plain group, or flags. False for flags alone.
  bool group() {
    const bool outer_ignore = ignore_case_, outer_dot = dot_all_;
    if (take('?')) {
      if (at('=') || at('!') || (at('<') && (at('=', 1) || at('!', 1)))) fail("look-around assertions are not supported");
      if (take('P') || at('<')) {
        if (!take('<')) fail("'(?P' must be followed by '<name>'");
        while (more() && !at('>')) ++at_;
        if (!take('>')) fail("a group's name does not end");
      } else if (flags()) {
        return false;
      }
    }
    alternatives();
    if (!take(')')) fail("a parenthesis is not closed");
    ignore_case_ = outer_ignore;
    dot_all_ = outer_dot;
    return true;
  }

  // Reads "flags:" or "flags)"; true for the second, which holds until the group around it ends.
  bool flags() {
    bool value = true;
    for (; more(); ++at_) {
      if (at('i')) {
        ignore_case_ = value;
      } else if (at('s')) {
        dot_all_ = value;
      } else if (at('-')) {
        value = false;
      } else if (!at('m') && !at('U')) {
        break;
      }
    }
    if (take(':')) return false;
    if (take(')')) return true;
    fail("a group begins with flags that are not known");
  }

  // Adds the class that a letter after a backslash names; false when it names none.
  static bool add_class(uint32_t letter, CharacterSet& set) {
    std::vector<Range> ranges;
    switch (letter | 0x20) {
      case 'd':
        ranges = {{'0', '9'}};
        break;
      case 'w':
        ranges = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
        break;
      case 's':
        ranges = {{'\t', '\n'}, {'\f', '\r'}, {' ', ' '}};
        break;
      default:
        return false;
    }
    if (letter >= 'a') {
      set.ranges.insert(set.ranges.end(), ranges.begin(), ranges.end());
    } else {
      set.add_complement(std::move(ranges));
    }
    return true;
  }

  uint32_t hexadecimal() {
    const bool braces = take('{');
    uint32_t value = 0;
    int digits = 0;
    for (; more() && digits < (braces ? 6 : 2); ++at_, ++digits) {
      const uint32_t c = text_[at_], lower = c | 0x20;
      if (c >= '0' && c <= '9') {
        value = value * 16 + (c - '0');
      } else if (lower >= 'a' && lower <= 'f') {
        value = value * 16 + (lower - 'a' + 10);
      } else {
        break;
      }
    }
    if (digits == 0 || (braces && !take('}'))) fail("an escape with \\x is not complete");
    return value;
  }

  // The character an escape stands for, after the backslash.
  uint32_t escaped_character() {
    const uint32_t c = text_[at_++];
    switch (c) {
      case 'n':
        return '\n';
      case 't':
        return '\t';
      case 'r':
        return '\r';
      case 'f':
        return '\f';
      case 'v':
        return '\v';
      case 'a':
        return '\a';
      case 'x':
        return hexadecimal();
      default:
        break;
    }
    if (is_word(c) && c != '_') fail(std::string("the escape \\") + static_cast<char>(c) + " is not supported");
    return c;
  }

  void escape() {
    if (!more()) fail("it ends in a backslash");
    CharacterSet set;
    if (add_class(text_[at_], set)) {
      ++at_;
      return emit_set(std::move(set));
    }
    if (take('b')) return void(emit({.kind = Kind::word_boundary}));
    if (take('B')) return void(emit({.kind = Kind::no_word_boundary}));
    if (take('A')) return void(emit({.kind = Kind::text_start}));
    if (take('z')) return void(emit({.kind = Kind::text_end}));
    emit_character(escaped_character());
  }

  // "[:name:]" inside brackets; false when there is none.
  bool named_class(CharacterSet& set) {
    static const std::vector<std::pair<std::string, std::vector<Range>>> kClasses = {
        {"alnum", {{'0', '9'}, {'A', 'Z'}, {'a', 'z'}}},
        {"alpha", {{'A', 'Z'}, {'a', 'z'}}},
        {"digit", {{'0', '9'}}},
        {"lower", {{'a', 'z'}}},
        {"upper", {{'A', 'Z'}}},
        {"space", {{'\t', '\r'}, {' ', ' '}}},
        {"punct", {{'!', '/'}, {':', '@'}, {'[', '`'}, {'{', '~'}}},
        {"xdigit", {{'0', '9'}, {'A', 'F'}, {'a', 'f'}}},
        {"word", {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}}}};
    if (!at('[') || !at(':', 1)) return false;
    for (const auto& [name, ranges] : kClasses) {
      bool same = true;
      for (size_t i = 0; i < name.size(); ++i) same &= at(static_cast<uint8_t>(name[i]), 2 + i);
      if (!same || !at(':', 2 + name.size()) || !at(']', 3 + name.size())) continue;
      set.ranges.insert(set.ranges.end(), ranges.begin(), ranges.end());
      at_ += name.size() + 4;
      return true;
    }
    return false;
  }

  // After "[".
  void set() {
    CharacterSet set;
    set.negated = take('^');
    for (bool first = true; first || !at(']'); first = false) {
      if (!more()) fail("a bracket is not closed");
      if (named_class(set)) continue;
      uint32_t from = text_[at_++];
      if (from == '\\') {
        if (!more()) fail("it ends in a backslash");
        if (add_class(text_[at_], set)) {
          ++at_;
          continue;
        }
        from = escaped_character();
      }
      uint32_t to = from;
      if (at('-') && at_ + 1 < text_.size() && !at(']', 1)) {
        ++at_;
        to = text_[at_++];
        if (to == '\\') {
          if (!more()) fail("it ends in a backslash");
          to = escaped_character();
        }
      }
      if (to < from) fail("a range in brackets runs backwards");
      set.add(from, to);
    }
    ++at_;
    emit_set(std::move(set));
  }

  // A number of up to four digits, or -1.
  int number() {
    int value = -1;
    for (int digits = 0; more() && text_[at_] >= '0' && text_[at_] <= '9' && digits < 4; ++at_, ++digits) {
      value = std::max(value, 0) * 10 + static_cast<int>(text_[at_] - '0');
    }
    return value;
  }

  // "{m}", "{m,}" or "{m,n}"; false, taking nothing, where the brace is only a character.
  bool counted(int& least, int& most) {
    const size_t start = at_;
    if (!take('{')) return false;
    least = number();
    most = least;
    if (least >= 0 && take(',')) most = number();
    if (least < 0 || !take('}')) {
      at_ = start;
      return false;
    }
    if (least > kMostRepeats || most > kMostRepeats || (most >= 0 && most < least)) fail("a repetition's count is out of range");
    return true;
  }

  void quantifiers(int start) {
    for (;;) {
      int least = 0, most = -1;
      if (take('*')) {
      } else if (take('+')) {
        least = 1;
      } else if (take('?')) {
        most = 1;
      } else if (!counted(least, most)) {
        return;
      }
      take('?');  // a lazy repetition matches the same whole texts
      repeat(start, least, most);
    }
  }

  // Replaces steps [start, end) by `least` to `most` (-1: any number) copies of them.
  void repeat(int start, int least, int most) {
    const std::vector<Step> body(steps_.begin() + start, steps_.end());
    steps_.resize(static_cast<size_t>(start));
    const auto append = [&] {
      const int shift = here() - start;
      for (Step step : body) {
        step.next += shift;
        if (step.other >= 0) step.other += shift;
        emit(std::move(step));
      }
    };
    for (int i = 0; i < least; ++i) append();
    if (most < 0) {
      const int fork = emit({.kind = Kind::fork});
      append();
      emit({.kind = Kind::jump, .next = fork});
      steps_[static_cast<size_t>(fork)].other = here();
      return;
    }
    std::vector<int> forks;
    for (int i = least; i < most; ++i) {
      forks.push_back(emit({.kind = Kind::fork}));
      append();
    }
    for (int fork : forks) steps_[static_cast<size_t>(fork)].other = here();
  }

  std::vector<uint32_t> text_;
  std::vector<Step>& steps_;
  size_t at_ = 0;
  int depth_ = 0;
  bool ignore_case_ = false, dot_all_ = false;
};

}  // namespace

void compile_regex(const std::string& pattern, std::vector<Regex::Step>& steps) {
  Compiler(pattern, steps).compile();
}

}  // namespace fretsaw
