// DeformConvGrad: a convolution is a product of the weights and the samples that its taps take. Products bring the gradient back to weights
// and samples; from there it goes to the elements around each sample point, and to what moves and scales the samples.
#include <algorithm>
#include <memory>

#include "kernels/cuda/convolution_deformation.cuh"
#include "kernels/cuda/gradients.h"
#include "kernels/cuda/matmul_product.h"
#include "kernels/cuda/row_runs.cuh"
#include "kernels/scratch_pieces.h"

namespace fretsaw::cuda {
namespace {

// Some images. Samples are [images, C, taps, cells]; an offset group's channels share their places [images, offset_groups, taps, cells].
template <typename T>
struct Images {
  Deformation d;
  int64_t places;              // of all images and groups
  const T *x, *offset, *mask;  // mask: null when left out

  // Of a place: its image and group as one number, and the rest.
  __device__ int64_t set_of(int64_t place) const { return place / (d.taps() * d.cells()); }
  __device__ Corners<WideOf<T>> corners(int64_t place) const {
    const int64_t cell = place % d.cells(), line = place / d.cells();
    return {d.H, d.W,
            moved_spot(d, first_spot<WideOf<T>>(d, cell), static_cast<int>(line % d.taps()), cell, offset + 2 * line * d.cells())};
  }
  __device__ WideOf<T> factor(int64_t place) const { return mask ? widen(mask[place]) : WideOf<T>(1); }
};

template <typename T>
__device__ WideOf<T> sum_corners(const Corners<WideOf<T>>& corners, const WideOf<T> (&of)[4], const T* plane) {
  WideOf<T> sum = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (corners.at[k] >= 0) sum += of[k] * widen(plane[corners.at[k]]);
  return sum;
}

// The samples, for the gradient of the weights. A thread takes a place, and every `gridDim.y`-th of the channels that share it.
template <typename T>
__global__ void __launch_bounds__(kThreads) take_samples(Images<T> images, T* samples) {
  const Deformation& d = images.d;
  const int64_t place = int64_t{blockIdx.x} * kThreads + threadIdx.x, each = d.taps() * d.cells();
  if (place >= images.places) return;
  const Corners<WideOf<T>> corners = images.corners(place);
  const WideOf<T> factor = images.factor(place);
  const int64_t set = images.set_of(place), within = place - set * each;
  for (int64_t c = blockIdx.y; c < d.sharing; c += gridDim.y) {
    const int64_t channel = set * d.sharing + c;
    samples[channel * each + within] = narrow<T>(factor * sum_corners(corners, corners.weight, images.x + channel * d.H * d.W));
  }
}

// What each place gives to the image, as SampleTerms has it: `tap` is one of the four corners there.
template <typename T, typename N>
__global__ void __launch_bounds__(kThreads) name_corners(Images<T> images, N rows, N* targets, N* order, WideOf<T>* weights) {
  const Deformation& d = images.d;
  const int64_t place = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (place >= images.places) return;
  const Corners<WideOf<T>> corners = images.corners(place);
  const WideOf<T> factor = images.factor(place);
  const int64_t plane = images.set_of(place) * d.H * d.W;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const N item = static_cast<N>(place + k * images.places);
    targets[item] = corners.at[k] >= 0 ? static_cast<N>(plane + corners.at[k]) : rows;
    order[item] = item;
    weights[item] = corners.weight[k] * factor;
  }
}

// A thread of threadIdx.x a place; the threadIdx.y share its channels. dsamples: as samples. Either result may be null.
template <typename T>
__global__ void __launch_bounds__(kThreads) move_places(Images<T> images, const WideOf<T>* dsamples, T* doffset, T* dmask) {
  using W = WideOf<T>;
  __shared__ W shared[kThreads];
  const Deformation& d = images.d;
  const int64_t place = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, each = d.taps() * d.cells();
  const bool real = place < images.places;
  W taken = 0, down = 0, right = 0;
  if (real) {
    const Corners<W> corners = images.corners(place);
    const int64_t set = images.set_of(place), within = place - set * each;
    for (int64_t c = threadIdx.y; c < d.sharing; c += blockDim.y) {
      const int64_t channel = set * d.sharing + c;
      const W g = dsamples[channel * each + within];
      const T* plane = images.x + channel * d.H * d.W;
      taken += g * sum_corners(corners, corners.weight, plane);
      down += g * sum_corners(corners, corners.down, plane), right += g * sum_corners(corners, corners.right, plane);
    }
  }
  taken = join_column(taken, shared, AddJoin{});
  down = join_column(down, shared, AddJoin{}), right = join_column(right, shared, AddJoin{});
  if (!real || threadIdx.y != 0) return;
  if (dmask) dmask[place] = narrow<T>(taken);
  if (!doffset) return;
  const W factor = images.factor(place);
  const int64_t cell = place % d.cells(), first = 2 * (place - cell) + cell;  // of [places' lines, 2, cells]
  doffset[first] = narrow<T>(factor * down), doffset[first + d.cells()] = narrow<T>(factor * right);
}

// sums [count] = what is there (unless `begins`) + the parts [parts, count] in their order; at the end they are stored in `to`.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_weight_parts(int64_t count, int64_t parts, const WideOf<T>* from, bool begins, WideOf<T>* sums, T* to) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  WideOf<T> sum = begins ? WideOf<T>(0) : sums[i];
  for (int64_t p = 0; p < parts; ++p) sum += from[p * count + i];
  if (to)
    to[i] = narrow<T>(sum);
  else
    sums[i] = sum;
}

