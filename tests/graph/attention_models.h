// Attention and rotary embeddings as exporters write them, for tests of structure (tests/graph) and of numbers (tests/kernels).
#pragma once
#include <string>
#include <vector>

namespace fretsaw::testing {

struct PatternModel {
  std::string name;
  std::string graph;     // operator set 20
  std::string expected;  // the operators afterwards
};

inline void PrintTo(const PatternModel& model, std::ostream* out) {
  *out << model.name;
}

// x [2, 5, 12] attends to z and w [2, 7, 12] with three heads.
inline std::string attention_model(const std::string& body, const std::string& more_inputs = "", const std::string& more_constants = "") {
  return "g (float[2,5,12] x, float[2,7,12] z, float[2,7,12] w" + more_inputs +
         ") => (float[2,5,12] y) <int64[4] qs = {2,5,3,4}, int64[4] ks = {2,7,3,4}, int64[3] ys = {2,5,12}, int64[3] kr = {6,7,4}, "
         "int64[4] kt4 = {2,3,4,7}, float sc = {0.5}, float two = {2}, float r = {0.7071068}, float zero = {0}, float low = {-1e9}, "
         "float inf = {-inf}" +
         more_constants + "> { " + body + " }";
}
inline const std::string kHeads =
    "q0 = Reshape(x, qs) q = Transpose<perm=[0,2,1,3]>(q0) k0 = Reshape(z, ks) v0 = Reshape(w, ks) v = Transpose<perm=[0,2,1,3]>(v0) ";
inline const std::string kScores = kHeads + "kt = Transpose<perm=[0,2,3,1]>(k0) s = MatMul(q, kt) m = Mul(s, sc) ";
inline const std::string kResult = "a = MatMul(p, v) t = Transpose<perm=[0,2,1,3]>(a) y = Reshape(t, ys) ";
inline const std::string kFlat = "Attention Reshape Reshape";

inline std::string mask_of(const std::string& rows) {
  return ", float[5,7] c = {" + rows + "}";
}
inline const std::string kCausalRows =
    "0,-inf,-inf,-inf,-inf,-inf,-inf, 0,0,-inf,-inf,-inf,-inf,-inf, 0,0,0,-inf,-inf,-inf,-inf, 0,0,0,0,-inf,-inf,-inf, 0,0,0,0,0,-inf,-inf";
inline const std::string kOffsetRows =
    "0,0,0,-1e9,-1e9,-1e9,-1e9, 0,0,0,0,-1e9,-1e9,-1e9, 0,0,0,0,0,-1e9,-1e9, 0,0,0,0,0,0,-1e9, 0,0,0,0,0,0,0";

// z and w [2, 7, 4]: one head, repeated three times.
inline std::string grouped_model(const std::string& repeat_k, const std::string& repeat_v) {
  return "g (float[2,5,12] x, float[2,7,8] z, float[2,7,8] w) => (float[2,5,16] y) <int64[4] qs = {2,5,4,3}, int64[4] ks = {2,7,2,4}, "
         "int64[4] qz = {2,5,4,4}, int64[3] ys = {2,5,16}, int64[5] five = {2,2,2,7,4}, int64[4] four = {2,4,7,4}, int64[1] two = {2}, "
         "float sc = {0.5}, float[12,16] wq = {" +
         [] {
           std::string numbers;
           for (int i = 0; i < 12 * 16; ++i) numbers += (i ? "," : "") + std::to_string((i * 37 % 19 - 9) * 0.1);
           return numbers;
         }() +
         "}> { xq = MatMul(x, wq) q0 = Reshape(xq, qz) q = Transpose<perm=[0,2,1,3]>(q0) k0 = Reshape(z, ks) k1 = "
         "Transpose<perm=[0,2,1,3]>(k0) v0 = Reshape(w, ks) v1 = Transpose<perm=[0,2,1,3]>(v0) " +
         repeat_k + repeat_v +
         "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) m = Mul(s, sc) p = Softmax<axis=-1>(m) a = MatMul(p, v) t = "
         "Transpose<perm=[0,2,1,3]>(a) y = Reshape(t, ys) }";
}

inline std::vector<PatternModel> attention_models() {
  const std::string softmax = "p = Softmax<axis=-1>(m) ", masked = "n = Add(m, c) p = Softmax<axis=-1>(n) ";
  return {
      {"scores_times", attention_model(kScores + softmax + kResult), kFlat},
      {"scores_divided",
       attention_model(kHeads + "kt = Transpose<perm=[0,2,3,1]>(k0) s = MatMul(q, kt) m = Div(s, two) " + softmax + kResult), kFlat},
      {"queries_scaled",
       attention_model(kHeads + "kt = Transpose<perm=[0,2,3,1]>(k0) u = Mul(q, sc) m = MatMul(u, kt) " + softmax + kResult), kFlat},
      {"keys_scaled", attention_model(kHeads + "kt = Transpose<perm=[0,2,3,1]>(k0) u = Mul(sc, kt) m = MatMul(q, u) " + softmax + kResult),
       kFlat},
      {"both_scaled_through_three_dimensions",
       attention_model(kHeads +
                       "k = Transpose<perm=[0,2,1,3]>(k0) k3 = Reshape(k, kr) k3t = Transpose<perm=[0,2,1]>(k3) kt = Reshape(k3t, "
                       "kt4) u = Mul(q, r) l = Mul(kt, r) m = MatMul(u, l) o = Softmax<axis=-1>(m) h = IsNaN(o) p = Where(h, zero, "
                       "o) " +
                       kResult),
       kFlat},
      {"scaled_before_heads",
       attention_model("xs = Mul(x, sc) q0 = Reshape(xs, qs) q = Transpose<perm=[0,2,1,3]>(q0) k0 = Reshape(z, ks) v0 = Reshape(w, ks) v = "
                       "Transpose<perm=[0,2,1,3]>(v0) kt = Transpose<perm=[0,2,3,1]>(k0) m = MatMul(q, kt) " +
                       softmax + kResult),
       kFlat},
      {"mask_constant", attention_model(kScores + masked + kResult, "", mask_of(kOffsetRows)), kFlat},
      {"mask_of_batches", attention_model(kScores + masked + kResult, ", float[2,1,1,7] c"), kFlat},
      {"mask_of_heads", attention_model(kScores + masked + kResult, ", float[1,3,5,7] c"), kFlat},
      {"mask_subtracted", attention_model(kScores + "n = Sub(m, c) p = Softmax<axis=-1>(n) " + kResult, ", float[1,3,5,7] c"),
       "Mul " + kFlat},
      {"mask_before_scale",
       attention_model(kHeads + "kt = Transpose<perm=[0,2,3,1]>(k0) s = MatMul(q, kt) n = Add(c, s) m = Mul(n, sc) " + softmax + kResult,
                       ", float[1,3,5,7] c"),
       "Mul " + kFlat},
      {"mask_is_zero", attention_model(kScores + masked + kResult, "", ", float[1,1,1,7] c = {0,0,0,0,0,0,0}"), kFlat},
      {"mask_causal", attention_model(kScores + masked + kResult, "", mask_of(kCausalRows)), kFlat},
      {"masks_two",
       attention_model(kScores + "n = Add(m, c) o = Add(n, d) p = Softmax<axis=-1>(o) " + kResult, ", float[2,1,1,7] d",
                       mask_of(kCausalRows)),
       kFlat},
      {"masks_two_computed",
       attention_model(kScores + "n = Add(m, c) o = Where(d, n, inf) p = Softmax<axis=-1>(o) " + kResult,
                       ", float[2,3,1,7] c, bool[5,7] d"),
       "Where Add " + kFlat},
      {"choice_allowed", attention_model(kScores + "n = Where(d, m, inf) p = Softmax<axis=-1>(n) " + kResult, ", bool[2,1,1,7] d"), kFlat},
      {"choice_refused", attention_model(kScores + "n = Where(d, inf, m) p = Softmax<axis=-1>(n) " + kResult, ", bool[2,1,1,7] d"),
       "Not " + kFlat},
      {"choice_finite", attention_model(kScores + "n = Where(d, m, low) p = Softmax<axis=-1>(n) " + kResult, ", bool[5,7] d"),
       "Where " + kFlat},
      {"choice_added", attention_model(kScores + "c = Where(d, zero, inf) " + masked + kResult, ", bool[5,7] d"), kFlat},
      {"choice_constant",
       attention_model(kScores + "n = Where(d, m, low) p = Softmax<axis=-1>(n) " + kResult, "",
                       ", bool[5,7] d = {1,1,1,0,0,0,0, 0,1,1,1,0,0,0, 0,0,1,1,1,0,0, 0,0,0,1,1,1,0, 0,0,0,0,1,1,1}"),
       kFlat},
      {"choice_constant_with_empty_row",
       attention_model(kScores + "n = Where(d, m, low) p = Softmax<axis=-1>(n) " + kResult, "",
                       ", bool[5,7] d = {1,1,1,0,0,0,0, 0,0,0,0,0,0,0, 0,0,1,1,1,0,0, 0,0,0,1,1,1,0, 0,0,0,0,1,1,1}"),
       kFlat},
      {"softcap",
       attention_model(kScores + "b = Div(m, two) d = Tanh(b) e = Mul(d, two) n = Add(e, c) p = Softmax<axis=-1>(n) " + kResult,
                       ", float[5,7] c"),
       kFlat},
      {"bounded", attention_model(kScores + "n = Add(m, c) o = Max(n, low) p = Softmax<axis=-1>(o) " + kResult, ", float[5,7] c"), kFlat},
      {"result_not_transposed",
       "g (float[2,5,12] x, float[2,7,12] z, float[2,7,12] w) => (float[2,3,5,4] a) <int64[4] qs = {2,5,3,4}, int64[4] ks = {2,7,3,4}, "
       "float sc = {0.5}> { " +
           kScores + softmax + "a = MatMul(p, v) }",
       "Attention Reshape Transpose"},
      {"result_used_twice",
       attention_model(kScores + softmax +
                       "a = MatMul(p, v) b = Relu(a) e = Add(a, b) t = Transpose<perm=[0,2,1,3]>(e) y = "
                       "Reshape(t, ys) "),
       "Attention Reshape Transpose Relu Add Transpose Reshape"},
      {"four_dimensions",
       "g (float[2,3,5,4] q, float[2,3,7,4] k, float[2,3,7,6] v) => (float[2,3,5,6] y) <float sc = {0.5}> { kt = "
       "Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) m = Mul(s, sc) p = Softmax<axis=-1>(m) y = MatMul(p, v) }",
       "Attention"},
      {"keys_given_transposed",
       "g (float[2,3,5,4] q, float[2,3,4,7] k, float[2,3,7,4] v) => (float[2,3,5,4] y) { s = MatMul(q, k) p = Softmax<axis=-1>(s) y = "
       "MatMul(p, v) }",
       "Transpose Attention"},
      {"one_head_of_keys",
       "g (float[2,3,5,4] q, float[2,1,7,4] k, float[2,1,7,4] v) => (float[2,3,5,4] y) { kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, "
       "kt) "
       "p = Softmax<axis=-1>(s) y = MatMul(p, v) }",
       "Attention"},
      {"cache",
       "g (float[2,3,1,4] q, float[2,3,6,4] kp, float[2,3,1,4] kn, float[2,3,6,4] vp, float[2,3,1,4] vn) => (float[2,3,1,4] y, "
       "float[2,3,7,4] k, float[2,3,7,4] v) { k = Concat<axis=2>(kp, kn) v = Concat<axis=2>(vp, vn) kt = Transpose<perm=[0,1,3,2]>(k) s = "
       "MatMul(q, kt) p = Softmax<axis=-1>(s) y = MatMul(p, v) }",
       "Concat Concat Attention"},
      {"three_dimensions",
       "g (float[2,5,12] x, float[2,7,12] z, float[2,7,12] w, float[2,1,5,7] c) => (float[2,5,12] y) <int64[4] qs = {2,5,3,4}, int64[4] ks "
       "= {2,7,3,4}, int64[3] q3 = {6,5,4}, int64[3] k3 = {6,7,4}, int64[4] s4 = {2,3,5,7}, int64[3] s3 = {6,5,7}, int64[4] a4 = "
       "{2,3,5,4}, int64[3] ys = {2,5,12}, float sc = {0.5}> { q0 = Reshape(x, qs) q1 = Transpose<perm=[0,2,1,3]>(q0) q = Reshape(q1, q3) "
       "k0 = Reshape(z, ks) k1 = Transpose<perm=[0,2,1,3]>(k0) k = Reshape(k1, k3) v0 = Reshape(w, ks) v1 = Transpose<perm=[0,2,1,3]>(v0) "
       "v "
       "= Reshape(v1, k3) u = Mul(q, sc) kt = Transpose<perm=[0,2,1]>(k) s = MatMul(u, kt) m = Reshape(s, s4) n = Add(m, c) o = "
       "Reshape(n, s3) p = Softmax<axis=-1>(o) b = MatMul(p, v) a = Reshape(b, a4) t = Transpose<perm=[0,2,1,3]>(a) y = Reshape(t, ys) }",
       kFlat},
      {"three_dimensions_without_heads",
       "g (float[2,5,4] q, float[2,7,4] k, float[2,7,4] v) => (float[2,5,4] y) { kt = Transpose<perm=[0,2,1]>(k) s = MatMul(q, kt) p = "
       "Softmax<axis=-1>(s) y = MatMul(p, v) }",
       "Reshape Reshape Reshape Attention Reshape"},
      {"joined_projection",
       "g (float[2,5,36] x) => (float[2,5,12] y) <int64[5] five = {2,5,3,3,4}, int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}, int64[3] ys "
       "= "
       "{2,5,12}, float sc = {0.5}> { h = Reshape(x, five) u = Transpose<perm=[2,0,3,1,4]>(h) q = Gather<axis=0>(u, i0) k = "
       "Gather<axis=0>(u, i1) v = Gather<axis=0>(u, i2) kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) m = Mul(s, sc) p = "
       "Softmax<axis=-1>(m) a = MatMul(p, v) t = Transpose<perm=[0,2,1,3]>(a) y = Reshape(t, ys) }",
       "Split Attention Reshape Reshape"},
      {"positions_first",  // [S, B, H * D], as torch.nn.MultiheadAttention has them, with one batch
       "g (float[5,1,12] x) => (float[5,12] y) <int64[3] qs = {5,3,4}, int64[4] four = {1,3,5,4}, int64[4] kt4 = {1,3,4,5}, int64[2] ys = "
       "{5,12}, float sc = {0.5}> { q0 = Reshape(x, qs) q1 = Transpose<perm=[1,0,2]>(q0) q = Reshape(q1, four) v = Reshape(q1, four) k = "
       "Transpose<perm=[0,2,1]>(q1) kt = Reshape(k, kt4) s = MatMul(q, kt) m = Mul(s, sc) p = Softmax<axis=-1>(m) a = MatMul(p, v) t = "
       "Transpose<perm=[2,0,1,3]>(a) y = Reshape(t, ys) }",
       "Reshape Reshape Reshape Attention Reshape Reshape"},
      {"joined_projection_positions_first",
       "g (float[5,1,36] x) => (float[5,1,12] y) <int64[4] hs = {5,1,3,12}, int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}, int64[3] qs = "
       "{5,3,4}, int64[4] four = {1,3,5,4}, int64[3] ys = {5,1,12}, float sc = {0.5}> { h = Reshape(x, hs) u = "
       "Transpose<perm=[2,0,1,3]>(h) "
       "q0 = Gather<axis=0>(u, i0) k0 = Gather<axis=0>(u, i1) v0 = Gather<axis=0>(u, i2) q1 = Reshape(q0, qs) q2 = "
       "Transpose<perm=[1,0,2]>(q1) q = Reshape(q2, four) k1 = Reshape(k0, qs) k2 = Transpose<perm=[1,0,2]>(k1) k = Reshape(k2, four) v1 = "
       "Reshape(v0, qs) v2 = Transpose<perm=[1,0,2]>(v1) v = Reshape(v2, four) kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) m = "
       "Mul(s, sc) p = Softmax<axis=-1>(m) a = MatMul(p, v) t = Transpose<perm=[2,0,1,3]>(a) y = Reshape(t, ys) }",
       "Reshape Split Attention Reshape Reshape"},
      {"grouped_expand",
       grouped_model("k2 = Unsqueeze(k1, two) k3 = Expand(k2, five) k = Reshape(k3, four) ",
                     "v2 = Unsqueeze(v1, two) v3 = Expand(v2, five) v = Reshape(v3, four) "),
       "MatMul " + kFlat},
      {"grouped_concat",
       grouped_model("k2 = Unsqueeze(k1, two) k3 = Concat<axis=2>(k2, k2) k = Reshape(k3, four) ",
                     "v2 = Unsqueeze(v1, two) v3 = Concat<axis=2>(v2, v2) v = Reshape(v3, four) "),
       "MatMul " + kFlat},
      {"grouped_the_other_way",  // heads 0 1 0 1, which the operator can't say
       grouped_model("k = Concat<axis=1>(k1, k1) ", "v = Concat<axis=1>(v1, v1) "),
       "MatMul Reshape Transpose Reshape Transpose Reshape Transpose Concat Concat Attention Transpose Reshape"},
      {"half_with_float_softmax",
       "g (float16[2,3,5,4] q, float16[2,3,7,4] k, float16[2,3,7,4] v) => (float16[2,3,5,4] y) <float16 sc = {14336}> { kt = "
       "Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) m = Mul(s, sc) f = Cast<to=1>(m) o = Softmax<axis=-1>(f) p = Cast<to=10>(o) y = "
       "MatMul(p, v) }",
       "Attention"},
      {"probabilities_wanted",
       "g (float[2,3,5,4] q, float[2,3,4,7] k, float[2,3,7,4] v) => (float[2,3,5,4] y, float[2,3,5,7] p) { s = MatMul(q, k) p = "
       "Softmax<axis=-1>(s) y = MatMul(p, v) }",
       "MatMul Softmax MatMul"},
      {"softmax_of_queries",
       "g (float[2,3,5,4] q, float[2,3,4,7] k, float[2,3,7,4] v) => (float[2,3,5,4] y) { s = MatMul(q, k) p = Softmax<axis=2>(s) y = "
       "MatMul(p, v) }",
       "MatMul Softmax MatMul"},
      {"mask_widens_scores",
       "g (float[1,3,5,4] q, float[1,3,4,7] k, float[1,3,7,4] v, float[2,1,5,7] c) => (float[2,3,5,4] y) { s = MatMul(q, k) m = Add(s, c) "
       "p "
       "= Softmax<axis=-1>(m) y = MatMul(p, v) }",
       "MatMul Add Softmax MatMul"},
  };
}

inline std::string rotary_model(const std::string& body) {
  return "g (float[2,3,5,4] x, float[1,5,2] f) => (float[2,3,5,4] y) <int64[1] b = {0}, int64[1] h = {2}, int64[1] e = {9}, int64[1] last "
         "= "
         "{-1}, int64[1] one = {1}, float[1,1,5,4] cc = {1,2,1,2, 3,4,3,4, 5,6,5,6, 7,8,7,8, 1,3,1,3}, float[1,1,5,4] cs = {2,3,2,3, "
         "1,0,1,0, "
         "4,5,4,5, 1,2,1,2, 0,1,0,1}, float[1,1,5,4] cx = {2,3,2,3, 1,0,1,0, 4,5,4,5, 1,2,1,2, 0,1,0,2}> { " +
         body + " }";
}

inline std::vector<PatternModel> rotary_models() {
  const std::string turned = "u = Slice(x, b, h, last) v = Slice(x, h, e, last) n = Neg(v) t = Concat<axis=-1>(n, u) ";
  const std::string end = "p = Mul(x, cc) q = Mul(t, cs) y = Add(p, q) ";
  return {
      {"constants", rotary_model(turned + end), "RotaryEmbedding"},
      {"halves_differ", rotary_model(turned + "p = Mul(x, cc) q = Mul(t, cx) y = Add(p, q) "), "Slice Slice Neg Concat Mul Mul Add"},
      {"split",
       rotary_model("u, v = Split<axis=3, num_outputs=2>(x) n = Neg(v) t = Concat<axis=3>(n, u) p = Mul(cc, x) q = Mul(cs, t) y = "
                    "Add(q, p) "),
       "RotaryEmbedding"},
      {"other_half_negated", rotary_model("u = Slice(x, b, h, last) v = Slice(x, h, e, last) n = Neg(u) t = Concat<axis=-1>(v, n) " + end),
       "Slice Slice Neg Concat Mul Mul Add"},
      {"computed",
       rotary_model("g = Concat<axis=-1>(f, f) c0 = Cos(g) s0 = Sin(g) c = Unsqueeze(c0, one) s = Unsqueeze(s0, one) " + turned +
                    "p = Mul(x, c) q = Mul(t, s) y = Add(p, q) "),
       "Concat Cos Sin Unsqueeze Unsqueeze Slice Reshape Slice Reshape RotaryEmbedding"},
      {"partial",
       "g (float[2,3,5,6] x) => (float[2,3,5,6] y) <int64[1] b = {0}, int64[1] h = {2}, int64[1] w = {4}, int64[1] e = {9}, int64[1] last "
       "= "
       "{-1}, float[1,1,5,4] cc = {1,2,1,2, 3,4,3,4, 5,6,5,6, 7,8,7,8, 1,3,1,3}, float[1,1,5,4] cs = {2,3,2,3, 1,0,1,0, 4,5,4,5, 1,2,1,2, "
       "0,1,0,1}> { a = Slice(x, b, w, last) r = Slice(x, w, e, last) u = Slice(a, b, h, last) v = Slice(a, h, e, last) n = Neg(v) t = "
       "Concat<axis=-1>(n, u) p = Mul(a, cc) q = Mul(t, cs) z = Add(p, q) y = Concat<axis=-1>(z, r) }",
       "RotaryEmbedding"},
      {"heads_in_rows",
       "g (float[1,5,12] z) => (float[1,3,5,4] y) <int64[4] hs = {1,5,3,4}, int64[1] b = {0}, int64[1] h = {2}, int64[1] e = {9}, int64[1] "
       "last = {-1}, float[1,1,5,4] cc = {1,2,1,2, 3,4,3,4, 5,6,5,6, 7,8,7,8, 1,3,1,3}, float[1,1,5,4] cs = {2,3,2,3, 1,0,1,0, 4,5,4,5, "
       "1,2,1,2, 0,1,0,1}> { x0 = Reshape(z, hs) x = Transpose<perm=[0,2,1,3]>(x0) " +
           turned + end + "}",
       "RotaryEmbedding Reshape Transpose"},
      {"heads_second",
       "g (float[2,5,3,4] x) => (float[2,5,3,4] y) <int64[1] b = {0}, int64[1] h = {2}, int64[1] e = {9}, int64[1] last = {-1}, "
       "float[1,5,1,4] cc = {1,2,1,2, 3,4,3,4, 5,6,5,6, 7,8,7,8, 1,3,1,3}, float[1,5,1,4] cs = {2,3,2,3, 1,0,1,0, 4,5,4,5, 1,2,1,2, "
       "0,1,0,1}> { " +
           turned + end + "}",
       "Reshape RotaryEmbedding Reshape"},
  };
}

}  // namespace fretsaw::testing
