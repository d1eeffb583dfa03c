// What --loss, --optimizer and --lr are written in, and what learning rates come of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numbers>

#include "graph/errors.h"
#include "graph/training/loss.h"
#include "graph/training/lr_schedule.h"
#include "graph/training/name_pattern.h"
#include "graph/training/optimizer.h"

namespace fretsaw {
namespace {

using ::testing::HasSubstr;

// The message of the usage error that `call` ends with; "" without one.
std::string usage_error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::usage) << e.what();
    return e.what();
  }
  return "";
}
std::string loss_error(const std::string& text) {
  return usage_error_of([&] { parse_loss(text); });
}
std::string optimizer_error(const std::string& text) {
  return usage_error_of([&] { parse_optimizer(text); });
}
std::string lr_error(const std::string& text) {
  return usage_error_of([&] { parse_lr_schedule(text); });
}

TEST(NamePattern, Matches) {
  EXPECT_TRUE(matches_pattern("*.bias", "fc1.bias"));
  EXPECT_FALSE(matches_pattern("*.bias", "fc1.bias_scale"));
  EXPECT_TRUE(matches_pattern("h.?.ln*", "h.0.ln_1.weight"));
  EXPECT_FALSE(matches_pattern("h.?.ln*", "h.10.ln_1.weight"));
  EXPECT_TRUE(matches_pattern("*ab*ab*", "xxabyabab"));
  EXPECT_FALSE(matches_pattern("*ab*ab", "abxba"));
  EXPECT_TRUE(matches_pattern("*", ""));
  EXPECT_TRUE(matches_pattern("a**", "a"));
  EXPECT_FALSE(matches_pattern("", "a"));
  EXPECT_TRUE(matches_pattern("onnx::MatMul_[1]", "onnx::MatMul_[1]"));  // no other character is special
  EXPECT_TRUE(matches_any(split_patterns("*.bias|*norm*"), "h.norm.weight"));
  EXPECT_THAT(usage_error_of([] { split_patterns("a||b"); }), HasSubstr("empty part"));
}

TEST(LossOption, Parses) {
  const LossSpec plain = parse_loss("softmax_cross_entropy");
  EXPECT_EQ(plain.kind, LossSpec::Kind::softmax_cross_entropy);
  EXPECT_FALSE(plain.ignore_index);
  EXPECT_EQ(plain.label_smoothing, 0);
  EXPECT_EQ(plain.reduction, LossSpec::Reduction::mean);

  const LossSpec full = parse_loss("softmax_cross_entropy:ignore_index=-100,label_smoothing=0.1,output=logits,reduction=sum");
  EXPECT_EQ(full.ignore_index, -100);
  EXPECT_EQ(full.label_smoothing, 0.1);
  EXPECT_EQ(full.output, "logits");
  EXPECT_EQ(full.reduction, LossSpec::Reduction::sum);

  EXPECT_EQ(parse_loss("mse").kind, LossSpec::Kind::mse);
  EXPECT_EQ(parse_loss("l1").kind, LossSpec::Kind::l1);
  EXPECT_EQ(parse_loss("bce_with_logits").kind, LossSpec::Kind::bce_with_logits);
  EXPECT_EQ(parse_loss("output").output, "");
  EXPECT_EQ(parse_loss("output:total,loss:0").output, "total,loss:0");
  EXPECT_EQ(parse_loss("output:reduction=sum").reduction, LossSpec::Reduction::sum);
  const LossSpec named = parse_loss("output:a=b,reduction=sum");
  EXPECT_EQ(named.output, "a=b");
  EXPECT_EQ(named.reduction, LossSpec::Reduction::sum);
}

TEST(LossOption, SaysWhatIsAllowed) {
  EXPECT_THAT(loss_error("cross_entropy"), AllOf(HasSubstr("--loss cross_entropy"), HasSubstr("softmax_cross_entropy"), HasSubstr("l1")));
  EXPECT_THAT(loss_error(""), HasSubstr("there is no such loss"));
  EXPECT_THAT(loss_error("mse:ignore_index=1"), AllOf(HasSubstr("no setting 'ignore_index' of 'mse'"), HasSubstr("output, reduction")));
  EXPECT_THAT(loss_error("softmax_cross_entropy:ignore_index=1.5"), HasSubstr("not a whole number"));
  EXPECT_THAT(loss_error("softmax_cross_entropy:label_smoothing=2"), HasSubstr("between 0 and 1"));
  EXPECT_THAT(loss_error("softmax_cross_entropy:label_smoothing=nan"), HasSubstr("not a number"));
  EXPECT_THAT(loss_error("softmax_cross_entropy:ignore_index"), HasSubstr("has no value"));
  EXPECT_THAT(loss_error("softmax_cross_entropy:ignore_index=1,ignore_index=2"), HasSubstr("given twice"));
  EXPECT_THAT(loss_error("mse:"), HasSubstr("nothing follows"));
  EXPECT_THAT(loss_error("mse:reduction=none"), HasSubstr("mean, sum"));
  EXPECT_THAT(loss_error("mse:reduction=sum,"), HasSubstr("no setting ''"));
}