// --- the operator ---

enum Operand : size_t { kInputDy, kInputX, kInputW, kInputOffset, kInputMask };
enum Result : size_t { kOfX, kOfW, kOfOffset, kOfMask };

Deformation deformation_of(const CompileContext& c, Dims& y) {
  const std::optional<Dims> mask = c.has_input(kInputMask) ? c.input_dims(kInputMask) : std::nullopt;
  return read_deformation(c.node(), *c.input_dims(kInputX), *c.input_dims(kInputW), *c.input_dims(kInputOffset), std::nullopt, mask, y);
}

constexpr int64_t kMostBytes = int64_t{1} << 28;  // of scratch memory, unless one image needs more

class DeformableGradient {
 public:
  explicit DeformableGradient(const CompileContext& c);
  void run(RunContext& r);

 private:
  template <typename T>
  void run_as(RunContext& r);
  template <typename T>
  struct Addresses;
  template <typename T>
  void to_weights(RunContext& r, const Images<T>& images, const Addresses<T>& at, int64_t first) const;
  template <typename T, typename N>
  void to_images(RunContext& r, const Images<T>& images, const Addresses<T>& at, T* dx) const;

  void multiply(RunContext& r, Product& product, const void* a, const void* b, void* to, void* scratch) const {
    product.run({.a = a, .b = b, .d = to}, scratch, stream_of(r));
  }
  bool is_wanted(Result o) const { return wanted_[o]; }
  int64_t samples() const { return d_.C * d_.taps() * d_.cells(); }             // of an image
  int64_t places() const { return d_.offset_groups * d_.taps() * d_.cells(); }  // likewise
  int64_t elements() const { return d_.offset_groups * d_.H * d_.W; }           // of one channel of each offset group
  int64_t weights() const { return d_.O * d_.group_in * d_.taps(); }
  size_t sort_bytes(int64_t images) const {
    return with_count_type(images * std::max(4 * places(), elements() + 1),
                           [&]<typename N>() { return bytes_to_find_runs<N>(4 * images * places(), images * elements()); });
  }

  Deformation d_;
  DType dtype_;
  size_t narrow_, wide_;  // bytes of an element
  bool wanted_[4] = {};
  int64_t at_once_ = 1;                  // images: they divide N
  std::unique_ptr<Product> to_samples_;  // W' dY
  std::unique_ptr<Product> to_parts_;    // dY samples', for each image
};

