// Attention and RotaryEmbedding against loops; LSTM, GRU and RNN against their formulas.
#include <cmath>

#include "tests/kernels/single_op.h"

namespace fretsaw::testing {
namespace {

using Values = std::vector<double>;

RuntimeValue random_tensor(const Dims& dims, uint32_t seed) {
  return tensor_as(DType::float32, dims, spread_values(count_of(dims), -1, 1, seed));
}

void expect_near(const RuntimeValue& got, const Values& wanted, double tolerance = 1e-5) {
  const Values values = doubles_of(got);
  ASSERT_EQ(values.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) ASSERT_NEAR(values[i], wanted[i], tolerance) << "element " << i;
}

// q [B, H, S, D], k and v [B, G, T, D] dense; `allowed(i, t)` says which keys a query sees.
template <typename Allowed>
Values reference(const Values& q, const Values& k, const Values& v, int64_t B, int64_t H, int64_t G, int64_t S, int64_t T, int64_t D,
                 const Allowed& allowed) {
  Values y(q.size());
  for (int64_t head = 0; head < B * H; ++head) {
    const int64_t group = head / H * G + head % H / (H / G);
    for (int64_t i = 0; i < S; ++i) {
      Values weight(static_cast<size_t>(T));
      double sum = 0;
      for (int64_t t = 0; t < T; ++t) {
        double score = 0;
        for (int64_t d = 0; d < D; ++d)
          score += q[static_cast<size_t>((head * S + i) * D + d)] * k[static_cast<size_t>((group * T + t) * D + d)];
        weight[static_cast<size_t>(t)] = allowed(i, t) ? std::exp(score / std::sqrt(static_cast<double>(D))) : 0;
        sum += weight[static_cast<size_t>(t)];
      }
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t d = 0; d < D; ++d)
          y[static_cast<size_t>((head * S + i) * D + d)] +=
              sum ? weight[static_cast<size_t>(t)] / sum * v[static_cast<size_t>((group * T + t) * D + d)] : 0;
      }
    }
  }
  return y;
}

TEST(Attention, GroupedHeadsCausalAndMasked) {
  const int64_t B = 2, H = 4, G = 2, S = 5, D = 8;
  const RuntimeValue q = random_tensor({B, H, S, D}, 1), k = random_tensor({B, G, S, D}, 2), v = random_tensor({B, G, S, D}, 3);
  const Values qv = doubles_of(q), kv = doubles_of(k), vv = doubles_of(v);
  const RuntimeValue mask =
      tensor<bool>({S, S}, std::vector<bool>{1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 1});
  const Values allowed = doubles_of(mask);
  for (int threads : {1, 2}) {
    const InterpreterOptions options{.threads = threads};
    expect_near(run_op("Attention", {q, k, v}, {}, 1, options)[0],
                reference(qv, kv, vv, B, H, G, S, S, D, [](int64_t, int64_t) { return true; }));
    expect_near(run_op("Attention", {q, k, v}, {attribute("is_causal", int64_t{1})}, 1, options)[0],
                reference(qv, kv, vv, B, H, G, S, S, D, [](int64_t i, int64_t t) { return t <= i; }));
    // The second query sees no key: its row is zeros.
    expect_near(run_op("Attention", {q, k, v, mask}, {}, 1, options)[0], reference(qv, kv, vv, B, H, G, S, S, D, [&](int64_t i, int64_t t) {
                  return allowed[static_cast<size_t>(i * S + t)] != 0;
                }));
  }
}

TEST(Attention, CacheEqualsWhole) {
  const int64_t H = 2, S = 6, D = 4, P = 4;
  const RuntimeValue q = random_tensor({1, S, H * D}, 1), k = random_tensor({1, S, H * D}, 2), v = random_tensor({1, S, H * D}, 3);
  const std::vector<Attribute> attributes = {attribute("is_causal", int64_t{1}), attribute("q_num_heads", H), attribute("kv_num_heads", H)};
  const Values whole = doubles_of(run_op("Attention", {q, k, v}, attributes)[0]);
  const auto rows = [&](const RuntimeValue& x, int64_t from, int64_t to) {
    const Values all = doubles_of(x);
    return tensor_as(DType::float32, {1, to - from, H * D}, Values(all.begin() + from * H * D, all.begin() + to * H * D));
  };
  const auto first = run_op("Attention", {rows(q, 0, P), rows(k, 0, P), rows(v, 0, P)}, attributes, 3);
  EXPECT_EQ(first[1].tensor.dims, (Dims{1, H, P, D}));
  const auto second = run_op("Attention", {rows(q, P, S), rows(k, P, S), rows(v, P, S), {}, first[1], first[2]}, attributes, 3);
  expect_near(second[0], Values(whole.begin() + P * H * D, whole.end()));
  EXPECT_EQ(second[2].tensor.dims, (Dims{1, H, S, D}));
}

