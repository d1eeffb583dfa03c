// Speeds of known devices, and targets read from JSON files.
#include "partitioner/target.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "graph/errors.h"

namespace fretsaw {
namespace {

// One core of a server CPU with AVX2, as oneDNN drives it. Tensors live in the shared cache: the core waits for them before and after it
// computes. Neighbours exchange values through shared caches and memory.
Target cpu() {
  return {"cpu", 90e3, 90e3, 14e3, 0.0, 1.0, 8e3, 3.0, std::nullopt};
}
// Dense float32 without TF32, HBM3, NVLink 4; what stays after launch overheads of a captured graph.
Target h100() {
  return {"h100", 55e6, 700e6, 2.9e6, 1.0, 2.0, 370e3, 6.0, int64_t{80} * 1000 * 1000 * 1000};
}
Target h200() {
  return {"h200", 55e6, 700e6, 4.2e6, 1.0, 2.0, 370e3, 6.0, int64_t{141} * 1000 * 1000 * 1000};
}

Target read_target(const std::string& file) {
  std::ifstream in(file);
  std::error_code error;
  if (!in || std::filesystem::is_directory(file, error))
    throw Error("'" + file + "' is no target", "use cpu, h100, h200 or a JSON file that describes one", ErrorCode::usage);
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(in);
  } catch (const nlohmann::json::exception& e) {
    throw Error(std::string("this is no JSON: ") + e.what(), "a target file is one JSON object", ErrorCode::usage).in_file(file);
  }
  if (!json.is_object()) throw Error("this is no JSON object", "a target file is one JSON object", ErrorCode::usage).in_file(file);
  Target target = cpu();
  target.name = file;
  auto number = [&](const char* key, double& value, double scale, bool may_be_zero) {
    auto it = json.find(key);
    if (it == json.end()) return;
    if (!it->is_number() || it->get<double>() < 0 || (!may_be_zero && it->get<double>() == 0))
      throw Error(fmt::format("field '{}' is no positive number", key), "correct the target file", ErrorCode::usage).in_file(file);
    value = it->get<double>() * scale;
  };
  number("gflops", target.flops_per_us, 1e3, false);
  target.half_flops_per_us = target.flops_per_us;
  number("half_gflops", target.half_flops_per_us, 1e3, false);
  number("memory_gb_per_s", target.memory_bytes_per_us, 1e3, false);
  number("overlap", target.overlap, 1, true);
  if (target.overlap > 1)
    throw Error("field 'overlap' is above 1", "give the share of time that is hidden, 0 to 1", ErrorCode::usage).in_file(file);
  number("launch_us", target.launch_us, 1, true);
  number("link_gb_per_s", target.link_bytes_per_us, 1e3, false);
  number("link_latency_us", target.link_latency_us, 1, true);
  double memory = -1;
  number("memory_bytes", memory, 1, false);
  if (memory > 0) target.memory_bytes = static_cast<int64_t>(std::min(memory, 9e18));
  for (auto it = json.begin(); it != json.end(); ++it) {
    static constexpr const char* kKnown[] = {"name",      "gflops",        "half_gflops",     "memory_gb_per_s", "overlap",
                                             "launch_us", "link_gb_per_s", "link_latency_us", "memory_bytes"};
    if (std::none_of(std::begin(kKnown), std::end(kKnown), [&](const char* k) { return it.key() == k; }))
      throw Error(fmt::format("field '{}' is not known", it.key()), "correct the target file", ErrorCode::usage).in_file(file);
  }
  return target;
}

}  // namespace

Target load_target(const std::string& name) {
  if (name == "cpu") return cpu();
  if (name == "h100") return h100();
  if (name == "h200") return h200();
  return read_target(name);
}

}  // namespace fretsaw
