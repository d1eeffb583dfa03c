// The list of architectures.
#include "models/models.h"

#include "graph/errors.h"
#include "models/builder.h"

namespace fretsaw {
namespace {

std::vector<Architecture> architectures() {
  std::vector<Architecture> list;
  add_convolutional(list);
  add_transformers(list);
  return list;
}

}  // namespace

std::vector<ModelInfo> list_models() {
  std::vector<ModelInfo> infos;
  for (const Architecture& a : architectures()) infos.push_back({a.name, a.summary, a.keys});
  return infos;
}

Model build_model(const std::string& name, const std::map<std::string, std::string>& values) {
  std::string known;
  for (const Architecture& a : architectures()) {
    if (a.name == name) {
      Settings settings(name, values);
      Model model = a.build(name, settings);
      settings.finish();
      verify(*model.graph);
      return model;
    }
    known += (known.empty() ? "" : ", ") + a.name;
  }
  throw Error("there is no model '" + name + "'", "choose one of " + known, ErrorCode::usage);
}

}  // namespace fretsaw