TEST(Attention, WrongShapesAreErrors) {
  EXPECT_THROW(run_op("Attention", {random_tensor({1, 2, 6}, 1), random_tensor({1, 2, 6}, 2), random_tensor({1, 2, 6}, 3)}), Error);
  EXPECT_THROW(run_op("Attention", {random_tensor({1, 3, 2, 4}, 1), random_tensor({1, 2, 2, 4}, 2), random_tensor({1, 2, 2, 4}, 3)}),
               Error);
}

TEST(RotaryEmbedding, RotatesPairs) {
  const RuntimeValue x = tensor_as(DType::float32, {1, 1, 2, 4}, {1, 2, 3, 4, 5, 6, 7, 8});
  const RuntimeValue cosine = tensor_as(DType::float32, {3, 2}, {9, 9, 1, 0, 0.6, 0.8}),
                     sine = tensor_as(DType::float32, {3, 2}, {9, 9, 0, 1, 0.8, 0.6});
  const RuntimeValue positions = tensor_as(DType::int64, {1, 2}, {1, 2});
  expect_near(run_op("RotaryEmbedding", {x, cosine, sine, positions})[0],
              {1, -4, 3, 2, 5 * 0.6 - 7 * 0.8, 6 * 0.8 - 8 * 0.6, 5 * 0.8 + 7 * 0.6, 6 * 0.6 + 8 * 0.8});
  expect_near(run_op("RotaryEmbedding", {x, cosine, sine, positions}, {attribute("interleaved", int64_t{1})})[0],
              {1, 2, -4, 3, 5 * 0.6 - 6 * 0.8, 5 * 0.8 + 6 * 0.6, 7 * 0.8 - 8 * 0.6, 7 * 0.6 + 8 * 0.8});
  EXPECT_THROW(run_op("RotaryEmbedding", {x, cosine, sine, tensor_as(DType::int64, {1, 2}, {1, 3})}), Error);
  // Only of [B,S,H*D] the number of heads must be told.
  const RuntimeValue none = tensor_as(DType::float32, {1, 0, 2, 4}, {}),
                     flat = tensor_as(DType::float32, {1, 2, 4}, {1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_EQ(run_op("RotaryEmbedding", {none, cosine, sine, positions})[0].tensor.dims, (Dims{1, 0, 2, 4}));
  EXPECT_THROW(run_op("RotaryEmbedding", {flat, cosine, sine, positions}), Error);
}

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

// One direction of a cell over x [T, B, I], h = 0 first, all activations the defaults; the states h of all steps [T, B, H].
Values recur(const std::string& op, const Values& x, const Values& W, const Values& R, const Values& bias, size_t T, size_t B, size_t I,
             size_t H, bool linear) {
  const size_t gates = op == "LSTM" ? 4 : op == "GRU" ? 3 : 1;
  Values y, h(B * H), c(B * H);
  for (size_t t = 0; t < T; ++t) {
    Values next = h;
    for (size_t b = 0; b < B; ++b) {
      const auto from_x = [&](size_t row) {
        double sum = bias[row];
        for (size_t i = 0; i < I; ++i) sum += W[row * I + i] * x[(t * B + b) * I + i];
        return sum;
      };
      const auto from_h = [&](size_t row, const Values& state) {
        double sum = bias[gates * H + row];
        for (size_t k = 0; k < H; ++k) sum += R[row * H + k] * state[b * H + k];
        return sum;
      };
      Values reset = h;
      if (op == "GRU") {
        for (size_t k = 0; k < H; ++k) reset[b * H + k] = sigmoid(from_x(H + k) + from_h(H + k, h)) * h[b * H + k];
      }
      for (size_t k = 0; k < H; ++k) {
        const size_t at = b * H + k;
        if (op == "RNN") next[at] = std::tanh(from_x(k) + from_h(k, h));
        if (op == "LSTM") {
          c[at] = sigmoid(from_x(2 * H + k) + from_h(2 * H + k, h)) * c[at] +
                  sigmoid(from_x(k) + from_h(k, h)) * std::tanh(from_x(3 * H + k) + from_h(3 * H + k, h));
          next[at] = sigmoid(from_x(H + k) + from_h(H + k, h)) * std::tanh(c[at]);
        }
        if (op == "GRU") {
          const double z = sigmoid(from_x(k) + from_h(k, h)), r = sigmoid(from_x(H + k) + from_h(H + k, h));
          const double candidate = std::tanh(from_x(2 * H + k) + (linear ? r * from_h(2 * H + k, h) : from_h(2 * H + k, reset)));
          next[at] = (1 - z) * candidate + z * h[at];
        }
      }
    }
    h = next;
    y.insert(y.end(), h.begin(), h.end());
  }
  return y;
}

TEST(Recurrent, BothDirectionsAndLayouts) {
  const size_t T = 4, B = 3, I = 5, H = 6;
  for (const char* op : {"LSTM", "GRU", "RNN"}) {
    for (bool linear : {false, true}) {
      const int64_t gates = std::string(op) == "LSTM" ? 4 : std::string(op) == "GRU" ? 3 : 1;
      const RuntimeValue x = random_tensor({4, 3, 5}, 1), W = random_tensor({1, gates * 6, 5}, 2), R = random_tensor({1, gates * 6, 6}, 3),
                         bias = random_tensor({1, 2 * gates * 6}, 4);
      const Values xv = doubles_of(x), wanted = recur(op, xv, doubles_of(W), doubles_of(R), doubles_of(bias), T, B, I, H, linear);
      const std::vector<Attribute> attributes = {attribute("hidden_size", int64_t{6}), attribute("linear_before_reset", int64_t{linear})};
      const auto y = run_op(op, {x, W, R, bias}, attributes, 2);
      SCOPED_TRACE(op);
      expect_near(y[0], wanted);
      expect_near(y[1], Values(wanted.end() - static_cast<int64_t>(B * H), wanted.end()));
      EXPECT_EQ(y[0].tensor.dims, (Dims{4, 1, 3, 6}));
      // Backwards: the same over the reversed sequence.
      Values reversed_x, reversed_y;
      for (size_t t = T; t-- > 0;)
        reversed_x.insert(reversed_x.end(), xv.begin() + static_cast<int64_t>(t * B * I),
                          xv.begin() + static_cast<int64_t>((t + 1) * B * I));
      for (size_t t = T; t-- > 0;)
        reversed_y.insert(reversed_y.end(), wanted.begin() + static_cast<int64_t>(t * B * H),
                          wanted.begin() + static_cast<int64_t>((t + 1) * B * H));
      std::vector<Attribute> backwards = attributes;
      backwards.push_back(attribute("direction", std::string("reverse")));
      expect_near(run_op(op, {tensor_as(DType::float32, {4, 3, 5}, reversed_x), W, R, bias}, backwards)[0], reversed_y);
    }
  }
}

TEST(Recurrent, ShortSequencesKeepTheirState) {
  const RuntimeValue x = random_tensor({4, 2, 3}, 1), W = random_tensor({1, 16, 3}, 2), R = random_tensor({1, 16, 4}, 3),
                     lengths = tensor_as(DType::int32, {2}, {4, 2});
  const std::vector<Attribute> attributes = {attribute("hidden_size", int64_t{4})};
  const auto all = run_op("LSTM", {x, W, R}, attributes, 3), some = run_op("LSTM", {x, W, R, {}, lengths}, attributes, 3);
  const Values y = doubles_of(all[0]), cut = doubles_of(some[0]), last = doubles_of(some[1]);
  for (size_t t = 0; t < 4; ++t) {
    for (size_t k = 0; k < 4; ++k) {
      EXPECT_EQ(cut[t * 8 + k], y[t * 8 + k]);
      EXPECT_EQ(cut[t * 8 + 4 + k], t < 2 ? y[t * 8 + 4 + k] : 0);
    }
  }
  for (size_t k = 0; k < 4; ++k) EXPECT_EQ(last[4 + k], y[8 + 4 + k]);
  EXPECT_THROW(run_op("LSTM", {x, W, R, {}, tensor_as(DType::int32, {2}, {5, 2})}, attributes), Error);
  EXPECT_THROW(run_op("GRU", {x, W, R}, attributes), Error);
}

}  // namespace
}  // namespace fretsaw::testing
