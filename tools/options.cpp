// What stands behind an option on the command line: NAME=VALUE pairs, shapes, meshes, sizes.
#include "tools/options.h"

#include <CLI/App.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>

#include "graph/errors.h"

namespace fretsaw {
namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t start = 0;
  for (size_t end = text.find(separator); end != std::string::npos; start = end + 1, end = text.find(separator, start))
    parts.push_back(text.substr(start, end - start));
  parts.push_back(text.substr(start));
  return parts;
}

// "a,b,c" with known names "a,b" and "c" -> ["a,b", "c"].
std::vector<std::string> split_names(const std::string& text, const std::set<std::string>& known) {
  std::vector<std::string> names;
  size_t start = 0;
  while (start <= text.size()) {
    size_t end = text.size();
    while (end > start && !known.contains(text.substr(start, end - start))) {
      const size_t comma = text.rfind(',', end - 1);
      if (comma == std::string::npos || comma < start) {
        end = text.find(',', start);  // no known name starts here: up to the next comma, for the error that names it
        break;
      }
      end = comma;
    }
    if (end == std::string::npos) end = text.size();
    names.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return names;
}

// The number that the text is; nullopt for what is none, or not finite.
std::optional<double> finite(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  return !text.empty() && end == text.c_str() + text.size() && std::isfinite(number) ? std::optional(number) : std::nullopt;
}

std::string no_value(const std::string& text, const std::string& wanted) {
  return "'" + text + "' is not " + wanted;
}

}  // namespace

CLI::Option* add_repeated(CLI::App& app, const std::string& name, std::vector<std::string>& values, const std::string& help) {
  return app.add_option(name, values, help)->type_size(1)->allow_extra_args(false);
}

CLI::Option* from_zero(CLI::Option* option) {
  return option->check([](const std::string& text) { return finite(text).value_or(-1) >= 0 ? "" : no_value(text, "a number from 0 on"); });
}

CLI::Option* above_zero(CLI::Option* option) {
  return option->check([](const std::string& text) { return finite(text).value_or(0) > 0 ? "" : no_value(text, "a number above 0"); });
}

CLI::Option* takes_seed(CLI::Option* option) {
  return option->check([](const std::string& text) {
    uint64_t seed = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
    return error == std::errc() && end == text.data() + text.size() ? "" : no_value(text, "a whole number from 0 to 18446744073709551615");
  });
}

void refuse_empty_values(CLI::App& command) {
  for (CLI::Option* option : command.get_options())
    option->check([](const std::string& text) { return text.empty() ? "the value is empty: give one, or leave the option out" : ""; });
}

void usage_error(const std::string& problem, const std::string& remedy) {
  throw Error(problem, remedy, ErrorCode::usage);
}

void not_supported(const std::string& what, const std::string& why, const std::string& remedy) {
  usage_error(what + " is not supported: " + why, remedy);
}

std::pair<std::string, std::string> parse_pair(const std::string& option, const std::string& text) {
  const size_t at = text.rfind('=');
  if (at == std::string::npos || at == 0) usage_error(option + " '" + text + "' is not NAME=VALUE", "write for example " + option + " x=1");
  return {text.substr(0, at), text.substr(at + 1)};
}

int64_t parse_integer(const std::string& option, const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty())
    usage_error(option + ": '" + text + "' is not a whole number");
  return value;
}

std::map<std::string, Dims> parse_shapes(const std::vector<std::string>& texts) {
  std::map<std::string, Dims> shapes;
  for (const std::string& text : texts) {
    const auto [name, list] = parse_pair("--shape", text);
    Dims dims;
    if (!list.empty()) {  // "x=" is a scalar
      for (const std::string& part : split(list, ',')) {
        dims.push_back(parse_integer("--shape " + name, part));
        if (dims.back() < 0) usage_error("--shape " + name + ": " + part + " is not a size", "sizes are 0 or more");
      }
    }
    shapes[name] = dims;
  }
  return shapes;
}

Mesh parse_mesh(const std::string& text) {
  Mesh mesh;
  std::set<std::string> named;
  int tensor_x = 1;
  if (text.empty()) return mesh;
  if (text == "auto")
    not_supported("--mesh auto", "the planner that chooses a mesh is not part of this build", "name the axes, as in --mesh pipeline=2");
  for (const std::string& part : split(text, ',')) {
    const auto [axis, number] = parse_pair("--mesh", part);
    if (!named.insert(axis).second) usage_error("--mesh names the axis '" + axis + "' twice", "write each axis once");
    const int64_t size = parse_integer("--mesh " + axis, number);
    if (size < 1 || size > 65536) usage_error("--mesh " + axis + "=" + number + " is not a number of ranks", "write 1 or more");
    if (axis == "pipeline") {
      mesh.pipeline = static_cast<int>(size);
    } else if (axis == "data") {
      mesh.data = static_cast<int>(size);
    } else if (axis == "tensor") {
      mesh.tensor = static_cast<int>(size);
    } else if (axis == "tensor_x") {
      tensor_x = static_cast<int>(size);
    } else if (axis == "tensor_y") {
      mesh.tensor_y = static_cast<int>(size);
    } else if (axis == "spatial" || axis == "expert") {
      if (size > 1) not_supported("--mesh " + part, "this build divides the batch, stages and tensors only", "write tensor=" + number);
    } else {
      usage_error("--mesh names the unknown axis '" + axis + "'",
                  "the axes are data, pipeline, tensor, or in its place tensor_x and tensor_y");
    }
  }
  if (tensor_x * mesh.tensor_y > 1) {
    if (mesh.tensor > 1) usage_error("--mesh names tensor beside tensor_x or tensor_y", "write one tensor axis, or two");
    mesh.tensor = tensor_x * mesh.tensor_y;
    if (tensor_x == 1) mesh.tensor_y = 1;  // one axis is no grid
  }
  return mesh;
}

