// Fourier transforms: radix 2, and Bluestein's algorithm for the other lengths.
#include "kernels/cpu/fourier.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace fretsaw {

void Fourier::Powers::prepare(int64_t n) {
  length = n;
  roots.resize(static_cast<size_t>(n / 2));
  for (int64_t i = 0; i < n / 2; ++i) {
    roots[static_cast<size_t>(i)] = std::polar(1.0, -2 * std::numbers::pi * static_cast<double>(i) / static_cast<double>(n));
  }
  reversed.assign(static_cast<size_t>(n), 0);
  for (int64_t i = 1; i < n; ++i) {
    reversed[static_cast<size_t>(i)] = reversed[static_cast<size_t>(i / 2)] / 2 + (i % 2 ? n / 2 : 0);
  }
}

void Fourier::Powers::forward(Complex* values) const {
  for (int64_t i = 0; i < length; ++i) {
    const int64_t j = reversed[static_cast<size_t>(i)];
    if (i < j) std::swap(values[i], values[j]);
  }
  for (int64_t half = 1; half < length; half *= 2) {
    const int64_t step = length / (2 * half);
    for (int64_t start = 0; start < length; start += 2 * half) {
      for (int64_t i = 0; i < half; ++i) {
        const Complex root = roots[static_cast<size_t>(i * step)], odd = values[start + half + i];
        // Written out: the library's product also looks after infinities, which costs a call.
        const Complex turned(odd.real() * root.real() - odd.imag() * root.imag(), odd.real() * root.imag() + odd.imag() * root.real());
        values[start + half + i] = values[start + i] - turned;
        values[start + i] += turned;
      }
    }
  }
}

void Fourier::Powers::backward(Complex* values) const {
  for (int64_t i = 0; i < length; ++i) values[i] = std::conj(values[i]);
  forward(values);
  for (int64_t i = 0; i < length; ++i) values[i] = std::conj(values[i]);
}

Fourier::Fourier(int64_t length, bool inverse) : length_(length), inverse_(inverse) {
  if ((length & (length - 1)) == 0) {
    powers_.prepare(std::max<int64_t>(length, 1));
    return;
  }
  int64_t padded = 1;
  while (padded < 2 * length) padded *= 2;
  powers_.prepare(padded);
  chirp_.resize(static_cast<size_t>(length));
  kernel_.assign(static_cast<size_t>(padded), Complex());
  buffer_.resize(static_cast<size_t>(padded));
  for (int64_t i = 0; i < length; ++i) {
    const auto square = static_cast<double>(static_cast<int64_t>(static_cast<__int128>(i) * i % (2 * length)));
    const Complex w = std::polar(1.0, -std::numbers::pi * square / static_cast<double>(length));
    chirp_[static_cast<size_t>(i)] = w;
    kernel_[static_cast<size_t>(i)] = std::conj(w);
    if (i > 0) kernel_[static_cast<size_t>(padded - i)] = std::conj(w);
  }
  powers_.forward(kernel_.data());
}

void Fourier::transform(Complex* values) {
  if (inverse_) {
    for (int64_t i = 0; i < length_; ++i) values[i] = std::conj(values[i]);
  }
  if (chirp_.empty()) {
    powers_.forward(values);
  } else {
    std::fill(buffer_.begin(), buffer_.end(), Complex());
    for (int64_t i = 0; i < length_; ++i) buffer_[static_cast<size_t>(i)] = values[i] * chirp_[static_cast<size_t>(i)];
    powers_.forward(buffer_.data());
    for (size_t i = 0; i < buffer_.size(); ++i) buffer_[i] *= kernel_[i];
    powers_.backward(buffer_.data());
    const double scale = 1 / static_cast<double>(powers_.length);
    for (int64_t i = 0; i < length_; ++i) values[i] = buffer_[static_cast<size_t>(i)] * scale * chirp_[static_cast<size_t>(i)];
  }
  if (!inverse_) return;
  for (int64_t i = 0; i < length_; ++i) values[i] = std::conj(values[i]) / static_cast<double>(length_);
}

}  // namespace fretsaw