TEST(LossOption, Divisor) {
  EXPECT_EQ(loss_divisor(parse_loss("mse"), 12), 12);
  EXPECT_EQ(loss_divisor(parse_loss("mse"), 0), 1);
  EXPECT_EQ(loss_divisor(parse_loss("mse:reduction=sum"), 12), 1);
}

TEST(OptimizerOption, ParsesWithPyTorchsDefaults) {
  const OptimizerSpec sgd = parse_optimizer("sgd");
  EXPECT_EQ(sgd.kind, OptimizerSpec::Kind::sgd);
  EXPECT_EQ(std::make_tuple(sgd.lr, sgd.momentum, sgd.dampening, sgd.nesterov, sgd.weight_decay), std::make_tuple(1e-3, 0, 0, false, 0));
  EXPECT_TRUE(sgd.states().empty());
  const OptimizerSpec full = parse_optimizer("sgd:lr=0.01,momentum=0.9,nesterov=1,weight_decay=1e-4");
  EXPECT_EQ(std::make_tuple(full.lr, full.momentum, full.nesterov, full.weight_decay), std::make_tuple(0.01, 0.9, true, 1e-4));
  EXPECT_THAT(full.states(), testing::ElementsAre("momentum_buffer"));

  const OptimizerSpec adam = parse_optimizer("adam");
  EXPECT_EQ(std::make_tuple(adam.lr, adam.beta1, adam.beta2, adam.eps, adam.weight_decay), std::make_tuple(1e-3, 0.9, 0.999, 1e-8, 0));
  EXPECT_THAT(adam.states(), testing::ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_EQ(parse_optimizer("adamw").weight_decay, 0.01);
  EXPECT_EQ(parse_optimizer("lamb").eps, 1e-6);
}

TEST(OptimizerOption, GroupsOfWeightDecay) {
  const OptimizerSpec spec = parse_optimizer("adamw:weight_decay=0.1,no_decay=1d|*.wpe.weight,weight_decay@*head*=0.5");
  EXPECT_EQ(spec.weight_decay_of("h.0.weight", 2), 0.1);
  EXPECT_EQ(spec.weight_decay_of("h.0.bias", 1), 0);
  EXPECT_EQ(spec.weight_decay_of("scale", 0), 0);
  EXPECT_EQ(spec.weight_decay_of("t.wpe.weight", 2), 0);
  EXPECT_EQ(spec.weight_decay_of("lm_head.bias", 1), 0.5);  // the last that matches
}

TEST(OptimizerOption, SaysWhatIsAllowed) {
  EXPECT_THAT(optimizer_error("rmsprop"), AllOf(HasSubstr("--optimizer rmsprop"), HasSubstr("sgd, adam, adamw, lamb")));
  EXPECT_THAT(optimizer_error("adam:momentum=0.9"), AllOf(HasSubstr("no setting 'momentum' of 'adam'"), HasSubstr("beta1")));
  EXPECT_THAT(optimizer_error("adam:lr=-1"), HasSubstr("at least 0"));
  EXPECT_THAT(optimizer_error("adam:lr=1e-3x"), HasSubstr("not a number"));
  EXPECT_THAT(optimizer_error("adam:beta2=1"), HasSubstr("below 1"));
  EXPECT_THAT(optimizer_error("sgd:nesterov=1"), HasSubstr("momentum"));
  EXPECT_THAT(optimizer_error("sgd:momentum=0.9,nesterov=yes"), HasSubstr("nesterov=1 or nesterov=0"));
  EXPECT_THAT(optimizer_error("sgd:lr@*.bias=1"), HasSubstr("no setting 'lr@*.bias'"));
}

TEST(GradientScale, ClipsTheGlobalNorm) {
  EXPECT_EQ(gradient_scale(100, 4, 0), 0.25);                             // no clipping: the divisor alone
  EXPECT_NEAR(gradient_scale(100, 2, 1), 0.5 * (1 / (5 + 1e-6)), 1e-15);  // norm 10 / 2 = 5
  EXPECT_EQ(gradient_scale(1, 2, 1), 0.5);                                // 0.5 is short enough
  EXPECT_EQ(gradient_scale(0, 1, 1), 1);
}

TEST(LrSchedule, Constant) {
  EXPECT_EQ(parse_lr_schedule("", {.lr = 0.25}).at(100), 0.25);
  EXPECT_EQ(parse_lr_schedule("3e-4", {.lr = 0.25}).at(7), 3e-4);
  EXPECT_EQ(parse_lr_schedule(".5").at(7), 0.5);
  EXPECT_EQ(parse_lr_schedule("constant:lr=0.1").at(0), 0.1);
  const LrSchedule warm = parse_lr_schedule("constant:lr=1,warmup=3");
  EXPECT_DOUBLE_EQ(warm.at(0), 0.25);
  EXPECT_DOUBLE_EQ(warm.at(2), 0.75);
  EXPECT_DOUBLE_EQ(warm.at(3), 1);
}

TEST(LrSchedule, Linear) {
  const LrSchedule s = parse_lr_schedule("linear:peak=1,warmup=4,total=14,final=0.5");
  EXPECT_DOUBLE_EQ(s.at(0), 0.2);
  EXPECT_DOUBLE_EQ(s.at(4), 1);
  EXPECT_DOUBLE_EQ(s.at(9), 0.75);
  EXPECT_DOUBLE_EQ(s.at(14), 0.5);
  EXPECT_DOUBLE_EQ(s.at(1000), 0.5);
}

TEST(LrSchedule, Cosine) {
  const LrSchedule s = parse_lr_schedule("cosine:peak=3e-4,warmup=100,final=3e-5", {.steps = 1000});
  EXPECT_DOUBLE_EQ(s.at(0), 3e-4 / 101);
  EXPECT_DOUBLE_EQ(s.at(100), 3e-4);
  EXPECT_DOUBLE_EQ(s.at(550), (3e-4 + 3e-5) / 2);
  EXPECT_NEAR(s.at(325), 3e-5 + 2.7e-4 * 0.5 * (1 + std::cos(std::numbers::pi / 4)), 1e-18);
  EXPECT_DOUBLE_EQ(s.at(1000), 3e-5);
  for (int64_t step = 101; step < 1000; ++step) EXPECT_LT(s.at(step), s.at(step - 1));
}

TEST(LrSchedule, Steps) {
  const LrSchedule every = parse_lr_schedule("step:every=30,factor=0.5", {.lr = 8});
  EXPECT_DOUBLE_EQ(every.at(29), 8);
  EXPECT_DOUBLE_EQ(every.at(30), 4);
  EXPECT_DOUBLE_EQ(every.at(95), 1);
  const LrSchedule at = parse_lr_schedule("step:lr=1,milestones=30|80,factor=0.1,warmup=1");
  EXPECT_DOUBLE_EQ(at.at(0), 0.5);
  EXPECT_DOUBLE_EQ(at.at(29), 1);
  EXPECT_DOUBLE_EQ(at.at(30), 0.1);
  EXPECT_NEAR(at.at(80), 0.01, 1e-17);
}

TEST(LrSchedule, SaysWhatIsAllowed) {
  EXPECT_THAT(lr_error("poly"), AllOf(HasSubstr("--lr poly"), HasSubstr("constant, linear, cosine, step")));
  EXPECT_THAT(lr_error("cosine"), HasSubstr("total=N"));
  EXPECT_THAT(lr_error("cosine:total=10,warmup=10"), HasSubstr("below 10"));
  EXPECT_THAT(lr_error("step:lr=1"), HasSubstr("every"));
  EXPECT_THAT(lr_error("step:milestones=3|3"), HasSubstr("ascend"));
  EXPECT_THAT(lr_error("linear:every=3"), HasSubstr("no setting 'every'"));
  EXPECT_THAT(lr_error("1e-3:warmup=2"), HasSubstr("not a number"));
  EXPECT_THAT(lr_error("constant:lr=inf"), HasSubstr("not a number"));
}

}  // namespace
}  // namespace fretsaw
