// What a rank sends to other ranks and receives from them.
#include <thread>
#include <utility>

#include "graph/errors.h"
#include "runtime/rank.h"

namespace fretsaw {
namespace {

// A message whose memory the receiver reads itself.
class ParcelRequest : public Request {
 public:
  ParcelRequest(std::shared_ptr<std::atomic<bool>> read, Communicator& communicator)
      : read_(std::move(read)), communicator_(communicator) {}
  // Throws when the receiver can't be waited for any longer.
  bool done() override {
    if (!*read_ && communicator_.aborted()) throw Error("the ranks were stopped", "", ErrorCode::device);
    return *read_;
  }
  void wait() override {
    while (!done()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }

 private:
  std::shared_ptr<std::atomic<bool>> read_;
  Communicator& communicator_;
};

}  // namespace

// One message: its header, then a buffer of its size, then the payload. True when it is there.
bool Rank::advance_receive(Stage& stage, MicroBatch& slot, size_t crossing, int micro_batch, Communicator& communicator, bool wait) {
  const Crossing& from = stage.incoming[crossing];
  if (from.peer_rank < 0) return true;
  Receiving& state = slot.receiving[crossing];
  int tag = wire_tag(*from.route, micro_batch);
  if (!state.has_header) {
    if (wait) {
      // Its sender may wait until what it sent before has been read.
      if (!communicator.try_recv_header(state.header, from.peer_rank, tag)) {
        let_go_of_parcels(/*wait=*/true);
        state.header = communicator.recv_header(from.peer_rank, tag);
      }
    } else if (!communicator.try_recv_header(state.header, from.peer_rank, tag)) {
      return false;
    }
    state.has_header = true;
    RuntimeValue& value = slot.inputs[from.place];
    if (state.header.memory == Memory::device) {
      receive_parcel(state, from, value, tag);
      return true;
    }
    make_pooled(context_.memory.pool, value, state.header.dtype, state.header.dims, from.layout);
    state.request = communicator.irecv({static_cast<std::byte*>(value.tensor.data), value.tensor.bytes()}, from.peer_rank, tag);
  }
  if (state.arrived) return true;
  if (wait) state.request->wait();
  return state.request->done();
}

// Posts what the next micro-batches need, so that it arrives while this rank computes.
void Rank::advance_posted(Communicator& communicator) {
  size_t ahead = 0;
  for (auto [index, micro_batch] : posted_) {
    if (ahead++ == receives_ahead) break;
    Stage& stage = *stages_[static_cast<size_t>(index)];
    for (size_t c = 0; c < stage.incoming.size(); ++c) {
      advance_receive(stage, stage.micro_batches[static_cast<size_t>(micro_batch)], c, micro_batch, communicator, false);
    }
  }
}

void Rank::finish_receives(Stage& stage, int micro_batch, Communicator& communicator) {
  MicroBatch& slot = stage.micro_batches[static_cast<size_t>(micro_batch)];
  double start_us = context_.trace ? context_.now_us() : 0;
  for (size_t c = 0; c < stage.incoming.size(); ++c) {
    advance_receive(stage, slot, c, micro_batch, communicator, true);
    if (slot.receiving[c].arrived) context_.device->wait_for(*slot.receiving[c].arrived);
  }
  let_go_of_parcels(/*wait=*/false);
  if (context_.trace && !stage.incoming.empty()) {
    context_.events.push_back(
        {context_.rank, std::to_string(stage.number) + "R" + std::to_string(micro_batch), "recv", start_us, context_.now_us() - start_us});
  }
  std::erase_if(posted_, [&](const auto& wanted) {
    return stages_[static_cast<size_t>(wanted.first)].get() == &stage && wanted.second == micro_batch;
  });
}

void Rank::do_send(const Action& action, Communicator& communicator) {
  Stage& source = stage(action.stage);
  MicroBatch& slot = source.micro_batches[static_cast<size_t>(action.micro_batch)];
  for (const Crossing& crossing : source.outgoing) {
    if (crossing.route->to_stage != action.peer) continue;
    const RuntimeValue& value = slot.outputs[crossing.place];
    if (value.kind != RuntimeValue::Kind::tensor || value.tensor.dtype == DType::string) {
      throw Error("value '" + crossing.route->value + "' crosses a stage boundary and is no tensor of numbers", "cut the model elsewhere");
    }
    double start_us = context_.trace ? context_.now_us() : 0;
    context_.counts_communication = action.micro_batch == 0;
    int tag = wire_tag(*crossing.route, action.micro_batch);
    RequestPtr request;
    if (value.tensor.memory == Memory::device) {
      request = std::make_shared<ParcelRequest>(send_parcel(value, crossing.peer_rank, tag), communicator);
    } else {
      request = communicator.isend({static_cast<const std::byte*>(value.tensor.data), value.tensor.bytes()}, crossing.peer_rank, tag);
    }
    communicator.send_header({value.tensor.dtype, value.tensor.dims, value.tensor.memory}, crossing.peer_rank, tag);
    sending_.emplace_back(request, value.owner);
    context_.count_communication("Send", "pipeline", value.tensor.bytes());
    if (context_.trace) context_.events.push_back({context_.rank, crossing.route->value, "send", start_us, context_.now_us() - start_us});
  }
}

// Waits while too many messages are under way; what this rank itself is to receive goes on meanwhile, so that two ranks can't block each
// other.
void Rank::limit_sends(Communicator& communicator) {
  auto drop_done = [&] { std::erase_if(sending_, [](const auto& sent) { return sent.first->done(); }); };
  drop_done();
  while (sending_.size() > sends_in_flight * std::max<size_t>(plan_->routes.size(), 1)) {
    advance_posted(communicator);
    let_go_of_parcels(/*wait=*/false);
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    drop_done();
  }
}

}  // namespace fretsaw
