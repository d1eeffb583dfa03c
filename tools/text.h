// Text for people: aligned tables, sizes with units, and names that cannot break a line.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace fretsaw {

// Control characters become \n, \t, \x1b: the text stays on one line and cannot move the cursor.
std::string one_line(const std::string& text);
std::string human_bytes(double bytes);    // "1.2 GiB", "640 B"
std::string human_count(double count);    // "4.1 G", "512"
std::string human_time(double time_us);   // "3.25 ms"
std::string human_percent(double share);  // "87%"

// Columns as wide as their widest cell. Numbers stand to the right: a column whose heading starts with '>' (which is not printed).
class Table {
 public:
  explicit Table(std::vector<std::string> headings) : rows_{std::move(headings)} {}
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  bool empty() const { return rows_.size() == 1; }
  std::string text() const;
  void print() const;  // to stdout

 private:
  std::vector<std::vector<std::string>> rows_;
};

std::string join(const std::vector<std::string>& parts, const std::string& separator);
void print_notes(const std::vector<std::string>& notes);  // "note: ..." lines on stdout

}  // namespace fretsaw