DeformableGradient::DeformableGradient(const CompileContext& c)
    : dtype_(c.input_dtype(kInputX)), narrow_(bytes_of(dtype_, 1)), wide_(dtype_ == DType::float64 ? sizeof(double) : sizeof(float)) {
  Dims y;
  d_ = deformation_of(c, y);
  for (size_t o = 0; o < 4; ++o) wanted_[o] = o < c.outputs.size() && c.outputs[o] != nullptr;
  if (count_of(y) == 0 || d_.C * d_.H * d_.W == 0) return;
  size_t bytes = 0;
  if (is_wanted(kOfW)) bytes += static_cast<size_t>(samples()) * narrow_ + static_cast<size_t>(weights()) * wide_;
  if (is_wanted(kOfX)) bytes += sort_bytes(1) + static_cast<size_t>(4 * places()) * wide_;
  bytes += static_cast<size_t>(samples()) * wide_;
  at_once_ = std::clamp<int64_t>(kMostBytes / static_cast<int64_t>(bytes), 1, d_.N);
  while (d_.N % at_once_ != 0) --at_once_;
  const int64_t groups = d_.C / d_.group_in, group_rows = d_.group_in * d_.taps(), cells = d_.cells();
  const int64_t of_x = group_rows * cells, of_y = d_.group_out * cells, of_w = d_.group_out * group_rows;
  const auto make = [&](ProductSpec spec) {
    spec.type = dtype_, spec.tf32 = c.tf32;
    if (wide_ > narrow_) spec.out = DType::float32;
    return std::make_unique<Product>(gpu(c), spec);
  };
  if (is_wanted(kOfX) || is_wanted(kOfOffset) || is_wanted(kOfMask))
    to_samples_ = make({.M = group_rows,
                        .N = cells,
                        .K = d_.group_out,
                        .a_row = 1,
                        .a_column = group_rows,
                        .b_row = cells,
                        .batches = {{at_once_, 0, groups * of_y, groups * of_x}, {groups, of_w, of_y, of_x}}});
  if (is_wanted(kOfW))
    to_parts_ = make({.M = d_.group_out,
                      .N = group_rows,
                      .K = cells,
                      .a_row = cells,
                      .b_row = 1,
                      .b_column = cells,
                      .batches = {{at_once_, groups * of_y, groups * of_x, groups * of_w}, {groups, of_y, of_x, of_w}}});
}

// Where the parts of the scratch memory lie.
template <typename T>
struct DeformableGradient::Addresses {
  using W = WideOf<T>;
  void *product, *items;
  T *samples, *dw;
  const T* dy;
  W *dsamples, *corner_weights, *parts, *sums;
};

template <typename T>
void DeformableGradient::to_weights(RunContext& r, const Images<T>& images, const Addresses<T>& at, int64_t first) const {
  const int64_t blocks = (images.places + kThreads - 1) / kThreads;
  // Channels share a place's corners unless too few threads would be left.
  const int64_t shares = std::clamp<int64_t>(8 * gpu(r).multiprocessors() / blocks, 1, std::min<int64_t>(d_.sharing, 65535));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(shares));
  take_samples<T><<<grid, kThreads, 0, stream_of(r)>>>(images, at.samples);
  check_launch("take_samples");
  multiply(r, *to_parts_, at.dy, at.samples, at.parts, at.product);
  const bool ends = first + at_once_ == d_.N;
  add_weight_parts<T><<<static_cast<unsigned>((weights() + kThreads - 1) / kThreads), kThreads, 0, stream_of(r)>>>(
      weights(), at_once_, at.parts, first == 0, at.sums, ends ? at.dw : nullptr);
  check_launch("add_weight_parts");
}

template <typename T, typename N>
void DeformableGradient::to_images(RunContext& r, const Images<T>& images, const Addresses<T>& at, T* dx) const {
  const int64_t items = 4 * images.places, rows = at_once_ * elements();
  auto* targets = static_cast<N*>(at.items);
  name_corners<T, N><<<static_cast<unsigned>((images.places + kThreads - 1) / kThreads), kThreads, 0, stream_of(r)>>>(
      images, static_cast<N>(rows), targets, targets + items, at.corner_weights);
  check_launch("name_corners");
  const RowRuns<N> runs = find_runs<N>(r, items, rows, targets);
  launch_sum_runs(r, runs,
                  SampleTerms<WideOf<T>, T, N>{at.dsamples, dx, at.corner_weights, d_.sharing, d_.taps() * d_.cells(),
                                               Divider<N>(images.places), Divider<N>(d_.H * d_.W)});
}

