// LSTMGrad, GRUGrad and RNNGrad: backpropagation through time, as the CPU's kernels/cpu/recurrent_gradients.cpp says it.
//
// The states before all steps stand in Y, so that one product makes the gates of all steps once more; then every step back is a launch and
// a product (two of each for a GRU whose reset gate comes before the product), and the gradients of the weights are products over all
// steps at once. Both directions run in the same launches.
#include "kernels/cuda/recurrent_gradients.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cuda/gradients.h"
#include "kernels/cuda/matmul_product.h"

namespace fretsaw::cuda {

namespace {

// Where the operands beside the forward node's and the results stand.
enum Operand : size_t { kInputX, kInputW, kInputR, kInputB, kLengths, kInputH, kInputC, kInputPeephole };
enum Result : size_t { kOfX, kOfW, kOfR, kOfB, kOfH, kOfC, kOfPeephole };

class RecurrentGradient {
 public:
  explicit RecurrentGradient(const CompileContext& c);
  void run(RunContext& r);

 private:
  bool is_lstm() const { return settings_.gates == 4; }
  bool is_linear() const { return settings_.gates == 3 && settings_.linear_before_reset; }
  bool resets_before() const { return settings_.gates == 3 && !settings_.linear_before_reset; }
  size_t y_place() const { return is_lstm() ? 8 : 6; }

  void make_products(const CompileContext& c);
  void place(RunContext& r);
  void replay(RunContext& r);
  void walk_back(RunContext& r);
  void of_weights(RunContext& r);
  void of_biases(RunContext& r);

  void multiply(RunContext& r, const std::unique_ptr<Product>& product, const void* a, const void* b, void* d) const {
    product->run({.a = a, .b = b, .c = d, .d = d}, product_scratch_, stream_of(r));
  }
  // From element `i` of an array of X's elements on.
  const void* from(const void* array, int64_t i) const { return static_cast<const char*>(array) + i * static_cast<int64_t>(narrow_); }
  void* from(void* array, int64_t i) const { return static_cast<char*>(array) + i * static_cast<int64_t>(narrow_); }
  // Of the result, which has the operand's dimensions; null where nobody wants it.
  void* result(RunContext& r, Result o) const {
    const size_t operand = o < kOfH ? o : o + 1;  // none of the lengths
    return r.wants_output(o) ? r.output(o, r.input(operand).dims).data : nullptr;
  }

