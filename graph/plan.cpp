// Plan folders: written beside their place and renamed into it, read with every cross-reference checked.
#include "graph/plan.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "graph/errors.h"
#include "graph/io.h"
#include "graph/merge.h"
#include "graph/passes.h"
#include "graph/plan_checks.h"
#include "graph/plan_files.h"
#include "graph/plan_json.h"

namespace fretsaw {
namespace fs = std::filesystem;

bool is_plan_folder(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(fs::path(path) / "plan.json", error);
}

namespace {

// Removes a folder of ours unless it was given its final name.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(fs::path path) : path_(std::move(path)) {
    std::error_code error;
    fs::remove_all(path_, error);
    if (!fs::create_directory(path_, error))
      throw Error(fmt::format("cannot create a folder: {}", error ? error.message() : "it exists"), "check the path and its permissions")
          .in_file(path_.string());
  }
  ~TemporaryFolder() {
    std::error_code error;
    if (!path_.empty()) fs::remove_all(path_, error);
  }
  const fs::path& path() const { return path_; }
  void rename_to(const fs::path& target) {
    std::error_code error;
    fs::rename(path_, target, error);
    if (error)
      throw Error(fmt::format("cannot rename the finished plan: {}", error.message()), "check the path and its permissions")
          .in_file(target.string());
    path_.clear();
  }

 private:
  fs::path path_;
};

bool lies_in(const std::string& file, const fs::path& folder) {
  if (file.empty()) return false;
  std::error_code error;
  fs::path a = fs::weakly_canonical(file, error), b = fs::weakly_canonical(folder, error);
  return std::mismatch(b.begin(), b.end(), a.begin(), a.end()).first == b.end();
}

// Refuses to write where something stands that is not ours to replace.
void check_target(const Plan& plan, const fs::path& folder, bool overwrite) {
  std::error_code error;
  if (fs::symlink_status(folder, error).type() == fs::file_type::not_found) return;
  bool is_folder = fs::is_directory(folder, error);
  if (is_folder && fs::is_empty(folder, error)) return;
  if (!overwrite)
    throw Error("there is something at the plan's place already", "choose another folder, or --overwrite a plan", ErrorCode::usage)
        .in_file(folder.string());
  if (!is_folder || !is_plan_folder(folder.string()))
    throw Error("what stands at the plan's place is no plan, and is not overwritten", "choose another folder, or remove it",
                ErrorCode::usage)
        .in_file(folder.string());
  auto refuse = [&](const std::string& file) {
    throw Error(fmt::format("the model's own file '{}' lies in the folder that would be overwritten", file), "choose another folder",
                ErrorCode::usage)
        .in_file(folder.string());
  };
  if (lies_in(plan.source_file, folder)) refuse(plan.source_file);
  std::set<const MappedFile*> files;
  const auto check = [&](const Tensor& tensor) {
    if (tensor.file && files.insert(tensor.file.get()).second && lies_in(tensor.file->path(), folder)) refuse(tensor.file->path());
  };
  for (const PlanGraph& g : plan.graphs)
    for (const Value* v : g.model->graph->initializers()) check(*v->constant);
  for (const PlanState& state : plan.states)
    if (state.initial) check(*state.initial);
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  if (!out) throw Error("cannot write the file", "is there space, and may it be written?").in_file(path.string());
}

void replace_folder(TemporaryFolder& done, const fs::path& folder) {
  std::error_code error;
  if (!fs::exists(folder, error) || fs::is_empty(folder, error)) {
    fs::remove(folder, error);
    return done.rename_to(folder);
  }
  fs::path old = folder.string() + fmt::format(".old-{}", ::getpid());
  fs::rename(folder, old, error);
  if (error)
    throw Error(fmt::format("cannot replace the plan: {}", error.message()), "check the path and its permissions").in_file(folder.string());
  try {
    done.rename_to(folder);
  } catch (...) {
    fs::rename(old, folder, error);
    throw;
  }
  fs::remove_all(old, error);
}

// The values that states begin with, as initializers under their names.
Model model_of_states(const Plan& plan) {
  constexpr int64_t kIrVersion = 10;
  Model model;
  model.ir_version = kIrVersion;
  model.opsets = {{"", newest_opset()}};
  model.graph = std::make_shared<Graph>();
  model.graph->name = "states";
  for (const PlanState& state : plan.states) {
    if (!state.initial) continue;
    Value* value = model.graph->add_constant(state.name, state.initial);
    value->type = state.type;
  }
  return model;
}

