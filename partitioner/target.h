// The device whose speeds the costs assume.
#pragma once
#include <optional>
#include <string>

namespace fretsaw {

struct Target {
  std::string name = "cpu";
  double flops_per_us = 0;       // float32 multiply-adds count two
  double half_flops_per_us = 0;  // float16 and bfloat16
  double memory_bytes_per_us = 0;
  double overlap = 1;            // the share of the shorter of computing and moving bytes that hides behind the longer
  double launch_us = 0;          // what starting one kernel costs
  double link_bytes_per_us = 0;  // from rank to rank
  double link_latency_us = 0;
  std::optional<int64_t> memory_bytes;  // of one device; nullopt: not limited
};

// "cpu" (one core), "h100", "h200", or the name of a JSON file:
//   {"name": "mine", "gflops": 100, "half_gflops": 200, "memory_gb_per_s": 20, "overlap": 1, "launch_us": 2,
//    "link_gb_per_s": 10, "link_latency_us": 5, "memory_bytes": 16000000000}
// Fields left out are the cpu's. Throws Error naming the file and field.
Target load_target(const std::string& name_or_file);

}  // namespace fretsaw
