// The files that `run` writes: outputs with their description, and traces.
#include "tools/run_files.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "graph/errors.h"
#include "graph/io/temporary_file.h"
#include "tools/value_files.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

// Writes under a temporary name beside `path` and renames.
void write_whole(const std::string& path, const std::function<void(const std::string&)>& write) {
  TemporaryFile part(path);
  write(part.path());
  part.put_in_place();
}

void write_text(const std::string& text, const std::string& path) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (!out || !(out << text) || !out.flush()) throw Error("can't be written", "check the folder and the space on its disk").in_file(path);
}

}  // namespace

Json value_json(const std::string& name, const Type& type, const RuntimeValue& value) {
  if (value.kind == RuntimeValue::Kind::tensor)
    return {{"name", name}, {"dtype", std::string(name_of(value.tensor.dtype))}, {"shape", json_of(value.tensor.dims)}};
  Json out = {{"name", name}, {"dtype", dtype_text(type)}, {"shape", nullptr}};
  if (value.kind == RuntimeValue::Kind::sequence) {
    out["items"] = Json::array();
    for (const RuntimeValue& item : value.items)
      out["items"].push_back(item.kind == RuntimeValue::Kind::tensor ? json_of(item.tensor.dims) : Json(nullptr));
  }
  return out;
}

bool is_numbered(const std::string& file, const std::string& prefix) {
  constexpr std::string_view kSuffix = ".pb";
  if (!file.starts_with(prefix) || !file.ends_with(kSuffix) || file.size() <= prefix.size() + kSuffix.size()) return false;
  return file.find_first_not_of("0123456789", prefix.size()) == file.size() - kSuffix.size();
}

void remove_earlier_files(const std::string& folder, const std::string& prefix, size_t count) {
  std::set<std::string> own;
  for (size_t i = 0; i < count; ++i) own.insert(prefix + std::to_string(i) + ".pb");
  std::vector<fs::path> earlier;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (is_numbered(name, prefix) && !own.contains(name) && !entry.is_directory(error)) earlier.push_back(entry.path());
  }
  for (const fs::path& path : earlier) {
    fs::remove(path, error);
    if (error) throw Error("is of an earlier run and cannot be removed: " + error.message(), "remove it").in_file(path.string());
  }
}

void write_outputs(const Plan& plan, const std::vector<RuntimeValue>& outputs, const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error || !fs::is_directory(folder, error)) throw Error("can't be made a folder", "choose another place for --output").in_file(folder);
  Json list = Json::array();
  for (size_t i = 0; i < outputs.size(); ++i) {
    const std::string file = "output_" + std::to_string(i) + ".pb";
    const PlanOutput& output = plan.outputs[i];
    write_whole((fs::path(folder) / file).string(),
                [&](const std::string& path) { write_value_file(outputs[i], output.type, output.name, path); });
    Json one = value_json(output.name, output.type, outputs[i]);
    one["file"] = file;
    list.push_back(one);
  }
  remove_earlier_files(folder, "output_", outputs.size());
  write_whole((fs::path(folder) / "outputs.json").string(), [&](const std::string& path) {
    write_text(dump({{"outputs", list}}) + "\n", path);
  });
}

void write_trace(const std::vector<TraceEvent>& events, const std::string& path) {
  Json list = Json::array();
  std::set<int> ranks;
  for (const TraceEvent& event : events) {
    ranks.insert(event.rank);
    list.push_back({{"name", event.name},
                    {"cat", event.category},
                    {"ph", "X"},
                    {"pid", 0},
                    {"tid", event.rank},
                    {"ts", event.start_us},
                    {"dur", event.duration_us}});
  }
  for (const int rank : ranks)
    list.push_back({{"name", "thread_name"}, {"ph", "M"}, {"pid", 0}, {"tid", rank}, {"args", {{"name", "rank " + std::to_string(rank)}}}});
  write_whole(path, [&](const std::string& part) {
    write_text(
        Json({{"traceEvents", list}, {"displayTimeUnit", "ms"}}).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n",
        part);
  });
}

}  // namespace fretsaw
