// fretsaw devices: what there is to run on.
#include "kernels/cuda/devices.h"

#include <unistd.h>

#include <CLI/App.hpp>
#include <cstdio>

#include "tools/commands.h"
#include "tools/execution.h"
#include "tools/json_output.h"
#include "tools/text.h"

namespace fretsaw {
namespace {

// The widest vector instructions that this processor has.
std::string instruction_set() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16")) return "avx512_bf16";
  if (__builtin_cpu_supports("avx512vnni")) return "avx512_vnni";
  if (__builtin_cpu_supports("avx512f")) return "avx512";
  if (__builtin_cpu_supports("avx2")) return "avx2";
  return __builtin_cpu_supports("sse4.1") ? "sse4.1" : "sse2";
#elif defined(__aarch64__)
  return "neon";
#else
  return "generic";
#endif
}

void print_devices(bool json) {
  const int64_t memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
  const std::vector<CudaDevice> gpus = cuda_devices();
  if (json) {
    Json cuda = Json::array();
    for (const CudaDevice& gpu : gpus)
      cuda.push_back({{"index", gpu.index}, {"name", gpu.name}, {"memory_bytes", gpu.memory_bytes}, {"peers", gpu.peers}});
    return print_json({{"cpu", {{"cores", machine_cores()}, {"memory_bytes", memory_bytes}, {"isa", instruction_set()}}}, {"cuda", cuda}});
  }
  Table table({"device", "name", ">memory", "peers"});
  table.add({"cpu", std::to_string(machine_cores()) + " cores, " + instruction_set(), human_bytes(static_cast<double>(memory_bytes)), ""});
  for (const CudaDevice& gpu : gpus) {
    std::vector<std::string> peers;
    for (const int peer : gpu.peers) peers.push_back(std::to_string(peer));
    table.add({"cuda:" + std::to_string(gpu.index), gpu.name, human_bytes(static_cast<double>(gpu.memory_bytes)), join(peers, ",")});
  }
  table.print();
}

}  // namespace

void add_devices(CLI::App& app, Outcome&) {
  auto json = std::make_shared<bool>(false);
  CLI::App* command = app.add_subcommand("devices", "Show what there is to run on");
  command->add_flag("--json", *json, "Print one JSON object");
  command->callback([json] { print_devices(*json); });
}

}  // namespace fretsaw
