// Gradients of LSTM, GRU and RNN: one node that walks back through time.
#include "graph/communication_schemas.h"
#include "graph/operators/gradient_rules.h"

namespace fretsaw {
namespace {

// From the operands and Y: what is kept between forward and backward pass are they, and no gates.
std::vector<Value*> recurrent_rule(GradientContext& c) {
  const std::string& op = c.node().op;
  const size_t operands = op == "LSTM" ? 8 : 6, results = op == "LSTM" ? 3 : 2;
  std::vector<Value*> inputs;
  for (size_t i = 0; i < operands; ++i) inputs.push_back(c.input(i));
  inputs.push_back(c.output(0, c.input(0)->type.dtype));
  for (size_t o = 0; o < results; ++o) inputs.push_back(c.of_output(o));
  while (!inputs.back()) inputs.pop_back();
  std::vector<bool> wanted;
  std::vector<size_t> input_of;  // each result's
  for (size_t i = 0; i < operands; ++i) {
    if (i == 4) continue;  // sequence_lens
    wanted.push_back(c.wants(i));
    input_of.push_back(i);
  }
  const std::vector<Value*> made = c.add_several(op + "Grad", inputs, wanted,
                                                 c.attributes({"activation_alpha", "activation_beta", "activations", "clip", "direction",
                                                               "hidden_size", "input_forget", "layout", "linear_before_reset"}),
                                                 kCommunicationDomain);
  std::vector<Value*> found = c.none();
  for (size_t o = 0; o < made.size(); ++o)
    if (input_of[o] < found.size()) found[input_of[o]] = made[o];
  return found;
}

}  // namespace

GradientRule recurrent_gradient(const std::string& name) {
  return name == "LSTM" || name == "GRU" || name == "RNN" ? recurrent_rule : nullptr;
}

}  // namespace fretsaw
