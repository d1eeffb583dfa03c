// Update graphs over several steps against PyTorch's documented rules in double precision.
#include <gtest/gtest.h>

#include <cmath>

#include "graph/errors.h"
#include "graph/training/optimizer.h"
#include "tests/runtime/plans.h"

namespace fretsaw {
namespace {

using namespace testing_plans;

constexpr int kSteps = 6;

// One parameter, as torch.optim keeps it.
struct Reference {
  std::vector<double> p, buffer, exp_avg, exp_avg_sq;
};

// torch.optim.SGD, one step; `step` counts from 1.
void sgd(const OptimizerSpec& s, Reference& r, const std::vector<double>& gradient, double decay, double lr, int step) {
  for (size_t i = 0; i < r.p.size(); ++i) {
    double g = gradient[i];
    if (decay != 0) g = g + decay * r.p[i];
    if (s.momentum != 0) {
      r.buffer[i] = step > 1 ? s.momentum * r.buffer[i] + (1 - s.dampening) * g : g;
      g = s.nesterov ? g + s.momentum * r.buffer[i] : r.buffer[i];
    }
    r.p[i] = r.p[i] - lr * g;
  }
}

// torch.optim.Adam and AdamW.
void adam(const OptimizerSpec& s, Reference& r, const std::vector<double>& gradient, double decay, double lr, int step) {
  for (size_t i = 0; i < r.p.size(); ++i) {
    double g = gradient[i];
    if (s.kind == OptimizerSpec::Kind::adamw) r.p[i] = r.p[i] - lr * decay * r.p[i];
    if (s.kind == OptimizerSpec::Kind::adam) g = g + decay * r.p[i];
    r.exp_avg[i] = s.beta1 * r.exp_avg[i] + (1 - s.beta1) * g;
    r.exp_avg_sq[i] = s.beta2 * r.exp_avg_sq[i] + (1 - s.beta2) * g * g;
    const double m = r.exp_avg[i] / (1 - std::pow(s.beta1, step)), v = r.exp_avg_sq[i] / (1 - std::pow(s.beta2, step));
    r.p[i] = r.p[i] - lr * m / (std::sqrt(v) + s.eps);
  }
}

// Algorithm 2 of the LAMB paper, with apex's rule for parameters without weight decay.
void lamb(const OptimizerSpec& s, Reference& r, const std::vector<double>& gradient, double decay, double lr, int step) {
  std::vector<double> u(r.p.size());
  double of_p = 0, of_u = 0;
  for (size_t i = 0; i < r.p.size(); ++i) {
    r.exp_avg[i] = s.beta1 * r.exp_avg[i] + (1 - s.beta1) * gradient[i];
    r.exp_avg_sq[i] = s.beta2 * r.exp_avg_sq[i] + (1 - s.beta2) * gradient[i] * gradient[i];
    const double m = r.exp_avg[i] / (1 - std::pow(s.beta1, step)), v = r.exp_avg_sq[i] / (1 - std::pow(s.beta2, step));
    u[i] = m / (std::sqrt(v) + s.eps) + decay * r.p[i];
    of_p += r.p[i] * r.p[i];
    of_u += u[i] * u[i];
  }
  const double ratio = decay != 0 && of_p > 0 && of_u > 0 ? std::sqrt(of_p) / std::sqrt(of_u) : 1;
  for (size_t i = 0; i < r.p.size(); ++i) r.p[i] -= lr * ratio * u[i];
}

void reference_step(const OptimizerSpec& s, Reference& r, const std::vector<double>& gradient, double decay, double lr, int step) {
  if (s.kind == OptimizerSpec::Kind::sgd) return sgd(s, r, gradient, decay, lr, step);
  if (s.kind == OptimizerSpec::Kind::lamb) return lamb(s, r, gradient, decay, lr, step);
  adam(s, r, gradient, decay, lr, step);
}

struct Trained {
  TrainedParameter parameter;
  std::vector<float> start;
};
std::vector<Trained> parameters() {
  return {{{"fc.weight", Type::tensor(DType::float32, shape_of({3, 4}))}, noise(12, 1)},
          {{"fc.bias", Type::tensor(DType::float32, shape_of({4}))}, noise(4, 2)},
          {{"zero", Type::tensor(DType::float32, shape_of({2}))}, {0, 0}}};
}

// An update model as a session, and what it has of each parameter between steps.
class Update {
 public:
  Update(const OptimizerSpec& spec, const std::vector<TrainedParameter>& parameters) : update_(make_update(spec, parameters)) {
    for (const Value* v : update_.model.graph->outputs) outputs_.push_back(v->name);
    session_ = std::make_unique<Session>(make_plan({std::make_shared<Model>(std::move(update_.model))}));
    for (const ParameterUpdate& p : update_.parameters)
      for (const Value* state : p.states) inputs_[state->name] = make_value(state->type.dtype, dims_of(*state->type.shape));
  }

