// Attention between views, for tests of structure (tests/graph) and of numbers (tests/kernels). Operator set 24.
#pragma once
#include <string>
#include <vector>

#include "tests/graph/attention_models.h"

namespace fretsaw::testing {

// Two batches of five positions and three heads of four elements.
inline std::string strided_model(const std::string& inputs, const std::string& output, const std::string& body) {
  return "g (" + inputs + ") => (" + output +
         " y) <int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}, int64[1] v0 = {0}, int64[1] v1 = {1}, int64[1] v2 = {2}, int64[1] v3 = {3}, "
         "int64[1] v5 = {5}, int64[1] v12 = {12}, int64[1] v24 = {24}, int64[1] v36 = {36}, int64[4] heads = {2,5,3,4}, int64[4] joined = "
         "{2,5,3,12}, int64[4] first = {5,2,3,12}, int64[3] all_heads = {5,6,4}, int64[4] four = {2,3,5,4}, int64[2] rows = {10,12}, "
         "int64[3] flat = {2,5,12}, int64[4] wide = {2,3,5,4}> { " +
         body + " }";
}
inline const std::string kSplitRows = "q, k, v = Split<axis=2, num_outputs=3>(x) ";
inline const std::string kRowHeads = "<q_num_heads=3, kv_num_heads=3>";

// As torch.nn.MultiheadAttention takes its operands from the product that made all three.
inline const std::string kPositionsFirst = [] {
  std::string text = "j = Reshape(x, first) u = Unsqueeze(j, v0) t = Transpose<perm=[3,1,2,0,4]>(u) p = Squeeze(t, v3) ";
  for (const std::string at : {"0", "1", "2"})
    text += "g" + at + " = Gather<axis=0>(p, i" + at + ") a" + at + " = Reshape(g" + at + ", all_heads) b" + at +
            " = Transpose<perm=[1,0,2]>(a" + at + ") o" + at + " = Reshape(b" + at + ", four) ";
  return text;
}();

inline std::vector<PatternModel> strided_models() {
  const std::string strided = "ai.fretsaw.device.StridedAttention";
  const std::string split_heads = "h = Reshape(x, joined) t = Transpose<perm=[0,2,1,3]>(h) q, k, v = Split<axis=3, num_outputs=3>(t) ";
  return {
      {"split_rows", strided_model("float[2,5,36] x", "float[2,5,12]", kSplitRows + "y = Attention" + kRowHeads + "(q, k, v)"), strided},
      {"split_rows_masked",
       strided_model("float[2,5,36] x, bool[2,1,5,5] m", "float[2,5,12]",
                     kSplitRows + "y = Attention<q_num_heads=3, kv_num_heads=3, is_causal=1, scale=0.3>(q, k, v, m)"),
       strided},
      {"split_heads", strided_model("float[2,5,36] x", "float[2,3,5,4]", split_heads + "y = Attention(q, k, v)"), strided},
      {"positions_first",
       strided_model("float[5,2,36] x", "float[10,12]",
                     kPositionsFirst + "o = Attention(o0, o1, o2) z = Transpose<perm=[2,0,1,3]>(o) y = Reshape(z, rows)"),
       strided},
      {"sliced",
       strided_model(
           "float[2,5,36] x", "float[2,5,12]",
           "q = Slice(x, v0, v12, v2) k = Slice(x, v12, v24, v2) v = Slice(x, v24, v36, v2) y = Attention" + kRowHeads + "(q, k, v)"),
       strided},
      {"every_second_key",
       strided_model("float[2,5,36] x", "float[2,5,12]",
                     kSplitRows + "l = Slice(k, v0, v5, v1, v2) w = Slice(v, v0, v5, v1, v2) y = Attention" + kRowHeads + "(q, l, w)"),
       strided},
      {"fewer_heads_of_keys",
       strided_model("float[2,5,12] x, float[2,5,8] z", "float[2,5,12]",
                     "k, v = Split<axis=2, num_outputs=2>(z) y = Attention<q_num_heads=3, kv_num_heads=1>(x, k, v)"),
       strided},
      {"keys_and_values_of_others",
       strided_model(
           "float[2,5,3,4] x, float[2,7,3,4] z, float[2,7,3,4] w", "float[2,5,3,4]",
           "q = Transpose<perm=[0,2,1,3]>(x) k = Transpose<perm=[0,2,1,3]>(z) v = Transpose<perm=[0,2,1,3]>(w) o = Attention(q, k, v) "
           "y = Transpose<perm=[0,2,1,3]>(o)"),
       strided},
      {"operands_used_elsewhere",
       strided_model("float[2,5,36] x", "float[2,5,12]", kSplitRows + "o = Attention" + kRowHeads + "(q, k, v) y = Add(o, q)"),
       "Split " + strided + " Add"},
      {"result_used_twice",
       strided_model("float[2,5,36] x", "float[2,3,5,4]",
                     split_heads + "o = Attention(q, k, v) t2 = Transpose<perm=[0,1,3,2]>(o) s = MatMul(o, t2) y = MatMul(s, o)"),
       strided + " Transpose MatMul MatMul"},
      {"result_turned",  // the elements of a row would not be neighbours
       strided_model("float[2,3,5,4] q", "float[2,3,4,5]", "o = Attention(q, q, q) y = Transpose<perm=[0,1,3,2]>(o)"),
       "Attention Transpose"},
      {"nothing_moves",
       strided_model("float[2,5,3,4] x", "float[2,5,3,4]",
                     "q = Reshape(x, flat) o = Attention" + kRowHeads + "(q, q, q) y = Reshape(o, heads)"),
       "Reshape Attention Reshape"},
      {"index_that_is_computed",
       strided_model("float[3,2,5,12] x, int64 i", "float[2,5,12]", "q = Gather<axis=0>(x, i) y = Attention" + kRowHeads + "(q, q, q)"),
       "Gather Attention"},
      {"every_second_element",
       strided_model("float[2,5,24] x", "float[2,5,12]", "q = Slice(x, v0, v24, v2, v2) y = Attention" + kRowHeads + "(q, q, q)"),
       "Slice Attention"},
      {"odd_offset",
       strided_model("float[2,5,24] x", "float[2,5,12]",
                     "l = Slice(x, v1, v24, v2) q = Slice(l, v0, v12, v2) y = Attention" + kRowHeads + "(q, q, q)"),
       "Slice Slice Attention"},
      {"repeated_heads", strided_model("float[2,1,5,4] x", "float[2,3,5,4]", "q = Expand(x, wide) y = Attention(q, q, q)"),
       "Expand Attention"},
  };
}

// A layer whose products take and make positions first, as torch.nn.MultiheadAttention's do, between values with the batch first: two
// batches of five positions and two heads of four elements.
inline std::string turned_model(const std::string& end) {
  const auto numbers = [](int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += (i ? "," : "") + std::to_string((i * 37 % 19 - 9) * 0.1);
    return "{" + text + "}";
  };
  std::string operands;
  for (const std::string at : {"0", "1", "2"})
    operands += "g" + at + " = Gather<axis=0>(s, i" + at + ") a" + at + " = Reshape(g" + at + ", all_heads) b" + at +
                " = Transpose<perm=[1,0,2]>(a" + at + ") o" + at + " = Reshape(b" + at + ", four) ";
  return "g (float[2,5,8] x) => (float[2,5,8] y) <int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}, int64[1] v0 = {0}, int64[1] v3 = {3}, "
         "int64[4] joined = {5,2,3,8}, int64[3] all_heads = {5,4,4}, int64[4] four = {2,2,5,4}, int64[2] rows = {10,8}, int64[3] first = "
         "{5,2,8}, float[8,24] wi = " +
         numbers(192) + ", float[24] bi = " + numbers(24) + ", float[8,8] wo = " + numbers(64) + ", float[8] bo = " + numbers(8) +
         "> { t = Transpose<perm=[1,0,2]>(x) p = MatMul(t, wi) a = Add(p, bi) j = Reshape(a, joined) u = Unsqueeze(j, v0) c = "
         "Transpose<perm=[3,1,2,0,4]>(u) s = Squeeze(c, v3) " +
         operands +
         "o = Attention(o0, o1, o2) z = Transpose<perm=[2,0,1,3]>(o) f = Reshape(z, rows) h = Gemm<transB=1>(f, wo, bo) n = Reshape(h, "
         "first) m = Transpose<perm=[1,0,2]>(n) " +
         end + " }";
}

inline std::vector<PatternModel> turned_models() {
  const std::string strided = "ai.fretsaw.device.StridedAttention";
  return {
      {"layer", turned_model("y = Add(x, m)"), "MatMul Add " + strided + " Gemm Reshape Add Reshape"},
      {"projection_used_elsewhere", turned_model("e = ReduceMax<keepdims=0>(a) y = Add(m, e)"),
       "Transpose MatMul Add " + strided + " Gemm ReduceMax Add Reshape"},
      {"result_used_elsewhere", turned_model("e = ReduceMax<keepdims=0>(n) y = Add(m, e)"),
       "MatMul Add " + strided + " Gemm Reshape Transpose ReduceMax Add"},
  };
}

}  // namespace fretsaw::testing
