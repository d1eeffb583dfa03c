// The steps of LSTM, GRU and RNN over time, in both directions and for sequences of different lengths.
#include "kernels/cpu/recurrent.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/vector_math.h"

namespace fretsaw {

namespace {

using Kind = GateActivation::Kind;

struct ActivationRow {
  const char* name;
  Kind kind;
  bool has_alpha, has_beta;
  float alpha, beta;  // where the node gives none
};
constexpr ActivationRow kActivations[] = {
    {"relu", Kind::relu, false, false, 0, 0},
    {"tanh", Kind::tanh, false, false, 0, 0},
    {"sigmoid", Kind::sigmoid, false, false, 0, 0},
    {"affine", Kind::affine, true, true, 1, 0},
    {"leakyrelu", Kind::leaky_relu, true, false, 0.01f, 0},
    {"thresholdedrelu", Kind::thresholded_relu, true, false, 1, 0},
    {"scaledtanh", Kind::scaled_tanh, true, true, 1, 1},
    {"hardsigmoid", Kind::hard_sigmoid, true, true, 0.2f, 0.5f},
    {"elu", Kind::elu, true, false, 1, 0},
    {"softsign", Kind::softsign, false, false, 0, 0},
    {"softplus", Kind::softplus, false, false, 0, 0},
};

GateActivation read_activation(std::string name, const std::vector<float>& alphas, size_t& alpha, const std::vector<float>& betas,
                               size_t& beta) {
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const ActivationRow& row : kActivations) {
    if (name != row.name) continue;
    GateActivation f{row.kind, row.alpha, row.beta};
    if (row.has_alpha && alpha < alphas.size()) f.alpha = alphas[alpha++];
    if (row.has_beta && beta < betas.size()) f.beta = betas[beta++];
    return f;
  }
  throw Error("the activation '" + name + "' is not known", "use one that ONNX names for RNN, GRU and LSTM");
}

template <typename T, typename F>
void map_row(T* x, int64_t n, const F& f) {
  run_vectorised([&]() FRETSAW_ALWAYS_INLINE {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] = f(x[i]);
  });
}

}  // namespace

template <typename T>
void activate(const GateActivation& f, T* x, int64_t n) {
  const T a = static_cast<T>(f.alpha), b = static_cast<T>(f.beta);
#define FRETSAW_MAP(expression)                     \
  map_row(x, n, [a, b](T v) FRETSAW_ALWAYS_INLINE { \
    (void)a, (void)b;                               \
    return expression;                              \
  })
  switch (f.kind) {
    case Kind::relu:
      FRETSAW_MAP(v < T(0) ? T(0) : v);
      break;
    case Kind::tanh:
      FRETSAW_MAP(math::tanh(v));
      break;
    case Kind::sigmoid:
      FRETSAW_MAP(T(1) / (T(1) + math::exp(-v)));
      break;
    case Kind::affine:
      FRETSAW_MAP(a * v + b);
      break;
    case Kind::leaky_relu:
      FRETSAW_MAP(v < T(0) ? a * v : v);
      break;
    case Kind::thresholded_relu:
      FRETSAW_MAP(v > a ? v : T(0));
      break;
    case Kind::scaled_tanh:
      FRETSAW_MAP(a * math::tanh(b * v));
      break;
    case Kind::hard_sigmoid:
      FRETSAW_MAP(math::max(T(0), math::min(T(1), a * v + b)));
      break;
    case Kind::elu:
      FRETSAW_MAP(v < T(0) ? a * math::expm1(v) : v);
      break;
    case Kind::softsign:
      FRETSAW_MAP(v / (T(1) + std::fabs(v)));
      break;
    case Kind::softplus:
      FRETSAW_MAP(math::max(v, T(0)) + math::log1p(math::exp(-std::fabs(v))));
      break;
  }
#undef FRETSAW_MAP
}
template void activate<float>(const GateActivation&, float*, int64_t);
template void activate<double>(const GateActivation&, double*, int64_t);