  RecurrentSettings settings_;
  DType dtype_;
  size_t narrow_, wide_;  // bytes of an element
  int64_t I_ = 0;
  CellGradient g_{};
  const void* x_ = nullptr;
  // Over all steps: X W', h R', (r h) R', dX, dW, dR, the candidate's part of dR; and of one step: dh, the gradient of r h.
  std::unique_ptr<Product> project_, recur_, recur_inner_, of_x_, of_w_, of_r_, of_r_inner_, back_, back_inner_;
  void *product_scratch_ = nullptr, *masked_x_ = nullptr;
};

RecurrentGradient::RecurrentGradient(const CompileContext& c)
    : settings_(read_recurrent(c.node())),
      dtype_(c.input_dtype(0)),
      narrow_(bytes_of(dtype_, 1)),
      wide_(dtype_ == DType::float64 ? sizeof(double) : sizeof(float)) {
  const Dims x = *c.input_dims(kInputX);
  g_.batch_first = settings_.layout == 1, g_.first_reversed = settings_.first_reversed;
  g_.T = x[g_.batch_first ? 1 : 0], g_.B = x[g_.batch_first ? 0 : 1], I_ = x[2];
  g_.H = c.input_dims(kInputR)->at(2), g_.D = settings_.directions;
  g_.G = settings_.gates, g_.K = resets_before() ? 2 : g_.G;
  g_.input_forget = settings_.input_forget, g_.clip = settings_.clip;
  set_activations(settings_, g_.f);
  make_products(c);
}

void RecurrentGradient::make_products(const CompileContext& c) {
  const int64_t rows = g_.rows(), H = g_.H, D = g_.D, width = g_.G * H, taken = g_.K * H;
  const auto make = [&](bool into_wide, ProductSpec spec) {
    spec.type = dtype_, spec.tf32 = c.tf32;
    if (into_wide && wide_ > narrow_) spec.out = DType::float32;
    return std::make_unique<Product>(gpu(c), spec);
  };
  project_ = make(true, {.M = rows, .N = D * width, .K = I_, .a_row = I_, .b_row = 1, .b_column = I_});
  recur_ =
      make(true, {.M = rows, .N = taken, .K = H, .a_row = D * H, .b_row = 1, .b_column = H, .batches = {{D, H, width * H, rows * taken}}});
  back_ = make(true,
               {.M = g_.B, .N = H, .K = taken, .a_row = taken, .b_row = H, .batches = {{D, g_.B * taken, width * H, g_.B * H}}, .beta = 1});
  of_x_ = make(false, {.M = rows, .N = I_, .K = D * width, .a_row = D * width, .b_row = I_});
  of_w_ = make(false, {.M = D * width, .N = I_, .K = rows, .a_row = 1, .a_column = D * width, .b_row = I_});
  const int64_t from_da = is_linear() ? 2 * H : taken;
  of_r_ = make(false,
               {.M = from_da, .N = H, .K = rows, .a_row = 1, .a_column = D * width, .b_row = D * H, .batches = {{D, width, H, width * H}}});
  if (g_.G != 3) return;
  const bool linear = is_linear();  // `inner` is what R's part is multiplied with, or the gradient of the product
  of_r_inner_ = make(false, {.M = H,
                             .N = H,
                             .K = rows,
                             .a_row = 1,
                             .a_column = linear ? D * H : D * width,
                             .b_row = D * H,
                             .batches = {{D, linear ? H : width, H, width * H}}});
  if (linear) return;
  recur_inner_ =
      make(true, {.M = rows, .N = H, .K = H, .a_row = D * H, .b_row = 1, .b_column = H, .batches = {{D, H, width * H, rows * H}}});
  back_inner_ = make(true, {.M = g_.B, .N = H, .K = H, .a_row = H, .b_row = H, .batches = {{D, g_.B * H, width * H, g_.B * H}}});
}

// Divides the scratch memory of this run, and takes its operands.
void RecurrentGradient::place(RunContext& r) {
  const auto units = static_cast<size_t>(g_.D * g_.H), rows = static_cast<size_t>(g_.rows()), gates = static_cast<size_t>(g_.G);
  const size_t taken = static_cast<size_t>(g_.K), samples = static_cast<size_t>(g_.B);
  size_t scratch = 0;
  for (const auto* product : {&project_, &recur_, &recur_inner_, &of_x_, &of_w_, &of_r_, &of_r_inner_, &back_, &back_inner_})
    if (*product) scratch = std::max(scratch, (*product)->scratch_bytes());
  ScratchPieces pieces;
  std::vector<std::pair<void**, size_t>> places;
  const auto add = [&](void*& to, size_t count, size_t bytes, bool wanted = true) {
    to = nullptr;
    if (wanted) places.emplace_back(&to, pieces.add(count * bytes));
  };
  const bool gru = g_.G == 3;
  add(product_scratch_, scratch, 1);
  add(masked_x_, rows * static_cast<size_t>(I_), narrow_, r.has_input(kLengths));
  add(g_.h, rows * units, narrow_), add(g_.inner, rows * units, narrow_, gru);
  add(g_.da, rows * units * gates, narrow_);
  add(g_.step_da, samples * units * taken, narrow_), add(g_.step_inner, samples * units, narrow_, resets_before());
  add(g_.gates, rows * units * gates, wide_), add(g_.slopes, rows * units * gates, wide_);
  add(g_.recurrent, rows * units * taken, wide_), add(g_.recurrent_inner, rows * units, wide_, resets_before());
  add(g_.c, rows * units, wide_, is_lstm()), add(g_.linear, rows * units, wide_, is_linear());
  add(g_.through_reset, samples * units, wide_, resets_before());
  add(g_.dh, samples * units, wide_), add(g_.dc, samples * units, wide_, is_lstm());
  char* block = static_cast<char*>(r.scratch(pieces.total()));
  for (const auto& [to, offset] : places) *to = block + offset;

  const auto data = [&](size_t i) -> const void* { return r.has_input(i) ? r.input(i).data : nullptr; };
  g_.bias = data(kInputB), g_.lengths = static_cast<const int32_t*>(data(kLengths)), g_.initial_h = data(kInputH);
  g_.initial_c = is_lstm() ? data(kInputC) : nullptr, g_.peephole = is_lstm() ? data(kInputPeephole) : nullptr;
  g_.y = data(y_place()), g_.dy = data(y_place() + 1);
  x_ = g_.lengths ? masked_x_ : data(kInputX);
}

void RecurrentGradient::replay(RunContext& r) {
  const cudaStream_t stream = stream_of(r);
  const void *W = r.input(kInputW).data, *R = r.input(kInputR).data;
  if (g_.lengths) mask_ended_rows(dtype_, g_, r.input(kInputX).data, I_, masked_x_, stream);
  find_states_before(dtype_, g_, stream);
  multiply(r, project_, x_, W, g_.gates);
  multiply(r, recur_, g_.h, R, g_.recurrent);
  if (!resets_before()) return replay_cells(dtype_, is_lstm() ? CellPart::lstm : is_linear() ? CellPart::gru : CellPart::rnn, g_, stream);
  replay_cells(dtype_, CellPart::gru_gates, g_, stream);
  multiply(r, recur_inner_, g_.inner, from(R, 2 * g_.H * g_.H), g_.recurrent_inner);
  replay_cells(dtype_, CellPart::gru_candidate, g_, stream);
}

void RecurrentGradient::walk_back(RunContext& r) {
  const cudaStream_t stream = stream_of(r);
  const void* R = r.input(kInputR).data;
  CellStep states{};
  states.B = g_.B, states.H = g_.H, states.D = g_.D, states.batch_first = g_.batch_first, states.h = g_.dh, states.c = g_.dc;
  const auto given = [&](size_t i) -> const void* { return r.has_input(i) ? r.input(i).data : nullptr; };
  start_states(dtype_, states, given(y_place() + 2), is_lstm() ? given(y_place() + 3) : nullptr, stream);
  for (int64_t step = g_.T; step-- > 0;) {
    if (resets_before()) {
      step_back(dtype_, CellPart::gru_candidate, g_, step, stream);
      multiply(r, back_inner_, g_.step_inner, from(R, 2 * g_.H * g_.H), g_.through_reset);
      step_back(dtype_, CellPart::gru_gates, g_, step, stream);
    } else {
      step_back(dtype_, is_lstm() ? CellPart::lstm : is_linear() ? CellPart::gru : CellPart::rnn, g_, step, stream);
    }
    multiply(r, back_, g_.step_da, R, g_.dh);
  }
}

void RecurrentGradient::of_weights(RunContext& r) {
  if (void* to = result(r, kOfX)) multiply(r, of_x_, g_.da, r.input(kInputW).data, to);
  if (void* to = result(r, kOfW)) multiply(r, of_w_, g_.da, x_, to);
  void* to = result(r, kOfR);
  if (!to) return;
  multiply(r, of_r_, g_.da, g_.h, to);
  void* candidate = from(to, 2 * g_.H * g_.H);
  if (is_linear()) multiply(r, of_r_inner_, g_.inner, g_.h, candidate);
  if (resets_before()) multiply(r, of_r_inner_, from(g_.da, 2 * g_.H), g_.inner, candidate);
}

void RecurrentGradient::of_biases(RunContext& r) {
  const cudaStream_t stream = stream_of(r);
  const int64_t width = g_.G * g_.H;
  if (void* to = result(r, kOfB)) {
    sum_columns(dtype_, {g_.slopes, g_.rows(), width, g_.rows() * width, width, g_.D, to, from(to, width), 2 * width}, stream);
    if (is_linear())
      sum_columns(dtype_, {g_.linear, g_.rows(), g_.D * g_.H, g_.H, g_.H, g_.D, from(to, width + 2 * g_.H), nullptr, 2 * width}, stream);
  }
  if (!is_lstm()) return;
  if (void* to = result(r, kOfPeephole)) sum_peepholes(dtype_, g_, to, stream);
}

void RecurrentGradient::run(RunContext& r) {
  recurrent_shape(r, settings_);
  place(r);
  replay(r);
  walk_back(r);
  if (void* to = result(r, kOfH)) store_states(dtype_, g_, g_.dh, to, stream_of(r));
  if (is_lstm())
    if (void* to = result(r, kOfC)) store_states(dtype_, g_, g_.dc, to, stream_of(r));
  of_weights(r);
  of_biases(r);
}

CompiledKernel make_recurrent_gradient(const CompileContext& c) {
  const auto gradient = std::make_shared<RecurrentGradient>(c);
  return {[gradient](RunContext& r) { gradient->run(r); }};
}

std::string why_not(const CompileContext& c) {
  if (std::string reason = refuse_recurrent(c); !reason.empty()) return reason;
  const size_t y = c.node().op == "LSTMGrad" ? 8 : 6;
  std::string reason =
      y == 8 ? refuse_mixed_floats(c, {0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11}) : refuse_mixed_floats(c, {0, 1, 2, 3, 5, 6, 7, 8});
  if (!reason.empty()) return reason;
  const Dims x = *c.input_dims(0), R = *c.input_dims(2);
  const int64_t states = R[0] * R[2] * x[c.node().get_int("layout", 0) == 1 ? 0 : 1], steps = x[c.node().get_int("layout", 0) == 1 ? 1 : 0];
  const auto fits = [&](size_t i, int64_t count) { return !c.has_input(i) || count_of(*c.input_dims(i)) == count; };
  const bool all_fit =
      c.has_input(y) && fits(y, states * steps) && fits(y + 1, states * steps) && fits(y + 2, states) && fits(y + 3, states);
  return all_fit ? "" : "shapes that do not fit";  // the CPU's kernel says what is wrong
}

}  // namespace

void register_recurrent_gradients(KernelRegistry& registry) {
  for (const char* op : {"LSTMGrad", "GRUGrad", "RNNGrad"})
    registry.add({.op = op, .domain = kCommunicationDomain, .make = make_recurrent_gradient, .unsupported = why_not});
}

}  // namespace fretsaw::cuda
