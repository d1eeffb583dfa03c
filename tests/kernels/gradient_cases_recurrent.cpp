// Gradients of LSTM, GRU and RNN.
#include <algorithm>
#include <cmath>

#include "tests/kernels/gradient_case.h"
#include "tests/kernels/operator_case.h"

namespace fretsaw::testing {

namespace {

using Strings = std::vector<std::string>;
using Floats = std::vector<float>;

constexpr int64_t kSteps = 4, kBatch = 3, kWide = 2, kHidden = 3;

int64_t gates_of(const std::string& op) {
  return op == "LSTM" ? 4 : op == "GRU" ? 3 : 1;
}

// A node with all of its operands, but for lengths, and all of its results in the loss.
GradientCase whole_case(Draw& x, const std::string& op, const std::string& direction = "forward", int64_t layout = 0) {
  const int64_t D = direction == "bidirectional" ? 2 : 1, G = gates_of(op);
  const Dims states = layout ? Dims{kBatch, D, kHidden} : Dims{D, kBatch, kHidden};
  GradientCase c{.op = op, .outputs = op == "LSTM" ? size_t{3} : size_t{2}};
  c.inputs = {x(layout ? Dims{kBatch, kSteps, kWide} : Dims{kSteps, kBatch, kWide}),
              x({D, G * kHidden, kWide}, -1, 1),
              x({D, G * kHidden, kHidden}, -1, 1),
              x({D, 2 * G * kHidden}, -1, 1),
              nothing(),
              x(states)};
  if (op == "LSTM") c.inputs.insert(c.inputs.end(), {x(states), x({D, 3 * kHidden}, -1, 1)});
  c.attributes = {{"hidden_size", kHidden}, {"direction", direction}, {"layout", layout}};
  return c;
}

// The sum of the two biases of each gate is one of these in turn, and what else enters a gate is small against their distances.
void set_biases(GradientCase& c, Draw& x, const std::vector<double>& centres) {
  const int64_t gates = c.inputs[3].tensor.count() / 2;
  std::vector<double> biases(static_cast<size_t>(2 * gates), 0);
  for (size_t i = 0; i < static_cast<size_t>(gates); ++i) biases[i] = centres[i % centres.size()];
  c.inputs[3] = tensor_of({1, 2 * gates}, biases);
  for (size_t i : {1, 2}) c.inputs[i] = x(c.inputs[i].tensor.dims, -0.1, 0.1);
  if (c.op == "LSTM") c.inputs[7] = x(c.inputs[7].tensor.dims, -0.1, 0.1);
}

void set_activations(GradientCase& c, const Strings& names, const Floats& alphas = {}, const Floats& betas = {}) {
  c.attributes.push_back({"activations", names});
  if (!alphas.empty()) c.attributes.push_back({"activation_alpha", alphas});
  if (!betas.empty()) c.attributes.push_back({"activation_beta", betas});
}

// Numbers of an activation, and biases between which its derivative jumps.
struct Bend {
  const char* name;
  Floats alphas, betas;
  std::vector<double> centres;
};
const std::vector<Bend> kBends = {
    {"Relu", {}, {}, {-2, 2}},
    {"Tanh", {}, {}, {0.5, -1}},
    {"Sigmoid", {}, {}, {0.5, -1}},
    {"Affine", {0.7F}, {0.2F}, {0.5, -1}},
    {"Affine", {}, {}, {0.5, -1}},
    {"LeakyRelu", {0.3F}, {}, {-2, 2}},
    {"LeakyRelu", {}, {}, {-2, 2}},
    {"ThresholdedRelu", {1.5F}, {}, {0, 3, -3}},
    {"ThresholdedRelu", {}, {}, {0, 2}},
    {"ScaledTanh", {1.2F}, {0.8F}, {0.5, -1}},
    {"ScaledTanh", {}, {}, {0.5, -1}},
    {"HardSigmoid", {0.3F}, {0.4F}, {0.5, 4, -4}},
    {"HardSigmoid", {}, {}, {0.5, 5, -5}},
    {"Elu", {0.6F}, {}, {-2, 2}},
    {"Elu", {}, {}, {-2, 2}},
    {"Softsign", {}, {}, {-2, 2}},
    {"Softplus", {}, {}, {0.5, -1}},
};

}  // namespace

std::vector<GradientCase> recurrent_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  const RuntimeValue lengths = tensor_of({kBatch}, std::vector<int32_t>{2, 4, 0});
  for (const std::string op : {"LSTM", "GRU", "RNN"}) {
    for (const std::string direction : {"forward", "reverse", "bidirectional"}) {
      for (int64_t layout : {0, 1}) {
        for (int64_t linear : {0, 1}) {
          if (linear && op != "GRU") continue;
          GradientCase c = whole_case(x, op, direction, layout);
          if (op == "GRU") c.attributes.push_back({"linear_before_reset", linear});
          cases.push_back(c);
          c.inputs[4] = lengths;
          cases.push_back(c);
        }
      }
    }
    // Operands and results that are left out.
    GradientCase plain = whole_case(x, op);
    plain.inputs.resize(3);
    for (size_t o = 0; o < plain.outputs; ++o) {
      GradientCase alone = plain;
      for (size_t other = 0; other < plain.outputs; ++other)
        if (other != o) alone.left_out.push_back(other);
      cases.push_back(alone);
    }
    GradientCase some = whole_case(x, op, "bidirectional", 1);
    some.inputs[3] = nothing();
    some.in_loss = 1;
    cases.push_back(some);
    GradientCase fed = whole_case(x, op, "reverse");
    fed.inputs[4] = lengths, fed.fed = {4}, fed.frozen = {1, 2};
    cases.push_back(fed);
    if (op == "GRU") {
      GradientCase no_bias = plain;
      no_bias.attributes.push_back({"linear_before_reset", int64_t{1}});
      cases.push_back(no_bias);
    }
    // What stands behind the end of a sequence counts for nothing.
    GradientCase padded = whole_case(x, op, "bidirectional");
    padded.inputs[4] = lengths;
    for (int64_t i = 2 * kBatch; i < kSteps * kBatch; i += kBatch)
      std::fill_n(padded.inputs[0].tensor.as<double>() + i * kWide, kWide, std::nan(""));
    cases.push_back(padded);
    // No samples, and no steps.
    GradientCase none = plain;
    none.inputs[0] = x({kSteps, 0, kWide});
    cases.push_back(none);
    GradientCase still = whole_case(x, op, "bidirectional");
    still.inputs[0] = x({0, kBatch, kWide});
    cases.push_back(still);
    // Gates within the bound and far beyond it.
    for (int64_t other : {0, 1}) {
      if (other && op == "RNN") continue;
      GradientCase clipped = whole_case(x, op);
      set_biases(clipped, x, {0, 4, 0, -4});
      clipped.attributes.push_back({"clip", 2.0F});
      if (other) clipped.attributes.push_back({op == "LSTM" ? "input_forget" : "linear_before_reset", int64_t{1}});
      cases.push_back(clipped);
    }
  }
  GradientCase coupled = whole_case(x, "LSTM", "bidirectional");
  coupled.attributes.push_back({"input_forget", int64_t{1}});
  cases.push_back(coupled);
  for (const Bend& bend : kBends) {
    GradientCase c = whole_case(x, "RNN");
    set_biases(c, x, bend.centres);
    set_activations(c, {bend.name}, bend.alphas, bend.betas);
    cases.push_back(c);
  }
  // Each gate and direction has its own.
  GradientCase lstm = whole_case(x, "LSTM", "bidirectional");
  set_activations(lstm, {"Softsign", "ScaledTanh", "Affine", "Sigmoid", "Tanh", "ScaledTanh"}, {1.2F, 0.7F, 0.9F}, {0.8F, 0.1F, 1.1F});
  cases.push_back(lstm);
  GradientCase gru = whole_case(x, "GRU", "bidirectional");
  set_activations(gru, {"ScaledTanh", "Softsign", "Tanh", "Affine"}, {0.9F, 0.3F}, {0.5F, 0.2F});
  cases.push_back(gru);
  return cases;
}

}  // namespace fretsaw::testing
