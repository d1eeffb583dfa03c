// LSTM, GRU, RNN: one product for the input of all steps, then a launch (for some GRUs two) for each step.
#include "kernels/cuda/recurrent.h"

#include <memory>

#include "kernels/cpu/recurrent_settings.h"
#include "kernels/cuda/matmul_product.h"

namespace fretsaw::cuda {

namespace {

enum class Cell { lstm, gru, rnn };

constexpr int64_t most_samples = int64_t{65535} * 8;  // a grid's second dimension counts groups of 8

class Recurrent {
 public:
  Recurrent(const CompileContext& c, Cell cell) : cell_(cell), settings_(read_recurrent(c.node())), dtype_(c.input_dtype(0)) {
    const Dims x = *c.input_dims(0), R = *c.input_dims(2);
    ProductSpec spec;
    const int64_t width = settings_.gates * R.at(2);
    wide_ = dtype_ == DType::float64 ? 8 : 4;
    spec.type = dtype_, spec.tf32 = c.tf32;
    if (wide_ > bytes_of(dtype_, 1)) spec.out = DType::float32;  // what the steps add to is not rounded
    spec.M = x.at(0) * x.at(1), spec.N = width, spec.K = x.at(2);
    spec.a_row = spec.K, spec.b_row = 1, spec.b_column = spec.K;  // B is W^T
    spec.batches = {{settings_.directions, 0, width * spec.K, spec.M * width}};
    product_ = std::make_unique<Product>(gpu(c), spec);
  }
  void run(RunContext& r);

 private:
  void place(RunContext& r, const RecurrentShape& shape);
  void project(RunContext& r);
  CellStep step_of(RunContext& r, const RecurrentShape& shape) const;
  void take_steps(RunContext& r, CellStep step) const;

