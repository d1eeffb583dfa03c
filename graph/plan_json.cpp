// Plans to JSON and back.
#include "graph/plan_json.h"

#include <fmt/format.h>

#include <algorithm>

#include "graph/errors.h"
#include "graph/json_field.h"
#include "graph/plan_checks.h"
#include "graph/training/plan_graphs.h"

namespace fretsaw {
namespace {

using Json = nlohmann::ordered_json;

// --- writing ---

const char* kind_name(Type::Kind kind) {
  static constexpr const char* kNames[] = {"unknown", "tensor", "sparse_tensor", "sequence", "optional", "map"};
  return kNames[static_cast<size_t>(kind)];
}

Json to_json(const Type& type) {
  Json j{{"kind", kind_name(type.kind)}, {"dtype", name_of(type.dtype)}};
  if (type.shape) {
    Json dims = Json::array();
    for (const Dim& d : *type.shape) dims.push_back(d.known() ? Json(d.value) : d.symbol.empty() ? Json() : json_text(d.symbol));
    j["shape"] = std::move(dims);
  }
  if (type.element) j["element"] = to_json(*type.element);
  return j;
}

Json coordinates_json(const std::map<std::string, int>& coordinates) {
  Json j = Json::object();
  for (const auto& [axis, i] : coordinates) j[axis] = i;
  return j;
}

Json graphs_json(const Plan& plan) {
  Json list = Json::array();
  for (const PlanGraph& g : plan.graphs)
    list.push_back({{"stage", g.stage}, {"kind", g.kind}, {"coordinates", coordinates_json(g.coordinates)}, {"file", g.file}});
  return list;
}

Json ranks_json(const Plan& plan) {
  const GraphNumbers numbers = graph_numbers(plan);
  Json list = Json::array();
  for (int d = 0; d < plan.mesh.data; ++d)
    for (int p = 0; p < plan.mesh.pipeline; ++p)
      for (int t = 0; t < plan.mesh.tensor; ++t) {
        std::map<std::string, int> at{{"data", d}, {"pipeline", p}, {"tensor", t}};
        Json files = Json::array();
        std::vector<int> stages;
        for (const PlanGraph& g : plan.graphs) {
          bool ours = numbers.rank_of(g.stage) == p;
          for (const auto& [axis, i] : g.coordinates) ours = ours && at.count(axis) && at[axis] == i;
          if (!ours) continue;
          files.push_back(g.file);
          if (std::find(stages.begin(), stages.end(), g.stage) == stages.end()) stages.push_back(g.stage);
        }
        list.push_back({{"rank", plan.mesh.rank(d, p, t)}, {"coordinates", coordinates_json(at)}, {"stages", stages}, {"graphs", files}});
      }
  return list;
}

Json schedule_json(const Schedule& schedule) {
  Json ranks = Json::array();
  for (const auto& actions : schedule.ranks) {
    Json list = Json::array();
    for (const Action& a : actions) list.push_back(to_string(a));
    ranks.push_back(std::move(list));
  }
  return {{"name", schedule.name}, {"ranks", std::move(ranks)}};
}

Json routes_json(const Plan& plan) {
  const GraphNumbers numbers = graph_numbers(plan);
  Json list = Json::array();
  for (const Route& r : plan.routes)
    list.push_back({{"tag", r.tag},
                    {"from_stage", r.from_stage},
                    {"to_stage", r.to_stage},
                    {"from_rank", plan.mesh.rank(0, numbers.rank_of(r.from_stage), 0)},
                    {"to_rank", plan.mesh.rank(0, numbers.rank_of(r.to_stage), 0)},
                    {"value", json_text(r.value)},
                    {"from_name", json_text(r.from_name)},
                    {"to_name", json_text(r.to_name)},
                    {"source", json_text(r.source)},
                    {"type", to_json(r.type)}});
  return list;
}

Json states_json(const Plan& plan) {
  Json list = Json::array();
  for (const PlanState& state : plan.states) {
    Json parts = Json::array();
    for (const PlanState::Part& part : state.parts) {
      Json of_ranks = Json::array();
      for (const Intervals& intervals : part.cut.parts) {
        Json of_rank = Json::array();
        for (const Interval& i : intervals) of_rank.push_back({i.begin, i.end});
        of_ranks.push_back(std::move(of_rank));
      }
      parts.push_back({{"axis", part.axis}, {"dim", part.dim}, {"size", part.cut.size}, {"intervals", std::move(of_ranks)}});
    }
    list.push_back({{"name", json_text(state.name)},
                    {"type", to_json(state.type)},
                    {"initial", state.initial != nullptr},
                    {"starts_at_zero", state.starts_at_zero},
                    {"parts", std::move(parts)}});
    if (!state.rounded_from.empty()) list.back()["rounded_from"] = json_text(state.rounded_from);
  }
  return list;
}

}  // namespace

std::string plan_to_json(const Plan& plan) {
  Json j;
  j["format_version"] = Plan::format_version;
  j["source"] = {{"file", json_text(plan.source_file)}, {"digest", plan.source_digest}};
  j["target"] = json_text(plan.target);
  j["link"] = {{"bytes_per_us", plan.link_bytes_per_us}, {"latency_us", plan.link_latency_us}};
  j["structure_only"] = plan.structure_only;
  j["mesh"] = {{"data", plan.mesh.data}, {"pipeline", plan.mesh.pipeline}, {"tensor", plan.mesh.tensor}};
  if (plan.mesh.tensor_y > 1) j["mesh"]["tensor_y"] = plan.mesh.tensor_y;
  j["micro_batches"] = plan.micro_batches;
  j["batch"] = plan.batch;
  j["graphs"] = graphs_json(plan);
  j["ranks"] = ranks_json(plan);
  Json stages = Json::array(), inputs = Json::array(), outputs = Json::array(), shardings = Json::array(), notes = Json::array();
  double slowest_us = 0;
  int64_t most_bytes = 0;
  for (size_t s = 0; s < plan.stages.size(); ++s) {
    const StageEstimate& e = plan.stages[s];
    stages.push_back({{"stage", s},
                      {"flops", e.flops},
                      {"time_us", e.time_us},
                      {"weight_bytes", e.weight_bytes},
                      {"activation_bytes", e.activation_bytes},
                      {"send_bytes", e.send_bytes}});
    slowest_us = std::max(slowest_us, e.time_us);
    most_bytes = std::max(most_bytes, e.weight_bytes + e.activation_bytes);
  }
  j["stages"] = std::move(stages);
  j["predicted"] = {{"slowest_stage_us", slowest_us}, {"memory_bytes", most_bytes}};
  for (const PlanInput& i : plan.inputs)
    inputs.push_back({{"name", json_text(i.name)}, {"type", to_json(i.type)}, {"batch_axis", i.batch_axis}, {"stages", i.stages}});
  for (const PlanOutput& o : plan.outputs)
    outputs.push_back({{"name", json_text(o.name)}, {"type", to_json(o.type)}, {"stage", o.stage}, {"merge", o.merge}, {"axis", o.axis}});
  for (const auto& [tensor, sharding] : plan.shardings) shardings.push_back({{"tensor", json_text(tensor)}, {"sharding", sharding}});
  for (const std::string& n : plan.notes) notes.push_back(json_text(n));
  j["inputs"] = std::move(inputs);
  j["outputs"] = std::move(outputs);
  j["routes"] = routes_json(plan);
  j["shardings"] = std::move(shardings);
  j["state"] = states_json(plan);
  j["schedule"] = schedule_json(plan.schedule);
  j["notes"] = std::move(notes);
  return j.dump(1) + "\n";
}

// --- reading ---

namespace {

Type read_type(const Field& f, int depth = 0) {
  if (depth > 16) throw f.wrong("is nested too deeply");
  Type type;
  std::string kind = f.at("kind").text(), dtype = f.at("dtype").text();
  bool found = false;
  for (auto k :
       {Type::Kind::unknown, Type::Kind::tensor, Type::Kind::sparse_tensor, Type::Kind::sequence, Type::Kind::optional, Type::Kind::map})
    if (kind == kind_name(k)) type.kind = k, found = true;
  if (!found) throw f.at("kind").wrong("is no kind of type");
  found = false;
  for (int d = 0; d <= static_cast<int>(DType::int2); ++d)
    if (dtype == name_of(static_cast<DType>(d))) type.dtype = static_cast<DType>(d), found = true;
  if (!found) throw f.at("dtype").wrong("is no element type");
  if (f.has("shape")) {
    type.shape.emplace();
    for (const Field& d : f.at("shape").items())
      type.shape->push_back(d.is_null() ? Dim() : d.is_number() ? Dim(d.integer(0)) : Dim(d.text()));
  }
  if (f.has("element")) type.element = std::make_shared<const Type>(read_type(f.at("element"), depth + 1));
  return type;
}

Schedule read_schedule(const Field& f) {
  Schedule schedule;
  schedule.name = f.at("name").text();
  for (const Field& rank : f.at("ranks").items()) {
    auto& actions = schedule.ranks.emplace_back();
    for (const Field& a : rank.items()) try {
        actions.push_back(parse_action(a.text()));
      } catch (const Error& e) {
        throw a.wrong("is no action: " + e.problem());
      }
  }
  return schedule;
}

// A file of the plan's own folder.
std::string read_file_name(const Field& f) {
  std::string name = f.text();
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos || name.find('\0') != std::string::npos)
    throw f.wrong("is no file of the plan's folder");
  return name;
}

void read_parts(const Field& root, Plan& plan, int stages) {
  for (const Field& i : root.at("inputs").items()) {
    PlanInput& input = plan.inputs.emplace_back();
    input.name = i.at("name").text();
    input.type = read_type(i.at("type"));
    input.batch_axis = i.at("batch_axis").small(-1);
    for (const Field& s : i.at("stages").items()) input.stages.push_back(static_cast<int>(s.integer(0, stages - 1)));
  }
  for (const Field& o : root.at("outputs").items()) {
    PlanOutput& output = plan.outputs.emplace_back();
    output.name = o.at("name").text();
    output.type = read_type(o.at("type"));
    output.stage = static_cast<int>(o.at("stage").integer(0, stages - 1));
    output.merge = o.at("merge").text();
    if (output.merge != "concat" && output.merge != "mean" && output.merge != "sum" && output.merge != "same")
      throw o.at("merge").wrong("is not concat, mean, sum or same");
    output.axis = o.at("axis").small(0);
  }
  for (const Field& r : root.at("routes").items()) {
    Route& route = plan.routes.emplace_back();
    route.tag = r.at("tag").small(0);
    route.from_stage = static_cast<int>(r.at("from_stage").integer(0, stages - 1));
    route.to_stage = static_cast<int>(r.at("to_stage").integer(route.from_stage + 1, stages - 1));
    route.value = r.at("value").text();
    route.from_name = r.at("from_name").text();
    route.to_name = r.at("to_name").text();
    route.source = r.at("source").text();
    route.type = read_type(r.at("type"));
  }
}

Intervals read_intervals(const Field& f) {
  Intervals intervals;
  for (const Field& i : f.items()) {
    const std::vector<Field> ends = i.items();
    if (ends.size() != 2) throw i.wrong("is no pair of a begin and an end");
    intervals.push_back({ends[0].integer(0), ends[1].integer(0)});
  }
  return intervals;
}

void read_states(const Field& list, Plan& plan) {
  for (const Field& s : list.items()) {
    PlanState& state = plan.states.emplace_back();
    state.name = s.at("name").text();
    state.type = read_type(s.at("type"));
    state.starts_at_zero = s.at("starts_at_zero").boolean();
    if (s.has("rounded_from")) state.rounded_from = s.at("rounded_from").text();
    if (s.at("initial").boolean()) {
      auto announced = std::make_shared<Tensor>();
      announced->missing = "its file was not read";
      state.initial = std::move(announced);
    }
    for (const Field& p : s.at("parts").items()) {
      PlanState::Part& part = state.parts.emplace_back();
      part.axis = p.at("axis").text();
      part.dim = p.at("dim").small(0);
      part.cut.size = p.at("size").integer(0);
      for (const Field& rank : p.at("intervals").items()) part.cut.parts.push_back(read_intervals(rank));
    }
  }
}

}  // namespace

