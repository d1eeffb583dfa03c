// What follows a convolution where its engine can't take it in: bias, residual and activation in one pass over Y.
#include <limits>

#include "kernels/cuda/convolution.h"
#include "kernels/cuda/convolution_activation.cuh"

namespace fretsaw::cuda {

namespace {

constexpr int kThreads = 256;

// y [outer, channels, inner] in packs of V along the last dimension that is not 1; `Index` is wide enough for the count of packs.
// With inner 1 (channels last) each element of a pack has a channel of its own.
template <typename T, int V, typename Index>
__global__ void add_and_activate(Index packs, Index channel_packs, Index inner_packs, const T* bias, const T* residual, FusedActivation f,
                                 T* y) {
  for (Index i = blockIdx.x * Index(blockDim.x) + threadIdx.x; i < packs; i += Index(gridDim.x) * blockDim.x) {
    auto pack = reinterpret_cast<Lanes<T, V>*>(y)[i];
    Lanes<T, V> other{};
    if (residual) other = reinterpret_cast<const Lanes<T, V>*>(residual)[i];
    const Index channel = i / inner_packs % channel_packs;
    const Index first = inner_packs == 1 ? channel * V : channel;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      WideOf<T> value = widen(pack.at[v]);
      if (bias) value += widen(bias[inner_packs == 1 ? first + v : first]);
      if (residual) value += widen(other.at[v]);
      pack.at[v] = narrow<T>(fused_activation(f, value));
    }
    reinterpret_cast<Lanes<T, V>*>(y)[i] = pack;
  }
}

template <typename T, int V>
void launch(const Convolution& c, const ConvolutionAddresses& at, int64_t channels, int64_t inner, cudaStream_t stream) {
  const int64_t packs = count_of(c.y) / V;
  const auto *bias = c.bias ? static_cast<const T*>(at.bias) : nullptr,
             *residual = c.residual ? static_cast<const T*>(at.residual) : nullptr;
  auto* y = static_cast<T*>(at.y);
  const unsigned blocks = blocks_for(packs, kThreads);
  if (packs < std::numeric_limits<int32_t>::max() / 2) {
    add_and_activate<T, V, uint32_t><<<blocks, kThreads, 0, stream>>>(static_cast<uint32_t>(packs), static_cast<uint32_t>(channels),
                                                                      static_cast<uint32_t>(inner), bias, residual, c.activation, y);
  } else {
    add_and_activate<T, V, int64_t><<<blocks, kThreads, 0, stream>>>(packs, channels, inner, bias, residual, c.activation, y);
  }
  check_launch("add_and_activate");
}

}  // namespace

void run_epilogue(const Convolution& c, const ConvolutionAddresses& at, cudaStream_t stream) {
  if (!c.has_epilogue() || count_of(c.y) == 0) return;
  int64_t cells = 1;
  for (size_t i = 2; i < c.y.size(); ++i) cells *= c.y[i];
  // One cell: the channels are the last dimension in either layout.
  const bool last = c.channels_last || cells == 1;
  with_float_type(c.dtype, [&]<typename Tag>(Tag) {
    using T = typename Tag::type;
    constexpr int V = kPackOf16<T>;
    const bool aligned = is_16_byte_aligned(at.y) && (!c.residual || is_16_byte_aligned(at.residual));
    if (last && c.y[1] % V == 0 && aligned) return launch<T, V>(c, at, c.y[1] / V, 1, stream);
    if (last) return launch<T, 1>(c, at, c.y[1], 1, stream);
    // inner 1 stands for channels last: a single pack of cells is left to single elements.
    if (cells % V == 0 && cells > V && aligned) return launch<T, V>(c, at, c.y[1], cells / V, stream);
    launch<T, 1>(c, at, c.y[1], cells, stream);
  });
}

}  // namespace fretsaw::cuda
