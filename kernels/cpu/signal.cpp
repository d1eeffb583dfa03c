// Operators on signals: DFT, STFT, MelWeightMatrix.
#include <algorithm>
#include <cmath>
#include <complex>

#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/fourier.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/parallel.h"

namespace fretsaw {
namespace {

using Complex = std::complex<double>;
constexpr int64_t kLongestTransform = int64_t{1} << 24;

int64_t checked_length(int64_t length) {
  if (length < 1 || length > kLongestTransform) throw Error("a transform of length " + std::to_string(length) + " is out of range");
  return length;
}

struct DftShape {
  int64_t outer, in, inner, parts;  // x [outer, in, inner, parts]; parts: 1 real, 2 complex
  int64_t length, out;              // of the transform, and how many of its results are kept
  bool inverse, onesided;
  int64_t out_parts() const { return inverse && onesided ? 1 : 2; }
};

// Reads one signal into `values`, cut or filled with zeros to the transform's length.
void read_signal(const DftShape& s, const double* x, Complex* values) {
  for (int64_t i = 0; i < s.length; ++i) {
    const double* at = x + i * s.inner * s.parts;
    values[i] = i < s.in ? Complex(at[0], s.parts == 2 ? at[1] : 0) : Complex();
  }
  if (!s.inverse || !s.onesided) return;
  // Half of a spectrum is given: the other half is its mirror image, as that of a real signal is.
  values[0] = values[0].real();
  for (int64_t i = s.length / 2 + 1; i < s.length; ++i) values[i] = std::conj(values[s.length - i]);
  if (s.length % 2 == 0) values[s.length / 2] = values[s.length / 2].real();
}

void run_dft(const DftShape& s, const double* x, double* y, int threads) {
  parallel_for(s.outer * s.inner, 64 * 1024 / (16 * s.length) + 1, threads, [&](int64_t begin, int64_t end) {
    Fourier fourier(s.length, s.inverse);
    std::vector<Complex> values(static_cast<size_t>(s.length));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t outer = item / s.inner, inner = item % s.inner, parts = s.out_parts();
      read_signal(s, x + (outer * s.in * s.inner + inner) * s.parts, values.data());
      fourier.transform(values.data());
      double* target = y + (outer * s.out * s.inner + inner) * parts;
      for (int64_t i = 0; i < s.out; ++i) {
        target[i * s.inner * parts] = values[static_cast<size_t>(i)].real();
        if (parts == 2) target[i * s.inner * parts + 1] = values[static_cast<size_t>(i)].imag();
      }
    }
  });
}

CompiledKernel make_dft(const CompileContext& c) {
  const bool inverse = c.node().get_int("inverse", 0) != 0, onesided = c.node().get_int("onesided", 0) != 0;
  const int64_t axis_attribute = c.node().get_int("axis", -2);  // an input in the newest form
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);  // [..., 1 or 2]
    require(x.rank() >= 2 && (x.dims.back() == 1 || x.dims.back() == 2),
            "the last dimension of the signal must be 1 (real) or 2 (complex)");
    const size_t axis = normalise_axis(r.has_input(2) ? input_int(r, 2) : axis_attribute, x.rank());
    require(axis + 1 < x.rank(), "the last axis holds the real and imaginary parts and can't be transformed");
    DftShape s{.outer = product(x.dims, 0, axis),
               .in = x.dims[axis],
               .inner = product(x.dims, axis + 1, x.rank() - 1),
               .parts = x.dims.back(),
               .inverse = inverse,
               .onesided = onesided};
    s.length = r.has_input(1) ? input_int(r, 1) : inverse && onesided ? 2 * (s.in - 1) : s.in;
    checked_length(s.length);
    s.out = onesided && !inverse ? s.length / 2 + 1 : s.length;
    Dims dims = x.dims;
    dims[axis] = s.out;
    dims.back() = s.out_parts();
    TensorView& y = sized_output(r, 0, dims, x.dtype);
    NumberReader<double> from(x);
    NumberWriter<double> to(y);
    run_dft(s, from.data(), to.data(), r.threads());
    to.finish();
  }};
}

