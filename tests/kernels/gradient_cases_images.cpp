// Gradients of Resize, GridSample, regions, Fourier transforms, attention and rotary embeddings.
#include "tests/kernels/gradient_case.h"
#include "tests/kernels/operator_case.h"

namespace fretsaw::testing {

namespace {

using Ints = std::vector<int64_t>;

RuntimeValue scales(const std::vector<float>& values) {
  return tensor_of({static_cast<int64_t>(values.size())}, values);
}

void add_linear_attention(std::vector<GradientCase>& cases, Draw& x) {
  struct Heads {
    int64_t queries, others;
  };
  constexpr int64_t kBatch = 2, kKeys = 3, kValues = 2;
  for (const char* rule : {"linear", "gated", "delta", "gated_delta"}) {
    const bool gated = std::string(rule).rfind("gated", 0) == 0, delta = std::string(rule).find("delta") != std::string::npos;
    for (const auto& [queries, others] : {Heads{2, 2}, {4, 2}, {3, 1}}) {
      for (const int64_t steps : {1, 7}) {
        GradientCase c{.op = "LinearAttention", .outputs = 2};
        c.inputs = {x({kBatch, steps, queries * kKeys}, -1, 1), x({kBatch, steps, others * kKeys}, -1, 1),
                    x({kBatch, steps, others * kValues}), x({kBatch, others, kKeys, kValues})};
        c.inputs.push_back(gated ? x({kBatch, steps, others * (queries == others ? 1 : kKeys)}, -1, 0) : nothing());
        if (delta) c.inputs.push_back(x({kBatch, steps, queries == 4 ? 1 : others}, 0.1, 0.9));
        if (!gated && !delta) c.inputs.pop_back();
        c.attributes = {{"update_rule", std::string(rule)}, {"q_num_heads", queries}, {"kv_num_heads", others}};
        if (steps == 1) c.attributes.push_back({"scale", 0.3F});
        cases.push_back(c);
        // From nothing; by the output or the last state alone.
        c.inputs[3] = nothing();
        if (c.inputs.size() == 4) c.inputs.pop_back();
        c.in_loss = 1;
        cases.push_back(c);
        c.in_loss = SIZE_MAX, c.left_out = {0};
        cases.push_back(c);
      }
    }
  }
}

}  // namespace

std::vector<GradientCase> image_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  for (const char* mode : {"nearest", "linear", "cubic"}) {
    const Attribute how = {"mode", std::string(mode)};
    cases.push_back({.op = "Resize", .inputs = {x({1, 2, 3, 4}), nothing(), scales({1, 1, 2, 3})}, .attributes = {how}});
    cases.push_back({.op = "Resize", .inputs = {x({1, 2, 5, 4}), nothing(), scales({1, 1, 0.6F, 1.7F})}, .attributes = {how}});
    cases.push_back({.op = "Resize", .inputs = {x({1, 2, 5, 4}), nothing(), nothing(), ints({1, 2, 3, 7})}, .attributes = {how}});
    cases.push_back({.op = "Resize",
                     .inputs = {x({5, 4, 2}), nothing(), nothing(), ints({7, 3})},
                     .attributes = {how, {"axes", Ints{0, 1}}, {"coordinate_transformation_mode", std::string("align_corners")}},
                     .fed = {3}});
  }
  const std::vector<Attribute> floors = {{"coordinate_transformation_mode", std::string("asymmetric")},
                                         {"nearest_mode", std::string("floor")}};
  cases.push_back({.op = "Resize", .inputs = {x({1, 2, 3, 4}), nothing(), scales({1, 1, 2, 2})}, .attributes = floors});
  cases.push_back({.op = "Resize", .inputs = {x({1, 2, 4, 6}), nothing(), scales({1, 1, 0.5F, 0.5F})}, .attributes = floors});
  cases.push_back({.op = "Resize",
                   .inputs = {x({1, 1, 6, 6}), nothing(), scales({1, 1, 0.4F, 0.5F})},
                   .attributes = {{"mode", std::string("linear")}, {"antialias", int64_t{1}}}});
  cases.push_back({.op = "Col2Im", .inputs = {x({2, 12, 12}), ints({4, 5}), ints({2, 2})}, .symbolic = false});
  cases.push_back({.op = "Col2Im",
                   .inputs = {x({1, 12, 6}), ints({5, 5}), ints({2, 3})},
                   .attributes = {{"pads", Ints{1, 0, 0, 1}}, {"strides", Ints{2, 1}}, {"dilations", Ints{1, 2}}},
                   .symbolic = false});
  for (const char* mode : {"linear", "cubic", "nearest"}) {
    for (const char* outside : {"zeros", "border", "reflection"}) {
      for (const int64_t align : {0, 1}) {
        const std::vector<Attribute> attributes = {
            {"mode", std::string(mode)}, {"padding_mode", std::string(outside)}, {"align_corners", align}};
        const bool smooth = std::string(mode) != "nearest";
        for (const auto& [image, points] :
             {std::pair<Dims, Dims>{{2, 3, 5, 4}, {2, 3, 2, 2}}, {{1, 2, 6}, {1, 4, 1}}, {{1, 1, 3, 4, 3}, {1, 2, 2, 2, 3}}}) {
          GradientCase c{.op = "GridSample", .inputs = {x(image), x(points, -1.4, 1.4)}, .attributes = attributes};
          c.narrow = c.coarse = smooth;
          cases.push_back(c);
        }
      }
    }
  }
  struct Deformed {
    Dims x, w, offset;
    std::vector<Attribute> attributes;
  };
  const std::vector<Deformed> deformed = {
      {{2, 3, 5, 4}, {2, 3, 2, 2}, {2, 8, 4, 3}, {}},
      {{1, 4, 6, 5},
       {4, 2, 3, 3},
       {1, 36, 3, 3},
       {{"group", int64_t{2}}, {"offset_group", int64_t{2}}, {"pads", Ints{1, 1, 1, 1}}, {"strides", Ints{2, 2}}}},
      {{1, 2, 7, 6}, {2, 2, 3, 2}, {1, 12, 3, 4}, {{"dilations", Ints{2, 2}}}},
  };
  for (const Deformed& d : deformed) {
    const Dims& o = d.offset;
    GradientCase c{.op = "DeformConv", .inputs = {x(d.x), x(d.w), x(o, -1.3, 1.3)}, .attributes = d.attributes};
    cases.push_back(c);
    c.inputs.insert(c.inputs.end(), {x({d.w[0]}), x({o[0], o[1] / 2, o[2], o[3]}, 0.2, 1)});
    cases.push_back(c);
    c.inputs[3] = nothing();
    cases.push_back(c);
  }
  for (const char* mode : {"avg", "max"}) {
    for (const int64_t sampling : {0, 2}) {
      for (const char* coordinates : {"half_pixel", "output_half_pixel"}) {
        // Of the second image too, over one another, partly outside, and an empty one.
        const RuntimeValue regions = tensor_of({4, 4}, std::vector<double>{0, 1, 7, 9, 2, 2, 6, 5, -3, 4, 5, 14, 3, 3, 3, 3});
        GradientCase c{.op = "RoiAlign", .inputs = {x({2, 3, 6, 5}), regions, tensor_of({4}, std::vector<int64_t>{0, 1, 0, 1})}};
        c.attributes = {{"mode", std::string(mode)},   {"sampling_ratio", sampling},
                        {"output_height", int64_t{2}}, {"output_width", int64_t{3}},
                        {"spatial_scale", 0.5F},       {"coordinate_transformation_mode", std::string(coordinates)}};
        c.frozen = {1};
        cases.push_back(c);
      }
    }
  }
  // Of the second image too, over one another, partly outside, and one beyond the image whose result is 0.
  const RuntimeValue pooled =
      tensor_of({5, 5}, std::vector<double>{0, 1, 1, 7, 9, 1, 2, 0, 6, 5, 0, -3, 4, 5, 14, 1, 3, 3, 3, 3, 0, 40, 40, 50, 50});
  for (const auto& [shape, scale] : {std::pair<Ints, float>{{2, 3}, 0.5F}, {{1, 1}, 1}, {{4, 2}, 0.7F}}) {
    cases.push_back({.op = "MaxRoiPool",
                     .inputs = {x({2, 3, 6, 5}), pooled},
                     .attributes = {{"pooled_shape", shape}, {"spatial_scale", scale}},
                     .frozen = {1}});
  }
  for (const int64_t inverse : {0, 1}) {
    for (const int64_t onesided : {0, 1}) {
      const std::vector<Attribute> attributes = {{"inverse", inverse}, {"onesided", onesided}};
      for (const int64_t parts : {1, 2}) {
        if ((inverse && onesided && parts == 1) || (!inverse && onesided && parts == 2)) continue;
        for (const int64_t length : {0, 4, 7, 9}) {  // 0: as long as the signal
          const RuntimeValue wanted = length == 0 ? nothing() : tensor_of({}, std::vector<int64_t>{length});
          cases.push_back({.op = "DFT",
                           .inputs = {x({2, 6, 3, parts}), wanted, tensor_of({}, std::vector<int64_t>{1})},
                           .attributes = attributes,
                           .symbolic = false});
        }
      }
    }
  }
  cases.push_back({.op = "DFT", .inputs = {x({5, 2})}, .symbolic = false});
  const RuntimeValue step = tensor_of({}, std::vector<int64_t>{3}), frame = tensor_of({}, std::vector<int64_t>{6});
  const RuntimeValue window = tensor_of({6}, std::vector<double>{0.2, 1, 0.7, 0.1, 0.4, -0.3});
  for (const int64_t onesided : {0, 1}) {
    const std::vector<Attribute> attributes = {{"onesided", onesided}};
    for (const Dims& signal : onesided ? std::vector<Dims>{{2, 14}, {2, 14, 1}} : std::vector<Dims>{{2, 14}, {2, 13, 1}, {1, 14, 2}}) {
      GradientCase plain{.op = "STFT", .inputs = {x(signal), step, nothing(), frame}, .attributes = attributes, .symbolic = false};
      cases.push_back(plain);
      plain.inputs[2] = window, plain.frozen = {2};
      cases.push_back(plain);
      plain.inputs.resize(3);
      cases.push_back(plain);
    }
  }
  cases.push_back({.op = "AffineGrid", .inputs = {x({2, 2, 3}), ints({2, 1, 3, 4})}, .symbolic = false});
  cases.push_back({.op = "AffineGrid",
                   .inputs = {x({1, 3, 4}), ints({1, 1, 2, 3, 4})},
                   .attributes = {{"align_corners", int64_t{1}}},
                   .symbolic = false});
  return cases;
}