  const ParameterUpdate& operator[](size_t i) const { return update_.parameters[i]; }
  void set(const Value* input, const RuntimeValue& value) { inputs_[input->name] = value; }
  const RuntimeValue& input(const Value* input) { return inputs_[input->name]; }
  const RuntimeValue& output(const Value* value) { return results_[value->name]; }

  void step(float lr, int64_t step, float scale) {
    set(update_.scalars.lr, float_value({}, {lr}));
    set(update_.scalars.step, int_value({}, {step}));
    set(update_.scalars.scale, float_value({}, {scale}));
    const auto values = session_->run(inputs_);
    for (size_t i = 0; i < values.size(); ++i) results_[outputs_[i]] = values[i];
    for (const ParameterUpdate& p : update_.parameters) {
      inputs_[p.parameter->name] = output(p.new_parameter);
      for (size_t i = 0; i < p.states.size(); ++i) inputs_[p.states[i]->name] = output(p.new_states[i]);
    }
  }

 private:
  UpdateModel update_;
  std::vector<std::string> outputs_;
  std::unique_ptr<Session> session_;
  std::map<std::string, RuntimeValue> inputs_, results_;
};

void expect_near(const std::vector<float>& got, const std::vector<double>& wanted, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], tolerance * (1 + std::abs(wanted[i]))) << what << " " << i;
}

class OptimizerTest : public ::testing::TestWithParam<std::string> {};

