// The operators of the domain ai.fretsaw: communication between ranks, visible in the graph. (Those of gradients: gradient_operators.h.)
#pragma once

namespace fretsaw {

struct Node;

inline constexpr const char* kCommunicationDomain = "ai.fretsaw";

bool communicates(const Node& node);  // whether it is one of Send, Recv, AllReduce and so on

// Registers the schemas of Send, Recv, AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast and HaloExchange (version 1) with libonnx,
// and those of the gradient operators, so that its checker and shape inference know them. May be called from any thread, as often as one
// likes.
void register_communication_schemas();

}  // namespace fretsaw