template <typename T>
void activate_with_slopes(const GateActivation& f, float clip, T* x, T* slopes, int64_t n) {
  const T bound = clip > 0 ? static_cast<T>(clip) : std::numeric_limits<T>::infinity();
  std::copy_n(x, n, slopes);
  if (clip > 0) map_row(x, n, [bound](T v) FRETSAW_ALWAYS_INLINE { return v < -bound ? -bound : v > bound ? bound : v; });
  activate(f, x, n);
  const T a = static_cast<T>(f.alpha), b = static_cast<T>(f.beta);
  // Of v, which became y. NaN stays.
#define FRETSAW_SLOPES(expression)                                \
  run_vectorised([&]() FRETSAW_ALWAYS_INLINE {                    \
    _Pragma("omp simd") for (int64_t i = 0; i < n; ++i) {         \
      [[maybe_unused]] const T v = slopes[i], y = x[i];           \
      slopes[i] = v < -bound || v > bound ? T(0) : T(expression); \
    }                                                             \
  })
  switch (f.kind) {
    case Kind::relu:
      FRETSAW_SLOPES(v > T(0) ? 1 : 0);
      break;
    case Kind::tanh:
      FRETSAW_SLOPES(T(1) - y * y);
      break;
    case Kind::sigmoid:
      FRETSAW_SLOPES(y * (T(1) - y));
      break;
    case Kind::affine:
      FRETSAW_SLOPES(a);
      break;
    case Kind::leaky_relu:
      FRETSAW_SLOPES(v < T(0) ? a : 1);
      break;
    case Kind::thresholded_relu:
      FRETSAW_SLOPES(v > a ? 1 : 0);
      break;
    case Kind::scaled_tanh:
      FRETSAW_SLOPES(a * b * (T(1) - math::tanh(b * v) * math::tanh(b * v)));
      break;
    case Kind::hard_sigmoid:
      FRETSAW_SLOPES(y > T(0) && y < T(1) ? a : 0);
      break;
    case Kind::elu:
      FRETSAW_SLOPES(v < T(0) ? y + a : 1);
      break;
    case Kind::softsign:
      FRETSAW_SLOPES(T(1) / ((T(1) + std::fabs(v)) * (T(1) + std::fabs(v))));
      break;
    case Kind::softplus:
      FRETSAW_SLOPES(T(1) / (T(1) + math::exp(-v)));
      break;
  }
#undef FRETSAW_SLOPES
}
template void activate_with_slopes<float>(const GateActivation&, float, float*, float*, int64_t);
template void activate_with_slopes<double>(const GateActivation&, float, double*, double*, int64_t);

RecurrentSettings read_recurrent(const Node& node) {
  const bool lstm = node.op.starts_with("LSTM"), gru = node.op.starts_with("GRU");
  // The activations of one direction.
  const std::vector<std::string> defaults = lstm  ? std::vector<std::string>{"Sigmoid", "Tanh", "Tanh"}
                                            : gru ? std::vector<std::string>{"Sigmoid", "Tanh"}
                                                  : std::vector<std::string>{"Tanh"};
  RecurrentSettings s;
  s.gates = lstm ? 4 : gru ? 3 : 1;
  const std::string direction = node.get_string("direction", "forward");
  require(direction == "forward" || direction == "reverse" || direction == "bidirectional", "an unknown direction",
          "use forward, reverse or bidirectional");
  s.directions = direction == "bidirectional" ? 2 : 1;
  s.first_reversed = direction == "reverse";
  s.layout = node.get_int("layout", 0);
  require(s.layout == 0 || s.layout == 1, "attribute layout is neither 0 nor 1", "use one of these");
  s.hidden = node.get_int("hidden_size", 0);
  s.clip = node.get_float("clip", 0);
  s.input_forget = node.get_int("input_forget", 0) != 0;
  s.linear_before_reset = node.get_int("linear_before_reset", 0) != 0;
  std::vector<std::string> names = node.has("activations") ? node.get_strings("activations") : std::vector<std::string>{};
  if (names.empty()) {
    for (int64_t d = 0; d < s.directions; ++d) names.insert(names.end(), defaults.begin(), defaults.end());
  }
  require(names.size() == defaults.size() * static_cast<size_t>(s.directions), "the wrong number of activations",
          "give each direction as many as the cell has");
  const std::vector<float> alphas = node.get_floats("activation_alpha"), betas = node.get_floats("activation_beta");
  size_t alpha = 0, beta = 0;
  for (int64_t d = 0; d < s.directions; ++d) {
    s.activations.emplace_back();
    for (size_t i = 0; i < defaults.size(); ++i) {
      s.activations.back().push_back(read_activation(names[static_cast<size_t>(d) * defaults.size() + i], alphas, alpha, betas, beta));
    }
  }
  return s;
}