TEST_P(OptimizerTest, SeveralSteps) {
  const OptimizerSpec spec = parse_optimizer(GetParam());
  const std::vector<Trained> trained = parameters();
  std::vector<TrainedParameter> list;
  for (const Trained& t : trained) list.push_back(t.parameter);
  Update update(spec, list);
  std::vector<Reference> references;
  for (size_t k = 0; k < trained.size(); ++k) {
    const std::vector<double> p(trained[k].start.begin(), trained[k].start.end()), zeros(p.size());
    references.push_back({p, zeros, zeros, zeros});
    update.set(update[k].parameter, float_value(dims_of(*list[k].type.shape), trained[k].start));
  }
  for (int step = 1; step <= kSteps; ++step) {
    const auto lr = static_cast<float>(spec.lr / step), scale = step % 2 ? 0.125f : 1.0f;
    for (size_t k = 0; k < trained.size(); ++k) {
      std::vector<float> gradient = noise(trained[k].start.size(), static_cast<unsigned>(100 * step) + static_cast<unsigned>(k));
      gradient[0] = 0;
      update.set(update[k].gradient, float_value(dims_of(*list[k].type.shape), gradient));
      std::vector<double> scaled;
      for (float g : gradient) scaled.push_back(double{g} * scale);
      const double decay = spec.weight_decay_of(list[k].name, list[k].type.shape->size());
      reference_step(spec, references[k], scaled, decay, lr, step);
    }
    update.step(lr, step, scale);
    for (size_t k = 0; k < trained.size(); ++k) {
      const std::string what = list[k].name + " after step " + std::to_string(step);
      expect_near(elements<float>(update.input(update[k].parameter)), references[k].p, 2e-6, what);
      if (update[k].states.size() == 1)
        expect_near(elements<float>(update.input(update[k].states[0])), references[k].buffer, 2e-6, what + ", momentum");
      if (update[k].states.size() == 2) {
        expect_near(elements<float>(update.input(update[k].states[0])), references[k].exp_avg, 1e-6, what + ", exp_avg");
        expect_near(elements<float>(update.input(update[k].states[1])), references[k].exp_avg_sq, 1e-6, what + ", exp_avg_sq");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, OptimizerTest,
                         ::testing::Values("sgd:lr=0.1", "sgd:lr=0.1,weight_decay=0.1", "sgd:lr=0.1,momentum=0.9",
                                           "sgd:lr=0.1,momentum=0.9,dampening=0.5,weight_decay=0.1",
                                           "sgd:lr=0.1,momentum=0.9,nesterov=1,weight_decay=1e-4,no_decay=*.bias", "adam:lr=0.01",
                                           "adam:lr=0.01,weight_decay=0.1,beta1=0,beta2=0.5", "adamw:lr=0.01",
                                           "adamw:lr=0.01,weight_decay=0.5,no_decay=1d,eps=1e-3", "lamb:lr=0.01",
                                           "lamb:lr=0.01,weight_decay=0.1,no_decay=*.bias"));

// The first step of Adam moves by lr whatever the gradient's size: bias correction in float32 alone would miss it by 1e-5.
TEST(Optimizer, BiasCorrectionIsExact) {
  Update update(parse_optimizer("adam:lr=1"), {{"p", Type::tensor(DType::float32, shape_of({1}))}});
  update.set(update[0].parameter, float_value({1}, {0}));
  update.set(update[0].gradient, float_value({1}, {3}));
  update.step(1, 1, 1);
  EXPECT_NEAR(elements<float>(update.input(update[0].parameter))[0], -1, 3e-7);
}

// Master weights in float32, gradients in bfloat16, a copy in float16; and a float16 parameter by itself.
TEST(Optimizer, HalfPrecision) {
  Update update(parse_optimizer("sgd:lr=0.5"), {{"master", Type::tensor(DType::float32, shape_of({1})), DType::bfloat16, DType::float16},
                                                {"half", Type::tensor(DType::float16, shape_of({1})), DType::float16}});
  const auto half = [](DType type, uint16_t bits) {
    RuntimeValue v = make_value(type, {1});
    *v.tensor.as<uint16_t>() = bits;
    return v;
  };
  update.set(update[0].parameter, float_value({1}, {1.0f}));
  update.set(update[0].gradient, half(DType::bfloat16, 0x3a80));  // 2^-10
  update.set(update[1].parameter, half(DType::float16, 0x3c00));  // 1
  update.set(update[1].gradient, half(DType::float16, 0x4000));   // 2
  update.step(0.5f, 1, 0.25f);
  EXPECT_EQ(elements<float>(update.input(update[0].parameter))[0], 1.0f - 0x1p-13f);
  EXPECT_EQ(elements<uint16_t>(update.output(update[0].copy))[0], 0x3c00);      // rounded to 1: the master keeps what it can't hold
  EXPECT_EQ(elements<uint16_t>(update.input(update[1].parameter))[0], 0x3a00);  // 1 - 0.25
}

TEST(Optimizer, NamesAndStructure) {
  const TrainedParameter lr{"lr", Type::tensor(DType::float32, shape_of({2}))};
  const UpdateModel update = make_update(parse_optimizer("adamw"), {lr, {"w", Type::tensor(DType::float64, shape_of({2}))}});
  EXPECT_EQ(update.scalars.lr->name, "lr");
  EXPECT_EQ(update.parameters[0].parameter->source_name(), "lr");
  EXPECT_NE(update.parameters[0].parameter->name, "lr");
  EXPECT_EQ(update.parameters[1].states[0]->type.dtype, DType::float64);
  EXPECT_EQ(update.parameters[1].new_parameter->type.dtype, DType::float64);
  verify(*update.model.graph);
  Model copy = clone(update.model);
  EXPECT_TRUE(infer_shapes(copy).faults.empty());
  EXPECT_THROW(make_update(parse_optimizer("sgd"), {{"k", Type::tensor(DType::int64, shape_of({2}))}}), Error);
}

}  // namespace
}  // namespace fretsaw
