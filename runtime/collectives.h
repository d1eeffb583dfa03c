// Collectives inside a rank's graph: AllReduce, AllGather, ReduceScatter, AllToAll and Broadcast of the domain ai.fretsaw.
//
//   AllGather(X){axis="tensor", tensor_axis=1, sizes=[3, 2]}     X on rank 0: [4, 3], on rank 1: [4, 2]
//
//   send   rank 0: X                    4 * 3 elements           a block has the size of the largest part
//          rank 1: X, then padding      4 * 2 elements, 4 unused
//   gather both:   block 0, block 1
//   Y      both:   [4, 5], row by row out of the blocks
//
// Parts of one size that lie whole in the tensor (axis 0, or only axes of size 1 before it) are sent and received where they are.
#pragma once
#include <array>
#include <vector>

#include "runtime/program.h"

namespace fretsaw {

bool is_collective(const Node& node);
// The kernel that runs the collective `c.node()` with the ranks along its mesh axis, and counts it. `rank` must outlive it. Throws Error
// when the node's attributes don't fit the mesh.
CompiledKernel make_collective(const CompileContext& c, RankContext& rank);

// Counts a collective and the time in it, which is mostly waiting for other ranks.
class CollectiveCall {
 public:
  CollectiveCall(RankContext& rank, RankContext::Group& group, const std::string& op, size_t payload_bytes)
      : rank_(rank), start_us_(rank.now_us()) {
    ++group.calls;
    rank.count_communication(op, group.axis, payload_bytes);
  }
  ~CollectiveCall() { rank_.communicating_us += rank_.now_us() - start_us_; }
  CollectiveCall(const CollectiveCall&) = delete;
  CollectiveCall& operator=(const CollectiveCall&) = delete;

 private:
  RankContext& rank_;
  double start_us_;
};

// What a rank had called and counted before a program ran.
class CollectiveCounts {
 public:
  explicit CollectiveCounts(const RankContext& rank);
  // A program is to run again, because a shape was inferred wrongly; so are the collectives it has run. That is right only when every rank
  // does the same from the same place: throws Error when the others don't.
  void agree_to_repeat(RankContext& rank) const;

 private:
  std::array<int64_t, 5> calls_{};  // by group: data, pipeline, and of tensor axes both and all of their ranks
  std::vector<CommunicationCount> communication_;
};

}  // namespace fretsaw