std::vector<GradientCase> attention_gradient_cases() {
  Draw x;
  std::vector<GradientCase> cases;
  cases.push_back({.op = "RotaryEmbedding", .inputs = {x({2, 3, 5, 4}), x({2, 5, 2}), x({2, 5, 2})}, .frozen = {1, 2}});
  cases.push_back({.op = "RotaryEmbedding",
                   .inputs = {x({1, 5, 12}), x({7, 2}), x({7, 2}), tensor_of({1, 5}, Ints{6, 0, 2, 2, 1})},
                   .attributes = {{"num_heads", int64_t{2}}, {"interleaved", int64_t{1}}, {"rotary_embedding_dim", int64_t{4}}},
                   .frozen = {1, 2}});
  cases.push_back({.op = "Attention", .inputs = {x({2, 2, 3, 4}), x({2, 2, 5, 4}), x({2, 2, 5, 6})}});
  cases.push_back(
      {.op = "Attention", .inputs = {x({1, 4, 3, 4}), x({1, 2, 3, 4}), x({1, 2, 3, 4})}, .attributes = {{"is_causal", int64_t{1}}}});
  cases.push_back({.op = "Attention",
                   .inputs = {x({2, 3, 8}), x({2, 3, 8}), x({2, 3, 8}), x({3, 3})},
                   .attributes = {{"q_num_heads", int64_t{2}}, {"kv_num_heads", int64_t{2}}, {"scale", 0.3F}},
                   .symbolic = false});
  const std::vector<Attribute> four_for_two = {{"q_num_heads", int64_t{4}}, {"kv_num_heads", int64_t{2}}};
  cases.push_back(
      {.op = "Attention", .inputs = {x({2, 3, 16}), x({2, 5, 8}), x({2, 5, 12})}, .attributes = four_for_two, .symbolic = false});
  // A query that sees no key, or has none (ONNX's function, which float32 takes, knows no such), keys beyond the mask, masks of each head
  // and sample.
  const RuntimeValue hidden =
      tensor_of({3, 4}, std::vector<bool>{true, false, true, true, false, false, false, false, true, true, false, true});
  cases.push_back({.op = "Attention", .inputs = {x({1, 2, 3, 4}), x({1, 2, 4, 4}), x({1, 2, 4, 4}), hidden}, .narrow = false});
  cases.push_back({.op = "Attention", .inputs = {x({2, 2, 3, 4}), x({2, 2, 5, 4}), x({2, 2, 5, 4}), x({2, 1, 3, 4})}, .frozen = {3}});
  cases.push_back({.op = "Attention",
                   .inputs = {x({2, 4, 3, 4}), x({2, 1, 3, 4}), x({2, 1, 3, 2}), x({1, 4, 3, 3})},
                   .attributes = {{"softcap", 1.5F}, {"is_causal", int64_t{1}}},
                   .frozen = {3}});
  cases.push_back({.op = "Attention",
                   .inputs = {x({1, 2, 6, 4}), x({1, 2, 6, 4}), x({1, 2, 6, 4})},
                   .attributes = {{"left_window_size", int64_t{2}}, {"right_window_size", int64_t{1}}}});
  cases.push_back({.op = "Attention", .inputs = {x({1, 2, 3, 4}), x({1, 2, 5, 4}), x({1, 2, 5, 4})}, .frozen = {0, 2}});
  cases.push_back({.op = "Attention", .inputs = {x({1, 2, 3, 4}), x({1, 2, 0, 4}), x({1, 2, 0, 4})}, .narrow = false});
  cases.push_back({.op = "Attention", .inputs = {x({1, 2, 3, 4}), x({1, 2, 5, 4}), x({1, 2, 5, 4})}, .frozen = {1}});
  add_linear_attention(cases, x);
  return cases;
}

}  // namespace fretsaw::testing
