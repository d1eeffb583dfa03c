// Plans whose ranks communicate inside their graphs, run on every rank, and what collectives should give.
#pragma once
#include <bit>
#include <chrono>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "graph/communication_schemas.h"
#include "graph/errors.h"
#include "runtime/rank.h"
#include "tests/runtime/plans.h"

namespace fretsaw::testing_plans {

using Models = std::vector<std::shared_ptr<Model>>;
using Inputs = std::map<std::string, RuntimeValue>;
using Attributes = std::vector<Attribute>;

inline Attribute ints(const std::string& name, std::vector<int64_t> values) {
  return attribute(name, std::move(values));
}
inline Attribute number(const std::string& name, int64_t value) {
  return attribute(name, value);
}

inline Value* add_collective(Graph& graph, const std::string& op, Value* x, int ranks, const std::string& output,
                             Attributes attributes = {}) {
  attributes.push_back(attribute("axis", std::string("tensor")));
  attributes.push_back(number("group_size", ranks));
  return graph.add_node(op, {x}, {output}, std::move(attributes), kCommunicationDomain)->outputs[0];
}

// One stage, cut over the tensor axis: a model for each rank, all with the same outputs. Inputs that several models have are one.
inline std::shared_ptr<Plan> tensor_plan(const Models& models, int micro_batches = 1) {
  auto plan = make_plan({models[0]}, micro_batches);
  plan->mesh.tensor = static_cast<int>(models.size());
  plan->graphs.clear();
  for (size_t t = 0; t < models.size(); ++t) {
    plan->graphs.push_back({0, "forward", {{"tensor", static_cast<int>(t)}}, "", models[t]});
    for (const Value* v : models[t]->graph->inputs) {
      bool known = false;
      for (const PlanInput& input : plan->inputs) known |= input.name == v->name;
      if (!known) plan->inputs.push_back({v->name, v->type, micro_batches > 1 ? 0 : -1, {0}});
    }
  }
  return plan;
}

inline double clock_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Output 0 of every rank after one step; a session would give that of the first rank alone.
inline std::vector<RuntimeValue> run_on_every_rank(const std::shared_ptr<Plan>& plan, const Inputs& inputs) {
  const int count = plan->mesh.size();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int t = 0; t < count; ++t) ranks.push_back(std::make_unique<Rank>(plan, SessionOptions{}, 0, 0, t, 1, clock_us));
  auto communicators = make_thread_communicators(count, std::chrono::seconds(20));
  StepInputs step;
  step.inputs = check_inputs(*plan, inputs, std::vector<bool>(plan->inputs.size(), false));
  step.batches = divide_batch(*plan, step.inputs);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(count));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < ranks.size(); ++t) {
    threads.emplace_back([&, t] {
      try {
        ranks[t]->run_step(step, *communicators[t]);
      } catch (const std::exception& e) {
        errors[t] = std::current_exception();
        communicators[t]->abort(e.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  std::vector<RuntimeValue> outputs;
  for (auto& rank : ranks) outputs.push_back(*rank->output(0, 0));
  return outputs;
}

inline std::string error_of(const std::shared_ptr<Plan>& plan, const Inputs& inputs) {
  try {
    Session(plan, {.threads = 1}).run(inputs);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

// --- what collectives should give, in the plainest way ---

struct Array {
  Dims dims;
  std::vector<double> values;
};
inline int64_t inner_of(const Dims& dims, size_t axis) {
  return std::accumulate(dims.begin() + static_cast<ptrdiff_t>(axis) + 1, dims.end(), int64_t{1}, std::multiplies<>());
}
inline Array slice(const Array& x, size_t axis, int64_t begin, int64_t count) {
  Array y{x.dims, {}};
  y.dims[axis] = count;
  const int64_t inner = inner_of(x.dims, axis);
  for (size_t i = 0; i < x.values.size(); ++i) {
    int64_t at = static_cast<int64_t>(i) / inner % x.dims[axis];
    if (at >= begin && at < begin + count) y.values.push_back(x.values[i]);
  }
  return y;
}
inline Array joined(const std::vector<Array>& parts, size_t axis) {
  Array y{parts[0].dims, {}};
  y.dims[axis] = 0;
  for (const Array& part : parts) y.dims[axis] += part.dims[axis];
  const int64_t inner = inner_of(y.dims, axis), rows = count_of(y.dims) == 0 ? 0 : count_of(y.dims) / (inner * y.dims[axis]);
  for (int64_t row = 0; row < rows; ++row) {
    for (const Array& part : parts) {
      auto begin = part.values.begin() + row * part.dims[axis] * inner;
      y.values.insert(y.values.end(), begin, begin + part.dims[axis] * inner);
    }
  }
  return y;
}
inline Array reduced(const std::vector<Array>& parts, const std::string& reduction) {
  Array y = parts[0];
  for (size_t r = 1; r < parts.size(); ++r) {
    for (size_t i = 0; i < y.values.size(); ++i) {
      double &a = y.values[i], b = parts[r].values[i];
      a = reduction == "max" ? std::max(a, b) : reduction == "min" ? std::min(a, b) : reduction == "product" ? a * b : a + b;
    }
  }
  if (reduction == "mean") {
    for (double& v : y.values) v /= static_cast<double>(parts.size());
  }
  return y;
}

// Small whole numbers as elements of any type that has them.
inline void store(const TensorView& x, const std::vector<double>& values) {
  auto fill = [&]<typename T>(T) {
    for (size_t i = 0; i < values.size(); ++i) x.as<T>()[i] = static_cast<T>(values[i]);
  };
  if (x.dtype == DType::float32) return fill(float{});
  if (x.dtype == DType::float64) return fill(double{});
  if (x.dtype == DType::float16) return fill(_Float16{});
  if (x.dtype == DType::int8 || x.dtype == DType::uint8 || x.dtype == DType::boolean) return fill(int8_t{});
  if (x.dtype == DType::int16 || x.dtype == DType::uint16) return fill(int16_t{});
  if (x.dtype == DType::int32 || x.dtype == DType::uint32) return fill(int32_t{});
  if (x.dtype == DType::int64 || x.dtype == DType::uint64) return fill(int64_t{});
  for (size_t i = 0; i < values.size(); ++i) {
    if (x.dtype == DType::bfloat16) {
      x.as<uint16_t>()[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(values[i])) >> 16);
    } else if (x.dtype == DType::complex128) {
      x.as<double>()[2 * i] = x.as<double>()[2 * i + 1] = values[i];
    } else if (x.dtype == DType::uint4) {
      uint8_t& byte = x.as<uint8_t>()[i / 2];
      byte = static_cast<uint8_t>(i % 2 ? (byte & 15) | static_cast<int>(values[i]) << 4 : static_cast<int>(values[i]));
    }
  }
}
inline RuntimeValue value_of(DType dtype, const Array& x) {
  RuntimeValue v = make_value(dtype, x.dims);
  store(v.tensor, x.values);
  return v;
}
inline std::string raw_bytes(const RuntimeValue& v) {
  return {v.tensor.as<const char>(), v.tensor.bytes()};
}

}  // namespace fretsaw::testing_plans
