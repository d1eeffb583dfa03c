// Operators that draw random numbers: RandomNormal, RandomUniform, their Like forms, Multinomial, Bernoulli, Dropout.
#include "kernels/cpu/random_operators.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/random.h"

namespace fretsaw {

uint64_t random_key(const Node& node) {
  if (node.has("seed")) return std::bit_cast<uint32_t>(node.get_float("seed", 0));
  std::string name = node.name;
  if (name.empty() && node.out(0)) name = node.out(0)->source_name();
  uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
  for (char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
  return hash | uint64_t{1} << 63;  // apart from the keys of seeds
}

namespace {

// Fills output 0 with draw(index) for every element.
template <typename Draw>
void fill_random(RunContext& r, const Dims& dims, DType dtype, const Draw& draw) {
  TensorView& y = sized_output(r, 0, dims, dtype);
  with_compute_type(dtype, [&]<typename T>() {
    NumberWriter<T> to(y);
    parallel_for(y.count(), kGrainElements / 16, r.threads(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = static_cast<T>(draw(static_cast<uint64_t>(i)));
    });
    to.finish();
  });
}

// RandomNormal and RandomUniform, whose shape is an attribute, or (like = true) that of the input.
template <bool kNormal, bool kLike>
CompiledKernel make_random(const CompileContext& c) {
  const auto attribute = static_cast<DType>(c.node().get_int("dtype", kLike ? 0 : 1));
  const double a = c.node().get_float(kNormal ? "mean" : "low", 0), b = c.node().get_float(kNormal ? "scale" : "high", 1);
  const Dims shape = c.node().get_ints("shape");
  const Philox random(random_key(c.node()));
  return {[=](RunContext& r) {
    const DType dtype = attribute == DType::undefined ? r.input(0).dtype : attribute;
    fill_random(r, kLike ? r.input(0).dims : shape, dtype,
                [&](uint64_t i) { return kNormal ? a + b * random.normal(i) : a + (b - a) * random.uniform(i); });
  }};
}

CompiledKernel make_bernoulli(const CompileContext& c) {
  const auto attribute = static_cast<DType>(c.node().get_int("dtype", 0));
  const Philox random(random_key(c.node()));
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);
    const std::vector<double> probabilities = as_doubles(x);
    TensorView& y = sized_output(r, 0, x.dims, attribute == DType::undefined ? x.dtype : attribute);
    std::vector<float> drawn(probabilities.size());
    for (size_t i = 0; i < drawn.size(); ++i) drawn[i] = random.uniform(i) < probabilities[i] ? 1.0f : 0.0f;
    store_from<float>(y.dtype, y.data, 0, y.count(), drawn.data());
  }};
}

CompiledKernel make_multinomial(const CompileContext& c) {
  const auto dtype = static_cast<DType>(c.node().get_int("dtype", 6));
  const int64_t samples = c.node().get_int("sample_size", 1);
  require(dtype == DType::int32 || dtype == DType::int64, "the output must be int32 or int64");
  const Philox random(random_key(c.node()));
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);  // [batch, classes], logarithms of probabilities, not normalised
    require(x.rank() == 2 && x.dims[1] > 0, "the input must be [batch, classes]");
    const std::vector<double> logits = as_doubles(x);
    TensorView& y = sized_output(r, 0, {x.dims[0], samples}, dtype);
    std::vector<int64_t> drawn(static_cast<size_t>(y.count()));
    std::vector<double> cumulative(static_cast<size_t>(x.dims[1]));
    for (int64_t b = 0; b < x.dims[0]; ++b) {
      const auto row = logits.begin() + b * x.dims[1];
      const double highest = *std::max_element(row, row + x.dims[1]);
      double sum = 0;
      for (size_t k = 0; k < cumulative.size(); ++k) cumulative[k] = sum += std::exp(row[static_cast<ptrdiff_t>(k)] - highest);
      for (int64_t s = 0; s < samples; ++s) {
        const auto i = static_cast<size_t>(b * samples + s);
        const auto found = std::upper_bound(cumulative.begin(), cumulative.end(), random.uniform(i) * sum);
        drawn[i] = std::min<int64_t>(found - cumulative.begin(), x.dims[1] - 1);
      }
    }
    store_from<int64_t>(dtype, y.data, 0, y.count(), drawn.data());
  }};
}

template <typename T>
void drop(RunContext& r, const TensorView& x, TensorView& y, uint8_t* mask, double ratio, const Philox& random) {
  NumberReader<T> from(x);
  NumberWriter<T> to(y);
  const T scale = static_cast<T>(1.0 / (1.0 - ratio));
  parallel_for(x.count(), kGrainElements / 16, r.threads(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const bool kept = random.uniform(static_cast<uint64_t>(i)) >= ratio;
      to[i] = kept ? from[i] * scale : T(0);
      if (mask) mask[i] = kept;
    }
  });
  to.finish();
}

