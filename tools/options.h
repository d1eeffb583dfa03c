// What stands behind an option on the command line: NAME=VALUE pairs, shapes, meshes, sizes.
#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph/plan.h"
#include "partitioner/partition.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace fretsaw {

// An option that may be given several times with one value each.
CLI::Option* add_repeated(CLI::App& app, const std::string& name, std::vector<std::string>& values, const std::string& help);

// What an option refuses, in few words: all but finite numbers from 0 on, or above 0; all but whole numbers that uint64_t holds.
CLI::Option* from_zero(CLI::Option* option);
CLI::Option* above_zero(CLI::Option* option);
CLI::Option* takes_seed(CLI::Option* option);
// Of every option that the command has now: an empty text would count as an option that is not given.
void refuse_empty_values(CLI::App& command);

// All of these throw Error with code usage, naming the option and its value.
[[noreturn]] void usage_error(const std::string& problem, const std::string& remedy = "");
[[noreturn]] void not_supported(const std::string& what, const std::string& why,
                                const std::string& remedy = "");  // "WHAT is not supported: WHY"

// "NAME=VALUE", cut at the last '=': names of values may hold any character.
std::pair<std::string, std::string> parse_pair(const std::string& option, const std::string& text);
int64_t parse_integer(const std::string& option, const std::string& text);
std::map<std::string, Dims> parse_shapes(const std::vector<std::string>& texts);          // --shape NAME=D,D,...
Mesh parse_mesh(const std::string& text);                                                 // --mesh AXIS=N,...
int64_t parse_size_bytes(const std::string& option, const std::string& text);             // "8GiB", "500MB", "1024"
std::map<std::string, int> parse_batch_axes(const std::vector<std::string>& texts);       // --batch NAME=AXIS|none
std::map<std::string, MergeRule> parse_merges(const std::vector<std::string>& texts);     // --merge OUTPUT=concat[:AXIS]|mean|sum|same
std::map<std::string, PinnedTensor> parse_shards(const std::vector<std::string>& texts);  // --shard TENSOR=[AXIS|_,...]
// --cut VALUE[,VALUE]...: a comma may also be part of a name; the longest names that are in `known` win.
std::vector<std::vector<std::string>> parse_cuts(const std::vector<std::string>& texts, const std::set<std::string>& known);

}  // namespace fretsaw