  Cell cell_;
  RecurrentSettings settings_;
  DType dtype_;
  std::unique_ptr<Product> product_;
  size_t wide_;  // bytes of an element of a state, and of a step's projected input
  char *projected_ = nullptr, *product_scratch_ = nullptr, *states_[2] = {}, *c_ = nullptr, *z_ = nullptr, *reset_h_ = nullptr;
};

// Divides the scratch memory of this run.
void Recurrent::place(RunContext& r, const RecurrentShape& shape) {
  const size_t state = static_cast<size_t>(shape.D * shape.B * shape.H) * wide_;
  const bool two_parts = cell_ == Cell::gru && !settings_.linear_before_reset;
  ScratchPieces pieces;
  const size_t projected = pieces.add(static_cast<size_t>(shape.D * shape.T * shape.B * settings_.gates * shape.H) * wide_);
  const size_t product = pieces.add(product_->scratch_bytes());
  const size_t first = pieces.add(state), second = pieces.add(state), c = pieces.add(cell_ == Cell::lstm ? state : 0);
  const size_t z = pieces.add(two_parts ? state : 0), reset_h = pieces.add(two_parts ? state : 0);
  char* block = static_cast<char*>(r.scratch(pieces.total()));
  projected_ = block + projected, product_scratch_ = block + product, states_[0] = block + first, states_[1] = block + second;
  c_ = cell_ == Cell::lstm ? block + c : nullptr;
  z_ = block + z, reset_h_ = block + reset_h;
}

void Recurrent::project(RunContext& r) {
  ProductOperands operands;
  operands.a = r.input(0).data, operands.b = r.input(1).data, operands.d = projected_;
  product_->run(operands, product_scratch_, stream_of(r));
}

CellStep Recurrent::step_of(RunContext& r, const RecurrentShape& shape) const {
  CellStep step{};
  step.T = shape.T, step.B = shape.B, step.H = shape.H, step.D = shape.D;
  step.first_reversed = settings_.first_reversed, step.batch_first = settings_.layout == 1;
  step.input_forget = settings_.input_forget, step.clip = settings_.clip;
  set_activations(settings_, step.f);
  const auto data = [&](size_t i) -> const void* { return r.has_input(i) ? r.input(i).data : nullptr; };
  step.R = data(2), step.bias = data(3), step.lengths = static_cast<const int32_t*>(data(4));
  step.peephole = cell_ == Cell::lstm ? data(7) : nullptr;
  step.projected = projected_, step.c = c_, step.z = z_, step.reset_h = reset_h_;
  const Dims y_dims = step.batch_first ? Dims{shape.B, shape.T, shape.D, shape.H} : Dims{shape.T, shape.D, shape.B, shape.H};
  const Dims state_dims = step.batch_first ? Dims{shape.B, shape.D, shape.H} : Dims{shape.D, shape.B, shape.H};
  step.y = r.wants_output(0) ? r.output(0, y_dims).data : nullptr;
  step.y_h = r.wants_output(1) ? r.output(1, state_dims).data : nullptr;
  step.y_c = cell_ == Cell::lstm && r.wants_output(2) ? r.output(2, state_dims).data : nullptr;
  return step;
}

void Recurrent::take_steps(RunContext& r, CellStep step) const {
  const cudaStream_t stream = stream_of(r);
  for (int64_t t = 0; t < step.T; ++t) {
    step.t = t, step.h = states_[t % 2], step.next_h = states_[(t + 1) % 2];
    if (cell_ == Cell::lstm) {
      run_cell(dtype_, CellPart::lstm, step, stream);
    } else if (cell_ == Cell::rnn) {
      run_cell(dtype_, CellPart::rnn, step, stream);
    } else if (settings_.linear_before_reset) {
      run_cell(dtype_, CellPart::gru, step, stream);
    } else {
      run_cell(dtype_, CellPart::gru_gates, step, stream);
      run_cell(dtype_, CellPart::gru_candidate, step, stream);
    }
  }
}

void Recurrent::run(RunContext& r) {
  const RecurrentShape shape = recurrent_shape(r, settings_);
  place(r, shape);
  project(r);
  CellStep step = step_of(r, shape);
  step.h = states_[0];
  const auto data = [&](size_t i) -> const void* { return r.has_input(i) ? r.input(i).data : nullptr; };
  start_states(dtype_, step, data(5), cell_ == Cell::lstm ? data(6) : nullptr, stream_of(r));
  take_steps(r, step);
}

template <Cell kCell>
CompiledKernel make_recurrent(const CompileContext& c) {
  const auto recurrent = std::make_shared<Recurrent>(c, kCell);
  return {[recurrent](RunContext& r) { recurrent->run(r); }};
}

}  // namespace

std::string refuse_recurrent(const CompileContext& c) {
  if (std::string reason = refuse_unknown_dims(c); !reason.empty()) return reason;
  const auto types = {DType::float32, DType::float16, DType::bfloat16, DType::float64};
  if (std::string reason = refuse_other_types(c, 0, types); !reason.empty()) return reason;
  if (std::string reason = refuse_other_types(c, 4, {DType::int32}); !reason.empty()) return reason;
  for (size_t i = 0; i < 3; ++i) {
    if (!c.has_input(i)) return "no weights";
    const Dims dims = *c.input_dims(i);
    if (dims.size() != 3) return "shapes that do not fit";
    if (count_of(dims) == 0) return "an empty input";
  }
  const Dims x = *c.input_dims(0);
  if (x[c.node().get_int("layout", 0) == 1 ? 0 : 1] > most_samples) return "more than " + std::to_string(most_samples) + " samples";
  return "";
}

void set_activations(const RecurrentSettings& settings, CellActivation (&to)[2][3]) {
  for (size_t d = 0; d < settings.activations.size(); ++d) {
    for (size_t i = 0; i < settings.activations[d].size(); ++i) {
      const GateActivation& f = settings.activations[d][i];
      to[d][i] = {static_cast<int>(f.kind), f.alpha, f.beta};
    }
  }
}

void register_recurrent(KernelRegistry& registry) {
  registry.add({.op = "LSTM", .make = make_recurrent<Cell::lstm>, .unsupported = refuse_recurrent});
  registry.add({.op = "GRU", .make = make_recurrent<Cell::gru>, .unsupported = refuse_recurrent});
  registry.add({.op = "RNN", .make = make_recurrent<Cell::rnn>, .unsupported = refuse_recurrent});
}

}  // namespace fretsaw::cuda