CompiledKernel make_dropout(const CompileContext& c) {
  const bool has_seed = c.node().has("seed");
  const Philox random(has_seed ? static_cast<uint64_t>(c.node().get_int("seed", 0)) : random_key(c.node()));
  return {[random](RunContext& r) {
    const TensorView& x = r.input(0);
    const double ratio = r.has_input(1) ? input_number(r, 1) : 0.5;
    const bool training = r.has_input(2) && input_int(r, 2) != 0;
    require(!training || (ratio >= 0 && ratio < 1), "the ratio of a dropout must be at least 0 and below 1");
    uint8_t* mask = r.wants_output(1) ? sized_output(r, 1, x.dims, DType::boolean).as<uint8_t>() : nullptr;
    TensorView& y = sized_output(r, 0, x.dims, x.dtype);
    if (training && ratio > 0) {
      with_compute_type(x.dtype, [&]<typename T>() { drop<T>(r, x, y, mask, ratio, random); });
      return;
    }
    copy_view(y, x, r.threads());
    if (mask) std::fill_n(mask, x.count(), uint8_t{1});
  }};
}

// Where an element of a mask stands in the whole batch: rows are those of the samples at hand, of the first of them on.
CompiledKernel make_dropout_mask(const CompileContext& c) {
  const double ratio = c.node().get_float("ratio", 0.5f);
  const auto key = static_cast<uint64_t>(c.node().get_int("key", 0));
  return {[ratio, key](RunContext& r) {
    const TensorView &shape = r.input(0), &samples = r.input(1);
    require(samples.count() == 2 && samples.as<int64_t>()[1] > 0, "the samples at hand are not given by two numbers");
    const Philox random(mask_key(key, static_cast<uint64_t>(input_int(r, 2))));
    TensorView& mask = sized_output(r, 0, Dims(shape.as<int64_t>(), shape.as<int64_t>() + shape.count()), DType::boolean);
    const uint64_t first = first_of_mask(mask.dims, samples.as<int64_t>()[0], samples.as<int64_t>()[1]);
    auto* kept = mask.as<uint8_t>();
    parallel_for(mask.count(), kGrainElements / 16, r.threads(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) kept[i] = random.uniform(first + static_cast<uint64_t>(i)) >= static_cast<float>(ratio);
    });
  }};
}

// Numbers by the same places.
CompiledKernel make_random_at(const CompileContext& c) {
  const bool normal = c.node().get_int("normal", 0) != 0;
  const auto key = static_cast<uint64_t>(c.node().get_int("key", 0));
  return {[normal, key](RunContext& r) {
    const TensorView &shape = r.input(0), &samples = r.input(1);
    require(samples.count() == 2 && samples.as<int64_t>()[1] > 0, "the samples at hand are not given by two numbers");
    const Philox random(mask_key(key, static_cast<uint64_t>(input_int(r, 2))));
    TensorView& y = sized_output(r, 0, Dims(shape.as<int64_t>(), shape.as<int64_t>() + shape.count()), DType::float32);
    const uint64_t first = first_of_mask(y.dims, samples.as<int64_t>()[0], samples.as<int64_t>()[1]);
    const float* limits = r.has_input(3) ? r.input(3).as<float>() : nullptr;
    const int64_t limit_step = limits && r.input(3).count() != 1 ? 1 : 0;
    require(limit_step == 0 || r.input(3).count() == y.count(), "the limits have another shape than the numbers");
    auto* numbers = y.as<float>();
    parallel_for(y.count(), kGrainElements / 16, r.threads(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const uint64_t at = first + static_cast<uint64_t>(i);
        const float number = normal ? static_cast<float>(random.normal(at)) : random.uniform(at);
        numbers[i] = limits ? static_cast<float>(number < limits[i * limit_step]) : number;
      }
    });
  }};
}

}  // namespace

uint64_t mask_key(uint64_t node, uint64_t counter) {
  return (node ^ counter * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
}

uint64_t first_of_mask(const Dims& dims, int64_t first_sample, int64_t samples) {
  const int64_t all = std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>());
  return samples == 0 ? 0 : static_cast<uint64_t>(all / samples * first_sample);
}

void register_random(KernelRegistry& registry) {
  registry.add({.op = "RandomNormal", .make = make_random<true, false>, .host_random = true});
  registry.add({.op = "RandomNormalLike", .make = make_random<true, true>, .host_random = true});
  registry.add({.op = "RandomUniform", .make = make_random<false, false>, .host_random = true});
  registry.add({.op = "RandomUniformLike", .make = make_random<false, true>, .host_random = true});
  registry.add({.op = "Bernoulli", .make = make_bernoulli, .host_random = true});
  registry.add({.op = "Multinomial", .make = make_multinomial, .host_random = true});
  registry.add({.op = "DropoutMask", .domain = "ai.fretsaw", .make = make_dropout_mask});
  registry.add({.op = "RandomAt", .domain = "ai.fretsaw", .make = make_random_at});
  registry.add({.op = "Dropout", .make = make_dropout, .host_random = true});
}

}  // namespace fretsaw
