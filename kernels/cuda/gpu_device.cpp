// The device behind kernels/device.h on a GPU: one stream for kernels, one for copies from peers, and pinned memory to stage through.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>

#include "kernels/cpu/parallel.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/devices.h"
#include "kernels/cuda/layout.h"
#include "kernels/cuda/random_weights.h"

namespace fretsaw {
namespace cuda {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Error(std::string(call) + " failed: " + cudaGetErrorString(status),
              "see the CUDA error; run on fewer or other devices, or --device cpu", ErrorCode::device);
}
void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(std::string(call) + " failed: " + cublasLtGetStatusString(status), "report this as a fault, with the node",
              ErrorCode::device);
}
void check(cudnnStatus_t status, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw Error(std::string(call) + " failed: " + cudnnGetErrorString(status), "report this as a fault, with the node", ErrorCode::device);
}

namespace {

class GpuEvent : public DeviceEvent {
 public:
  explicit GpuEvent(bool timed) { FRETSAW_CUDA_CHECK(cudaEventCreateWithFlags(&event, timed ? 0 : cudaEventDisableTiming)); }
  ~GpuEvent() override { cudaEventDestroy(event); }
  bool done() override {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady) return false;
    FRETSAW_CUDA_CHECK(status);
    return true;
  }
  void wait() override { FRETSAW_CUDA_CHECK(cudaEventSynchronize(event)); }
  double us_since(DeviceEvent& earlier) override {
    float ms = 0;
    FRETSAW_CUDA_CHECK(cudaEventElapsedTime(&ms, static_cast<GpuEvent&>(earlier).event, event));
    return 1e3 * static_cast<double>(ms);
  }

  cudaEvent_t event = nullptr;
};

class GpuGraph : public CapturedWork {
 public:
  ~GpuGraph() override {
    if (executable) cudaGraphExecDestroy(executable);
  }
  cudaGraphExec_t executable = nullptr;
};

// A library's version may differ from the one it was built with; what its kernels need is loaded when a handle is made.
class OpenedGpu : public GpuDevice {
 public:
  explicit OpenedGpu(int index) : index_(index) {
    use();
    cudaDeviceProp properties;
    FRETSAW_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
    multiprocessors_ = properties.multiProcessorCount;
    compute_capability_ = properties.major * 10 + properties.minor;
    FRETSAW_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    FRETSAW_CUDA_CHECK(cudaStreamCreateWithFlags(&peer_stream_, cudaStreamNonBlocking));
    FRETSAW_CUDA_CHECK(cudaStreamCreateWithFlags(&fetch_stream_, cudaStreamNonBlocking));
  }
  ~OpenedGpu() override {
    cudaSetDevice(index_);
    cudaStreamSynchronize(stream_);
    cudaStreamSynchronize(peer_stream_);
    cudaStreamSynchronize(fetch_stream_);
    if (cublas_lt_) cublasLtDestroy(cublas_lt_);
    if (cudnn_) cudnnDestroy(cudnn_);
    for (Staging& staging : staging_) cudaFreeHost(staging.memory);
    cudaStreamDestroy(stream_);
    cudaStreamDestroy(peer_stream_);
    cudaStreamDestroy(fetch_stream_);
  }

  std::string name() const override { return "cuda:" + std::to_string(index_); }
  int index() const override { return index_; }
  const KernelRegistry& kernels() const override { return cuda_kernels(); }
  void use() override { FRETSAW_CUDA_CHECK(cudaSetDevice(index_)); }

  void* allocate(size_t bytes) override {
    void* memory = nullptr;
    if (cudaMalloc(&memory, std::max<size_t>(bytes, 1)) == cudaSuccess) return memory;
    cudaGetLastError();
    throw Error(name() + " has no memory for " + std::to_string(bytes) + " bytes: " + std::to_string(free_bytes()) + " of " +
                    std::to_string(total_bytes()) + " are free",
                "use smaller inputs, more micro-batches, more stages or more devices", ErrorCode::device);
  }
  void release(void* memory) noexcept override { cudaFree(memory); }
  size_t free_bytes() override { return memory_info().first; }
  size_t total_bytes() override { return memory_info().second; }
  void* allocate_pinned(size_t bytes) override {
    void* memory = nullptr;
    const cudaError_t status = cudaHostAlloc(&memory, std::max<size_t>(bytes, 1), cudaHostAllocPortable);
    cudaGetLastError();  // so that no later launch reports it
    FRETSAW_CUDA_CHECK(status);
    return memory;
  }
  void release_pinned(void* memory) noexcept override { cudaFreeHost(memory); }

