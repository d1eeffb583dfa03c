// From a model and a wish to a plan.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "graph/passes.h"
#include "graph/plan.h"
#include "partitioner/sharding/shard.h"

namespace fretsaw {

struct MergeRule {
  std::string merge = "concat";  // concat, mean, sum, same
  int axis = 0;
};

struct PartitionOptions {
  Mesh mesh;
  int micro_batches = 1;
  std::string schedule = "gpipe";
  std::vector<std::vector<std::string>> cuts;  // --cut: the values after which each boundary lies
  std::map<std::string, int> batch_axes;       // --batch NAME=AXIS; -1: none
  std::map<std::string, MergeRule> merges;     // --merge
  bool note_sizes = true;                      // say which sizes the figures assume
  std::map<std::string, Dims> shapes;          // --shape
  std::string target = "cpu";                  // cpu, h100, h200 or a JSON file
  std::map<std::string, PinnedTensor> pins;    // --shard: by source name
  bool from_annotations = false;               // the model's own annotations say mesh, stages and shardings; a mesh given here wins
  std::string configuration;                   // which of them; empty: the only one
  std::set<std::string> told;                  // options that the user gave, even if as they are without: "--micro-batches"
  std::optional<int64_t> memory_bytes;         // --memory, of each device
};

// Takes the model through normalising, grouping, batch analysis and cutting.
// Throws Error naming the node or value that stands in the way.
Plan partition(Model model, const PartitionOptions& options);

}  // namespace fretsaw