Plan plan_from_json(const std::string& source) {
  Json json;
  try {
    json = Json::parse(source);
  } catch (const nlohmann::json::exception& e) {
    throw Error(fmt::format("this is no JSON: {}", e.what()), "the plan is damaged; partition the model again");
  }
  Field root(json, "");
  int64_t version = root.at("format_version").integer(INT64_MIN);
  if (version != Plan::format_version)
    throw Error(fmt::format("the plan has format version {}, this program reads {}", version, Plan::format_version),
                "partition the model again");
  Plan plan;
  plan.source_file = root.at("source").at("file").text();
  plan.source_digest = root.at("source").at("digest").text();
  plan.target = root.at("target").text();
  plan.link_bytes_per_us = root.at("link").at("bytes_per_us").number();
  plan.link_latency_us = root.at("link").at("latency_us").number();
  plan.structure_only = root.at("structure_only").boolean();
  Field mesh = root.at("mesh");
  plan.mesh = {mesh.at("data").small(1), mesh.at("pipeline").small(1), mesh.at("tensor").small(1)};
  if (int64_t{plan.mesh.data} * plan.mesh.pipeline > (1 << 20) ||
      int64_t{plan.mesh.data} * plan.mesh.pipeline * plan.mesh.tensor > (1 << 20))
    throw mesh.wrong("has too many ranks");
  if (json.at("mesh").contains("tensor_y")) plan.mesh.tensor_y = mesh.at("tensor_y").small(1);
  if (plan.mesh.tensor % plan.mesh.tensor_y != 0) throw mesh.wrong("has tensor axes that do not multiply to its tensor ranks");
  plan.micro_batches = root.at("micro_batches").small(1);
  plan.batch = root.at("batch").integer(-1);
  for (const Field& s : root.at("stages").items()) {
    StageEstimate& e = plan.stages.emplace_back();
    e.flops = s.at("flops").number();
    e.time_us = s.at("time_us").number();
    e.weight_bytes = s.at("weight_bytes").integer(0);
    e.activation_bytes = s.at("activation_bytes").integer(0);
    e.send_bytes = s.at("send_bytes").integer(0);
  }
  int stages = static_cast<int>(plan.stages.size());
  if (stages < plan.mesh.pipeline) throw root.at("stages").wrong("has fewer stages than the mesh has pipeline ranks");
  for (const Field& g : root.at("graphs").items()) {
    PlanGraph& graph = plan.graphs.emplace_back();
    graph.stage = g.at("stage").small(0);
    graph.kind = g.at("kind").text();
    graph.coordinates = g.at("coordinates").integers();
    graph.file = read_file_name(g.at("file"));
  }
  read_parts(root, plan, stages);
  for (const Field& s : root.at("shardings").items()) plan.shardings[s.at("tensor").text()] = s.at("sharding").text();
  read_states(root.at("state"), plan);
  plan.schedule = read_schedule(root.at("schedule"));
  for (const Field& n : root.at("notes").items()) plan.notes.push_back(n.text());
  check_numbers(plan);
  return plan;
}

}  // namespace fretsaw
