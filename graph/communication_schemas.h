// The operators of the domain ai.fretsaw: communication between ranks, visible in the graph.
#pragma once

namespace fretsaw {

inline constexpr const char* kCommunicationDomain = "ai.fretsaw";

// Registers the schemas of Send, Recv, AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast and HaloExchange (version 1) with libonnx,
// so that its checker and shape inference know them. May be called from any thread, as often as one likes.
void register_communication_schemas();

}  // namespace fretsaw