  void* stream() override { return stream_; }
  void upload(void* to, const void* from, size_t bytes) override;
  void download(void* to, const void* from, size_t bytes) override;
  std::shared_ptr<DeviceEvent> fetch(void* pinned, const void* from, size_t bytes) override {
    const auto ready = record_on(stream_, false);
    FRETSAW_CUDA_CHECK(cudaStreamWaitEvent(fetch_stream_, static_cast<GpuEvent&>(*ready).event));
    if (bytes) FRETSAW_CUDA_CHECK(cudaMemcpyAsync(pinned, from, bytes, cudaMemcpyDeviceToHost, fetch_stream_));
    return record_on(fetch_stream_, false);
  }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes) FRETSAW_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
  }
  void copy_rows(void* to, size_t to_stride, const void* from, size_t from_stride, size_t row_bytes, size_t count) override {
    if (row_bytes == 0 || count == 0) return;
    if (to_stride == row_bytes && from_stride == row_bytes) return copy(to, from, row_bytes * count);
    FRETSAW_CUDA_CHECK(cudaMemcpy2DAsync(to, to_stride, from, from_stride, row_bytes, count, cudaMemcpyDeviceToDevice, stream_));
  }
  void clear(void* to, size_t bytes) override {
    if (bytes) FRETSAW_CUDA_CHECK(cudaMemsetAsync(to, 0, bytes, stream_));
  }
  void make_random(void* to, const RandomWeights& weights) override { cuda::make_random(to, weights, stream_); }
  void reorder(const TensorView& from, const TensorView& to) override { cuda::reorder(from, to, stream_); }
  void synchronize() override {
    FRETSAW_CUDA_CHECK(cudaStreamSynchronize(peer_stream_));
    FRETSAW_CUDA_CHECK(cudaStreamSynchronize(stream_));
    FRETSAW_CUDA_CHECK(cudaStreamSynchronize(fetch_stream_));
    faults_->check();
  }
  void synchronize(DeviceEvent& until) override {
    until.wait();
    faults_->check();
  }

  std::shared_ptr<DeviceEvent> record(bool timed) override { return record_on(stream_, timed); }
  void wait_for(DeviceEvent& event) override { FRETSAW_CUDA_CHECK(cudaStreamWaitEvent(stream_, static_cast<GpuEvent&>(event).event)); }
  std::shared_ptr<DeviceEvent> copy_from_peer(void* to, const void* from, int from_device, size_t bytes, DeviceEvent& ready) override;

  void begin_capture() override { FRETSAW_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal)); }
  std::shared_ptr<CapturedWork> end_capture() override;
  void abandon_capture() noexcept override {
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream_, &graph);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
  }
  void launch(CapturedWork& work) override { FRETSAW_CUDA_CHECK(cudaGraphLaunch(static_cast<GpuGraph&>(work).executable, stream_)); }

  cublasLtHandle_t cublas_lt() override {
    if (!cublas_lt_) FRETSAW_CUDA_CHECK(cublasLtCreate(&cublas_lt_));
    return cublas_lt_;
  }
  cudnnHandle_t cudnn() override {
    if (!cudnn_) {
      FRETSAW_CUDA_CHECK(cudnnCreate(&cudnn_));
      FRETSAW_CUDA_CHECK(cudnnSetStream(cudnn_, stream_));
    }
    return cudnn_;
  }
  int multiprocessors() const override { return multiprocessors_; }
  int compute_capability() const override { return compute_capability_; }
  std::shared_ptr<DeviceFault> fault_word(const Node& node) override { return faults_->word_of(node); }

 private:
  // Pieces of pinned memory in turn: while the device reads some, the host fills others.
  struct Staging {
    std::byte* memory = nullptr;
    std::shared_ptr<DeviceEvent> read;  // the device has read what was staged last
  };
  static constexpr size_t staging_pieces = 4, staging_bytes = size_t{4} << 20;
  static constexpr size_t small_bytes = size_t{64} << 10;  // up to here the driver copies the source before the call returns

  std::pair<size_t, size_t> memory_info() {
    size_t available = 0, total = 0;
    FRETSAW_CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return {available, total};
  }
  std::shared_ptr<DeviceEvent> record_on(cudaStream_t stream, bool timed) {
    auto event = std::make_shared<GpuEvent>(timed);
    FRETSAW_CUDA_CHECK(cudaEventRecord(event->event, stream));
    return event;
  }
  Staging& next_staging() {
    Staging& staging = staging_[turn_++ % staging_pieces];
    if (!staging.memory) staging.memory = static_cast<std::byte*>(allocate_pinned(staging_bytes));
    if (staging.read) staging.read->wait();
    return staging;
  }
  void reach(int peer);

  int index_;
  int multiprocessors_ = 0, compute_capability_ = 0;
  cudaStream_t stream_ = nullptr, peer_stream_ = nullptr, fetch_stream_ = nullptr;
  cublasLtHandle_t cublas_lt_ = nullptr;
  cudnnHandle_t cudnn_ = nullptr;
  Staging staging_[staging_pieces];
  size_t turn_ = 0;
  std::set<int> reached_;
  const std::shared_ptr<DeviceFaults> faults_ = std::make_shared<DeviceFaults>();
};

