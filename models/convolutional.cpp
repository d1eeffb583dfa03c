// Multi-layer perceptron, ResNet, VGG, U-Net and MobileNetV2.
#include <cmath>

#include "models/builder.h"

namespace fretsaw {
namespace {

Value* relu(Builder& b, Value* x) {
  return b.op("Relu", {x});
}

std::vector<Attribute> window(int64_t kernel, int64_t stride, int64_t pad) {
  return {{"kernel_shape", std::vector<int64_t>{kernel, kernel}, "", ""},
          {"strides", std::vector<int64_t>{stride, stride}, "", ""},
          {"pads", std::vector<int64_t>{pad, pad, pad, pad}, "", ""}};
}

Value* images(Builder& b, Settings& s, int64_t size) {  // [batch, channels, image, image]
  int64_t image = s.number("image", size, 1 << 14);
  return b.input("x", b.dtype(), {s.dimension("batch"), s.number("channels", 3, 1 << 14), image, image});
}

// Global average pooling and a linear layer: [B, C, H, W] -> [B, classes].
void classify(Builder& b, Settings& s, Value* x, int64_t channels) {
  int64_t classes = s.number("classes", 1000, 1 << 24);
  Value* pooled = b.op("Flatten", {b.op("GlobalAveragePool", {x})}, {{"axis", int64_t{1}, "", ""}});
  b.output("logits", b.linear("fc", pooled, channels, classes), {s.dimension("batch"), classes});
}

Model mlp(const std::string& name, Settings& s) {
  Builder b(name, s);
  int64_t hidden = s.number("hidden", 1024, 1 << 20), layers = s.number("layers", 4, 1 << 16),
          classes = s.number("classes", hidden, 1 << 24);
  Value* x = b.input("x", b.dtype(), {s.dimension("batch"), hidden});
  for (int64_t i = 0; i < layers; ++i) {
    int64_t out = i + 1 == layers ? classes : hidden;
    x = b.linear("layers." + std::to_string(i), x, hidden, out, true, 1.4);
    if (i + 1 < layers) x = relu(b, x);
  }
  b.output("y", x, {s.dimension("batch"), classes});
  return b.finish();
}

// Two 3x3 convolutions, or 1x1, 3x3, 1x1 (He et al., 2015); the stride stands in the 3x3 one, as in torchvision.
Value* residual_block(Builder& b, const std::string& name, Value* x, int64_t in, int64_t width, int64_t out, int64_t stride,
                      bool bottleneck) {
  auto conv_bn = [&](const std::string& part, Value* v, int64_t i, int64_t o, int64_t k, int64_t st, double scale) {
    return b.batch_norm(name + ".bn" + part, b.conv(name + ".conv" + part, v, i, o, k, st, k / 2), o, scale);
  };
  Value* y;
  if (bottleneck) {
    y = relu(b, conv_bn("1", x, in, width, 1, 1, 1));
    y = relu(b, conv_bn("2", y, width, width, 3, stride, 1));
    y = conv_bn("3", y, width, out, 1, 1, 0.3);
  } else {
    y = relu(b, conv_bn("1", x, in, width, 3, stride, 1));
    y = conv_bn("2", y, width, out, 3, 1, 0.3);
  }
  if (in != out || stride != 1)
    x = b.batch_norm(name + ".downsample.1", b.conv(name + ".downsample.0", x, in, out, 1, stride, 0), out, 0.7);
  return relu(b, b.op("Add", {y, x}, {}, name));
}

Model resnet(const std::string& name, Settings& s) {
  struct Depth {
    const char* name;
    int64_t blocks[4];
    bool bottleneck;
  };
  static constexpr Depth depths[] = {{"resnet18", {2, 2, 2, 2}, false},
                                     {"resnet34", {3, 4, 6, 3}, false},
                                     {"resnet50", {3, 4, 6, 3}, true},
                                     {"resnet101", {3, 4, 23, 3}, true},
                                     {"resnet152", {3, 8, 36, 3}, true}};
  const Depth* depth = depths;
  while (name != depth->name) ++depth;
  Builder b(name, s);
  Value* x = images(b, s, 224);
  int64_t base = s.number("hidden", 64, 1 << 12), in = base;
  x = relu(b, b.batch_norm("bn1", b.conv("conv1", x, s.number("channels", 3), base, 7, 2, 3), base));
  x = b.op("MaxPool", {x}, window(3, 2, 1));
  for (int64_t stage = 0; stage < 4; ++stage) {
    int64_t width = base << stage, out = depth->bottleneck ? width * 4 : width;
    for (int64_t i = 0; i < depth->blocks[stage]; ++i) {
      std::string block = "layer" + std::to_string(stage + 1) + "." + std::to_string(i);
      x = residual_block(b, block, x, in, width, out, i == 0 && stage > 0 ? 2 : 1, depth->bottleneck);
      in = out;
    }
  }
  classify(b, s, x, in);
  return b.finish();
}

Model vgg16(const std::string& name, Settings& s) {
  static constexpr int64_t widths[] = {64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0};  // 0: pool
  Builder b(name, s);
  int64_t in = s.number("channels", 3, 1 << 14), image = s.number("image", 224, 1 << 14), hidden = s.number("hidden", 4096, 1 << 16);
  int64_t classes = s.number("classes", 1000, 1 << 24);
  if (image < 32) s.refuse("image", "must be at least 32 for VGG-16");
  Value* x = images(b, s, 224);
  int layer = 0;
  for (int64_t width : widths) {
    if (width == 0) {
      x = b.op("MaxPool", {x}, window(2, 2, 0));
      image /= 2;
    } else {
      x = relu(b, b.conv("features." + std::to_string(layer++), x, in, width, 3, 1, 1, 1, true));
      in = width;
    }
  }
  x = b.op("Flatten", {x}, {{"axis", int64_t{1}, "", ""}});
  x = relu(b, b.linear("classifier.0", x, in * image * image, hidden, true, 1.4));
  x = relu(b, b.linear("classifier.1", x, hidden, hidden, true, 1.4));
  b.output("logits", b.linear("classifier.2", x, hidden, classes), {s.dimension("batch"), classes});
  return b.finish();
}

Value* double_conv(Builder& b, const std::string& name, Value* x, int64_t in, int64_t out) {
  for (int64_t i = 0; i < 2; ++i) {
    std::string part = name + "." + std::to_string(i);
    x = relu(b, b.batch_norm(part + ".norm", b.conv(part + ".conv", x, i ? out : in, out, 3, 1, 1), out));
  }
  return x;
}

// Ronneberger et al., 2015, with padded convolutions: each level halves the image and doubles the channels.
Model unet(const std::string& name, Settings& s) {
  Builder b(name, s);
  int64_t levels = s.number("layers", 4, 8), base = s.number("hidden", 64, 1 << 12), image = s.number("image", 256, 1 << 14);
  int64_t classes = s.number("classes", 2, 1 << 16);
  if (image % (int64_t{1} << levels) != 0)
    s.refuse("image", "must be a multiple of " + std::to_string(int64_t{1} << levels) + " with " + std::to_string(levels) + " levels");
  Value* x = images(b, s, 256);
  std::vector<Value*> skips;
  int64_t in = s.number("channels", 3);
  for (int64_t i = 0; i < levels; ++i) {
    x = double_conv(b, "down." + std::to_string(i), x, in, base << i);
    in = base << i;
    skips.push_back(x);
    x = b.op("MaxPool", {x}, window(2, 2, 0));
  }
  x = double_conv(b, "middle", x, in, base << levels);
  for (int64_t i = levels; i-- > 0;) {
    int64_t out = base << i;
    std::string part = "up." + std::to_string(i);
    Value* w = b.weight(part + ".conv.weight", {2 * out, out, 2, 2}, 1.0 / std::sqrt(static_cast<double>(2 * out)));
    x = b.op("ConvTranspose", {x, w, b.weight(part + ".conv.bias", {out}, 0.02)},
             {{"kernel_shape", std::vector<int64_t>{2, 2}, "", ""}, {"strides", std::vector<int64_t>{2, 2}, "", ""}}, part);
    x = double_conv(b, part, b.op("Concat", {skips[static_cast<size_t>(i)], x}, {{"axis", int64_t{1}, "", ""}}), 2 * out, out);
  }
  b.output("mask", b.conv("head", x, base, classes, 1, 1, 0, 1, true), {s.dimension("batch"), classes, image, image});
  return b.finish();
}

Value* relu6(Builder& b, Value* x) {
  return b.op("Clip", {x, b.scalar(0), b.scalar(6)});
}

// Sandler et al., 2018: expand, depthwise 3x3, project; a residual where the shape stays.
Value* inverted_residual(Builder& b, const std::string& name, Value* x, int64_t in, int64_t out, int64_t stride, int64_t expansion) {
  int64_t width = in * expansion;
  Value* y = x;
  if (expansion != 1) y = relu6(b, b.batch_norm(name + ".expand.norm", b.conv(name + ".expand", y, in, width, 1, 1, 0), width));
  y = relu6(b, b.batch_norm(name + ".depthwise.norm", b.conv(name + ".depthwise", y, width, width, 3, stride, 1, width), width));
  y = b.batch_norm(name + ".project.norm", b.conv(name + ".project", y, width, out, 1, 1, 0), out, 0.7);
  return stride == 1 && in == out ? b.op("Add", {x, y}, {}, name) : y;
}

Model mobilenet_v2(const std::string& name, Settings& s) {
  static constexpr int64_t rows[][4] = {{1, 16, 1, 1}, {6, 24, 2, 2},  {6, 32, 3, 2}, {6, 64, 4, 2},
                                        {6, 96, 3, 1}, {6, 160, 3, 2}, {6, 320, 1, 1}};
  Builder b(name, s);
  Value* x = images(b, s, 224);
  int64_t in = 32;
  x = relu6(b, b.batch_norm("stem.norm", b.conv("stem", x, s.number("channels", 3), in, 3, 2, 1), in));
  int block = 0;
  for (const auto& [expansion, out, repeats, stride] : rows)
    for (int64_t i = 0; i < repeats; ++i) {
      x = inverted_residual(b, "blocks." + std::to_string(block++), x, in, out, i == 0 ? stride : 1, expansion);
      in = out;
    }
  x = relu6(b, b.batch_norm("head.norm", b.conv("head", x, in, 1280, 1, 1, 0), 1280));
  classify(b, s, x, 1280);
  return b.finish();
}

}  // namespace

void add_convolutional(std::vector<Architecture>& list) {
  list.push_back(
      {"mlp", "a multi-layer perceptron: Linear and ReLU", {"layers", "hidden", "classes", "batch", "dtype", "seed", "opset"}, mlp});
  for (const char* depth : {"18", "34", "50", "101", "152"})
    list.push_back({std::string("resnet") + depth,
                    std::string("ResNet-") + depth + ", an image classifier",
                    {"hidden", "channels", "image", "classes", "batch", "dtype", "seed", "opset"},
                    resnet});
  list.push_back(
      {"vgg16", "VGG-16, an image classifier", {"hidden", "channels", "image", "classes", "batch", "dtype", "seed", "opset"}, vgg16});
  list.push_back({"unet",
                  "U-Net, image segmentation with skip connections",
                  {"layers", "hidden", "channels", "image", "classes", "batch", "dtype", "seed", "opset"},
                  unet});
  list.push_back({"mobilenet_v2",
                  "MobileNetV2, depthwise convolutions",
                  {"channels", "image", "classes", "batch", "dtype", "seed", "opset"},
                  mobilenet_v2});
}

}  // namespace fretsaw