template <typename T>
void DeformableGradient::run_as(RunContext& r) {
  using W = WideOf<T>;
  const auto data = [&](size_t i) { return r.has_input(i) ? r.input(i).as<const T>() : nullptr; };
  const auto result = [&](Result o) {
    const size_t operand = o + 1;
    return is_wanted(o) && r.wants_output(o) && r.has_input(operand) ? r.output(o, r.input(operand).dims, dtype_).template as<T>()
                                                                     : nullptr;
  };
  T *dx = result(kOfX), *dw = result(kOfW), *doffset = result(kOfOffset), *dmask = result(kOfMask);
  const auto clear = [&](T* to, size_t operand) {
    if (to) r.device().clear(to, r.input(operand).bytes());
  };
  if (!to_samples_ && !to_parts_) {  // nothing was convolved
    clear(dx, kInputX), clear(dw, kInputW), clear(doffset, kInputOffset), clear(dmask, kInputMask);
    return;
  }
  ScratchPieces pieces;
  const auto count = static_cast<size_t>(at_once_), taken = count * static_cast<size_t>(samples()), own = static_cast<size_t>(weights());
  const size_t product_at =
      pieces.add(std::max(to_samples_ ? to_samples_->scratch_bytes() : 0, to_parts_ ? to_parts_->scratch_bytes() : 0));
  const size_t dsamples_at = pieces.add(to_samples_ ? taken * sizeof(W) : 0), samples_at = pieces.add(dw ? taken * sizeof(T) : 0);
  const size_t parts_at = pieces.add(dw ? count * own * sizeof(W) : 0), sums_at = pieces.add(dw ? own * sizeof(W) : 0);
  const size_t corners_at = pieces.add(dx ? 4 * count * static_cast<size_t>(places()) * sizeof(W) : 0);
  const size_t items_at = pieces.add(dx ? sort_bytes(at_once_) : 0);
  char* block = static_cast<char*>(r.scratch(pieces.total()));
  const auto wide = [&](size_t offset) { return reinterpret_cast<W*>(block + offset); };
  Addresses<T> at{
      block + product_at, block + items_at, reinterpret_cast<T*>(block + samples_at), dw, nullptr, wide(dsamples_at), wide(corners_at),
      wide(parts_at),     wide(sums_at)};
  const T *x = data(kInputX), *offset = data(kInputOffset), *mask = data(kInputMask);
  for (int64_t first = 0; first < d_.N; first += at_once_) {
    const int64_t moved = first * places(), shown = first * d_.C * d_.H * d_.W;
    const Images<T> images{d_, at_once_ * places(), x + shown, offset + 2 * moved, mask ? mask + moved : nullptr};
    at.dy = data(kInputDy) + first * d_.O * d_.cells();
    if (dw) to_weights<T>(r, images, at, first);
    if (to_samples_) multiply(r, *to_samples_, r.input(kInputW).data, at.dy, at.dsamples, at.product);
    if (dx) {
      with_count_type(at_once_ * std::max(4 * places(), elements() + 1), [&]<typename N>() { to_images<T, N>(r, images, at, dx + shown); });
    }
    if (!doffset && !dmask) continue;
    const dim3 threads = threads_sharing(d_.sharing);
    move_places<T><<<static_cast<unsigned>((images.places + threads.x - 1) / threads.x), threads, 0, stream_of(r)>>>(
        images, at.dsamples, doffset ? doffset + 2 * moved : nullptr, dmask ? dmask + moved : nullptr);
    check_launch("move_places");
  }
}

void DeformableGradient::run(RunContext& r) {
  with_float_type(dtype_, [&]<typename T>(TypeIs<T>) { run_as<T>(r); });
}

CompiledKernel make_deformable_gradient(const CompileContext& c) {
  const auto gradient = std::make_shared<DeformableGradient>(c);
  return {[gradient](RunContext& r) { gradient->run(r); }};
}

std::string why_not(const CompileContext& c) {
  if (std::string reason = refuse_mixed_floats(c, {0, 1, 2, 3, 4}); !reason.empty()) return reason;
  if (std::string reason = refuse_unknown_dims(c); !reason.empty()) return reason;
  try {
    Dims y;
    deformation_of(c, y);
    return *c.input_dims(kInputDy) == y ? "" : "shapes that do not fit";
  } catch (const Error&) {
    return "shapes that do not fit";  // the CPU's kernel says what is wrong
  }
}

}  // namespace

void register_deformable_gradient(KernelRegistry& registry) {
  registry.add({.op = "DeformConvGrad", .domain = kCommunicationDomain, .make = make_deformable_gradient, .unsupported = why_not});
}

}  // namespace fretsaw::cuda