void OpenedGpu::upload(void* to, const void* from, size_t bytes) {
  if (bytes <= small_bytes) {
    if (bytes) FRETSAW_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_));
    return;
  }
  for (size_t at = 0; at < bytes; at += staging_bytes) {
    const size_t part = std::min(staging_bytes, bytes - at);
    Staging& staging = next_staging();
    copy_in_parallel(staging.memory, static_cast<const std::byte*>(from) + at, part, omp_get_max_threads());
    FRETSAW_CUDA_CHECK(cudaMemcpyAsync(static_cast<std::byte*>(to) + at, staging.memory, part, cudaMemcpyHostToDevice, stream_));
    staging.read = record_on(stream_, false);
  }
}

void OpenedGpu::download(void* to, const void* from, size_t bytes) {
  if (bytes <= small_bytes) {
    if (bytes) FRETSAW_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_));
    FRETSAW_CUDA_CHECK(cudaStreamSynchronize(stream_));
    faults_->check();
    return;
  }
  // The copy of the next part runs while this one is taken out of the staging memory.
  Staging* filling = nullptr;
  size_t filled_at = 0, filled_bytes = 0;
  const auto take = [&] {
    filling->read->wait();
    copy_in_parallel(static_cast<std::byte*>(to) + filled_at, filling->memory, filled_bytes, omp_get_max_threads());
  };
  for (size_t at = 0; at < bytes; at += staging_bytes) {
    const size_t part = std::min(staging_bytes, bytes - at);
    Staging& staging = next_staging();
    FRETSAW_CUDA_CHECK(cudaMemcpyAsync(staging.memory, static_cast<const std::byte*>(from) + at, part, cudaMemcpyDeviceToHost, stream_));
    staging.read = record_on(stream_, false);
    if (filling) take();
    filling = &staging, filled_at = at, filled_bytes = part;
  }
  take();
  faults_->check();
}

// Lets this device read the peer's memory directly, where the machine can.
void OpenedGpu::reach(int peer) {
  if (peer == index_ || !reached_.insert(peer).second) return;
  int can = 0;
  FRETSAW_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, index_, peer));
  if (!can) return;
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status != cudaErrorPeerAccessAlreadyEnabled) FRETSAW_CUDA_CHECK(status);
  cudaGetLastError();
}

std::shared_ptr<DeviceEvent> OpenedGpu::copy_from_peer(void* to, const void* from, int from_device, size_t bytes, DeviceEvent& ready) {
  reach(from_device);
  FRETSAW_CUDA_CHECK(cudaStreamWaitEvent(peer_stream_, static_cast<GpuEvent&>(ready).event));
  // `to` may be memory that earlier work on the stream still reads.
  auto free = record_on(stream_, false);
  FRETSAW_CUDA_CHECK(cudaStreamWaitEvent(peer_stream_, static_cast<GpuEvent&>(*free).event));
  if (bytes) FRETSAW_CUDA_CHECK(cudaMemcpyPeerAsync(to, index_, from, from_device, bytes, peer_stream_));
  return record_on(peer_stream_, false);
}

std::shared_ptr<CapturedWork> OpenedGpu::end_capture() {
  cudaGraph_t graph = nullptr;
  FRETSAW_CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
  auto captured = std::make_shared<GpuGraph>();
  const cudaError_t status = cudaGraphInstantiate(&captured->executable, graph, 0);
  cudaGraphDestroy(graph);
  FRETSAW_CUDA_CHECK(status);
  return captured;
}

}  // namespace
}  // namespace cuda

std::unique_ptr<Device> open_cuda_device(int index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    throw Error(std::string("no CUDA device can be used: ") + cudaGetErrorString(status), "install the driver, or use --device cpu",
                ErrorCode::device);
  }
  if (index < 0 || index >= count) {
    throw Error("there is no device cuda:" + std::to_string(index) + "; this machine has " + std::to_string(count),
                "choose others with --devices", ErrorCode::device);
  }
  return std::make_unique<cuda::OpenedGpu>(index);
}

}  // namespace fretsaw
