// What nodes cost on a target: a roofline of arithmetic and memory traffic. Unknown dimensions count as 1.
#pragma once
#include <vector>

#include "graph/ir.h"
#include "partitioner/target.h"

namespace fretsaw {

int64_t type_bytes(const Type& type);  // of a tensor; 0 for sequences and the like
// A value that ranks can send each other: a tensor of numbers. Empty, or why it is not: "it is a sequence".
std::string why_not_sent(const Type& type);
// Draws random numbers or may do so (bodies included): must run once, where it stands.
bool is_random(const Node& node);
// Gives its input's bytes another shape: costs nothing.
bool is_view(const Node& node);

struct Cost {
  double flops = 0;
  double bytes = 0;  // read and written
  double time_us = 0;
};
// The cost of nodes that run as one kernel: what passes between them stays in registers or caches.
Cost cost_of(const std::vector<const Node*>& nodes, const Target& target);
// The time to send so many bytes to another rank; 0 for none.
double transfer_us(double bytes, const Target& target);

}  // namespace fretsaw