int64_t parse_size_bytes(const std::string& option, const std::string& text) {
  static const std::map<std::string, double> units = {{"", 1},
                                                      {"b", 1},
                                                      {"k", 1024},
                                                      {"kib", 1024},
                                                      {"m", 1048576.},
                                                      {"mib", 1048576.},
                                                      {"g", 1073741824.},
                                                      {"gib", 1073741824.},
                                                      {"kb", 1e3},
                                                      {"mb", 1e6},
                                                      {"gb", 1e9},
                                                      {"t", 1099511627776.},
                                                      {"tib", 1099511627776.},
                                                      {"tb", 1e12}};
  size_t digits = 0;
  while (digits < text.size() && (std::isdigit(static_cast<unsigned char>(text[digits])) || text[digits] == '.')) ++digits;
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + digits, number);
  std::string unit;
  for (size_t i = digits; i < text.size(); ++i)
    if (text[i] != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(text[i])));
  const auto found = units.find(unit);
  const bool whole = error == std::errc() && end == text.data() + digits && digits > 0;
  if (!whole || found == units.end() || number * found->second < 1 || number * found->second > 9e18)
    usage_error(option + ": '" + text + "' is not a size", "write for example 8GiB, 500MB or 1048576");
  return static_cast<int64_t>(std::llround(number * found->second));
}

std::map<std::string, int> parse_batch_axes(const std::vector<std::string>& texts) {
  std::map<std::string, int> axes;
  for (const std::string& text : texts) {
    const auto [name, axis] = parse_pair("--batch", text);
    const int64_t number = axis == "none" ? -1 : parse_integer("--batch " + name, axis);
    if (axis != "none" && (number < 0 || number > 1000))
      usage_error("--batch " + name + ": " + axis + " is not an axis", "write 0 or more, or none");
    axes[name] = static_cast<int>(number);
  }
  return axes;
}

std::map<std::string, MergeRule> parse_merges(const std::vector<std::string>& texts) {
  std::map<std::string, MergeRule> rules;
  for (const std::string& text : texts) {
    const auto [name, how] = parse_pair("--merge", text);
    MergeRule rule;
    const size_t colon = how.find(':');
    rule.merge = how.substr(0, colon);
    if (rule.merge != "concat" && rule.merge != "mean" && rule.merge != "sum" && rule.merge != "same")
      usage_error("--merge " + name + ": '" + how + "' is no way to merge", "write concat, concat:AXIS, mean, sum or same");
    if (colon != std::string::npos) {
      if (rule.merge != "concat") usage_error("--merge " + name + ": only concat takes an axis", "write " + name + "=" + rule.merge);
      rule.axis = static_cast<int>(parse_integer("--merge " + name, how.substr(colon + 1)));
    }
    rules[name] = rule;
  }
  return rules;
}

std::map<std::string, PinnedTensor> parse_shards(const std::vector<std::string>& texts) {
  std::map<std::string, PinnedTensor> pins;
  for (const std::string& text : texts) {
    auto [name, spec] = parse_pair("--shard", text);
    const std::string what = "--shard " + name;
    std::erase(spec, ' ');
    if (spec.size() < 2 || spec.front() != '[' || spec.back() != ']')
      usage_error(what + ": '" + spec + "' is no sharding", "write an axis or _ for each dimension, as in [tensor,_]");
    PinnedTensor pin;
    if (spec != "[]")
      for (const std::string& axis : split(spec.substr(1, spec.size() - 2), ',')) {
        if (axis == "data" || axis == "pipeline")
          usage_error(what + ": tensors are not cut over '" + axis + "'", "write tensor or _; the data axis divides the batch by itself");
        if (axis != "_" && axis != "tensor" && axis != "tensor_x" && axis != "tensor_y")
          usage_error(what + " names the unknown axis '" + axis + "'", "write tensor (tensor_x, tensor_y where there are two) or _");
        pin.axes.push_back(axis == "_" ? "" : axis);
      }
    for (const char* axis : {"tensor", "tensor_x", "tensor_y"})
      if (std::count(pin.axes.begin(), pin.axes.end(), axis) > 1)
        usage_error(what + " cuts two dimensions over one axis", "write each axis for one dimension");
    if (!pins.emplace(name, std::move(pin)).second) usage_error(what + " is there twice", "give one --shard for each tensor");
  }
  return pins;
}

std::vector<std::vector<std::string>> parse_cuts(const std::vector<std::string>& texts, const std::set<std::string>& known) {
  std::vector<std::vector<std::string>> cuts;
  for (const std::string& text : texts) {
    if (text.empty()) usage_error("--cut names no value", "write --cut VALUE[,VALUE]..., one option for each boundary");
    cuts.push_back(split_names(text, known));
  }
  return cuts;
}

}  // namespace fretsaw