RecurrentShape recurrent_shape(RunContext& r, const RecurrentSettings& s) {
  const Dims &x = r.input(0).dims, &W = r.input(1).dims, &R = r.input(2).dims;
  require(x.size() == 3 && W.size() == 3 && R.size() == 3, "X, W and R of a recurrent node must have 3 dimensions", "check their shapes");
  RecurrentShape shape{x[s.layout ? 1 : 0], x[s.layout ? 0 : 1], x[2], R[2], s.directions};
  require(s.hidden == 0 || s.hidden == shape.H, "hidden_size is not what R says", "make them equal");
  require(W == Dims{shape.D, s.gates * shape.H, shape.I} && R == Dims{shape.D, s.gates * shape.H, shape.H},
          "the weights of a recurrent node do not fit", "W is [directions, gates*hidden, input], R [directions, gates*hidden, hidden]");
  require(!r.has_input(3) || r.input(3).count() == shape.D * 2 * s.gates * shape.H, "the biases of a recurrent node do not fit",
          "give [directions, 2*gates*hidden]");
  for (size_t i : {5, 6}) {
    if (i == 6 && s.gates != 4) continue;
    require(!r.has_input(i) || r.input(i).count() == shape.D * shape.B * shape.H, "an initial state does not fit",
            "give [directions, batch, hidden]");
  }
  require(!r.has_input(4) || r.input(4).count() == shape.B, "sequence_lens does not fit", "give a length for each sample of the batch");
  require(s.gates != 4 || !r.has_input(7) || r.input(7).count() == shape.D * 3 * shape.H, "the peepholes do not fit",
          "give [directions, 3*hidden]");
  for (size_t i = 1; i < r.input_count(); ++i) {
    if (i != 4 && r.has_input(i))
      require(r.input(i).dtype == r.input(0).dtype, "inputs of a recurrent node have different types", "cast them");
  }
  return shape;
}

template <typename T>
void load_state(RunContext& r, size_t input, const StateRows& rows, int64_t d, T* to) {
  std::fill_n(to, rows.s.B * rows.s.H, T(0));
  if (!r.has_input(input)) return;
  for (int64_t b = 0; b < rows.s.B; ++b) std::copy_n(r.input(input).as<T>() + rows.state(d, b), rows.s.H, to + b * rows.s.H);
}

template <typename T>
void store_state(TensorView* y, const StateRows& rows, int64_t d, const T* from) {
  if (!y) return;
  for (int64_t b = 0; b < rows.s.B; ++b) std::copy_n(from + b * rows.s.H, rows.s.H, y->as<T>() + rows.state(d, b));
}

template void load_state<float>(RunContext&, size_t, const StateRows&, int64_t, float*);
template void load_state<double>(RunContext&, size_t, const StateRows&, int64_t, double*);
template void store_state<float>(TensorView*, const StateRows&, int64_t, const float*);
template void store_state<double>(TensorView*, const StateRows&, int64_t, const double*);

std::vector<int64_t> sequence_lengths(RunContext& r, const RecurrentShape& shape) {
  if (!r.has_input(4)) return {};
  std::vector<int64_t> lengths = r.input_ints(4);
  require(static_cast<int64_t>(lengths.size()) == shape.B, "sequence_lens does not have one entry for each sample", "give it [batch]");
  for (int64_t n : lengths) require(n >= 0 && n <= shape.T, "a sequence length is outside the sequence", "use 0 to the number of steps");
  return lengths;
}

template <typename T>
void project_input(const RecurrentSettings& s, const RecurrentShape& shape, const T* x, const T* W, const T* bias, T* gates) {
  const int64_t rows = shape.T * shape.B, width = s.gates * shape.H;
  multiply_strided<T>(rows, width, shape.I, {x, shape.I, 1}, {W, 1, shape.I}, gates, width);
  if (!bias) return;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < width; ++j) {
      // With linear_before_reset the recurrent bias of the last gate belongs inside the product with the reset gate.
      const bool later = s.linear_before_reset && s.gates == 3 && j >= 2 * shape.H;
      gates[i * width + j] += bias[j] + (later ? T(0) : bias[width + j]);
    }
  }
}
template void project_input<float>(const RecurrentSettings&, const RecurrentShape&, const float*, const float*, const float*, float*);
template void project_input<double>(const RecurrentSettings&, const RecurrentShape&, const double*, const double*, const double*, double*);

