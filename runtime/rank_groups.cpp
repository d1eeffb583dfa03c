// The groups of ranks that a rank communicates with along the mesh's axes.
#include <algorithm>
#include <utility>

#include "runtime/rank.h"

namespace fretsaw {

// Ranks that differ in their coordinate on one axis alone are a group; where plans with two tensor axes train, so are all tensor ranks.
// Every rank of the world must come.
void Rank::join_groups(Communicator& world) {
  const Mesh& mesh = plan_->mesh;
  const auto join_in = [&](RankContext& context, const char* axis, int size, int colour) {
    if (size == 1) return;
    RankContext::Group group{axis, world.split(colour), nullptr, 0};
    if (context.device) group.devices = on_device_.connect(*group.ranks, *context.device, &context != &context_);
    std::unique_lock lock(groups_mutex_);
    context.groups.push_back(std::move(group));
  };
  const auto join_tensor = [&](RankContext& context) {
    if (mesh.tensor_y == 1 || !plan_->states.empty()) join_in(context, "tensor", mesh.tensor, mesh.rank(data_, pipeline_, 0));
    if (mesh.tensor_y == 1) return;
    const int x = tensor_ / mesh.tensor_y, y = tensor_ % mesh.tensor_y;
    join_in(context, "tensor_x", mesh.tensor_x(), mesh.rank(data_, pipeline_, y));
    join_in(context, "tensor_y", mesh.tensor_y, mesh.rank(data_, pipeline_, x * mesh.tensor_y));
  };
  if (reduces_beside_) {
    RankContext none;  // of a rank that reduces nothing, and comes because all must
    RankContext& context = reduction_ ? reduction_->context() : none;
    join_in(context, "data", mesh.data, mesh.rank(0, pipeline_, tensor_));
    join_tensor(context);
  }
  const auto join = [&](const char* axis, int size, int colour) { join_in(context_, axis, size, colour); };
  join("data", mesh.data, mesh.rank(0, pipeline_, tensor_));
  join("pipeline", mesh.pipeline, mesh.rank(data_, 0, tensor_));
  join_tensor(context_);
}

void Rank::leave_groups() {
  // What was captured calls communicators that are about to go, and keeps them from going.
  for (auto& stage : stages_) stage->cache->forget_captured();
  if (reduction_) reduction_->forget_captured();
  std::unique_lock lock(groups_mutex_);
  context_.groups.clear();
  if (reduction_) reduction_->context().groups.clear();
}

void Rank::abort_devices() {
  std::unique_lock lock(groups_mutex_);
  for (auto& group : context_.groups)
    if (group.devices) group.devices->abort();
  if (!reduction_) return;
  for (auto& group : reduction_->context().groups)
    if (group.devices) group.devices->abort();
}

bool Rank::can_rejoin() const {
  std::unique_lock lock(groups_mutex_);
  const auto rejoins = [](const auto& g) { return !g.devices || g.devices->can_rejoin(); };
  const auto all_do = [&](const RankContext& context) { return std::all_of(context.groups.begin(), context.groups.end(), rejoins); };
  return all_do(context_) && (!reduction_ || all_do(reduction_->context()));
}

}  // namespace fretsaw
