// Draws runs in columns of text.
#include "tools/schedule_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "partitioner/training_schedules.h"

namespace fretsaw {
namespace {

bool is_run(const SimulatedAction& a) {
  return a.action.kind == Action::Kind::forward;
}

double shortest_run_us(const Simulation& simulation) {
  double shortest = 0;
  for (const SimulatedRank& rank : simulation.ranks)
    for (const SimulatedAction& a : rank.actions) {
      const double took = a.end_us - a.start_us;
      if (is_run(a) && took > 0 && (shortest == 0 || took < shortest)) shortest = took;
    }
  return shortest;
}

std::string label(const Action& a, int forward, int ranks) {
  const char letter = letter_of_training_stage(a.stage, forward);
  std::string text = fmt::format("{}{}", letter, a.micro_batch);
  if (forward == ranks) return text;
  const int stage = letter == 'F' ? a.stage : (letter == 'B' ? 2 : 3) * forward - 1 - a.stage;
  return text + static_cast<char>('a' + stage / ranks % 26);
}

// Draws one rank; `fill` says what stands in a run's columns.
template <class Fill>
std::string line_of(const SimulatedRank& rank, double columns_of_us, size_t width, char idle, Fill fill) {
  std::string line(width, idle);
  const auto column = [&](double us) { return std::min(width, static_cast<size_t>(std::lround(us * columns_of_us))); };
  for (const SimulatedAction& a : rank.actions) {
    if (!is_run(a)) continue;
    const size_t begin = column(a.start_us), end = std::min(width, std::max(column(a.end_us), begin + 1));
    const std::string text = fill(a.action, end - begin);
    line.replace(begin, text.size(), text);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace

std::vector<std::string> schedule_picture(const Simulation& simulation, int forward, int micro_batches, size_t most_columns) {
  const int ranks = static_cast<int>(simulation.ranks.size());
  const double shortest = shortest_run_us(simulation);
  std::vector<std::string> lines;
  if (shortest == 0) return lines;
  // A cell holds a label and a blank; labels start with capitals and may stand side by side where that is too wide.
  const size_t label_width = fmt::format("F{}", micro_batches - 1).size() + (forward > ranks);
  const auto cells = std::ceil(simulation.time_us / shortest - 1e-6);
  const bool fits = cells * static_cast<double>(label_width) <= static_cast<double>(most_columns);
  const bool spaced = cells * static_cast<double>(label_width + 1) <= static_cast<double>(most_columns);
  const size_t cell = label_width + spaced, width = fits ? static_cast<size_t>(cells) * cell : most_columns;
  const double columns_of_us = fits ? static_cast<double>(cell) / shortest : static_cast<double>(width) / simulation.time_us;
  for (const SimulatedRank& rank : simulation.ranks)
    lines.push_back(line_of(rank, columns_of_us, width, ' ', [&](const Action& a, size_t columns) {
      if (!fits) return std::string(columns, letter_of_training_stage(a.stage, forward));
      std::string text = label(a, forward, ranks);
      text.resize(std::max(text.size(), columns > label_width + 1 ? columns - spaced : 0), '-');
      return text.substr(0, columns);
    }));
  return lines;
}

std::string timeline(const SimulatedRank& rank, double time_us, size_t width) {
  if (time_us <= 0) return std::string(width, '.');
  return line_of(rank, static_cast<double>(width) / time_us, width, '.',
                 [](const Action& a, size_t columns) { return std::string(columns, static_cast<char>('0' + a.micro_batch % 10)); });
}

}  // namespace fretsaw