namespace {

// Steps through time, forwards or backwards. Rows whose sequence has ended keep their state and give zeros.
template <typename T>
void step_through(const RecurrentSettings& s, const RecurrentShape& shape, Cell<T> cell, const Direction<T>& d, int64_t direction,
                  bool backwards, const std::vector<int64_t>& lengths, const StateRows& rows, TensorView* y) {
  const std::unique_ptr<bool[]> active(new bool[static_cast<size_t>(shape.B) + 1]);
  for (int64_t step = 0; step < shape.T; ++step) {
    const int64_t t = backwards ? shape.T - 1 - step : step;
    for (int64_t b = 0; b < shape.B; ++b) active[b] = is_active(lengths, t, b);
    cell(s, shape, s.activations[static_cast<size_t>(direction)], d, d.gates + t * shape.B * s.gates * shape.H, active.get());
    for (int64_t b = 0; b < shape.B; ++b) {
      if (active[b]) std::copy_n(d.fresh + b * shape.H, shape.H, d.h + b * shape.H);
      if (!y) continue;
      T* to = y->as<T>() + rows.output(t, direction, b);
      if (active[b])
        std::copy_n(d.h + b * shape.H, shape.H, to);
      else
        std::fill_n(to, shape.H, T(0));
    }
  }
}

}  // namespace

template <typename T>
void run_recurrent(RunContext& r, const RecurrentSettings& s, Cell<T> cell, bool has_cell_state) {
  const RecurrentShape shape = recurrent_shape(r, s);
  const StateRows rows{shape, s.layout == 1};
  const int64_t T_ = shape.T, B = shape.B, H = shape.H, D = shape.D, width = s.gates * H;
  const Dims y_dims = s.layout ? Dims{B, T_, D, H} : Dims{T_, D, B, H}, state_dims = rows.dims();
  TensorView* y = r.wants_output(0) ? &r.output(0, y_dims) : nullptr;
  TensorView* y_h = r.wants_output(1) ? &r.output(1, state_dims) : nullptr;
  TensorView* y_c = has_cell_state && r.wants_output(2) ? &r.output(2, state_dims) : nullptr;
  const std::vector<int64_t> lengths = sequence_lengths(r, shape);
  const auto pieces = scratch_arrays<T, 6>(r, {T_ * B * shape.I, B * H, B * H, T_ * B * width, B * width, B * H});
  const TensorView& x = r.input(0);
  const T* time_first = x.as<T>();
  if (s.layout) {
    copy_strided(x.dtype, {T_, B, shape.I}, pieces[0], {B * shape.I, shape.I, 1}, x.data, {shape.I, T_ * shape.I, 1}, 1);
    time_first = pieces[0];
  }
  for (int64_t i = 0; i < D; ++i) {
    Direction<T> d{};
    d.x = time_first, d.W = r.input(1).as<T>() + i * width * shape.I, d.R = r.input(2).as<T>() + i * width * H;
    d.bias = r.has_input(3) ? r.input(3).as<T>() + i * 2 * width : nullptr;
    d.peephole = has_cell_state && r.has_input(7) ? r.input(7).as<T>() + i * 3 * H : nullptr;
    d.h = pieces[1], d.c = pieces[2], d.gates = pieces[3], d.work = pieces[4], d.fresh = pieces[5];
    load_state(r, 5, rows, i, d.h);
    if (has_cell_state) load_state(r, 6, rows, i, d.c);
    project_input(s, shape, d.x, d.W, d.bias, d.gates);
    step_through(s, shape, cell, d, i, i == 1 || s.first_reversed, lengths, rows, y);
    store_state(y_h, rows, i, d.h);
    store_state(y_c, rows, i, d.c);
  }
}
template void run_recurrent<float>(RunContext&, const RecurrentSettings&, Cell<float>, bool);
template void run_recurrent<double>(RunContext&, const RecurrentSettings&, Cell<double>, bool);

}  // namespace fretsaw
