// The matcher of regular expressions: all threads of the program that could match walk side by side over the text.
#include "kernels/cpu/regex.h"

#include <algorithm>

namespace fretsaw {

std::vector<uint32_t> code_points(std::string_view text) {
  std::vector<uint32_t> points;
  points.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<uint8_t>(text[i]);
    const size_t length = lead < 0x80                   ? 1
                          : lead >= 0xF0 && lead < 0xF8 ? 4
                          : lead >= 0xE0 && lead < 0xF0 ? 3
                          : lead >= 0xC0 && lead < 0xE0 ? 2
                                                        : 1;
    uint32_t point = length == 1 ? lead : lead & (0xFF >> (length + 1));
    size_t read = 1;
    for (; read < length && i + read < text.size() && (static_cast<uint8_t>(text[i + read]) & 0xC0) == 0x80; ++read) {
      point = (point << 6) | (static_cast<uint8_t>(text[i + read]) & 0x3F);
    }
    points.push_back(read == length ? point : lead);
    i += read == length ? length : 1;
  }
  return points;
}

std::string utf8(const std::vector<uint32_t>& points) {
  std::string text;
  for (uint32_t p : points) {
    if (p < 0x80) {
      text += static_cast<char>(p);
    } else if (p < 0x800) {
      text += {static_cast<char>(0xC0 | (p >> 6)), static_cast<char>(0x80 | (p & 0x3F))};
    } else if (p < 0x10000) {
      text += {static_cast<char>(0xE0 | (p >> 12)), static_cast<char>(0x80 | ((p >> 6) & 0x3F)), static_cast<char>(0x80 | (p & 0x3F))};
    } else {
      text += {static_cast<char>(0xF0 | (p >> 18)), static_cast<char>(0x80 | ((p >> 12) & 0x3F)),
               static_cast<char>(0x80 | ((p >> 6) & 0x3F)), static_cast<char>(0x80 | (p & 0x3F))};
    }
  }
  return text;
}

namespace {

using Step = Regex::Step;
using Range = Regex::Range;
using Kind = Step::Kind;

bool is_word(uint32_t c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

bool accepts(const Step& step, uint32_t c) {
  bool inside = false;
  for (const Range& range : step.ranges) inside |= c >= range.first && c <= range.last;
  return inside != step.negated;
}

}  // namespace

Regex::Regex(const std::string& pattern) {
  compile_regex(pattern, steps_);
}

// Follows every step that takes no character; `seen[step] == mark` where a thread stands already.
void Regex::add_threads(std::vector<int>& threads, std::vector<uint32_t>& seen, uint32_t mark, int start, size_t at,
                        const std::vector<uint32_t>& text) const {
  std::vector<int> pending = {start};
  while (!pending.empty()) {
    const int i = pending.back();
    pending.pop_back();
    if (seen[static_cast<size_t>(i)] == mark) continue;
    seen[static_cast<size_t>(i)] = mark;
    const Step& step = steps_[static_cast<size_t>(i)];
    const bool word_before = at > 0 && is_word(text[at - 1]), word_after = at < text.size() && is_word(text[at]);
    switch (step.kind) {
      case Kind::characters:
      case Kind::accept:
        threads.push_back(i);
        break;
      case Kind::fork:
        pending.push_back(step.other);
        pending.push_back(step.next);
        break;
      case Kind::jump:
        pending.push_back(step.next);
        break;
      case Kind::text_start:
        if (at == 0) pending.push_back(step.next);
        break;
      case Kind::text_end:
        if (at == text.size()) pending.push_back(step.next);
        break;
      case Kind::word_boundary:
        if (word_before != word_after) pending.push_back(step.next);
        break;
      case Kind::no_word_boundary:
        if (word_before == word_after) pending.push_back(step.next);
        break;
    }
  }
}

bool Regex::full_match(std::string_view utf8_text) const {
  const std::vector<uint32_t> text = code_points(utf8_text);
  std::vector<int> threads, next;
  std::vector<uint32_t> seen(steps_.size(), 0);
  add_threads(threads, seen, 1, 0, 0, text);
  for (size_t at = 0; at < text.size() && !threads.empty(); ++at) {
    next.clear();
    for (int i : threads) {
      const Step& step = steps_[static_cast<size_t>(i)];
      if (step.kind == Kind::characters && accepts(step, text[at])) {
        add_threads(next, seen, static_cast<uint32_t>(at + 2), step.next, at + 1, text);
      }
    }
    std::swap(threads, next);
  }
  return std::any_of(threads.begin(), threads.end(), [this](int i) { return steps_[static_cast<size_t>(i)].kind == Kind::accept; });
}

}  // namespace fretsaw