CompiledKernel make_stft(const CompileContext& c) {
  const bool onesided = c.node().get_int("onesided", 1) != 0;
  return {[onesided](RunContext& r) {
    const TensorView& x = r.input(0);  // [batch, length] or [batch, length, 1 or 2]
    require(x.rank() == 2 || (x.rank() == 3 && (x.dims[2] == 1 || x.dims[2] == 2)), "the signal must be [batch, length, 1 or 2]");
    const int64_t batch = x.dims[0], signal = x.dims[1], parts = x.rank() == 3 ? x.dims[2] : 1, step = input_int(r, 1);
    std::vector<double> window;
    if (r.has_input(2)) window = as_doubles(r.input(2));
    const auto window_length = static_cast<int64_t>(window.size());
    const int64_t length = checked_length(r.has_input(3) ? input_int(r, 3) : r.has_input(2) ? window_length : signal);
    require(step > 0, "the frame step must be positive");
    require(window_length <= length, "the window is longer than a frame");
    require(signal >= length, "the signal is shorter than a frame");
    if (!r.has_input(2)) window.assign(static_cast<size_t>(length), 1.0);
    window.resize(static_cast<size_t>(length), 0.0);
    const int64_t frames = (signal - length) / step + 1, out = onesided ? length / 2 + 1 : length;
    TensorView& y = sized_output(r, 0, {batch, frames, out, 2}, x.dtype);
    NumberReader<double> from(x);
    NumberWriter<double> to(y);
    parallel_for(batch * frames, 64 * 1024 / (16 * length) + 1, r.threads(), [&](int64_t begin, int64_t end) {
      Fourier fourier(length, false);
      std::vector<Complex> values(static_cast<size_t>(length));
      for (int64_t item = begin; item < end; ++item) {
        const double* frame = from.data() + (item / frames * signal + item % frames * step) * parts;
        for (int64_t i = 0; i < length; ++i) {
          values[static_cast<size_t>(i)] =
              Complex(frame[i * parts], parts == 2 ? frame[i * parts + 1] : 0) * window[static_cast<size_t>(i)];
        }
        fourier.transform(values.data());
        for (int64_t i = 0; i < out; ++i) {
          to[(item * out + i) * 2] = values[static_cast<size_t>(i)].real();
          to[(item * out + i) * 2 + 1] = values[static_cast<size_t>(i)].imag();
        }
      }
    });
    to.finish();
  }};
}

// The spectrogram bins at the edges of the `bins` triangles: bins + 2 of them, equally far apart on the mel scale.
std::vector<int64_t> mel_edges(int64_t bins, int64_t length, double rate, double lower, double upper) {
  const auto mel = [](double hertz) { return 2595 * std::log10(1 + hertz / 700); };
  const double low = mel(lower), step = (mel(upper) - low) / static_cast<double>(bins + 2);
  std::vector<int64_t> edges;
  for (int64_t i = 0; i < bins + 2; ++i) {
    const double hertz = 700 * (std::pow(10.0, (low + static_cast<double>(i) * step) / 2595) - 1);
    const double edge = std::floor(static_cast<double>(length + 1) * hertz / rate);
    if (!(edge >= 0 && edge <= static_cast<double>(length / 2)))
      throw Error("a mel band lies outside the spectrogram", "lower the upper edge");
    edges.push_back(static_cast<int64_t>(edge));
  }
  return edges;
}

CompiledKernel make_mel_weight_matrix(const CompileContext& c) {
  const auto dtype = static_cast<DType>(c.node().get_int("output_datatype", 1));
  return {[dtype](RunContext& r) {
    const int64_t bins = input_int(r, 0), length = input_int(r, 1), rate = input_int(r, 2);
    require(bins >= 0 && bins <= 1 << 24 && rate > 0, "the number of mel bins or the sample rate is out of range");
    checked_length(length);
    const std::vector<int64_t> edges = mel_edges(bins, length, static_cast<double>(rate), input_number(r, 3), input_number(r, 4));
    TensorView& y = sized_output(r, 0, {length / 2 + 1, bins}, dtype);
    std::vector<double> weights(static_cast<size_t>(y.count()), 0.0);
    for (int64_t i = 0; i < bins; ++i) {
      const int64_t left = edges[static_cast<size_t>(i)], center = edges[static_cast<size_t>(i) + 1],
                    right = edges[static_cast<size_t>(i) + 2];
      if (center == left) weights[static_cast<size_t>(center * bins + i)] = 1;
      for (int64_t j = left; j <= center && center > left; ++j) {
        weights[static_cast<size_t>(j * bins + i)] = static_cast<double>(j - left) / static_cast<double>(center - left);
      }
      for (int64_t j = center; j < right; ++j) {
        weights[static_cast<size_t>(j * bins + i)] = static_cast<double>(right - j) / static_cast<double>(right - center);
      }
    }
    store_from<double>(dtype, y.data, 0, y.count(), weights.data());
  }};
}

}  // namespace

void register_signal(KernelRegistry& registry) {
  registry.add({.op = "DFT", .make = make_dft});
  registry.add({.op = "STFT", .make = make_stft});
  registry.add({.op = "MelWeightMatrix", .make = make_mel_weight_matrix});
}

}  // namespace fretsaw