// Runs jobs on a few threads. All come to their end; the first error is thrown.
void run_side_by_side(const std::vector<std::function<void()>>& jobs) {
  std::atomic<size_t> next = 0;
  std::exception_ptr failure;
  std::mutex mutex;
  auto work = [&] {
    for (size_t i = next++; i < jobs.size(); i = next++) {
      try {
        jobs[i]();
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  };
  std::vector<std::thread> threads;
  const size_t count = std::min<size_t>({jobs.size(), std::max(1U, std::thread::hardware_concurrency()), 4});
  for (size_t t = 1; t < count; ++t) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

void write_plan(const Plan& plan, const std::string& folder, const WritePlanOptions& options) {
  write_plan_files(plan, {}, folder, options);
}

void write_plan_files(const Plan& plan, const std::map<std::string, std::string>& texts, const std::string& folder_name,
                      const WritePlanOptions& options) {
  fs::path folder = folder_name;
  while (!folder.empty() && folder.filename().empty() && folder.has_relative_path()) folder = folder.parent_path();  // "plan/" is "plan"
  if (folder.empty() || folder.filename() == "." || folder.filename() == ".." || !folder.has_filename())
    throw Error("'" + folder_name + "' is no name for a plan's folder", "give the plan a folder of its own", ErrorCode::usage);
  check_target(plan, folder, options.overwrite);
  std::error_code error;
  if (folder.has_parent_path()) fs::create_directories(folder.parent_path(), error);
  TemporaryFolder temporary(folder.string() + fmt::format(".part-{}", ::getpid()));
  std::vector<std::function<void()>> files;
  auto add_file = [&](const Model& model, const std::string& name, const WriteOptions& write) {
    files.push_back([&model, path = (temporary.path() / name).string(), write] { write_model(model, path, write); });
  };
  for (const PlanGraph& g : plan.graphs) add_file(*g.model, g.file, {.external_above = 0});
  if (plan.annotated) add_file(*plan.annotated, "annotated.onnx", {.external_above = SIZE_MAX});
  if (plan.whole) add_file(*plan.whole, kWholeFile, {});
  const Model states = model_of_states(plan);
  if (!states.graph->all_values().empty()) add_file(states, kStatesFile, {.external_above = 0});
  run_side_by_side(files);
  for (const auto& [name, text] : texts) write_text(temporary.path() / name, text);
  write_text(temporary.path() / "plan.json", plan_to_json(plan));
  replace_folder(temporary, folder);
}

namespace {

// Puts the values that states begin with in place of their announcements.
void read_states(Plan& plan, const ReadOptions& read) {
  const bool any = std::any_of(plan.states.begin(), plan.states.end(), [](const PlanState& s) { return s.initial != nullptr; });
  if (!any) return;
  const std::string path = (fs::path(plan.folder) / kStatesFile).string();
  const Model model = read_model(path, read);
  std::map<std::string, TensorPtr> found;
  for (const Value* v : model.graph->initializers()) found[v->name] = v->constant;
  for (PlanState& state : plan.states) {
    if (!state.initial) continue;
    const auto tensor = found.find(state.name);
    const auto wrong = [&](const std::string& what) {
      return Error(fmt::format("the state '{}' {}", state.name, what), "the plan is damaged; partition the model again").in_file(path);
    };
    if (tensor == found.end()) throw wrong("has no value there, and plan.json says it has one");
    if (tensor->second->dtype != state.type.dtype || tensor->second->dims != dims_of(*state.type.shape))
      throw wrong(fmt::format("is {} {} there, and {} in plan.json", name_of(tensor->second->dtype), to_string(tensor->second->dims),
                              to_string(state.type)));
    state.initial = tensor->second;
  }
}

std::string read_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw Error("the file cannot be read", "is this a plan's folder?");
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

}  // namespace

Plan read_plan(const std::string& folder, bool structure_only_weights) {
  fs::path path = fs::path(folder) / "plan.json";
  Plan plan;
  try {
    plan = plan_from_json(read_text(path));
    check_schedule(plan);
  } catch (const Error& e) {
    throw e.in_file(path.string());
  }
  plan.folder = folder;
  ReadOptions read;
  read.allow_missing_weights = structure_only_weights || plan.structure_only;
  for (PlanGraph& g : plan.graphs) g.model = std::make_shared<Model>(read_model((fs::path(folder) / g.file).string(), read));
  read_states(plan, read);
  try {
    check_references(plan);
  } catch (const Error& e) {
    throw e.in_file(path.string());
  }
  return plan;
}

}  // namespace fretsaw
