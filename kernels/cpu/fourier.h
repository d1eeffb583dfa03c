// Discrete Fourier transforms of any length, in double precision.
#pragma once
#include <complex>
#include <cstdint>
#include <vector>

namespace fretsaw {

// Transforms one length many times: by halving for powers of two, otherwise as a convolution of such a length (Bluestein).
class Fourier {
 public:
  Fourier(int64_t length, bool inverse);
  // In place, `length` values; the inverse divides by the length.
  void transform(std::complex<double>* values);

 private:
  using Complex = std::complex<double>;
  struct Powers {  // a transform whose length is a power of two
    int64_t length = 1;
    std::vector<Complex> roots;
    std::vector<int64_t> reversed;
    void prepare(int64_t n);
    void forward(Complex* values) const;
    void backward(Complex* values) const;  // without dividing
  };
  int64_t length_;
  bool inverse_;
  Powers powers_;
  std::vector<Complex> chirp_, kernel_, buffer_;  // of Bluestein; empty for powers of two
};

}  // namespace fretsaw
