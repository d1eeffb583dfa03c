// training.json: what a trainer must know besides the plan.
#include "graph/training/training_plan_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "graph/json_field.h"
#include "graph/plan_files.h"
#include "graph/training/loss.h"
#include "graph/training/optimizer.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kFile = "training.json";
constexpr int kFormatVersion = 1;

Json texts_json(const std::vector<std::string>& texts) {
  Json list = Json::array();
  for (const std::string& text : texts) list.push_back(json_text(text));
  return list;
}

std::string to_json(const TrainingPlan& t, const TrainingSpecs& specs) {
  Json options = Json::object();
  for (const auto& [name, value] : specs.options) options[name] = json_text(value);
  const Json json = {
      {"format_version", kFormatVersion},      {"loss", json_text(specs.loss)},          {"optimizer", json_text(specs.optimizer)},
      {"options", std::move(options)},         {"target", json_text(t.target)},          {"loss_sum", json_text(t.loss_sum)},
      {"loss_count", json_text(t.loss_count)}, {"parameters", texts_json(t.parameters)}, {"statistics", texts_json(t.statistics)},
      {"scales_loss", t.scales_loss},          {"draws_masks", t.draws_masks},           {"least_batch", t.least_batch}};
  return json.dump(1) + "\n";
}

// Reads the file of a plan that was read already, and holds every name in it against that.
class Reader {
 public:
  Reader(Field root, const Plan& plan) : root_(std::move(root)) {
    for (const PlanState& state : plan.states) states_.insert(state.name);
    for (const PlanInput& input : plan.inputs) inputs_.insert(input.name);
    for (const PlanOutput& output : plan.outputs) outputs_.insert(output.name);
  }

  void read(TrainingPlan& t, TrainingSpecs& specs) const {
    const int64_t version = root_.at("format_version").integer(INT64_MIN);
    if (version != kFormatVersion)
      throw root_.at("format_version").wrong(fmt::format("is {}, and this program reads {}", version, kFormatVersion));
    specs.loss = spec("loss", [](const std::string& text) { parse_loss(text); });
    specs.optimizer = spec("optimizer", [](const std::string& text) { parse_optimizer(text); });
    specs.options = root_.at("options").texts_by_key();
    t.target = root_.at("target").text();
    if (!t.target.empty() && !inputs_.contains(t.target)) throw root_.at("target").wrong("names '" + t.target + "', which is no input");
    t.loss_sum = output("loss_sum"), t.loss_count = output("loss_count");
    t.parameters = states_of("parameters"), t.statistics = states_of("statistics");
    t.scales_loss = flag("scales_loss", kLossScale), t.draws_masks = flag("draws_masks", kRandomCounter);
    t.least_batch = root_.at("least_batch").integer(1);
    check_kept_of_parameters(t, parse_optimizer(specs.optimizer));
  }

 private:
  template <typename Parse>
  std::string spec(const char* key, const Parse& parse) const {
    const Field field = root_.at(key);
    std::string text = field.text();
    try {
      parse(text);
    } catch (const Error& e) {
      throw field.wrong("can't be read: " + e.problem());
    }
    return text;
  }
  std::string output(const char* key) const {
    std::string name = root_.at(key).text();
    if (!outputs_.contains(name)) throw root_.at(key).wrong("names '" + name + "', which is no output");
    return name;
  }
  std::vector<std::string> states_of(const char* key) const {
    std::vector<std::string> names;
    for (const Field& f : root_.at(key).items()) {
      names.push_back(f.text());
      if (!states_.contains(names.back())) throw f.wrong("names '" + names.back() + "', which is no state");
    }
    return names;
  }
  // Where it is true there must be the state that it needs.
  bool flag(const char* key, const char* state) const {
    const bool value = root_.at(key).boolean();
    if (value && !states_.contains(state)) throw root_.at(key).wrong(fmt::format("is true, and there is no state '{}'", state));
    return value;
  }
  void check_kept_of_parameters(const TrainingPlan& t, const OptimizerSpec& optimizer) const {
    std::vector<std::string> wanted = optimizer.states();
    wanted.insert(wanted.begin(), "gradient");
    for (size_t i = 0; i < t.parameters.size(); ++i)
      for (const std::string& kind : wanted)
        if (const std::string name = kind + ":" + t.parameters[i]; !states_.contains(name))
          throw root_.at("parameters").items()[i].wrong(fmt::format("names '{}', of which there is no state '{}'", t.parameters[i], name));
  }

  Field root_;
  std::set<std::string> states_, inputs_, outputs_;
};

std::string read_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw Error("the file cannot be read", "is this the folder of a plan that trains?");
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

}  // namespace

void write_training_plan(const TrainingPlan& training, const TrainingSpecs& specs, const std::string& folder,
                         const WritePlanOptions& options) {
  write_plan_files(*training.plan, {{kFile, to_json(training, specs)}}, folder, options);
}

TrainingPlanFile read_training_plan(const std::string& folder, bool structure_only_weights) {
  TrainingPlanFile file;
  const auto plan = std::make_shared<Plan>(read_plan(folder, structure_only_weights));
  const fs::path path = fs::path(folder) / kFile;
  try {
    const Json json = Json::parse(read_text(path));
    Reader(Field(json, ""), *plan).read(file.training, file.specs);
  } catch (const nlohmann::json::exception& e) {
    throw Error(fmt::format("this is no JSON: {}", e.what()), "the plan is damaged; partition the model again").in_file(path.string());
  } catch (const Error& e) {
    throw e.in_file(path.string());
  }
  file.training.plan = plan;
  return file;
}

bool is_training_plan(const std::string& path) {
  std::error_code error;
  return is_plan_folder(path) && fs::is_regular_file(fs::path(path) / kFile, error);
}

}  // namespace fretsaw
