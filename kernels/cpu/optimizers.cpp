// The optimizer steps of ai.onnx.preview.training: Adagrad, Adam, Momentum. Inputs after R (rate) and T (step count) come in
// groups: all parameters, then all gradients, then all states.
#include <cmath>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/machine_learning.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/parallel.h"

namespace fretsaw {
namespace {

// For each parameter k and element i: step(values, rate, t), where values[0] is the parameter, values[1] its gradient and the rest
// its states; the step leaves the new parameter in values[0] and the new states behind it.
template <typename Step>
void run_steps(RunContext& r, size_t groups, const Step& step) {
  const double rate = input_number(r, 0);
  const int64_t t = input_int(r, 1);
  require(r.input_count() >= 2 + groups && (r.input_count() - 2) % groups == 0, "the inputs after R and T do not form equal groups");
  const size_t parameters = (r.input_count() - 2) / groups;
  for (size_t k = 0; k < parameters; ++k) {
    const TensorView& first = r.input(2 + k);
    for (size_t g = 1; g < groups; ++g) {
      const TensorView& other = r.input(2 + g * parameters + k);
      require(other.dims == first.dims && other.dtype == first.dtype, "a parameter, its gradient and its state differ in type or shape");
    }
    with_compute_type(first.dtype, [&]<typename T>() {
      std::vector<NumberReader<T>> from;
      std::vector<NumberWriter<T>> to;
      for (size_t g = 0; g < groups; ++g) from.emplace_back(r.input(2 + g * parameters + k));
      for (size_t g = 0; g + 1 < groups; ++g) to.emplace_back(sized_output(r, g * parameters + k, first.dims, first.dtype));
      parallel_for(first.count(), kGrainElements / 4, r.threads(), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          T values[4];
          for (size_t g = 0; g < groups; ++g) values[g] = from[g][i];
          step(values, static_cast<T>(rate), t);
          to[0][i] = values[0];
          for (size_t g = 2; g < groups; ++g) to[g - 1][i] = values[g];
        }
      });
      for (NumberWriter<T>& writer : to) writer.finish();
    });
  }
}

CompiledKernel make_adagrad(const CompileContext& c) {
  const double decay = c.node().get_float("decay_factor", 0), epsilon = c.node().get_float("epsilon", 1e-6f);
  const double norm = c.node().get_float("norm_coefficient", 0);
  return {[=](RunContext& r) {
    run_steps(r, 3, [=]<typename T>(T* v, T rate, int64_t t) {  // x, gradient, sum of squares
      const T gradient = static_cast<T>(norm) * v[0] + v[1];
      v[2] += gradient * gradient;
      v[0] -= rate / (1 + static_cast<T>(t) * static_cast<T>(decay)) * gradient / (std::sqrt(v[2]) + static_cast<T>(epsilon));
    });
  }};
}

CompiledKernel make_adam(const CompileContext& c) {
  const double alpha = c.node().get_float("alpha", 0.9f), beta = c.node().get_float("beta", 0.999f);
  const double epsilon = c.node().get_float("epsilon", 1e-6f);
  const double norm = c.node().get_float("norm_coefficient", 0), norm_post = c.node().get_float("norm_coefficient_post", 0);
  return {[=](RunContext& r) {
    const int64_t steps = input_int(r, 1);
    const double correction = steps > 0 ? std::sqrt(1 - std::pow(beta, steps)) / (1 - std::pow(alpha, steps)) : 1;
    run_steps(r, 4, [=]<typename T>(T* v, T rate, int64_t) {  // x, gradient, its average, the average of its square
      const T gradient = static_cast<T>(norm) * v[0] + v[1];
      v[2] = static_cast<T>(alpha) * v[2] + static_cast<T>(1 - alpha) * gradient;
      v[3] = static_cast<T>(beta) * v[3] + static_cast<T>(1 - beta) * gradient * gradient;
      v[0] -= rate * static_cast<T>(correction) * v[2] / (std::sqrt(v[3]) + static_cast<T>(epsilon));
      v[0] *= static_cast<T>(1 - norm_post);
    });
  }};
}

CompiledKernel make_momentum(const CompileContext& c) {
  const double alpha = c.node().get_float("alpha", 0), beta = c.node().get_float("beta", 0);
  const double norm = c.node().get_float("norm_coefficient", 0);
  const std::string mode = c.node().get_string("mode", "standard");
  require(mode == "standard" || mode == "nesterov", "the mode must be standard or nesterov");
  const bool nesterov = mode == "nesterov";
  return {[=](RunContext& r) {
    run_steps(r, 3, [=]<typename T>(T* v, T rate, int64_t t) {  // x, gradient, momentum
      const T gradient = static_cast<T>(norm) * v[0] + v[1];
      v[2] = static_cast<T>(alpha) * v[2] + static_cast<T>(t > 0 ? beta : 1) * gradient;
      v[0] -= rate * (nesterov ? gradient + static_cast<T>(alpha) * v[2] : v[2]);
    });
  }};
}

}  // namespace

void register_optimizers(KernelRegistry& registry) {
  const std::string domain = "ai.onnx.preview.training";
  registry.add({.op = "Adagrad", .domain = domain, .make = make_adagrad});
  registry.add({.op = "Adam", .domain = domain, .make = make_adam});
  registry.add({.op = "Momentum", .domain = domain, .make = make_momentum});
}

}  // namespace fretsaw
