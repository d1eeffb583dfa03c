// Text for people: aligned tables, sizes with units, and names that cannot break a line.
#include "tools/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>

namespace fretsaw {
namespace {

// `value` with three significant digits and the largest of the units below it, each `step` times the one before.
std::string with_unit(double value, double step, const std::vector<const char*>& units) {
  size_t unit = 0;
  while (value >= step && unit + 1 < units.size()) value /= step, ++unit;
  if (unit == 0) return fmt::format("{:.0f}{}", value, units[0]);
  return fmt::format("{:.{}f}{}", value, value < 10 ? 2 : value < 100 ? 1 : 0, units[unit]);
}

// Terminal columns of UTF-8 text, one for each code point.
size_t width_of(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

}  // namespace

std::string one_line(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c == '\r') {
      out += "\\r";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

std::string human_bytes(double bytes) {
  return with_unit(bytes, 1024, {" B", " KiB", " MiB", " GiB", " TiB"});
}
std::string human_count(double count) {
  return with_unit(count, 1000, {"", " k", " M", " G", " T", " P"});
}
std::string human_percent(double share) {
  return fmt::format("{:.0f}%", share * 100);
}

std::string human_time(double time_us) {
  if (time_us < 1000) return fmt::format("{:.1f} us", time_us);
  if (time_us < 1e6) return fmt::format("{:.2f} ms", time_us / 1e3);
  return fmt::format("{:.2f} s", time_us / 1e6);
}

std::string Table::text() const {
  std::vector<size_t> widths;
  std::vector<bool> right;
  for (size_t row = 0; row < rows_.size(); ++row) {
    for (size_t column = 0; column < rows_[row].size(); ++column) {
      const std::string& cell = rows_[row][column];
      const bool number = row == 0 && cell.starts_with('>');
      if (column >= widths.size()) widths.push_back(0), right.push_back(number);
      widths[column] = std::max(widths[column], width_of(cell) - (number ? 1 : 0));
    }
  }
  std::string out;
  for (size_t row = 0; row < rows_.size(); ++row) {
    std::string line;
    for (size_t column = 0; column < rows_[row].size(); ++column) {
      std::string cell = one_line(rows_[row][column]);
      if (row == 0 && right[column]) cell.erase(0, 1);
      const size_t width = width_of(cell);
      const std::string padding(widths[column] > width ? widths[column] - width : 0, ' ');
      line += (column ? "  " : "") + (right[column] ? padding + cell : cell + padding);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

void Table::print() const {
  const std::string all = text();
  std::fwrite(all.data(), 1, all.size(), stdout);
}

std::string join(const std::vector<std::string>& parts, const std::string& separator) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) out += (i ? separator : "") + parts[i];
  return out;
}

void print_notes(const std::vector<std::string>& notes) {
  for (const std::string& note : notes) std::printf("note: %s\n", one_line(note).c_str());
}

}  // namespace fretsaw
