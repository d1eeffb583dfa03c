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
#include "graph/plan_json.h"

namespace fretsaw {
namespace fs = std::filesystem;

ScheduleProblem schedule_problem(const Plan& plan) {
  ScheduleProblem problem;
  problem.stages = static_cast<int>(plan.stages.size());
  problem.micro_batches = plan.micro_batches;
  std::vector<std::set<int>> needs(plan.stages.size());
  for (const Route& r : plan.routes) needs.at(static_cast<size_t>(r.to_stage)).insert(r.from_stage);
  for (const auto& n : needs) problem.needs.emplace_back(n.begin(), n.end());
  for (int s = 0; s < problem.stages; ++s) problem.rank_of_stage.push_back(s % plan.mesh.pipeline);
  return problem;
}

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
  for (const PlanGraph& g : plan.graphs)
    for (const Value* v : g.model->graph->initializers())
      if (v->constant->file && files.insert(v->constant->file.get()).second && lies_in(v->constant->file->path(), folder))
        refuse(v->constant->file->path());
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

void write_plan(const Plan& plan, const std::string& folder_name, const WritePlanOptions& options) {
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
  run_side_by_side(files);
  write_text(temporary.path() / "plan.json", plan_to_json(plan));
  replace_folder(temporary, folder);
}

namespace {

std::string read_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw Error("the file cannot be read", "is this a plan's folder?");
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

[[noreturn]] void damaged(const std::string& what) {
  throw Error(what, "the plan is damaged; partition the model again");
}

const Graph& graph_of(const Plan& plan, int stage) {
  for (const PlanGraph& g : plan.graphs)
    if (g.stage == stage && g.kind == "forward") return *g.model->graph;
  damaged(fmt::format("stage {} has no forward graph", stage));
}

const Value* named(const std::vector<Value*>& values, const std::string& name) {
  for (const Value* v : values)
    if (v->name == name) return v;
  return nullptr;
}

// That inputs, outputs and routes name values that the graphs have.
void check_references(const Plan& plan) {
  for (size_t s = 0; s < plan.stages.size(); ++s) graph_of(plan, static_cast<int>(s));
  std::vector<std::set<std::string>> known(plan.stages.size());
  std::set<int> tags;
  for (size_t i = 0; i < plan.routes.size(); ++i) {
    const Route& r = plan.routes[i];
    if (!tags.insert(r.tag).second) damaged(fmt::format("field 'routes[{}].tag' is used twice", i));
    if (!named(graph_of(plan, r.from_stage).outputs, r.from_name))
      damaged(fmt::format("field 'routes[{}].from_name' names '{}', which is no output of stage {}", i, r.from_name, r.from_stage));
    if (!named(graph_of(plan, r.to_stage).inputs, r.to_name))
      damaged(fmt::format("field 'routes[{}].to_name' names '{}', which is no input of stage {}", i, r.to_name, r.to_stage));
    known[static_cast<size_t>(r.to_stage)].insert(r.to_name);
  }
  for (size_t i = 0; i < plan.inputs.size(); ++i)
    for (int s : plan.inputs[i].stages) {
      if (!named(graph_of(plan, s).inputs, plan.inputs[i].name))
        damaged(fmt::format("field 'inputs[{}].stages' names stage {}, which has no input '{}'", i, s, plan.inputs[i].name));
      known[static_cast<size_t>(s)].insert(plan.inputs[i].name);
    }
  for (size_t i = 0; i < plan.outputs.size(); ++i)
    if (!named(graph_of(plan, plan.outputs[i].stage).outputs, plan.outputs[i].name))
      damaged(fmt::format("field 'outputs[{}].stage' names stage {}, which has no output '{}'", i, plan.outputs[i].stage,
                          plan.outputs[i].name));
  for (size_t s = 0; s < plan.stages.size(); ++s)
    for (const Value* v : graph_of(plan, static_cast<int>(s)).inputs)
      if (!known[s].count(v->name)) damaged(fmt::format("stage {} takes '{}', which nobody gives it", s, v->name));
}

}  // namespace

Plan read_plan(const std::string& folder, bool structure_only_weights) {
  fs::path path = fs::path(folder) / "plan.json";
  Plan plan;
  try {
    plan = plan_from_json(read_text(path));
    verify(plan.schedule, schedule_problem(plan));
  } catch (const Error& e) {
    throw e.in_file(path.string());
  }
  plan.folder = folder;
  for (PlanGraph& g : plan.graphs) {
    ReadOptions read;
    read.allow_missing_weights = structure_only_weights || plan.structure_only;
    g.model = std::make_shared<Model>(read_model((fs::path(folder) / g.file).string(), read));
  }
  try {
    check_references(plan);
  } catch (const Error& e) {
    throw e.in_file(path.string());
  }
  return plan;
}

}  // namespace fretsaw
